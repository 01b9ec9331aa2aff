//! Shared memory of a block: bytes, who wrote and read each of them, and when.

use crate::fault::Fault;
use crate::order::{By, Order, Write};

pub struct Shared {
    bytes: Vec<u8>,
    written: Vec<Write>,
    /// Last read of every byte by warp: the warp's clock, one plane a warp.
    read: Vec<Vec<u32>>,
    /// Last atomic instruction, or 0.
    atomic: Vec<bool>,
    /// Store instruction that wrote the byte, to find lanes that contradict each other.
    store: Vec<u32>,
    stores: u32,
}

impl Shared {
    pub fn new(size: usize, warps: usize) -> Self {
        Self {
            bytes: vec![0xa5; size],
            written: vec![Write::NEVER; size],
            read: vec![vec![0; size]; warps],
            atomic: vec![false; size],
            store: vec![0; size],
            stores: 0,
        }
    }

    /// Begins a store instruction: lanes that write the same byte must write the same value.
    pub fn begin_store(&mut self) {
        self.stores += 1;
    }

    /// Bytes of an access, in bounds and aligned.
    fn range(&self, address: u64, size: usize, align: usize) -> Result<std::ops::Range<usize>, Fault> {
        let end = address.checked_add(size as u64).filter(|end| *end <= self.bytes.len() as u64);
        let Some(end) = end else {
            let length = self.bytes.len();
            return Err(Fault::new(format!(
                "shared address {address:#x} (+{size}) is outside the block's {length} bytes"
            )));
        };
        if !address.is_multiple_of(align as u64) {
            return Err(Fault::new(format!("shared address {address:#x} is not a multiple of {align}")));
        }
        Ok(address as usize..end as usize)
    }

    pub fn read(&mut self, order: &Order, by: By, address: u64, size: usize, align: usize) -> Result<&[u8], Fault> {
        let range = self.range(address, size, align).map_err(|fault| fault.of_lane(by.lane))?;
        let mut last = None;
        for (at, write) in self.written[range.clone()].iter().enumerate() {
            if Some(*write) == last {
                continue;
            }
            if *write == Write::NEVER {
                let what = format!("read of shared byte {:#x}, which was never written", address + at as u64);
                return Err(Fault::at(by.lane, what));
            }
            order.check(*write, by).map_err(|fault| self.named(fault, address + at as u64))?;
            last = Some(*write);
        }
        self.read[by.warp][range.clone()].fill(order.now(by.warp));
        Ok(&self.bytes[range])
    }

    pub fn write(&mut self, order: &Order, by: By, address: u64, data: &[u8], align: usize) -> Result<(), Fault> {
        let range = self.range(address, data.len(), align).map_err(|fault| fault.of_lane(by.lane))?;
        let write = Write::new(by.warp, by.lane, order.now(by.warp));
        for (at, value) in range.clone().zip(data) {
            if self.store[at] == self.stores {
                if self.bytes[at] != *value {
                    let what = format!("two lanes write different values to shared byte {at:#x}");
                    return Err(Fault::at(by.lane, what));
                }
            } else {
                order.check(self.written[at], by).map_err(|fault| self.named(fault, at as u64))?;
            }
            self.written[at] = write;
        }
        self.check_reads(order, by, range.clone())?;
        self.store[range.clone()].fill(self.stores);
        self.atomic[range.clone()].fill(false);
        self.bytes[range].copy_from_slice(data);
        Ok(())
    }

    /// A read-modify-write: atomics of different warps need no order among themselves.
    pub fn update(
        &mut self,
        order: &Order,
        by: By,
        address: u64,
        size: usize,
        f: impl FnOnce(u64) -> u64,
    ) -> Result<u64, Fault> {
        let range = self.range(address, size, size).map_err(|fault| fault.of_lane(by.lane))?;
        for at in range.clone() {
            if self.written[at] == Write::NEVER {
                return Err(Fault::at(by.lane, format!("atomic on shared byte {at:#x}, which was never written")));
            }
            if !self.atomic[at] {
                order.check(self.written[at], by).map_err(|fault| self.named(fault, at as u64))?;
            }
        }
        self.check_reads(order, by, range.clone())?;
        let mut old = [0; 8];
        old[..size].copy_from_slice(&self.bytes[range.clone()]);
        let old = u64::from_le_bytes(old);
        self.bytes[range.clone()].copy_from_slice(&f(old).to_le_bytes()[..size]);
        self.written[range.clone()].fill(Write::new(by.warp, by.lane, order.now(by.warp)));
        self.atomic[range].fill(true);
        Ok(old)
    }

    /// Marks the bytes of a copy that begins now.
    pub fn begin_copy(
        &mut self,
        order: &Order,
        by: By,
        address: u64,
        size: usize,
        align: usize,
        bulk: bool,
    ) -> Result<(), Fault> {
        let range = self.range(address, size, align).map_err(|fault| fault.of_lane(by.lane))?;
        for at in range.clone() {
            let write = self.written[at];
            order.check(write, by).map_err(|fault| self.named(fault, at as u64))?;
            if bulk {
                order.check_proxy(write, by).map_err(|fault| self.named(fault, at as u64))?;
            }
        }
        self.check_reads(order, by, range.clone())?;
        self.written[range].fill(Write::IN_FLIGHT);
        Ok(())
    }

    /// A copy's bytes arrive.
    pub fn land(&mut self, address: u64, data: &[u8], write: Write) {
        let range = address as usize..address as usize + data.len();
        self.written[range.clone()].fill(write);
        self.bytes[range].copy_from_slice(data);
    }

    /// Eight bytes become an mbarrier.
    pub fn claim_mbarrier(&mut self, order: &Order, by: By, address: u64) -> Result<(), Fault> {
        self.begin_copy(order, by, address, 8, 8, false)?;
        self.written[address as usize..address as usize + 8].fill(Write::MBARRIER);
        Ok(())
    }

    /// An mbarrier becomes eight unwritten bytes.
    pub fn free_mbarrier(&mut self, address: u64) {
        self.written[address as usize..address as usize + 8].fill(Write::NEVER);
    }

    fn check_reads(&self, order: &Order, by: By, range: std::ops::Range<usize>) -> Result<(), Fault> {
        for (reader, plane) in self.read.iter().enumerate() {
            let latest = plane[range.clone()].iter().copied().max().unwrap_or(0);
            order.check_read(reader, latest, by).map_err(|fault| self.named(fault, range.start as u64))?;
        }
        Ok(())
    }

    fn named(&self, fault: Fault, address: u64) -> Fault {
        Fault { what: format!("{} (shared byte {address:#x})", fault.what), ..fault }
    }
}
