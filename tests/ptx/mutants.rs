//! Seeded faults in the committed PTX; every one must be caught by a case.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use rayon::prelude::*;
use sparse_mla::cuda::MODULES;

use crate::case::Case;
use crate::edit::{self, Edit, Find};
use crate::module::Module;
use crate::stand_in::COMMITTED;
use Edit::{After, Before, Drop, DropEvery, Replace, ReplaceEvery, Swap};
use Find::{Last, Nth};

/// Module, entry point, what is wrong, and the edit that makes it so.
type Mutant = (&'static str, &'static str, &'static str, Edit);

const WAIT: &str = "mbarrier.try_wait";
const LOOP: &str = "@!done bra again";
const EXPECT: &str = "mbarrier.arrive.expect_tx";
const ARRIVE: &str = "mbarrier.arrive.shared::cta.b64";
const BULK: &str = "cp.async.bulk";
const MMA: &str = "f32.f16.f16.f32";
const MMA_BF16: &str = "f32.bf16.bf16.f32";
const INIT: &str = "mbarrier.init";
const RAISE: &str = "barrier.cta.red.or";
const STAGE: &str = "st.shared.v4.u32";
const TRANSPOSED: &str = "x4.trans";
const LN_2: &str = "0f3F317218";
const LOG2_E: &str = "0f3FB8AA3B";

const MUTANTS: &[Mutant] = &[
    // ---- barriers of the block and of its parts
    ("dsv3_2", "decode_16", "the CTA barrier dropped", Drop(Nth("bar.sync", 0))),
    ("dsv3_2", "decode_16", "PV warps do not wait for the sums", Drop(Last(LOOP))),
    ("dsv4", "decode_16", "QK warps do not wait for the values", Drop(Nth(LOOP, 1))),
    ("dsv4", "decode_32", "the CTA barrier dropped", DropEvery(&["bar.sync"])),
    ("dsv3_2", "decode_16", "group barrier after the largest |q| dropped", Drop(Nth("barrier.cta.sync", 0))),
    ("dsv4", "decode_16", "every group barrier dropped", DropEvery(&["barrier.cta.sync"])),
    ("dsv4_1", "decode_32", "group barrier of the exchange dropped", Drop(Find::Before(RAISE, "barrier.cta.sync"))),
    (
        "dsv3_2",
        "decode_32",
        "a group's barrier waits for both groups",
        Before(Find::Before(RAISE, "barrier.cta.sync"), 1, "add.s32 {new}, {old}, 128"),
    ),
    (
        "glm53_nope",
        "decode_16",
        "barrier of 32 threads too many",
        Before(Nth("barrier.cta.sync", 0), 1, "add.s32 {new}, {old}, 32"),
    ),
    ("glm53_nope", "decode_16", "all instead of any warp raises", Replace(Nth(RAISE, 0), "red.or", "red.and")),
    ("merge", "merge_many", "barrier between shares dropped", Drop(Nth("bar.sync", 0))),
    // ---- mbarriers
    ("dsv3_2", "decode_16", "full expects one arrival too many", Before(Nth(INIT, 0), 1, "add.s32 {new}, {old}, 1")),
    ("dsv3_2", "decode_16", "full expects one arrival too few", Before(Nth(INIT, 0), 1, "add.s32 {new}, {old}, -1")),
    ("dsv3_2", "decode_16", "free expects a warp too few", Before(Nth(INIT, 1), 1, "add.s32 {new}, {old}, -32")),
    ("dsv4_1", "decode_16", "weighted expects a warp too few", Before(Nth(INIT, 2), 1, "add.s32 {new}, {old}, -32")),
    ("dsv4", "decode_32", "an mbarrier is not initialised", Drop(Last(INIT))),
    (
        "dsv4",
        "decode_16",
        "no fence after the initialisation",
        DropEvery(&["fence.mbarrier_init", "fence.proxy.async"]),
    ),
    ("dsv3_2", "decode_16", "16 bytes too many expected", Before(Nth(EXPECT, 0), 2, "add.s32 {new}, {old}, 16")),
    ("dsv4", "decode_16", "16 bytes too few expected", Before(Last(EXPECT), 2, "add.s32 {new}, {old}, -16")),
    ("dsv4_1_inline", "decode_16", "no bytes expected", Before(Nth(EXPECT, 1), 2, "mov.u32 {new}, 0")),
    ("glm53_nope", "decode_32", "a stage is not announced", Drop(Nth(EXPECT, 0))),
    ("dsv3_2", "decode_16", "QK warps do not wait for rows", Drop(Nth(LOOP, 0))),
    ("dsv3_2", "decode_16", "PV warps do not wait for a free stage", Drop(Nth(LOOP, 2))),
    ("dsv4", "decode_16", "PV warps do not wait for weights", Drop(Nth(LOOP, 4))),
    ("dsv4_1", "decode_16", "QK warps wait for the other parity", Before(Nth(WAIT, 0), 2, "xor.b32 {new}, {old}, 1")),
    ("dsv4_1", "decode_16", "free stages of the other parity", Before(Nth(WAIT, 2), 2, "xor.b32 {new}, {old}, 1")),
    ("dots3_swa", "decode_16", "weights of the other parity", Before(Nth(WAIT, 4), 2, "xor.b32 {new}, {old}, 1")),
    ("dsv3_2", "decode_32", "weights are not announced", Drop(Nth(ARRIVE, 0))),
    ("dsv3_2", "decode_32", "stages are not given back", Drop(Last(ARRIVE))),
    ("dsv4", "decode_16", "footers are not announced", Drop(Nth("cp.async.mbarrier.arrive.noinc", 0))),
    // ---- copies
    ("dsv3_2", "decode_16", "a copy 16 bytes too short", Before(Nth(BULK, 1), 2, "add.s32 {new}, {old}, -16")),
    ("dsv3_2", "decode_16", "a copy from the next 16 bytes", Before(Nth(BULK, 0), 1, "add.s64 {new}, {old}, 16")),
    ("glm53_nope", "decode_16", "a copy to the next 16 bytes", Before(Last(BULK), 0, "add.s32 {new}, {old}, 16")),
    ("dsv4_1", "decode_16", "a copy is left out", Drop(Nth(BULK, 2))),
    ("dsv4_1", "decode_32", "every lane copies", Replace(Nth(BULK, 0), "@chosen ", "")),
    ("dsv4_1", "decode_16", "a footer from 16 bytes before", Before(Nth(BULK, 1), 1, "add.s64 {new}, {old}, -16")),
    ("dsv4", "decode_16", "footers 8 bytes late", Before(Nth("cp.async.ca", 0), 0, "add.s32 {new}, {old}, 8")),
    ("dots3_swa", "decode_16", "footers are not copied", Drop(Nth("cp.async.ca", 0))),
    ("dots3_swa", "decode_16", "half a footer", Replace(Last("cp.async.ca"), "], 8,", "], 4,")),
    // ---- exchange between lanes
    (
        "dsv3_2",
        "decode_16",
        "rows of the next lane",
        Before(Find::After(EXPECT, "shfl.sync.idx"), 2, "add.s32 {new}, {old}, 1"),
    ),
    (
        "dsv3_2",
        "decode_16",
        "scales of the next candidate",
        Before(Last("shfl.sync.idx"), 2, "xor.b32 {new}, {old}, 1"),
    ),
    ("dsv4", "decode_32", "sums over the wrong lanes", Before(Last("shfl.sync.bfly"), 2, "xor.b32 {new}, {old}, 4")),
    (
        "dsv4_1",
        "decode_16",
        "largest |q| over the wrong lanes",
        Before(Nth("shfl.sync.bfly", 0), 2, "xor.b32 {new}, {old}, 8"),
    ),
    (
        "dsv4_1",
        "decode_16",
        "smallest scale instead of the largest",
        Replace(Nth("redux.sync.max", 0), "sync.max", "sync.min"),
    ),
    ("dsv3_2", "decode_16", "presence of the next row", Before(Nth("st.shared.u8", 0), 1, "shl.b32 {new}, {old}, 1")),
    // ---- products
    ("dsv3_2", "decode_16", "rows of Q swapped", Swap(Nth(MMA, 0), 1, 0, 1)),
    ("dsv3_2", "decode_16", "halves of K swapped", Swap(Nth(MMA, 1), 2, 0, 1)),
    ("dsv4", "decode_16", "candidates of V swapped", Swap(Last(MMA), 2, 0, 1)),
    ("dsv4_1", "decode_32", "heads of the weights swapped", Swap(Last(MMA), 1, 0, 1)),
    ("dsv3_2", "decode_32", "accumulators swapped", Swap(Nth(MMA, 0), 3, 0, 2)),
    ("dsv3_2", "decode_16", "halves of a RoPE step swapped", Swap(Nth(MMA_BF16, 0), 2, 0, 1)),
    ("dsv4", "decode_16", "RoPE lanes of a tile left out", Drop(Find::After("cvt.f32.f16", MMA_BF16))),
    ("dsv4_1", "decode_16", "values are not transposed", Replace(Nth(TRANSPOSED, 0), ".trans", "")),
    (
        "dsv4_1",
        "decode_16",
        "values of the next 16 dimensions",
        Before(Last(TRANSPOSED), 1, "add.s32 {new}, {old}, 16"),
    ),
    (
        "glm53_nope",
        "decode_16",
        "codes of K in another order",
        Swap(Nth("ldmatrix.sync.aligned.m8n8.x4.shared", 0), 0, 1, 2),
    ),
    ("glm53_nope", "decode_32", "codes read as E5M2", ReplaceEvery("e4m3x2", "e5m2x2")),
    (
        "dsv3_2",
        "decode_16",
        "even and odd dimensions swapped",
        Before(Nth("prmt.b32", 0), 3, "xor.b32 {new}, {old}, 0x1111"),
    ),
    ("dsv4", "decode_16", "scale of the next group", Before(Last("ld.shared.u8"), 1, "add.s32 {new}, {old}, 1")),
    (
        "dsv3_2",
        "decode_16",
        "scale of the next FP32 group",
        Before(Find::After(WAIT, "ld.shared.u32"), 1, "add.s32 {new}, {old}, 4"),
    ),
    // ---- softmax
    ("dsv3_2", "decode_16", "a maximum is not updated", Replace(Nth("max.f32", 0), "max.f32", "min.f32")),
    ("dsv4_1", "decode_16", "references are never raised", Before(Nth("setp.ne.u32 mine", 0), 1, "mov.u32 {new}, 0")),
    (
        "dsv4",
        "decode_16",
        "PV warps never rescale",
        Before(Find::Before(ARRIVE, "st.shared.u32"), 1, "mov.u32 {new}, 0"),
    ),
    (
        "dsv3_2",
        "decode_16",
        "no weight for one candidate of two",
        Before(Find::After(LOOP, "cvt.rn.f16x2.f32"), 1, "mov.f32 {new}, 0f00000000"),
    ),
    ("dsv3_2", "decode_32", "absent candidates weigh", ReplaceEvery("0fFF800000", "0f00000000")),
    (
        "dsv3_2",
        "decode_16",
        "sinks are not added",
        After(Nth("ld.global.nc.f32", 0), 0, 0, "mov.f32 {old}, 0fFF800000"),
    ),
    ("dsv3_2", "decode_16", "natural LSE by a wrong constant", ReplaceEvery(LN_2, "0f3F300000")),
    ("dsv3_2", "decode_32", "sink's logarithm by a wrong constant", Replace(Last(LOG2_E), LOG2_E, "0f3F800000")),
    ("dsv4", "decode_32", "no normaliser", Replace(Last("rcp.rn.f32"), "rcp.rn.f32", "mov.f32")),
    // ---- edges
    ("dsv3_2", "decode_16", "splits begin a chunk late", After(Nth("div.u32", 2), 0, 0, "add.s32 {old}, {old}, 1")),
    ("dsv4", "decode_16", "splits end a chunk early", After(Nth("div.u32", 3), 0, 0, "add.s32 {old}, {old}, -1")),
    ("dsv4_1", "decode_16", "a head too many", After(Nth("ld.param.v2.u32", 0), 0, 1, "add.s32 {old}, {old}, 1")),
    ("dsv3_2", "decode_16", "lengths are clamped from below", Replace(Nth("min.s32", 0), "min.s32", "max.s32")),
    ("dsv4", "decode_16", "slots of the other cache", ReplaceEvery("+104]", "+40]")),
    ("dsv4_1", "decode_32", "pages of the other cache", ReplaceEvery("+88]", "+24]")),
    (
        "glm53_nope",
        "decode_16",
        "the first slot past the cache",
        Before(Nth("setp.lt.u32", 1), 2, "add.s32 {new}, {old}, 1"),
    ),
    ("glm53_nope", "decode_32", "rows of the page before", After(Nth("div.u32", 4), 0, 0, "add.s32 {old}, {old}, -1")),
    (
        "dsv4_1_inline",
        "decode_16",
        "output halves swapped",
        Replace(Last("cvt.rn.bf16x2.f32"), "cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"),
    ),
    ("dsv4_1_inline", "decode_32", "an output is not stored", Drop(Last("st.global.f32"))),
    // ---- 4-bit caches, and a secondary cache with a launch of its own
    ("dsv4_nvfp4", "decode_16", "group barrier dropped", Drop(Last("barrier.cta.sync"))),
    ("dsv4_nvfp4", "decode_16", "PV warps do not wait for weights", Drop(Nth(LOOP, 4))),
    ("dsv4_nvfp4", "decode_32", "halves of K swapped", Swap(Nth(MMA, 1), 2, 0, 1)),
    ("glm_nsa_nvfp4", "decode_16", "candidates of V swapped", Swap(Last(MMA), 2, 0, 1)),
    (
        "glm_nsa_nvfp4",
        "decode_32",
        "a copy from the next 16 bytes",
        Before(Nth(BULK, 0), 1, "add.s64 {new}, {old}, 16"),
    ),
    ("glm_nsa_nvfp4", "decode_16", "16 bytes too few expected", Before(Nth(EXPECT, 0), 2, "add.s32 {new}, {old}, -16")),
    ("dsv4_1_fp4", "decode_16", "does not wait for the launch before", DropEvery(&["griddepcontrol.wait"])),
    ("dsv4_1_fp4", "decode_32", "weights are not announced", Drop(Nth(ARRIVE, 1))),
    ("glm_nsa_nvfp4", "decode_16", "rows are not given back", Drop(Nth(ARRIVE, 0))),
    ("glm_nsa_nvfp4", "decode_16", "rows are refilled before they are read", Drop(Nth(LOOP, 3))),
    ("glm_nsa_nvfp4", "decode_16", "QK warps do not wait for a free half", Drop(Nth(LOOP, 1))),
    ("glm_nsa_nvfp4", "decode_16", "a half is not given back", Drop(Nth(ARRIVE, 3))),
    (
        "glm_nsa_nvfp4",
        "decode_32",
        "a half is free a warp too early",
        Before(Nth(INIT, 6), 1, "add.s32 {new}, {old}, -32"),
    ),
    ("dsv4_nvfp4", "decode_16", "RoPE lanes are not left for the PV warps", Drop(Nth(STAGE, 0))),
    ("dsv4_nvfp4", "decode_32", "values are not left for the PV warps", Drop(Last(STAGE))),
    ("glm_nsa_nvfp4", "decode_32", "values in another order", Swap(Nth(STAGE, 0), 1, 0, 1)),
    (
        "dsv4_1_inline_fp4",
        "decode_16",
        "values of the next 16 dimensions",
        Before(Last(TRANSPOSED), 1, "add.s32 {new}, {old}, 16"),
    ),
    // ---- joining splits
    ("merge", "merge_few", "does not wait for the decode", Drop(Nth("griddepcontrol.wait", 0))),
    ("merge", "merge_many", "does not wait for the decode", Drop(Nth("griddepcontrol.wait", 0))),
    (
        "merge",
        "merge_few",
        "values of the next split",
        Before(Nth("ld.global.cg.v4.f32", 1), 1, "add.s64 {new}, {old}, 2048"),
    ),
    (
        "merge",
        "merge_few",
        "state of the next split",
        Before(Nth("ld.global.cg.v2.f32", 0), 1, "add.s64 {new}, {old}, 8"),
    ),
    ("merge", "merge_few", "smallest instead of largest reference", Replace(Nth("max.f32", 1), "max.f32", "min.f32")),
    ("merge", "merge_few", "empty splits count", ReplaceEvery("setp.eq.f32", "setp.nan.f32")),
    (
        "merge",
        "merge_many",
        "references over half the lanes",
        Replace(Nth("shfl.sync.bfly", 0), "shfl.sync.bfly", "shfl.sync.down"),
    ),
    ("merge", "merge_many", "a share is left out", Drop(Last("ld.shared.v4.f32"))),
    // ---- writers, readers and moves of caches
    ("cache_dsv4", "write", "lanes that are turned together do not meet", Drop(Nth("shfl.sync.bfly", 0))),
    ("cache_dsv4", "write", "largest of half a group", Drop(Nth("shfl.sync.bfly", 2))),
    ("cache_dsv4", "write", "scales of the power below", ReplaceEvery("setp.ne.s32", "setp.eq.s32")),
    ("cache_dsv4", "write", "a lower row is not found", Replace(Nth("vote.sync.any", 0), ".any", ".all")),
    ("cache_dsv4", "write", "slots of the next rows", Before(Nth("ld.global.nc.v2", 1), 1, "add.s64 {new}, {old}, 8")),
    ("cache_dsv4", "write", "does not wait for the winners", DropEvery(&["griddepcontrol.wait"])),
    ("cache_dsv4", "write", "slots that do not exist", ReplaceEvery("setp.lt.u64", "setp.ne.u64")),
    ("cache_dsv4", "write", "the rotation turns back", ReplaceEvery("sub.rn.f32", "add.rn.f32")),
    ("cache_dsv4", "write", "codes 8 bytes late", Before(Nth("st.global.v2.u32", 0), 0, "add.s64 {new}, {old}, 8")),
    ("cache_dsv4", "write", "the pad is not zeroed", Drop(Last("st.global.u8"))),
    ("cache_dsv4", "write", "lanes of the next row", Before(Nth("ld.global.nc.v4", 0), 1, "add.s64 {new}, {old}, 16")),
    ("cache_dsv3_2", "write", "smallest instead of largest", ReplaceEvery("max.u32", "min.u32")),
    ("cache_glm", "write", "a quotient is not corrected", Drop(Last("fma.rn.f32"))),
    ("cache_dots3_swa", "write", "scales of the group before", Drop(Last("shfl.sync.bfly"))),
    ("cache_dsv4_1", "read", "subnormal values are flushed", ReplaceEvery("mul.rn.f32", "mul.rn.ftz.f32")),
    ("cache_fp4", "write", "a value is not rounded", Drop(Last("fma.rn.f32"))),
    ("cache_fp4", "write", "the scale has no floor", Replace(Nth("max.f32", 0), "max.f32", "min.f32")),
    ("cache_fp4", "read", "scales of the next group", Before(Nth("ld.global.u8", 0), 1, "add.s64 {new}, {old}, 1")),
    ("cache_glm_nvfp4", "write", "one value is not divided", Drop(Nth("div.rn.f32", 0))),
    ("cache_glm_nvfp4", "read", "one value without its factor", Drop(Last("mul.rn.f32"))),
    ("cache_dsv4_nvfp4", "read", "the last values are not stored", Drop(Last("st.global.v4"))),
    ("winners", "find_winners", "the highest row wins", Replace(Nth("atom.shared.min", 0), ".min.", ".max.")),
    ("winners", "find_winners", "a lower row of another block does not win", Drop(Nth("atom.shared.min", 2))),
    ("winners", "find_winners", "slots are entered before the table is clear", Drop(Nth("bar.sync", 0))),
    ("winners", "find_winners", "slots are looked up before all are there", Drop(Nth("bar.sync", 1))),
    ("winners", "find_winners", "winners are told before all are known", Drop(Nth("bar.sync", 2))),
    (
        "winners",
        "find_winners",
        "a word of winners is left out",
        Before(Last("st.global"), 0, "add.s64 {new}, {old}, 4"),
    ),
    (
        "move",
        "move_records",
        "codes from 16 bytes on",
        Before(Nth("ld.global.nc.v4", 0), 1, "add.s64 {new}, {old}, 16"),
    ),
    (
        "move",
        "move_records",
        "scales 8 bytes late",
        Before(Find::After("st.global.v4", "st.global.v2"), 0, "add.s64 {new}, {old}, 8"),
    ),
    ("move", "move_records", "lanes are left behind", Drop(Last("st.global.v4"))),
    ("move", "move_records", "the last codes are left behind", Drop(Nth("st.global.v4", 1))),
    (
        "convert_dsv4",
        "dsv4_to_dsv4_nvfp4",
        "codes of the next unit",
        Before(Nth("ld.global.nc.v2", 0), 1, "add.s64 {new}, {old}, 8"),
    ),
    ("convert_dsv4", "dsv4_to_dsv4_nvfp4", "lanes are left behind", Drop(Nth("st.global.u32", 0))),
    ("convert_dsv4", "dsv4_to_dsv4_nvfp4", "the pad is not zeroed", Drop(Last("st.global.u8"))),
    ("convert_dsv4", "dsv4_nvfp4_to_dsv4", "largest of half a group", Drop(Nth("shfl.sync.bfly", 0))),
    (
        "convert_dsv4",
        "dsv4_nvfp4_to_dsv4",
        "scales of the next group",
        Before(Nth("ld.global.nc.u8", 0), 1, "add.s64 {new}, {old}, 1"),
    ),
    ("convert_glm", "glm_to_dsv3_2", "smallest instead of largest", ReplaceEvery("max.u32", "min.u32")),
    (
        "convert_glm",
        "glm_to_dsv3_2",
        "lanes of the next pair",
        Before(Last("ld.global.nc.u32"), 1, "add.s64 {new}, {old}, 4"),
    ),
    ("convert_glm", "glm_to_glm_nvfp4", "one value is not divided", Drop(Nth("div.rn.f32", 0))),
    (
        "convert_glm",
        "glm_nvfp4_to_glm",
        "the new factor instead of the old",
        Replace(Nth("ld.param.f32", 0), "+60]", "+64]"),
    ),
    ("convert_glm", "glm_nvfp4_to_dsv3_2", "left-over slots keep their bytes", Drop(Nth("st.global.v2.u32", 0))),
    ("convert_dsv4_1", "glm_to_dsv4_1", "a scale is not stored", Drop(Last("st.global.u8"))),
    ("convert_dsv4_1", "glm_to_fp4", "the scale has no floor", Replace(Nth("max.f32", 0), "max.f32", "min.f32")),
    ("convert_dsv4_1", "dsv4_1_to_fp4", "half of the codes are not stored", Drop(Last("st.global.u32"))),
    ("convert_dsv4_1", "dsv4_1_to_glm", "a quotient is not corrected", Drop(Last("fma.rn.f32"))),
    ("convert_dsv4_1", "fp4_to_dsv4_1", "scales of the power below", ReplaceEvery("setp.ne.s32", "setp.eq.s32")),
    (
        "convert_dsv4_1",
        "fp4_to_glm",
        "codes of the next unit",
        Before(Nth("ld.global.nc.u32", 1), 1, "add.s64 {new}, {old}, 4"),
    ),
];

/// Applies every fault, runs the cases of its kernel until one fails, and prints the table.
pub fn run() {
    let start = Instant::now();
    let cases = crate::cases::all();
    let found: Vec<Result<String, String>> = MUTANTS.par_iter().map(|mutant| caught_by(mutant, &cases)).collect();
    println!("| module | entry | fault | caught by |\n|---|---|---|---|");
    let mut survivors = Vec::new();
    for ((module, entry, what, _), found) in MUTANTS.iter().zip(&found) {
        let found = found.as_ref().unwrap_or_else(|why| {
            survivors.push(format!("{module} {entry}, {what}: {why}"));
            why
        });
        println!("| {module} | {entry} | {what} | {} |", found.replace('|', "\\|"));
    }
    let (all, seconds) = (MUTANTS.len(), start.elapsed().as_secs_f64());
    println!("{} of {all} mutants caught in {seconds:.0} s", all - survivors.len());
    assert!(survivors.is_empty(), "{}", survivors.join("\n"));
}

/// Which case caught a fault, and how; an error if none did, or if the fault's place was not found.
fn caught_by(&(module, entry, _, edit): &Mutant, cases: &[Case]) -> Result<String, String> {
    let (_, text) = MODULES.iter().find(|(name, _)| *name == module).ok_or("no such module")?;
    let mutated = edit::apply(text, entry, edit)?;
    let mutated = match Module::parse(&mutated) {
        Ok(mutated) => mutated,
        Err(why) => return Err(format!("the edit makes no PTX: {why}")),
    };
    let mut modules: HashMap<_, _> = COMMITTED.clone();
    modules.insert(module, Arc::new(mutated));
    let survived = || "survived".to_owned();
    match crate::prefix(module) {
        "cache" | "winners" => return crate::test_caches::fault_of(&modules, module).ok_or_else(survived),
        "convert" | "move" => return crate::test_conversions::fault_of(&modules, module, entry).ok_or_else(survived),
        _ => {}
    }
    for case in cases.iter().filter(|case| case.launches(module, entry)) {
        if let Err(why) = crate::run_case(&modules, case) {
            return Ok(format!("{}: {why}", case.name));
        }
    }
    Err(survived())
}
