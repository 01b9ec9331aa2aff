//! Global memory: named buffers with unmapped gaps between them; who wrote each byte.

use crate::fault::Fault;

/// A buffer at a made-up address.
pub struct Buffer {
    pub name: String,
    pub address: u64,
    pub bytes: Vec<u8>,
    writers: Vec<Writer>,
    access: Access,
}

/// What a kernel may do with a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read what the host wrote.
    Input,
    /// Write; and read what was written.
    Output,
    /// Write, and read anything: bytes that were never written hold garbage, on which no result may depend.
    Scratch,
}

/// Who wrote a byte: nobody, the host, or a warp of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Writer(u32);

impl Writer {
    const NOBODY: Self = Self(0);
    const HOST: Self = Self(1);

    fn warp(by: &Thread) -> Self {
        Self((by.launch + 1) << 28 | by.block << 8 | (by.warp as u32) << 2 | 2)
    }

    fn launch(self) -> Option<u32> {
        (self.0 & 2 != 0).then(|| (self.0 >> 28) - 1)
    }
}

/// The thread that accesses memory.
#[derive(Debug, Clone, Copy)]
pub struct Thread {
    /// Number of the launch, below 15.
    pub launch: u32,
    /// Linear index of its block, below 2^20.
    pub block: u32,
    pub warp: usize,
    pub lane: usize,
    /// The first launch that may still run as far as this warp knows.
    pub running_since: Option<u32>,
}

#[derive(Default)]
pub struct Global {
    buffers: Vec<Buffer>,
}

impl Global {
    /// Where the first buffer lies: beyond 32 bits, so that cut addresses miss.
    const FIRST: u64 = 0x0007_4320_0000_0000;
    /// Unmapped bytes between buffers.
    const GAP: u64 = 1 << 20;

    /// Places a buffer at the next address that is `misalignment` past a multiple of 256. `written` tells which bytes the
    /// host has filled.
    pub fn place_next(
        &mut self,
        name: &str,
        bytes: Vec<u8>,
        written: &dyn Fn(usize) -> bool,
        access: Access,
        misalignment: u64,
    ) -> u64 {
        let next = |last: &Buffer| (last.address + last.bytes.len() as u64 + Self::GAP).next_multiple_of(256);
        let address = self.buffers.last().map_or(Self::FIRST, next) + misalignment;
        self.place_at(name, address, bytes, written, access);
        address
    }

    pub fn place_at(
        &mut self,
        name: &str,
        address: u64,
        bytes: Vec<u8>,
        written: &dyn Fn(usize) -> bool,
        access: Access,
    ) {
        let writers = (0..bytes.len()).map(|at| if written(at) { Writer::HOST } else { Writer::NOBODY }).collect();
        self.buffers.push(Buffer { name: name.to_owned(), address, bytes, writers, access });
    }

    /// Number of buffers; those after it are taken away.
    pub fn len(&self) -> usize {
        self.buffers.len()
    }

    pub fn truncate(&mut self, count: usize) {
        self.buffers.truncate(count);
    }

    fn find(&self, address: u64, size: usize, align: usize) -> Result<(usize, usize), Fault> {
        let found = self.buffers.iter().enumerate().find_map(|(index, buffer)| {
            let at = address.checked_sub(buffer.address)?;
            (at + size as u64 <= buffer.bytes.len() as u64).then_some((index, at as usize))
        });
        let found = found.ok_or_else(|| {
            Fault::new(format!("address {address:#x} (+{size}) is outside {}", self.nearest(address)))
        })?;
        if !address.is_multiple_of(align as u64) {
            return Err(Fault::new(format!(
                "address {address:#x} in {} is not a multiple of {align}",
                self.buffers[found.0].name
            )));
        }
        Ok(found)
    }

    fn nearest(&self, address: u64) -> String {
        let below = self.buffers.iter().filter(|buffer| buffer.address <= address).max_by_key(|buffer| buffer.address);
        below.map_or("every buffer".into(), |buffer| {
            let past = address - buffer.address;
            format!("every buffer; `{}` below it has {} bytes, this is byte {past}", buffer.name, buffer.bytes.len())
        })
    }

