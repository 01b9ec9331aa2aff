//! `mma`, `ldmatrix` and `stmatrix`, against plain matrix products. Fragments come from row-major matrices by `ldmatrix`, so
//! that the layouts of elements are checked by something else than themselves.

use microfloat::{f4e2m1fn, f6e2m3fn, f6e3m2fn, f8e4m3fn, f8e5m2, f8e8m0fnu};
use sparse_mla::half::{bf16, f16};

use crate::common::Lcg;
use crate::probe::{Probe, bytes};

/// Bytes of a row of A and of a column of B.
const ROW: usize = 32;

/// Loads A (16 rows) and B (8 columns) of 32 bytes each into fragments `%r10` to `%r15`; scales into `%r20`, `%r21`.
const LOAD: &str = "
    mov.u32 %r1, shared_memory; shl.b32 %r2, %r0, 4; add.s32 %r3, %r1, %r2; cvt.u64.u32 %rd4, %r2; add.s64 %rd4, %rd4, %rd2;
    ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd4]; st.shared.v4.u32 [%r3], {%r4, %r5, %r6, %r7};
    setp.lt.u32 %p0, %r0, 16;
    @%p0 ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd4+512];
    @%p0 st.shared.v4.u32 [%r3+512], {%r4, %r5, %r6, %r7};
    bar.sync 0;
    and.b32 %r4, %r0, 15; shl.b32 %r4, %r4, 5; shr.u32 %r5, %r0, 4; shl.b32 %r5, %r5, 4; add.s32 %r4, %r4, %r5;
    add.s32 %r4, %r4, %r1; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r4];
    and.b32 %r4, %r0, 7; shl.b32 %r4, %r4, 5; shr.u32 %r5, %r0, 3; and.b32 %r5, %r5, 1; shl.b32 %r5, %r5, 4;
    add.s32 %r4, %r4, %r5; add.s32 %r4, %r4, %r1;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r14, %r15}, [%r4+512];
    ld.global.u32 %r20, [%rd1+768]; ld.global.u32 %r21, [%rd1+896];
    mov.f32 %f0, 0f3F000000; mov.f32 %f1, 0f3F000000; mov.f32 %f2, 0f3F000000; mov.f32 %f3, 0f3F000000;
";
/// Stores the accumulators row-major.
const STORE: &str = "
    shr.u32 %r4, %r0, 2; shl.b32 %r4, %r4, 5; and.b32 %r5, %r0, 3; shl.b32 %r5, %r5, 3; add.s32 %r4, %r4, %r5;
    cvt.u64.u32 %rd5, %r4; add.s64 %rd5, %rd5, %rd3;
    st.global.v2.f32 [%rd5], {%f0, %f1}; st.global.v2.f32 [%rd5+256], {%f2, %f3};
";

/// How many bits an element takes, and its value.
type Elements = (usize, fn(u32) -> f64);

const F16: Elements = (16, |bits| f16::from_bits(bits as u16).to_f64());
const BF16: Elements = (16, |bits| bf16::from_bits(bits as u16).to_f64());
const E4M3: Elements = (8, |bits| f64::from(f8e4m3fn::from_bits(bits as u8).to_f32()));
const E5M2: Elements = (8, |bits| f64::from(f8e5m2::from_bits(bits as u8).to_f32()));
const E3M2: Elements = (8, |bits| f64::from(f6e3m2fn::from_bits(bits as u8 & 63).to_f32()));
const E2M3: Elements = (8, |bits| f64::from(f6e2m3fn::from_bits(bits as u8 & 63).to_f32()));
const E2M1_IN_BYTES: Elements = (8, |bits| f64::from(f4e2m1fn::from_bits(bits as u8 >> 2 & 15).to_f32()));
const E2M1: Elements = (4, |bits| f64::from(f4e2m1fn::from_bits(bits as u8).to_f32()));

