//! The table of cases: every kernel with ragged heads, widths, splits, pages and outputs.

use sparse_mla::cuda::OutType;
use sparse_mla::plan::DeviceFacts;
use sparse_mla::{Family, FamilySpec, KvCacheFormat, LseBase};

use crate::case::{Case, Extra, Holes, Page, Sink, Values};

const PLAIN: Case = Case {
    name: "",
    family: Family::Dsv3_2,
    format: KvCacheFormat::Fp8,
    tile: 16,
    tokens: 1,
    heads: 16,
    topk: 33,
    splits: 1,
    slots: 150,
    page: Page::Dense(64),
    extra: None,
    lengths: &[],
    holes: Holes::None,
    values: Values::Plain,
    sink: Sink::None,
    lse_base: LseBase::Two,
    lse: true,
    out_type: OutType::Bf16,
    gaps: 0,
    tokens_per_pass: None,
    planned: None,
};

const EXTRA: Extra =
    Extra { format: KvCacheFormat::Fp8, splits: 1, topk: 0, slots: 0, page: Page::Dense(64), lengths: &[] };

/// Shapes that every kernel runs.
const SHAPES: &[Case] = &[
    Case { name: "one head, one candidate", heads: 1, topk: 1, out_type: OutType::F32, page: Page::Dense(1), ..PLAIN },
    Case { name: "8 heads, holes", heads: 8, topk: 31, holes: Holes::Some, page: Page::Padded(7), gaps: 4, ..PLAIN },
    Case {
        name: "11 heads, lengths, sink",
        tokens: 3,
        heads: 11,
        topk: 33,
        lengths: &[1000, 5, 0],
        sink: Sink::Normal,
        lse_base: LseBase::E,
        page: Page::Padded(48),
        out_type: OutType::F32,
        gaps: 3,
        ..PLAIN
    },
    Case {
        name: "32 heads, three splits, wild",
        heads: 32,
        topk: 65,
        splits: 3,
        values: Values::Wild,
        out_type: OutType::F16,
        gaps: 1,
        ..PLAIN
    },
    Case {
        name: "24 heads, three splits, lengths",
        tokens: 2,
        heads: 24,
        topk: 130,
        splits: 3,
        lengths: &[130, 20],
        holes: Holes::Some,
        sink: Sink::Normal,
        page: Page::Padded(5),
        out_type: OutType::F32,
        gaps: 4,
        ..PLAIN
    },
    Case {
        name: "stages refilled twice, wild",
        topk: 300,
        values: Values::Wild,
        sink: Sink::Normal,
        page: Page::Padded(64),
        ..PLAIN
    },
    Case {
        name: "many splits",
        tokens: 2,
        heads: 3,
        topk: 300,
        splits: 9,
        lengths: &[300, -4],
        sink: Sink::Normal,
        lse_base: LseBase::E,
        page: Page::Dense(3),
        gaps: 4,
        ..PLAIN
    },
    Case { name: "40 heads", tokens: 2, heads: 40, topk: 40, ..PLAIN },
    Case { name: "40 heads, two splits", heads: 40, topk: 65, splits: 2, out_type: OutType::F32, ..PLAIN },
    Case { name: "rows of refilled stages in odd pages", heads: 2, topk: 300, page: Page::Padded(5), ..PLAIN },
    Case { name: "16-bit output, not aligned, no LSE", heads: 2, topk: 40, lse: false, gaps: 1, ..PLAIN },
    Case { name: "f16 output, not aligned", heads: 9, topk: 64, out_type: OutType::F16, gaps: 1, ..PLAIN },
    Case { name: "sinks above everything", heads: 9, topk: 40, sink: Sink::Above, out_type: OutType::F32, ..PLAIN },
    Case { name: "nothing present", tokens: 2, heads: 2, topk: 40, holes: Holes::All, lse_base: LseBase::E, ..PLAIN },
    Case {
        name: "nothing present, splits, sink",
        heads: 2,
        topk: 70,
        splits: 2,
        holes: Holes::All,
        sink: Sink::Normal,
        ..PLAIN
    },
];

