//! Instructions that the committed kernels use little or not at all, each against what the PTX manual says.

use crate::common::Lcg;
use crate::probe::{Probe, bytes, per_lane};

fn words() -> Vec<u32> {
    let mut random = Lcg(1);
    let special = [0, 1, 31, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0x0101_8080];
    (0..121).map(|_| (random.next() << 1 | random.next() & 1) as u32).chain(special).collect()
}

/// Compares `%r2` with a function of `%r1`.
fn check(code: &str, want: impl Fn(u32) -> u32) {
    let words = words();
    for (word, got) in words.iter().zip(per_lane(code, &words)) {
        assert_eq!(got, want(*word), "{code} of {word:#x}");
    }
}

#[test]
fn integers() {
    check("bfe.u32 %r2, %r1, 5, 9;", |x| x >> 5 & 0x1ff);
    check("bfe.s32 %r2, %r1, 20, 8;", |x| ((x << 4) as i32 >> 24) as u32);
    check("bfi.b32 %r2, %r1, 65535, 8, 4;", |x| x << 8 & 0xf00 | 0xffff & !0xf00);
    check("popc.b32 %r2, %r1;", u32::count_ones);
    check("clz.b32 %r2, %r1;", u32::leading_zeros);
    check("brev.b32 %r2, %r1;", u32::reverse_bits);
    check("lop3.b32 %r2, %r1, 252645135, 16711935, 0xCA;", |x| x & 0x0f0f_0f0f | !x & 0x00ff_00ff);
    check("shf.r.wrap.b32 %r2, %r1, 7, 12;", |x| x >> 12 | 7 << 20);
    check("mul.hi.u32 %r2, %r1, %r1;", |x| ((u64::from(x) * u64::from(x)) >> 32) as u32);
    check("mul.hi.s32 %r2, %r1, 77777;", |x| ((i64::from(x as i32) * 77777) >> 32) as u32);
    check("rem.u32 %r2, %r1, 1000;", |x| x % 1000);
    check("div.s32 %r2, %r1, -7;", |x| (x as i32 / -7) as u32);
    check("shl.b32 %r2, %r1, 40;", |_| 0);
    check("shr.s32 %r2, %r1, 40;", |x| (x as i32 >> 31) as u32);
    check("max.u16x2 %r2, %r1, 1000100;", |x| (x & 0xffff).max(1000100 & 0xffff) | (x >> 16).max(1000100 >> 16) << 16);
    check("prmt.b32 %r2, %r1, 0, 0x9801;", |x| {
        let sign = |byte: u32| if x >> (8 * byte + 7) & 1 == 1 { 255 } else { 0 };
        x >> 8 & 255 | (x & 255) << 8 | sign(0) << 16 | sign(1) << 24
    });
    check("setp.gt.and.s32 %p0, %r1, 5, 1; selp.u32 %r2, 1, 0, %p0;", |x| u32::from(x as i32 > 5));
}

#[test]
fn integers_and_floats() {
    check("mov.b32 %f0, %r1; cvt.rzi.s32.f32 %r2, %f0;", |x| f32::from_bits(x) as i32 as u32);
    check("mov.b32 %f0, %r1; cvt.rni.u32.f32 %r2, %f0;", |x| f32::from_bits(x).round_ties_even() as u32);
    check("cvt.rn.f32.u32 %f0, %r1; mov.b32 %r2, %f0;", |x| (x as f32).to_bits());
    check("cvt.s8.s32 %b0, %r1; cvt.s32.s8 %r2, %b0;", |x| x as i8 as u32);
    check(
        "cvt.s64.s32 %rd4, %r1; shr.u64 %rd4, %rd4, 32; cvt.u32.u64 %r2, %rd4;",
        |x| if x >> 31 == 1 { !0 } else { 0 },
    );
}

