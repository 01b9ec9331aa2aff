//! Conversions of narrow floats, against the `half` and `microfloat` crates.

use microfloat::{f4e2m1fn, f8e4m3fn, f8e5m2, f8e8m0fnu};
use sparse_mla::half::{bf16, f16};

use crate::common::Lcg;
use crate::probe::per_lane;

/// Magnitudes of every size, ties and special values among them.
fn floats() -> Vec<f32> {
    let mut random = Lcg(5);
    let mut values: Vec<f32> = (0..400).map(|_| random.normal() * 2f32.powi(random.below(40) as i32 - 24)).collect();
    values.extend((0..256).map(|code| f8e4m3fn::from_bits(code as u8).to_f32() * 1.0625).filter(|x| x.is_finite()));
    values.extend([
        0.0,
        -0.0,
        0.25,
        0.75,
        1.25,
        2.5,
        3.5,
        5.0,
        448.0,
        464.0,
        57344.0,
        1e-30,
        0.0009765625,
        0.001953125,
    ]);
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Both halves of a word as f32.
fn halves(word: u32) -> [f32; 2] {
    [f16::from_bits(word as u16).to_f32(), f16::from_bits((word >> 16) as u16).to_f32()]
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

#[test]
fn codes_become_their_values() {
    let pairs: Vec<u32> = (0..256).map(|code| (255 - code) << 8 | code).collect();
    let unpack = "cvt.u16.u32 %h0, %r1; cvt.rn.f16x2.FORMAT %r2, %h0;";
    type Value = fn(u8) -> f32;
    let formats: [(&str, Value); 2] =
        [("e4m3x2", |code| f8e4m3fn::from_bits(code).to_f32()), ("e5m2x2", |code| f8e5m2::from_bits(code).to_f32())];
    for (format, value) in formats {
        for (pair, got) in pairs.iter().zip(per_lane(&unpack.replace("FORMAT", format), &pairs)) {
            let want = [value(*pair as u8), value((pair >> 8) as u8)];
            assert!(halves(got).iter().zip(want).all(|(got, want)| same(*got, want)), "{format} {pair:#x}");
        }
    }
    let narrow = "mov.b32 {%b0, %b1, %b2, %b3}, %r1; cvt.rn.f16x2.e2m1x2 %r2, %b0;";
    for (pair, got) in (0..256).zip(per_lane(narrow, &(0..256).collect::<Vec<u32>>())) {
        let want = [pair & 15, pair >> 4].map(|code| f4e2m1fn::from_bits(code as u8).to_f32());
        assert_eq!(halves(got), want, "e2m1 {pair:#x}");
    }
    let scales = "cvt.u16.u32 %h0, %r1; cvt.rn.bf16x2.ue8m0x2 %r2, %h0;";
    for (pair, got) in pairs.iter().zip(per_lane(scales, &pairs)) {
        for half in 0..2 {
            let got = bf16::from_bits((got >> (16 * half)) as u16).to_f32();
            let want = f8e8m0fnu::from_bits((pair >> (8 * half)) as u8).to_f32();
            assert!(same(got, want), "ue8m0 {pair:#x}: {got} {want}");
        }
    }
}

#[test]
fn values_become_the_nearest_codes() {
    let values = floats();
    let pack =
        "mov.b32 %f0, %r1; mov.f32 %f1, 0f40000000; cvt.rn.satfinite.FORMAT.f32 %h0, %f0, %f1; cvt.u32.u16 %r2, %h0;";
    for (x, got) in values.iter().zip(per_lane(&pack.replace("FORMAT", "e4m3x2"), &bits(&values))) {
        let want = f8e4m3fn::from_f32(x.clamp(-448.0, 448.0)).to_bits();
        assert_eq!(got, u32::from(want) << 8 | 0x40, "e4m3 of {x}");
    }
    for (x, got) in values.iter().zip(per_lane(&pack.replace("FORMAT", "e5m2x2"), &bits(&values))) {
        let want = f8e5m2::from_f32(x.clamp(-57344.0, 57344.0)).to_bits();
        assert_eq!(got, u32::from(want) << 8 | 0x40, "e5m2 of {x}");
    }
    let narrow = "mov.b32 %f0, %r1; mov.f32 %f1, 0f40000000; cvt.rn.satfinite.e2m1x2.f32 %b0, %f0, %f1; \
                  mov.u32 %r3, 0; cvt.u8.u32 %b1, %r3; mov.b32 %r2, {%b0, %b1, %b1, %b1};";
    for (x, got) in values.iter().zip(per_lane(narrow, &bits(&values))) {
        assert_eq!(got, u32::from(f4e2m1fn::from_f32(*x).to_bits()) << 4 | 4, "e2m1 of {x}");
    }
    let from_halves = "cvt.rn.satfinite.e4m3x2.f16x2 %h0, %r1; cvt.u32.u16 %r2, %h0;";
    let pairs: Vec<u32> = (0..4000).map(|index| (index * 16 % 0x7c00) | ((index * 7 % 0x7c00) << 16)).collect();
    for (pair, got) in pairs.iter().zip(pairs.chunks(256).flat_map(|part| per_lane(from_halves, part))) {
        let want = halves(*pair).map(|x| u32::from(f8e4m3fn::from_f32(x.min(448.0)).to_bits()));
        assert_eq!(got, want[1] << 8 | want[0], "e4m3 of f16 {pair:#x}");
    }
}

#[test]
fn scales_are_rounded_up_or_down_to_powers_of_two() {
    let values: Vec<f32> = floats().iter().map(|x| x.abs()).filter(|x| *x > 0.0).collect();
    for (rounding, up) in [("rp", true), ("rz", false)] {
        let code = format!(
            "mov.b32 %f0, %r1; mov.f32 %f1, 0f3F800000; cvt.{rounding}.satfinite.ue8m0x2.f32 %h0, %f0, %f1; cvt.u32.u16 %r2, %h0;"
        );
        for (x, got) in values.iter().zip(per_lane(&code, &bits(&values))) {
            let scale = f8e8m0fnu::from_bits((got >> 8) as u8).to_f32();
            assert_eq!(got & 255, 127);
            let holds = if up { scale >= *x && scale / 2.0 < *x } else { scale <= *x && scale * 2.0 > *x };
            assert!(holds, "{rounding} of {x} is {scale}");
        }
    }
}

#[test]
fn halves_round_as_the_half_crate_rounds() {
    let values = floats();
    let pack = "mov.b32 %f0, %r1; mul.f32 %f1, %f0, 0fBF000000; cvt.rn.KIND.f32 %r2, %f0, %f1;";
    let f16s = per_lane(&pack.replace("KIND", "f16x2"), &bits(&values));
    let bf16s = per_lane(&pack.replace("KIND", "bf16x2"), &bits(&values));
    for ((x, f), b) in values.iter().zip(f16s).zip(bf16s) {
        let wanted = u32::from(f16::from_f32(*x).to_bits()) << 16 | u32::from(f16::from_f32(x * -0.5).to_bits());
        assert_eq!(f, wanted, "f16 of {x}");
        let wanted = u32::from(bf16::from_f32(*x).to_bits()) << 16 | u32::from(bf16::from_f32(x * -0.5).to_bits());
        assert_eq!(b, wanted, "bf16 of {x}");
    }
    let mut random = Lcg(9);
    let pairs: Vec<u32> = (0..256).map(|_| (random.next() as u32 & 0x7bff_7bff) | 0x8000).collect();
    for (operation, compute) in [
        ("add", (|a, b| a + b) as fn(f32, f32) -> f32),
        ("sub", |a, b| a - b),
        ("mul", |a, b| a * b),
        ("min", f32::min),
        ("max", f32::max),
    ] {
        let code = format!("shf.l.wrap.b32 %r3, %r1, %r1, 16; {operation}.f16x2 %r2, %r1, %r3;");
        for (pair, got) in pairs.iter().zip(per_lane(&code, &pairs)) {
            let [low, high] = halves(*pair);
            let want = f16::from_f32(compute(low, high)).to_bits();
            assert_eq!(got as u16, want, "{operation} of {low} and {high}");
        }
    }
}