/// Shapes for the kernels that join splits: every output, up to the most splits.
const JOINS: &[Case] = &[
    Case { name: "8 splits", heads: 3, topk: 260, splits: 8, sink: Sink::Normal, ..PLAIN },
    Case { name: "8 splits, f16", heads: 3, topk: 260, splits: 8, out_type: OutType::F16, lse: false, ..PLAIN },
    Case { name: "7 splits, not aligned", heads: 3, topk: 260, splits: 7, gaps: 1, ..PLAIN },
    Case {
        name: "5 splits, float32 not aligned",
        heads: 3,
        topk: 260,
        splits: 5,
        out_type: OutType::F32,
        gaps: 1,
        ..PLAIN
    },
    Case {
        name: "8 splits, f16 not aligned",
        heads: 3,
        topk: 260,
        splits: 8,
        out_type: OutType::F16,
        gaps: 1,
        ..PLAIN
    },
    Case { name: "64 splits", heads: 2, topk: 2100, splits: 64, values: Values::Wild, sink: Sink::Normal, ..PLAIN },
    Case { name: "8 splits, sinks above everything", heads: 3, topk: 260, splits: 8, sink: Sink::Above, ..PLAIN },
    Case { name: "9 splits, sinks above everything", heads: 3, topk: 260, splits: 9, sink: Sink::Above, ..PLAIN },
    Case { name: "12 splits, float32", heads: 2, topk: 400, splits: 12, out_type: OutType::F32, ..PLAIN },
    Case { name: "64 splits, f16", heads: 2, topk: 300, splits: 64, out_type: OutType::F16, lse: false, ..PLAIN },
    Case { name: "33 splits, not aligned", heads: 2, topk: 300, splits: 33, gaps: 1, ..PLAIN },
    Case {
        name: "10 splits, float32 not aligned",
        heads: 2,
        topk: 300,
        splits: 10,
        out_type: OutType::F32,
        gaps: 1,
        ..PLAIN
    },
    Case {
        name: "10 splits, f16 not aligned",
        heads: 2,
        topk: 300,
        splits: 10,
        out_type: OutType::F16,
        gaps: 1,
        ..PLAIN
    },
    Case {
        name: "9 splits, nothing present",
        heads: 2,
        topk: 300,
        splits: 9,
        holes: Holes::All,
        sink: Sink::Normal,
        ..PLAIN
    },
];

/// Shapes with a secondary cache.
const DUAL: &[Case] = &[
    Case {
        name: "two caches",
        tokens: 2,
        heads: 11,
        topk: 33,
        extra: Some(Extra { topk: 31, slots: 70, page: Page::Padded(9), lengths: &[31, 0], ..EXTRA }),
        lengths: &[33, 0],
        sink: Sink::Normal,
        ..PLAIN
    },
    Case {
        name: "two caches, splits, holes",
        heads: 30,
        topk: 65,
        splits: 3,
        holes: Holes::Some,
        extra: Some(Extra { topk: 650, slots: 400, splits: 3, ..EXTRA }),
        out_type: OutType::F32,
        page: Page::Padded(6),
        ..PLAIN
    },
    Case {
        name: "stages refilled from the secondary cache",
        heads: 5,
        topk: 70,
        extra: Some(Extra { topk: 300, slots: 90, page: Page::Padded(5), ..EXTRA }),
        holes: Holes::Some,
        ..PLAIN
    },
    Case {
        name: "two caches, 40 heads, wild",
        heads: 40,
        extra: Some(Extra { topk: 300, slots: 200, page: Page::Padded(64), ..EXTRA }),
        values: Values::Wild,
        sink: Sink::Normal,
        ..PLAIN
    },
    Case {
        name: "nothing in the secondary cache",
        heads: 3,
        topk: 40,
        extra: Some(Extra { topk: 40, slots: 64, lengths: &[0], ..EXTRA }),
        ..PLAIN
    },
    Case {
        name: "a split begins in the secondary cache",
        topk: 32,
        splits: 2,
        extra: Some(Extra { topk: 40, slots: 150, page: Page::Dense(1), ..EXTRA }),
        values: Values::Wild,
        ..PLAIN
    },
];