#[test]
fn approximations_keep_their_bounds() {
    let values: Vec<f32> = (0..256).map(|i| 2f32.powf(i as f32 / 8.0 - 16.0)).collect();
    let bits: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
    for (code, exact, bound) in [
        ("rcp.approx.ftz.f32", (|x| 1.0 / x) as fn(f64) -> f64, 2f64.powi(-23)),
        ("rsqrt.approx.ftz.f32", |x| 1.0 / x.sqrt(), 2f64.powf(-22.9)),
        ("lg2.approx.ftz.f32", f64::log2, 2f64.powi(-22)),
        ("tanh.approx.f32", f64::tanh, 2f64.powi(-11)),
        ("sqrt.rn.f32", f64::sqrt, 2f64.powi(-24)),
        ("rcp.rn.f32", |x| 1.0 / x, 2f64.powi(-24)),
    ] {
        let code = format!("mov.b32 %f0, %r1; {code} %f1, %f0; mov.b32 %r2, %f1;");
        for (x, got) in values.iter().zip(per_lane(&code, &bits)) {
            let (got, want) = (f64::from(f32::from_bits(got)), exact(f64::from(*x)));
            assert!((got - want).abs() <= bound * want.abs().max(1e-3), "{code} of {x}: {got} {want}");
        }
    }
    // Results and arguments below the normal numbers are zero.
    let flushed = per_lane(
        "mov.b32 %f0, %r1; ex2.approx.ftz.f32 %f1, %f0; mov.b32 %r2, %f1;",
        &[(-127f32).to_bits(), (-126f32).to_bits(), 1],
    );
    assert_eq!(flushed, [0, 0x0080_0000, 1f32.to_bits()]);
    let signs = per_lane(
        "mov.b32 %f0, %r1; max.f32 %f1, %f0, 0f00000000; mov.b32 %r2, %f1;",
        &[0x8000_0000, 0x7fc0_0000, (-1f32).to_bits()],
    );
    assert_eq!(signs, [0, 0, 0]);
}

#[test]
fn lanes_exchange() {
    let lanes = |f: &dyn Fn(u32) -> u32| (0..32).map(f).collect::<Vec<u32>>();
    let shuffle = |form: &str| {
        let body = format!(
            "shfl.sync.{form}, 0xffffffff; selp.u32 %r4, 100, 0, %p0; add.s32 %r3, %r3, %r4; st.global.u32 [%rd0], %r3;"
        );
        Probe { body: &body, ..Probe::default() }.output()
    };
    assert_eq!(shuffle("up.b32 %r3|%p0, %r0, 3, 0"), lanes(&|lane| if lane >= 3 { lane - 3 + 100 } else { lane }));
    assert_eq!(shuffle("down.b32 %r3|%p0, %r0, 5, 31"), lanes(&|lane| if lane < 27 { lane + 105 } else { lane }));
    assert_eq!(shuffle("bfly.b32 %r3|%p0, %r0, 6, 31"), lanes(&|lane| (lane ^ 6) + 100));
    // Segments of eight lanes.
    assert_eq!(shuffle("idx.b32 %r3|%p0, %r0, 2, 0x181f"), lanes(&|lane| lane / 8 * 8 + 102));
    let voted = |code: &str| {
        let body = format!("setp.lt.u32 %p1, %r0, 7; {code} st.global.u32 [%rd0], %r3;");
        Probe { body: &body, ..Probe::default() }.output()[31]
    };
    assert_eq!(voted("vote.sync.all.pred %p0, %p1, -1; selp.u32 %r3, 1, 0, %p0;"), 0);
    assert_eq!(voted("vote.sync.any.pred %p0, %p1, -1; selp.u32 %r3, 1, 0, %p0;"), 1);
    assert_eq!(voted("vote.sync.uni.pred %p0, !%p1, -1; selp.u32 %r3, 1, 0, %p0;"), 0);
    assert_eq!(voted("vote.sync.ballot.b32 %r3, %p1, -1;"), 127);
    assert_eq!(voted("redux.sync.add.u32 %r3, %r0, -1;"), 496);
    assert_eq!(voted("sub.s32 %r3, %r0, 5; redux.sync.min.s32 %r3, %r3, -1;"), -5i32 as u32);
    assert_eq!(voted("redux.sync.xor.b32 %r3, %r0, -1;"), 0);
    assert_eq!(voted("activemask.b32 %r3;"), !0);
    // Diverged lanes meet again at the exchange.
    let body = "setp.lt.u32 %p1, %r0, 9; mov.u32 %r3, 1; @%p1 bra low; mov.u32 %r3, 2; low: redux.sync.add.u32 %r3, %r3, -1; st.global.u32 [%rd0], %r3;";
    assert_eq!(Probe { body, ..Probe::default() }.output(), [55; 32]);
}