fn element(row: &[u8], at: usize, (bits, value): Elements) -> f64 {
    value(match bits {
        16 => u32::from(u16::from_le_bytes([row[2 * at], row[2 * at + 1]])),
        8 => u32::from(row[at]),
        _ => u32::from(row[at / 2] >> (4 * (at % 2)) & 15),
    })
}

/// Finite codes: exponents of E4M3, E5M2 and the halves stay small.
fn matrix(rows: usize, seed: u64) -> Vec<u8> {
    let mut random = Lcg(seed);
    (0..rows * ROW).map(|_| random.next() as u8 & 0xbf).collect()
}

/// Scale of a row (or column) and k.
type Scale<'a> = &'a dyn Fn(usize, usize) -> f64;

fn check(instruction: &str, a: Elements, b: Elements, scales: &[u32], [of_a, of_b]: [Scale<'_>; 2]) {
    let (left, right) = (matrix(16, 1), matrix(8, 2));
    let input = [left.clone(), right.clone(), bytes(scales.iter().copied())].concat();
    let body = format!("{LOAD}{instruction};{STORE}");
    let probe = Probe { body: &body, input: &input, words: 128, ..Probe::default() };
    let got = probe.output();
    for row in 0..16 {
        for column in 0..8 {
            let product = |k: usize| {
                let a = element(&left[row * ROW..], k, a) * of_a(row, k);
                a * element(&right[column * ROW..], k, b) * of_b(column, k)
            };
            let want = 0.5 + (0..8 * ROW / a.0).map(product).sum::<f64>();
            let got = f32::from_bits(got[row * 8 + column]);
            let magnitude = (0..8 * ROW / a.0).map(|k| product(k).abs()).sum::<f64>().max(0.5);
            assert!((f64::from(got) - want).abs() <= 1e-6 * magnitude, "{instruction}: [{row}, {column}] {got} {want}");
        }
    }
}

const NO_SCALE: [Scale<'static>; 2] = [&|_, _| 1.0, &|_, _| 1.0];
const OPERANDS: &str = "{%f0, %f1, %f2, %f3}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f0, %f1, %f2, %f3}";

#[test]
fn dense_products() {
    let scales = [0; 64];
    for (kinds, a, b) in [
        ("m16n8k16.row.col.f32.f16.f16.f32", F16, F16),
        ("m16n8k16.row.col.f32.bf16.bf16.f32", BF16, BF16),
        ("m16n8k32.row.col.f32.e4m3.e4m3.f32", E4M3, E4M3),
        ("m16n8k32.row.col.f32.e4m3.e5m2.f32", E4M3, E5M2),
        ("kind::f8f6f4.m16n8k32.row.col.f32.e4m3.e2m1.f32", E4M3, E2M1_IN_BYTES),
        ("m16n8k32.row.col.kind::f8f6f4.f32.e3m2.e2m3.f32", E3M2, E2M3),
    ] {
        check(&format!("mma.sync.aligned.{kinds} {OPERANDS}"), a, b, &scales, NO_SCALE);
    }
}

/// Scale words of A, then of B, for every lane; exponents near 127 in every byte.
fn scale_words() -> Vec<u32> {
    let mut random = Lcg(3);
    (0..64).map(|_| (0..4).fold(0, |word, _| word << 8 | (120 + random.below(14) as u32))).collect()
}

fn ue8m0(word: u32, byte: usize) -> f64 {
    f64::from(f8e8m0fnu::from_bits((word >> (8 * byte)) as u8).to_f32())
}

#[test]
fn block_scaled_products() {
    let scales = scale_words();
    // Rows of A: lanes 0 and 1 (thread id 0) or 2 and 3 (1) of every group of four; columns of B: lane 4n + thread id.
    let word_a = |row: usize, thread: usize| scales[4 * (row % 8) + 2 * thread + row / 8];
    let word_b = |column: usize, thread: usize| scales[32 + 4 * column + thread];
    for (byte_a, thread_a, byte_b, thread_b) in [(0, 0, 0, 0), (3, 1, 1, 2)] {
        let form = "m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32";
        for (types, a, b) in [("e4m3.e4m3", E4M3, E4M3), ("e4m3.e2m1", E4M3, E2M1_IN_BYTES)] {
            let instruction = format!(
                "mma.sync.aligned.{form}.{types}.f32.ue8m0 {OPERANDS}, %r20, {{{byte_a}, {thread_a}}}, %r21, {{{byte_b}, {thread_b}}}"
            );
            let of_a = |row: usize, _: usize| ue8m0(word_a(row, thread_a), byte_a);
            let of_b = |column: usize, _: usize| ue8m0(word_b(column, thread_b), byte_b);
            check(&instruction, a, b, &scales, [&of_a, &of_b]);
        }
    }
    for (kind, byte) in [("mxf4", 0), ("mxf4", 2), ("mxf4nvf4", 0)] {
        let instruction = format!(
            "mma.sync.aligned.m16n8k64.row.col.kind::{kind}.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0 \
             {OPERANDS}, %r20, {{{byte}, 0}}, %r21, {{{byte}, 0}}"
        );
        let of_a = |row: usize, k: usize| ue8m0(word_a(row, 0), byte + k / 32);
        let of_b = |column: usize, k: usize| ue8m0(word_b(column, 0), byte + k / 32);
        check(&instruction, E2M1, E2M1, &scales, [&of_a, &of_b]);
    }
    let e4m3: Vec<u32> = scales.iter().map(|word| word & 0x7777_7777).collect();
    let value = |word: u32, byte: usize| f64::from(f8e4m3fn::from_bits((word >> (8 * byte)) as u8).to_f32());
    let of_a = |row: usize, k: usize| value(e4m3[4 * (row % 8) + row / 8], k / 16);
    let of_b = |column: usize, k: usize| value(e4m3[32 + 4 * column], k / 16);
    let instruction = format!(
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 {OPERANDS}, %r20, \
         {{0, 0}}, %r21, {{0, 0}}"
    );
    check(&instruction, E2M1, E2M1, &e4m3, [&of_a, &of_b]);
}

#[test]
fn a_byte_id_that_the_form_does_not_have_is_refused() {
    let form = "m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0";
    let body = format!("{LOAD}mma.sync.aligned.{form} {OPERANDS}, %r20, {{1, 0}}, %r21, {{0, 0}};");
    let probe = Probe { body: &body, input: &[0; 1024], words: 128, ..Probe::default() };
    assert!(probe.run(crate::Schedule::Forward).unwrap_err().contains("byte id 1"));
}

#[test]
fn matrices_go_through_shared_memory() {
    // Element [row][column] of an 8 x 8 matrix is 8 * row + column; a lane holds [lane / 4][2 * (lane % 4)] and the next.
    let plain = |lane: u32| (2 * lane) | ((2 * lane + 1) << 16);
    let transposed = |lane: u32| {
        let (row, column) = (lane / 4, 2 * (lane % 4));
        (8 * column + row) | ((8 * (column + 1) + row) << 16)
    };
    let input = bytes((0..32).map(plain));
    for (store, load, want) in [
        ("", "", plain as fn(u32) -> u32),
        ("", ".trans", transposed),
        (".trans", "", transposed),
        (".trans", ".trans", plain),
    ] {
        let body = format!(
            "ld.global.u32 %r1, [%rd1]; mov.u32 %r2, shared_memory; and.b32 %r3, %r0, 7; shl.b32 %r3, %r3, 4; add.s32 %r3, %r3, %r2;
             stmatrix.sync.aligned.m8n8.x1{store}.shared.b16 [%r3], {{%r1}}; bar.sync 0;
             ldmatrix.sync.aligned.m8n8.x1{load}.shared.b16 {{%r4}}, [%r3]; st.global.u32 [%rd0], %r4;"
        );
        let probe = Probe { body: &body, input: &input, ..Probe::default() };
        assert_eq!(probe.output(), (0..32).map(want).collect::<Vec<_>>(), "stmatrix{store} ldmatrix{load}");
    }
}
