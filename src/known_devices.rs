//! Devices whose facts are known without a driver, for plans made elsewhere.

use crate::plan::DeviceFacts;

/// Shared memory of a block on SM120, the least of the served devices (SM90 and SM100 have 232,448).
pub const LEAST_SHARED_MEMORY_PER_BLOCK: usize = 101_376;

/// A product and its facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownDevice {
    /// The word that stands for it in every interface.
    pub word: &'static str,
    /// Product name.
    pub name: &'static str,
    /// What plans depend on.
    pub facts: DeviceFacts,
}

/// The products, from NVIDIA's data sheets; the H200's numbers are also what its driver says.
pub static KNOWN_DEVICES: &[KnownDevice] = &[
    known("h200", "NVIDIA H200", (9, 0), 132, 232_448),
    known("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, LEAST_SHARED_MEMORY_PER_BLOCK),
    known("rtx-5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, LEAST_SHARED_MEMORY_PER_BLOCK),
    known("gb10", "NVIDIA GB10", (12, 1), 48, LEAST_SHARED_MEMORY_PER_BLOCK),
];

const fn known(
    word: &'static str,
    name: &'static str,
    compute_capability: (i32, i32),
    multiprocessors: usize,
    shared_memory_per_block: usize,
) -> KnownDevice {
    KnownDevice { word, name, facts: DeviceFacts { multiprocessors, shared_memory_per_block, compute_capability } }
}