/// Devices that plans are made for: a large SM120, and one with a single multiprocessor.
const DEVICES: [DeviceFacts; 2] = [device(188), device(1)];

const fn device(multiprocessors: usize) -> DeviceFacts {
    DeviceFacts { multiprocessors, shared_memory_per_block: 101_376, compute_capability: (12, 0) }
}

/// A shape as the plans for `DEVICES` launch it, and batch-invariant.
fn planned(family: Family, format: KvCacheFormat, extra: Option<Extra>) -> impl Iterator<Item = Case> {
    let topk = if family == Family::Dots3Swa { WINDOW } else { 140 };
    let shape = Case { family, format, extra, tokens: 2, heads: 19, topk, sink: Sink::Normal, gaps: 4, ..PLAIN };
    let names = ["as planned", "as planned for one multiprocessor"].into_iter().zip(DEVICES);
    let plans = names.map(|(name, device)| (name, device, false));
    let plans = plans.chain([("as planned, batch-invariant", DEVICES[0], true)]);
    plans.map(move |(name, device, invariant)| Case { name, planned: Some((device, invariant)), ..shape })
}

/// A window's width may not be less than this.
const WINDOW: usize = 513;

/// Every case.
pub fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |case: Case| cases.push(case);
    for (family, format, tiles) in [
        (Family::Dsv3_2, KvCacheFormat::Fp8, &[16, 32][..]),
        (Family::GlmNsa, KvCacheFormat::Fp8, &[32]),
        (Family::Glm53Nope, KvCacheFormat::Fp8, &[16, 32]),
        (Family::Dsv4, KvCacheFormat::Fp8, &[16, 32]),
        (Family::Dsv4_1, KvCacheFormat::Fp8, &[16, 32]),
        (Family::Dsv4_1Inline, KvCacheFormat::Fp8, &[16, 32]),
        (Family::Dots3Swa, KvCacheFormat::Fp8, &[16]),
        (Family::Dsv4, KvCacheFormat::Nvfp4, &[16, 32]),
        (Family::GlmNsa, KvCacheFormat::Nvfp4, &[16, 32]),
    ] {
        let secondary = FamilySpec::find(family, format).map_or(&[][..], |spec| spec.secondary);
        planned(family, format, None).for_each(&mut add);
        for format_of_extra in secondary {
            let extra = Extra { format: *format_of_extra, topk: 50, slots: 80, ..EXTRA };
            planned(family, format, Some(extra)).for_each(&mut add);
        }
        for &tile in tiles {
            for shape in SHAPES {
                let shape = if family == Family::Dots3Swa { windowed(*shape) } else { *shape };
                add(Case { family, format, tile, ..shape });
            }
            for extra in secondary {
                for shape in DUAL {
                    let extra = shape.extra.map(|shape| Extra { format: *extra, ..shape });
                    add(Case { family, format, tile, extra, ..*shape });
                }
            }
        }
    }
    JOINS.iter().for_each(|shape| add(*shape));
    add(Case {
        name: "two launches, two passes",
        family: Family::Dsv4_1,
        tokens: 3,
        heads: 5,
        topk: 70,
        splits: 2,
        extra: Some(Extra {
            format: KvCacheFormat::Fp4,
            splits: 2,
            topk: 80,
            slots: 90,
            lengths: &[80, 0, 33],
            ..EXTRA
        }),
        lengths: &[70, 1, 0],
        tokens_per_pass: Some(2),
        gaps: 4,
        ..PLAIN
    });
    add(Case {
        name: "positions past the window",
        family: Family::Dots3Swa,
        topk: 576,
        holes: Holes::Some,
        splits: 2,
        ..PLAIN
    });
    cases
}

/// The same shape in an indices row as wide as the window, cut by lengths.
fn windowed(shape: Case) -> Case {
    let lengths = match (shape.lengths, shape.topk) {
        ([_, ..], _) => shape.lengths,
        (_, 1) => &[1],
        (_, 31) => &[31],
        (_, 33) => &[33],
        (_, 65) => &[65],
        _ => &[200],
    };
    Case { topk: WINDOW, lengths, ..shape }
}
