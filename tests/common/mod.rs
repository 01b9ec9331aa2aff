//! Seeded inputs that the integration tests share.
#![allow(dead_code, reason = "every test file uses a part")]

use ndarray::{Array2, Array3};
use sparse_mla::half::bf16;
use sparse_mla::{FAMILY_TABLE, FamilySpec, Geometry, PackedCache, pack_kv_cache};

/// Lines of the family table that may be a primary cache.
pub fn primary_specs() -> impl Iterator<Item = &'static FamilySpec> {
    FAMILY_TABLE.iter().filter(|spec| spec.registry.is_some())
}

/// A small linear congruential generator: tests need determinism, not quality.
pub struct Lcg(pub u64);

impl Lcg {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    /// Roughly normal, variance 1.
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..12).map(|_| (self.next() % 4096) as f32 / 4096.0).sum();
        sum - 6.0
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Latents with a few outlier channels.
pub fn latents(spec: &FamilySpec, rows: usize, seed: u64) -> Array2<bf16> {
    let mut random = Lcg(seed);
    Array2::from_shape_fn((rows, spec.d_qk()), |(_, dim)| {
        bf16::from_f32(random.normal() * if dim % 97 == 5 { 20.0 } else { 1.0 })
    })
}

pub fn queries(num_tokens: usize, num_heads: usize, d_qk: usize, seed: u64) -> Array3<bf16> {
    let mut random = Lcg(seed);
    Array3::from_shape_fn((num_tokens, num_heads, d_qk), |_| bf16::from_f32(random.normal()))
}

pub fn packed(spec: &'static FamilySpec, rows: usize, geometry: Geometry, seed: u64) -> PackedCache {
    pack_kv_cache(spec, latents(spec, rows, seed).view(), geometry, 1.0).unwrap()
}

pub fn relative_l2(got: impl IntoIterator<Item = f64>, want: impl IntoIterator<Item = f64>) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (got, want) in got.into_iter().zip(want) {
        error += (got - want).powi(2);
        norm += want.powi(2);
    }
    (error / norm).sqrt()
}
