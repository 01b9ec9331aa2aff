//! Element types of latents and outputs: bf16, f16 and f32.

use half::{bf16, f16};

/// A floating-point type that latents and outputs may have.
pub trait Element: Copy + Send + Sync + 'static {
    /// The value; exact for every type.
    fn to_f32(self) -> f32;
    /// The nearest value of the type, ties to even.
    fn from_f32(value: f32) -> Self;
    /// Bits of the nearest bf16, ties to even; the very bits of a bf16.
    fn to_bf16_bits(self) -> u16;
}

impl Element for bf16 {
    fn to_f32(self) -> f32 {
        // A shift, not bf16::to_f32, which branches on NaN; loops over rows stay vectorisable.
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }

    fn to_bf16_bits(self) -> u16 {
        self.to_bits()
    }
}

impl Element for f16 {
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }

    fn to_bf16_bits(self) -> u16 {
        bf16::from_f32(Self::to_f32(self)).to_bits()
    }
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> Self {
        value
    }

    fn to_bf16_bits(self) -> u16 {
        bf16::from_f32(self).to_bits()
    }
}
