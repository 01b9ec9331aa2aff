//! What the interpreter refuses that hardware may let pass; beside each rule a program that keeps it.

use crate::Schedule;
use crate::module::Module;
use crate::probe::{Probe, bytes};

/// Shared memory at `%r1`, this thread's word of it at `%r2`; predicates: first thread, first warp.
const START: &str = "mov.u32 %r1, shared_memory; shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1; mov.u32 %r9, 5;
    setp.eq.s32 %p1, %r0, 0; setp.lt.u32 %p2, %r0, 32;";

fn run(body: &str, threads: u32, schedule: Schedule) -> Result<Vec<u32>, String> {
    let body = format!("{START}{body}");
    let input = bytes(0..256);
    Probe { body: &body, threads, input: &input, words: threads as usize, ..Probe::default() }.run(schedule)
}

/// Every schedule finds it, whichever side comes first.
fn refused(body: &str, threads: u32, why: &str) {
    for schedule in crate::SCHEDULES {
        let error = run(body, threads, schedule).expect_err(body);
        assert!(error.contains(why), "{schedule:?}: `{error}`, not `{why}`");
        assert!(error.contains("probe, line ") && error.contains("block (0, 0, 0)"), "{error}");
    }
}

fn accepted(body: &str, threads: u32) {
    for schedule in crate::SCHEDULES {
        run(body, threads, schedule).unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
    }
}

#[test]
fn shared_memory() {
    refused("ld.shared.u32 %r3, [%r2];", 32, "never written");
    refused("st.shared.u32 [%r2+1020], %r0;", 32, "outside the block's 1024 bytes");
    refused("st.shared.u32 [%r2+2], %r0;", 32, "not a multiple of 4");
    refused("st.shared.u32 [%r1], %r0;", 32, "two lanes write different values");
    accepted("st.shared.u32 [%r1], %r9; bar.warp.sync -1; st.shared.u32 [%r2], %r0; ld.shared.u32 %r3, [%r2];", 32);
}

#[test]
fn races_between_warps() {
    // Each thread reads the word of the same lane in the other warp.
    let exchange = |between: &str| {
        format!(
            "st.shared.u32 [%r2], %r0; {between} xor.b32 %r3, %r0, 32; shl.b32 %r3, %r3, 2; add.s32 %r3, %r3, %r1; ld.shared.u32 %r4, [%r3];"
        )
    };
    accepted(&exchange("bar.sync 0;"), 64);
    accepted(&exchange("barrier.cta.sync.aligned 5, 64;"), 64);
    let error = |between: &str| run(&exchange(between), 64, Schedule::Forward).unwrap_err();
    assert!(error("membar.cta;").contains("never written") || error("membar.cta;").contains("race"));
    refused(&format!("{} st.shared.u32 [%r2], %r0;", exchange("bar.sync 0;")), 64, "race");
    accepted(&format!("{} bar.sync 0; st.shared.u32 [%r2], %r0;", exchange("bar.sync 0;")), 64);
    refused("@%p2 st.shared.u32 [%r2], %r9; @!%p2 st.shared.u32 [%r2+-128], %r9;", 64, "race: warp");
}

#[test]
fn races_between_lanes() {
    let exchange = |between: &str| {
        format!(
            "st.shared.u32 [%r2], %r0; {between} xor.b32 %r3, %r0, 1; shl.b32 %r3, %r3, 2; add.s32 %r3, %r3, %r1; ld.shared.u32 %r4, [%r3];"
        )
    };
    refused(&exchange(""), 32, "of the same warp wrote this");
    accepted(&exchange("bar.warp.sync -1;"), 32);
}

#[test]
fn global_memory() {
    refused("ld.global.u32 %r3, [%rd1+1000];", 32, "outside every buffer; `input` below it has 1024 bytes");
    refused("cvt.u64.u32 %rd4, %r0; ld.global.u32 %r3, [%rd4];", 32, "outside every buffer");
    refused("ld.global.u32 %r3, [%rd0];", 32, "byte 0 of `output`, which was never written");
    refused("st.global.u32 [%rd1], %r0;", 32, "`input`, which is an input");
    refused("ld.global.v2.u32 {%r3, %r4}, [%rd1];", 32, "not a multiple of 8");
    refused("st.global.u32 [%rd3], %r9; ld.global.nc.u32 %r3, [%rd3];", 32, "read-only load");
    refused("st.global.u32 [%rd3], %r9;", 64, "race: another warp of this launch");
    accepted("st.global.u32 [%rd3], %r9; ld.global.u32 %r3, [%rd3];", 32);
    let probe = Probe { body: "mov.u32 %r1, 1; st.global.u32 [%rd0], %r1;", blocks: 2, ..Probe::default() };
    assert!(probe.run(Schedule::Random(3)).unwrap_err().contains("race: another warp of this launch"));
}

#[test]
fn barriers() {
    refused("@%p2 bar.sync 0;", 64, "deadlock: warp 0");
    refused("@%p1 bar.sync 0;", 32, "diverged and cannot meet");
    refused("@%p2 bar.sync 1, 64; @!%p2 bar.sync 1, 96;", 64, "where others wait for");
    refused("bar.sync 1, 48;", 64, "no whole warps");
    refused("bar.arrive 1, 64;", 32, "ended while warps waited at barrier 1");
    refused("setp.gt.u32 %p3, %r0, 9; @%p3 bra past; shfl.sync.idx.b32 %r3, %r0, 0, 31, -1; past:", 32, "have ended");
    refused("shfl.sync.idx.b32 %r3, %r0, 0, 31, 0xffff;", 32, "does not name this lane");
    // Roles may meet from different places in the code, warp by warp.
    accepted("@%p2 bra one; bar.sync 0; bra.uni end; one: bar.sync 0; end:", 64);
}

