//! Number formats below 16 bits, written from their definitions: sign, exponent, mantissa, bias.

use std::sync::LazyLock;

/// A format whose codes all have a value.
pub struct Format {
    pub bits: u32,
    /// Value of every code.
    pub values: Vec<f32>,
}

pub static E4M3: LazyLock<Format> = LazyLock::new(|| {
    Format::signed(4, 3, 7, |exponent, mantissa| (exponent == 15 && mantissa == 7).then_some(f32::NAN))
});
pub static E5M2: LazyLock<Format> = LazyLock::new(|| {
    Format::signed(5, 2, 15, |exponent, mantissa| {
        (exponent == 31).then_some(if mantissa == 0 { f32::INFINITY } else { f32::NAN })
    })
});
pub static E2M1: LazyLock<Format> = LazyLock::new(|| Format::signed(2, 1, 1, |_, _| None));
pub static E3M2: LazyLock<Format> = LazyLock::new(|| Format::signed(3, 2, 3, |_, _| None));
pub static E2M3: LazyLock<Format> = LazyLock::new(|| Format::signed(2, 3, 1, |_, _| None));
/// E4M3 scales: the sign bit is ignored.
pub static UE4M3: LazyLock<Format> = LazyLock::new(|| {
    let values = (0..256).map(|code| E4M3.values[code & 127]).collect();
    Format { bits: 8, values }
});
pub static UE8M0: LazyLock<Format> = LazyLock::new(|| {
    let value = |code: i32| if code == 255 { f32::NAN } else { 2f64.powi(code - 127) as f32 };
    Format { bits: 8, values: (0..256).map(value).collect() }
});

impl Format {
    fn signed(exponent_bits: u32, mantissa_bits: u32, bias: i32, special: fn(u32, u32) -> Option<f32>) -> Self {
        let bits = 1 + exponent_bits + mantissa_bits;
        let value = |code: u32| {
            let exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
            let mantissa = code & ((1 << mantissa_bits) - 1);
            let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
            let magnitude = special(exponent, mantissa).map_or_else(
                || match exponent {
                    0 => fraction * 2f64.powi(1 - bias),
                    _ => (1.0 + fraction) * 2f64.powi(exponent as i32 - bias),
                },
                f64::from,
            );
            (if code >> (bits - 1) == 1 { -magnitude } else { magnitude }) as f32
        };
        Self { bits, values: (0..1 << bits).map(value).collect() }
    }

    pub fn named(name: &str) -> Option<&'static Self> {
        Some(match name {
            "e4m3" => &E4M3,
            "e5m2" => &E5M2,
            "e2m1" => &E2M1,
            "e3m2" => &E3M2,
            "e2m3" => &E2M3,
            "ue4m3" => &UE4M3,
            "ue8m0" => &UE8M0,
            _ => return None,
        })
    }

    /// The nearest code of a signed format, ties to even, beyond the largest finite value that value (`satfinite`); a
    /// NaN is the format's NaN, or where it has none its largest value.
    pub fn nearest(&self, x: f32) -> u32 {
        let half = 1usize << (self.bits - 1);
        let finite = self.values[..half].iter().filter(|value| value.is_finite()).count();
        if x.is_nan() {
            return half as u32 - 1;
        }
        let magnitude = x.abs().min(self.values[finite - 1]);
        let above = self.values[..finite].partition_point(|value| *value < magnitude).min(finite - 1);
        let below = above.saturating_sub(1);
        let to = |code: usize| (f64::from(magnitude) - f64::from(self.values[code])).abs();
        let code = match to(above).total_cmp(&to(below)) {
            std::cmp::Ordering::Less => above,
            std::cmp::Ordering::Greater => below,
            std::cmp::Ordering::Equal => {
                if above % 2 == 0 {
                    above
                } else {
                    below
                }
            }
        };
        code as u32 | if x.is_sign_negative() { half as u32 } else { 0 }
    }
}

/// UE8M0 of a magnitude, rounded up or towards zero, saturated; NaN is 255.
pub fn ue8m0(x: f32, up: bool) -> u32 {
    if x.is_nan() {
        return 255;
    }
    let magnitude = f64::from(x.abs()).min(2f64.powi(127));
    // The first code at or above it; below the smallest every magnitude rounds to code 0.
    let at = (0..255).find(|code| 2f64.powi(code - 127) >= magnitude).unwrap_or(254);
    let exact = 2f64.powi(at - 127) == magnitude;
    (if up || exact { at } else { (at - 1).max(0) }) as u32
}