    /// `constant`: through a path that need not see what this launch writes.
    pub fn read(&self, by: &Thread, address: u64, size: usize, align: usize, constant: bool) -> Result<&[u8], Fault> {
        let (index, at) = self.find(address, size, align).map_err(|fault| fault.of_lane(by.lane))?;
        let buffer = &self.buffers[index];
        let mut last = Writer::HOST;
        for (offset, writer) in buffer.writers[at..at + size].iter().enumerate() {
            if *writer != last {
                self.check(buffer, at + offset, by, *writer)?;
                if *writer == Writer::NOBODY && buffer.access != Access::Scratch {
                    let what = format!("read of byte {} of `{}`, which was never written", at + offset, buffer.name);
                    return Err(Fault::at(by.lane, what));
                }
                if constant && writer.launch() == Some(by.launch) {
                    let what =
                        format!("read-only load of byte {} of `{}`, which this launch wrote", at + offset, buffer.name);
                    return Err(Fault::at(by.lane, what));
                }
                last = *writer;
            }
        }
        Ok(&buffer.bytes[at..at + size])
    }

    pub fn write(&mut self, by: &Thread, address: u64, data: &[u8], align: usize) -> Result<(), Fault> {
        let (index, at) = self.find(address, data.len(), align).map_err(|fault| fault.of_lane(by.lane))?;
        let buffer = &self.buffers[index];
        if buffer.access == Access::Input {
            return Err(Fault::at(by.lane, format!("write to byte {at} of `{}`, which is an input", buffer.name)));
        }
        for offset in at..at + data.len() {
            self.check(buffer, offset, by, buffer.writers[offset])?;
        }
        let buffer = &mut self.buffers[index];
        buffer.bytes[at..at + data.len()].copy_from_slice(data);
        buffer.writers[at..at + data.len()].fill(Writer::warp(by));
        Ok(())
    }

    /// A read-modify-write, which needs no order among blocks.
    pub fn update(&mut self, by: &Thread, address: u64, size: usize, f: impl FnOnce(u64) -> u64) -> Result<u64, Fault> {
        let (index, at) = self.find(address, size, size).map_err(|fault| fault.of_lane(by.lane))?;
        let buffer = &mut self.buffers[index];
        if buffer.access == Access::Input || buffer.writers[at..at + size].contains(&Writer::NOBODY) {
            return Err(Fault::at(
                by.lane,
                format!("atomic on byte {at} of `{}`: an input, or never written", buffer.name),
            ));
        }
        let mut old = [0; 8];
        old[..size].copy_from_slice(&buffer.bytes[at..at + size]);
        let old = u64::from_le_bytes(old);
        buffer.bytes[at..at + size].copy_from_slice(&f(old).to_le_bytes()[..size]);
        Ok(old)
    }

    /// What one warp wrote no other may touch in the same launch, nor in a next one that has not waited for it.
    fn check(&self, buffer: &Buffer, at: usize, by: &Thread, writer: Writer) -> Result<(), Fault> {
        let Some(launch) = writer.launch() else { return Ok(()) };
        let place = || format!("byte {at} of `{}`", buffer.name);
        if launch == by.launch && writer != Writer::warp(by) {
            return Err(Fault::at(by.lane, format!("race: another warp of this launch wrote {}", place())));
        }
        if by.running_since.is_some_and(|first| launch >= first) && launch != by.launch {
            let what =
                format!("a launch that may still run wrote {}, and griddepcontrol.wait has not been executed", place());
            return Err(Fault::at(by.lane, what));
        }
        Ok(())
    }

    /// Bytes of a buffer, and which of them a kernel wrote.
    pub fn contents(&self, address: u64, size: usize) -> (Vec<u8>, Vec<bool>) {
        let buffer = self.buffers.iter().find(|buffer| buffer.address == address && buffer.bytes.len() == size);
        let buffer = buffer.expect("the address and size of a buffer");
        (buffer.bytes.clone(), buffer.writers.iter().map(|writer| writer.launch().is_some()).collect())
    }
}