/// An mbarrier at `%r1`, eight bytes; a bulk copy of 64 bytes to `%r5`.
fn copied(fence: &str, expected: u32, wait: &str, rest: &str) -> String {
    format!(
        "@!%p1 bra ready; mbarrier.init.shared::cta.b64 [%r1], 1; {fence} ready: bar.sync 0; add.s32 %r5, %r1, 64;
         @!%p1 bra copied; mov.u32 %r6, {expected}; mbarrier.arrive.expect_tx.shared::cta.b64 %rd5, [%r1], %r6; mov.u32 %r7, 64;
         cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r5], [%rd2], %r7, [%r1]; copied: {wait}
         and.b32 %r8, %r0, 15; shl.b32 %r8, %r8, 2; add.s32 %r8, %r8, %r5; {rest}"
    )
}

const FENCE: &str = "fence.mbarrier_init.release.cluster;";
const WAIT: &str = "again: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra again;";
const READ: &str = "ld.shared.u32 %r4, [%r8]; st.global.u32 [%rd0], %r4;";

#[test]
fn copies() {
    accepted(&copied(FENCE, 64, WAIT, READ), 64);
    refused(&copied("", 64, WAIT, READ), 64, "no fence stands between mbarrier.init and the copies");
    refused(&copied(FENCE, 64, "", READ), 64, "");
    refused(&copied(FENCE, 80, WAIT, READ), 64, "bytes missing");
    refused(&copied(FENCE, 48, WAIT, READ), 64, "bytes missing");
    refused(&copied(FENCE, 64, "mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0;", READ), 64, "");
    refused(&copied(FENCE, 64, WAIT, "ld.shared.u32 %r4, [%r8+64];"), 64, "never written");
    // One warp waits, the other reads.
    let half = "@!%p2 bra past; again: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra again; past:";
    refused(&copied(FENCE, 64, half, READ), 64, "");
    accepted(&copied(FENCE, 64, &format!("{half} bar.sync 0;"), READ), 64);
    refused(
        "@%p1 mbarrier.init.shared::cta.b64 [%r1], 1;@%p1 ld.shared.u32 %r3, [%r1];",
        32,
        "these bytes are an mbarrier",
    );
    refused("@%p1 mbarrier.arrive.shared::cta.b64 %rd5, [%r1];", 32, "no mbarrier was initialised");
    refused(
        "@%p1 mbarrier.init.shared::cta.b64 [%r1], 1; mbarrier.arrive.shared::cta.b64 %rd5, [%r1+1020];",
        32,
        "no mbarrier",
    );
    refused(
        "@%p1 mbarrier.init.shared::cta.b64 [%r1], 31; bar.sync 0; mbarrier.arrive.shared::cta.b64 %rd5, [%r1]; @%p1 mbarrier.arrive.shared::cta.b64 %rd5, [%r1], 31;",
        32,
        "more arrivals",
    );
}

#[test]
fn copies_after_other_uses_of_their_bytes() {
    let twice = |between: &str| {
        copied(
            FENCE,
            64,
            WAIT,
            &format!(
                "{READ} {between} @!%p1 bra end; mbarrier.arrive.expect_tx.shared::cta.b64 %rd5, [%r1], %r7;
            cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r5], [%rd2], %r7, [%r1];
            second: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 1; @!%p3 bra second; end:"
            ),
        )
    };
    accepted(&twice("bar.sync 0;"), 64);
    refused(&twice(""), 64, "");
    refused(
        &twice("bar.sync 0; st.shared.u32 [%r8], %r9; bar.sync 0;"),
        32,
        "no fence.proxy.async stands before the copy",
    );
    accepted(&twice("bar.sync 0; st.shared.u32 [%r8], %r9; fence.proxy.async.shared::cta; bar.sync 0;"), 32);
}

#[test]
fn arithmetic() {
    refused("div.u32 %r3, %r9, %r0;", 32, "division by zero");
    refused("mov.u32 %r3, 0; again: bra.uni again;", 32, "does not end");
}

#[test]
fn what_is_not_known_is_named() {
    for (instruction, named) in [
        ("frobnicate.u32 %r1, %r0;", "does not know `frobnicate.u32`"),
        ("add.sat.s32 %r1, %r0, 1;", "does not know `add.sat.s32`"),
        ("ld.global.weird.u32 %r1, [%rd1];", "does not know .weird"),
        (
            "mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%f0, %f1, %f2, %f3};",
            "f32",
        ),
        ("add.s32 %r1, %nothing, 1;", "%nothing is not known"),
        ("add.s32 %r1, %rd1, 1;", "a register of Some(8) bytes where 4 are read"),
        ("add.s32 %r1, %r0;", "2 operands where 3 are expected"),
    ] {
        let error = Probe { body: instruction, ..Probe::default() }.run(Schedule::Forward).unwrap_err();
        assert!(error.contains(named) && error.contains("line 1"), "{instruction}: {error}");
    }
    assert!(Module::parse(".entry x() .cluster 2 { ret; }").is_err());
}