#[test]
fn one_lane_is_elected() {
    let body = "mov.u32 %r3, 0; elect.sync _|%p0, 0xffffffff; @%p0 mov.u32 %r3, 1; redux.sync.add.u32 %r3, %r3, -1; st.global.u32 [%rd0], %r3;";
    assert_eq!(Probe { body, ..Probe::default() }.output(), [1; 32]);
}

#[test]
fn atomics_add_up() {
    let body = "mov.u32 %r1, shared_memory; setp.eq.s32 %p0, %r0, 0; mov.u32 %r2, 0; @%p0 st.shared.u32 [%r1], %r2; bar.sync 0;
        atom.shared.add.u32 %r3, [%r1], %r0; red.shared.add.u32 [%r1], 1; bar.sync 0;
        atom.shared.cas.b32 %r4, [%r1], 2080, 7; bar.sync 0; ld.shared.u32 %r5, [%r1]; st.global.u32 [%rd0], %r5;";
    assert_eq!(Probe { body, threads: 64, words: 64, ..Probe::default() }.output(), [7; 64]);
}

#[test]
fn barriers_reduce() {
    let reduced = |code: &str| {
        let body = format!("setp.lt.u32 %p1, %r0, 40; {code} st.global.u32 [%rd0], %r3;");
        let output = Probe { body: &body, threads: 64, words: 64, ..Probe::default() }.output();
        assert!(output.iter().all(|word| *word == output[0]));
        output[0]
    };
    assert_eq!(reduced("bar.red.popc.u32 %r3, 1, 64, %p1;"), 40);
    assert_eq!(reduced("bar.red.or.pred %p0, 1, %p1; selp.u32 %r3, 1, 0, %p0;"), 1);
    assert_eq!(reduced("barrier.cta.red.and.aligned.pred %p0, 1, 64, %p1; selp.u32 %r3, 1, 0, %p0;"), 0);
}

#[test]
fn who_arrives_without_waiting_releases_who_waits() {
    let body = "mov.u32 %r1, shared_memory; shl.b32 %r2, %r0, 2; and.b32 %r2, %r2, 127; add.s32 %r1, %r1, %r2;
        setp.ge.u32 %p0, %r0, 32; @%p0 bra consume;
        st.shared.u32 [%r1], %r0; bar.arrive 3, 64; bra.uni end;
        consume: bar.sync 3, 64; ld.shared.u32 %r3, [%r1]; st.global.u32 [%rd0+-128], %r3; end:";
    assert_eq!(Probe { body, threads: 64, ..Probe::default() }.output(), (0..32).collect::<Vec<_>>());
}

#[test]
fn copies_of_groups_land_when_waited_for() {
    let body = "mov.u32 %r1, shared_memory; shl.b32 %r2, %r0, 2; add.s32 %r1, %r1, %r2;
        cp.async.ca.shared.global [%r1], [%rd1], 4; cp.async.commit_group;
        cp.async.ca.shared.global [%r1+128], [%rd1], 4, 0; cp.async.commit_group;
        cp.async.wait_group 1; ld.shared.u32 %r3, [%r1]; cp.async.wait_all; ld.shared.u32 %r4, [%r1+128];
        add.s32 %r3, %r3, %r4; st.global.u32 [%rd0], %r3;";
    let input = bytes((0..32).map(|word| word * 3));
    assert_eq!(
        Probe { body, input: &input, ..Probe::default() }.output(),
        (0..32).map(|word| word * 3).collect::<Vec<_>>()
    );
}
