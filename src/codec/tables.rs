//! E4M3 and E2M1 conversion as tables that are filled by the `microfloat` crate, so that a row costs loads only.

use std::sync::LazyLock;

use microfloat::{f4e2m1fn, f8e4m3fn};

/// Bits of an f32 that decide the code: sign, exponent and the four highest mantissa bits...
const KEPT_BITS: u32 = 13;
/// ...and whether any of the lower mantissa bits is set. Rounding to three or fewer mantissa bits needs no more.
const ENTRIES: usize = 1 << (KEPT_BITS + 1);
const DROPPED_BITS: u32 = 32 - KEPT_BITS;

/// Conversions of one 4-bit or 8-bit float format.
pub(super) struct CodeTable {
    codes: Box<[u8; ENTRIES]>,
    values: Box<[f32; 256]>,
}

impl CodeTable {
    fn new(encode: impl Fn(f32) -> u8, decode: impl Fn(u8) -> f32) -> Self {
        let mut codes = Box::new([0; ENTRIES]);
        for (index, code) in codes.iter_mut().enumerate() {
            let sticky = (index & 1) as u32;
            *code = encode(f32::from_bits(((index >> 1) as u32) << DROPPED_BITS | sticky));
        }
        let mut values = Box::new([0.0; 256]);
        for (code, value) in (0..=255).zip(values.iter_mut()) {
            *value = decode(code);
        }
        Self { codes, values }
    }

    /// The code nearest to `x`, ties to even, beyond the range the largest code of the same sign.
    pub fn code(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let sticky = u32::from(bits << KEPT_BITS != 0);
        self.codes[(bits >> DROPPED_BITS << 1 | sticky) as usize % ENTRIES]
    }

    /// The value of a code.
    pub fn value(&self, code: u8) -> f32 {
        self.values[usize::from(code)]
    }
}

/// E4M3 (OCP, "fn"): largest value 448, codes 0x7f and 0xff are NaN.
pub(super) static E4M3: LazyLock<CodeTable> = LazyLock::new(|| {
    let largest = f8e4m3fn::MAX.to_f32();
    CodeTable::new(
        |x| f8e4m3fn::from_f32(x.clamp(-largest, largest)).to_bits(),
        |code| f8e4m3fn::from_bits(code).to_f32(),
    )
});

/// E2M1: largest value 6, every code finite. Decodes the low four bits.
pub(super) static E2M1: LazyLock<CodeTable> = LazyLock::new(|| {
    let largest = f4e2m1fn::MAX.to_f32();
    CodeTable::new(
        |x| f4e2m1fn::from_f32(x.clamp(-largest, largest)).to_bits(),
        |code| f4e2m1fn::from_bits(code & 0xf).to_f32(),
    )
});
