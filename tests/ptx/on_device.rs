//! The same launches on a GPU, through the driver, beside the interpreter.
#![expect(unsafe_code, reason = "device memory through the driver's own calls")]

use cudarc::driver::{result, sys};
use sparse_mla::cuda::{Device, Workspace, device};

use crate::case::{Case, Inputs, Outputs};
use crate::check::{self, Differences};
use crate::placed::{Memory, Placed};
use crate::schedule::Schedule;
use crate::stand_in::{self, COMMITTED};

/// What outputs hold before the first and before the second run: bytes that keep both were not written.
const FILLS: [u8; 2] = [0xa5, 0x5a];

/// Device memory, freed at the end.
#[derive(Default)]
struct DeviceMemory {
    allocations: Vec<sys::CUdeviceptr>,
    outputs: Vec<Output>,
}

struct Output {
    address: u64,
    size: usize,
    /// What the run before left.
    before: Vec<u8>,
}

impl DeviceMemory {
    fn allocate(&mut self, size: usize, misalignment: u64) -> u64 {
        // SAFETY: the context is current; the memory is freed on drop.
        let start = unsafe { result::malloc_sync(size + misalignment as usize + 256) }.expect("device memory");
        self.allocations.push(start);
        start.next_multiple_of(256) + misalignment
    }

    fn read(address: u64, size: usize) -> Vec<u8> {
        let mut bytes = vec![0u8; size];
        // SAFETY: the range lies in an allocation of this memory.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, address) }.expect("a copy from the device");
        bytes
    }

    fn fill(&self, value: u8) {
        for output in &self.outputs {
            // SAFETY: the range lies in an allocation of this memory.
            unsafe { result::memset_d8_sync(output.address, value, output.size) }.expect("a fill");
        }
    }

    /// Keeps what the run before left.
    fn keep(&mut self) {
        for output in &mut self.outputs {
            output.before = Self::read(output.address, output.size);
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        for allocation in self.allocations.drain(..) {
            // SAFETY: it was allocated here and is used no more: the device is idle.
            unsafe { result::free_sync(allocation) }.expect("a free");
        }
    }
}

impl Memory for DeviceMemory {
    fn place(&mut self, _: &str, bytes: Vec<u8>, _: &dyn Fn(usize) -> bool, misalignment: u64) -> u64 {
        let address = self.allocate(bytes.len(), misalignment);
        // SAFETY: the range was allocated just now.
        unsafe { result::memcpy_htod_sync(address, &bytes) }.expect("a copy to the device");
        address
    }

    fn place_output(&mut self, _: &str, size: usize, misalignment: u64) -> u64 {
        let address = self.allocate(size, misalignment);
        self.outputs.push(Output { address, size, before: Vec::new() });
        address
    }

    fn fetch(&self, address: u64, size: usize) -> (Vec<u8>, Vec<bool>) {
        let output = self.outputs.iter().find(|output| output.address == address).expect("an output");
        let second = Self::read(address, size);
        let written = output.before.iter().zip(&second).map(|(a, b)| [*a, *b] != FILLS).collect();
        (second, written)
    }
}

/// Runs a case twice on a device, over different bytes.
fn run(device: &Device, case: &Case, inputs: &Inputs) -> Result<Outputs, String> {
    let plan = case.plan();
    let mut memory = DeviceMemory::default();
    let placed = Placed::new(&mut memory, case, inputs);
    let bytes = plan.workspace_bytes();
    let workspace = Workspace { pointer: memory.allocate(bytes, 0), bytes };
    for fill in FILLS {
        memory.keep();
        memory.fill(fill);
        // SAFETY: every array was placed for this plan; the default stream is the context's own.
        unsafe { device.decode(&plan, &placed.decode, workspace, std::ptr::null_mut()) }
            .map_err(|error| error.to_string())?;
        // SAFETY: the default stream.
        unsafe { result::stream::synchronize(std::ptr::null_mut()) }.map_err(|error| error.to_string())?;
    }
    placed.outputs(&memory, case)
}

/// Runs every case on device 0 and compares with the interpreter; prints the largest differences.
pub fn compare_every_case(cases: &[Case]) {
    let device = device(0).expect("a device");
    let handle = result::device::get(0).expect("a device");
    // SAFETY: the handle was handed out just now; the context lives to the end of the process.
    unsafe {
        let context = result::primary_ctx::retain(handle).expect("its primary context");
        result::ctx::set_current(context).expect("a context");
    }
    let (mut largest, mut equal, mut failures) = (Differences::default(), 0, Vec::new());
    for case in cases {
        let inputs = case.inputs();
        let compared = run(device, case, &inputs).and_then(|got| {
            let want = stand_in::run(&COMMITTED, case, &inputs, Schedule::Forward)?.outputs;
            check::compare(case, &inputs, &got, &inputs.reference(case), check::FROM_CPU)?;
            let same = got.same_bits(&want);
            Ok((same, check::compare(case, &inputs, &got, &want, check::FROM_INTERPRETER)?))
        });
        match compared {
            Ok((same, differences)) => {
                equal += usize::from(same);
                largest = largest.max(differences);
            }
            Err(why) => failures.push(format!("{}: {why}", case.title())),
        }
    }
    let all = cases.len();
    crate::tell(&format!(
        "PTX on the device: {all} cases, {equal} equal to the interpreter bit for bit; largest differences from it \
         {:.1e} (out, relative L2 of a head, float32), {:.1e} (lse)",
        largest.out, largest.lse
    ));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
