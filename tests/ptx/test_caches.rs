//! The kernels that write and read packed caches, against the CPU: bytes must be equal, whatever the values are.

use std::sync::atomic::Ordering::Relaxed;

use ndarray::{Array2, ArrayView2};
use rayon::prelude::*;
use sparse_mla::cuda::{
    CacheOnDevice, Launch, OutType, ReadOnDevice, RotationOnDevice, RowNumbers, Workspace, WriteOnDevice, read_launch,
    record_module, write_launches,
};
use sparse_mla::half::{bf16, f16};
use sparse_mla::{
    CacheView, CacheViewMut, Element, FAMILY_TABLE, FamilySpec, Geometry, PageLayout, Placement, RopePairs, Rotation,
    ScaleRule, append_kv_cache, append_kv_cache_with_rope, pack_kv_cache, unpack_kv_cache,
};

use crate::SCHEDULES;
use crate::common::Lcg;
use crate::global::{Access, Global};
use crate::schedule::Schedule;
use crate::stand_in::{COMMITTED, Modules, run_launches};

/// Instructions of an entry point that no run needs to reach: gaps of inline rows where rows are in footer pages, 64-bit divisions.
const MOST_MISSED: usize = 200;
/// What lies in a cache before an append.
const UNTOUCHED: u8 = 0xab;
const MAX_POSITION: usize = 6;

/// A latent's element and its bits.
pub trait Bits: Element {
    const TYPE: OutType;
    fn of_bits(bits: u32) -> Self;
    fn nearest(value: f32) -> Self {
        Self::from_f32(value)
    }
    fn bytes(self) -> Vec<u8>;
}

macro_rules! bits {
    ($($element:ty, $name:ident, $bits:ty);+) => {
        $(impl Bits for $element {
            const TYPE: OutType = OutType::$name;
            fn of_bits(bits: u32) -> Self {
                Self::from_bits(bits as $bits)
            }
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
        })+
    };
}
bits!(bf16, Bf16, u16; f16, F16, u16; f32, F32, u32);

/// Rows whose groups differ in kind: any bits, normal numbers of any size, ties of the codes, zeros and tiny numbers,
/// and numbers beside the largest.
pub fn latents<T: Bits>(spec: &FamilySpec, rows: usize, seed: u64) -> Array2<T> {
    let mut random = Lcg(seed);
    let mut latent = Array2::from_elem((rows, spec.d_qk()), T::of_bits(0));
    for mut row in latent.rows_mut() {
        for start in (0..spec.d_qk()).step_by(spec.row.group.min(64)) {
            let kind = random.below(7);
            let size = 2f32.powi(random.below(40) as i32 - 24);
            for dim in start..(start + spec.row.group.min(64)).min(spec.d_qk()) {
                let sign = if random.below(2) == 0 { -1.0 } else { 1.0 };
                row[dim] = match kind {
                    0 => T::of_bits(random.next() as u32 ^ (random.next() as u32) << 16),
                    1 => T::nearest(random.normal() * size),
                    2 => T::nearest(sign * random.below(65) as f32 / 16.0 * size),
                    3 => T::nearest(sign * [0.0, 1e-45, 1e-40, 1e-4, 448e-4][random.below(5) as usize]),
                    4 => T::nearest(sign * [448.0, 449.0, 464.0, 6.0, 5.0, 2688.0, 0.25][random.below(7) as usize]),
                    _ => T::nearest(random.normal()),
                };
            }
        }
    }
    latent
}

pub fn geometry(spec: &FamilySpec, page: i64) -> Geometry {
    let record = spec.row.bytes_per_token() as i64;
    let row = if spec.row.placement == Placement::Inline { record + 32 } else { record };
    Geometry {
        page_block_size: Some(page),
        page_stride: Some((page * row + 63) / 16 * 16),
        row_stride: (spec.row.placement == Placement::Inline).then_some(row),
    }
}

pub fn global_scale(spec: &FamilySpec) -> f32 {
    if spec.row.scale == (ScaleRule::E4m3Nvfp4 { global: true }) { 0.37 } else { 1.0 }
}

pub fn place(global: &mut Global, name: &str, bytes: Vec<u8>, access: Access) -> u64 {
    global.place_next(name, bytes, &|_| true, access, 0)
}

fn place_latent<T: Bits>(global: &mut Global, latent: ArrayView2<'_, T>) -> u64 {
    place(global, "latent", latent.iter().flat_map(|x| x.bytes()).collect(), Access::Input)
}

fn place_numbers(global: &mut Global, name: &str, numbers: &[i64], wide: bool) -> RowNumbers {
    let narrow = |number: &i64| (*number as i32).to_le_bytes().to_vec();
    let bytes = numbers.iter().flat_map(|n| if wide { n.to_le_bytes().to_vec() } else { narrow(n) }).collect();
    RowNumbers { pointer: place(global, name, bytes, Access::Input), wide }
}

pub fn execute(
    modules: &Modules,
    launches: &[Option<Launch>],
    global: &mut Global,
    schedule: Schedule,
) -> Result<(), String> {
    run_launches(modules, launches.iter().flatten().copied(), global, schedule).map(drop)
}

pub fn first_difference(got: &[u8], want: &[u8]) -> Result<(), String> {
    match got.iter().zip(want).position(|(a, b)| a != b) {
        None if got.len() == want.len() => Ok(()),
        None => Err(format!("{} bytes, not {}", got.len(), want.len())),
        Some(at) => Err(format!("byte {at} of {} is {:#x}, not {:#x}", got.len(), got[at], want[at])),
    }
}

fn pack<T: Bits>(
    modules: &Modules,
    spec: &'static FamilySpec,
    rows: usize,
    page: i64,
    schedule: Schedule,
) -> Result<(), String> {
    let (latent, geometry, scale) = (latents::<T>(spec, rows, 7), geometry(spec, page), global_scale(spec));
    let want = pack_kv_cache(spec, latent.view(), geometry, scale).map_err(|error| error.to_string())?;
    let mut global = Global::default();
    let latent = place_latent(&mut global, latent.view());
    let pointer = global.place_next("cache", vec![0xcd; want.bytes.len()], &|_| false, Access::Output, 0);
    let write = WriteOnDevice {
        spec,
        cache: CacheOnDevice { pointer, pages: want.pages, layout: want.layout },
        latent,
        latent_type: T::TYPE,
        num_rows: rows,
        slots: None,
        rotation: None,
        kv_global_scale: scale,
    };
    let launches = write_launches(&write, Workspace::EMPTY).map_err(|error| error.to_string())?;
    execute(modules, &launches, &mut global, schedule)?;
    first_difference(&global.contents(pointer, want.bytes.len()).0, &want.bytes)
}

/// An append of rows to `slots`; `positions`: with a rotation.
struct Append<'a> {
    spec: &'static FamilySpec,
    page: i64,
    slots: &'a [i64],
    wide: bool,
    rotation: Option<(&'a [i64], RopePairs)>,
}

impl Append<'_> {
    fn run<T: Bits>(&self, modules: &Modules, schedule: Schedule) -> Result<(), String> {
        const PAGES: usize = 3;
        let (spec, geometry, scale) = (self.spec, geometry(self.spec, self.page), global_scale(self.spec));
        let latent = latents::<T>(spec, self.slots.len(), 11);
        let layout = PageLayout::new(spec, geometry, "").map_err(|error| error.to_string())?;
        let mut want = vec![UNTOUCHED; PAGES * layout.page_stride()];
        let mut random = Lcg(5);
        let table = Array2::from_shape_fn((MAX_POSITION, spec.row.rope_dims), |(row, lane)| match (row, lane % 8) {
            (5, 0) => f32::INFINITY,
            _ => random.normal(),
        });
        let cache = CacheViewMut::new(spec, geometry, PAGES, &mut want, scale).map_err(|error| error.to_string())?;
        match self.rotation {
            None => append_kv_cache(cache, latent.view(), self.slots),
            Some((positions, pairs)) => {
                let rotation = Rotation { cos_sin: table.view(), positions, pairs };
                append_kv_cache_with_rope(cache, latent.view(), self.slots, &rotation)
            }
        }
        .map_err(|error| error.to_string())?;

        let mut global = Global::default();
        let pointer = place(&mut global, "cache", vec![UNTOUCHED; want.len()], Access::Output);
        let rotation = self.rotation.map(|(positions, pairs)| RotationOnDevice {
            cos_sin: place(&mut global, "table", table.iter().flat_map(|x| x.to_le_bytes()).collect(), Access::Input),
            max_position: MAX_POSITION,
            positions: place_numbers(&mut global, "positions", positions, !self.wide),
            pairs,
        });
        let write = WriteOnDevice {
            spec,
            cache: CacheOnDevice { pointer, pages: PAGES, layout },
            latent: place_latent(&mut global, latent.view()),
            latent_type: T::TYPE,
            num_rows: self.slots.len(),
            slots: Some(place_numbers(&mut global, "slots", self.slots, self.wide)),
            rotation,
            kv_global_scale: scale,
        };
        let bytes = write.workspace_bytes();
        let pointer_of_winners = place(&mut global, "winners", vec![0x01; bytes], Access::Scratch);
        let launches = write_launches(&write, Workspace { pointer: pointer_of_winners, bytes });
        execute(modules, &launches.map_err(|error| error.to_string())?, &mut global, schedule)?;
        first_difference(&global.contents(pointer, want.len()).0, &want)
    }
}

fn read(modules: &Modules, spec: &'static FamilySpec, page: i64, schedule: Schedule) -> Result<(), String> {
    const PAGES: usize = 2;
    let (geometry, scale) = (geometry(spec, page), global_scale(spec));
    let layout = PageLayout::new(spec, geometry, "").map_err(|error| error.to_string())?;
    let mut random = Lcg(3);
    let bytes: Vec<u8> = (0..PAGES * layout.page_stride()).map(|_| random.next() as u8).collect();
    let mut want = Array2::<f32>::zeros((PAGES * page as usize, spec.d_qk()));
    let view = CacheView::new(spec, geometry, PAGES, &bytes, scale).map_err(|error| error.to_string())?;
    unpack_kv_cache(&view, want.view_mut()).map_err(|error| error.to_string())?;
    let mut global = Global::default();
    let pointer = place(&mut global, "cache", bytes, Access::Input);
    let out = global.place_next("out", vec![0xcd; want.len() * 4], &|_| false, Access::Output, 0);
    let cache = CacheOnDevice { pointer, pages: PAGES, layout };
    let launch = read_launch(&ReadOnDevice { spec, cache, out, kv_global_scale: scale });
    execute(modules, &[launch.map_err(|error| error.to_string())?], &mut global, schedule)?;
    let (got, written) = global.contents(out, want.len() * 4);
    let got = got.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    for (at, (got, want)) in got.zip(&want).enumerate() {
        // Of a NaN the hardware keeps no bits.
        if got.to_bits() != want.to_bits() && !(got.is_nan() && want.is_nan()) || !written[4 * at] {
            return Err(format!("value {at} is {got:e}, not {want:e}"));
        }
    }
    Ok(())
}

/// Fresh, repeated, negative and too large slots.
const SLOTS: &[i64] = &[4, 20, -1, 4, 0, 21, i64::MIN, 7, 1 << 32, 4, i64::MAX, 6, 7, 3, 20, -5, 0, 15, 2];
const POSITIONS: &[i64] = &[0, 5, 1, 1, -1, 2, 3, 4, 5, 0, 1, 6, 2, 3, 1, 0, 2, 1 << 33, 5];

fn narrow(numbers: &[i64]) -> Vec<i64> {
    numbers.iter().map(|number| i64::from(*number as i32)).collect()
}

fn run_line(modules: &Modules, spec: &'static FamilySpec, schedule: Schedule) -> Result<(), String> {
    let named = |what: &str| {
        let line = format!("{} {} {what}", spec.family, spec.format);
        move |why: String| format!("{line} ({schedule:?}): {why}")
    };
    pack::<bf16>(modules, spec, 9, 4, schedule).map_err(named("pack bf16"))?;
    pack::<f16>(modules, spec, 7, 7, schedule).map_err(named("pack f16"))?;
    pack::<f32>(modules, spec, 13, 5, schedule).map_err(named("pack f32"))?;
    let (narrow_slots, narrow_positions) = (narrow(SLOTS), narrow(POSITIONS));
    let append = Append { spec, page: 7, slots: SLOTS, wide: true, rotation: None };
    append.run::<f32>(modules, schedule).map_err(named("append int64"))?;
    let append = Append { slots: &narrow_slots, wide: false, page: 8, ..append };
    append.run::<bf16>(modules, schedule).map_err(named("append int32"))?;
    if spec.row.rope_dims > 0 {
        let rotated =
            Append { slots: SLOTS, wide: true, rotation: Some((&narrow_positions, RopePairs::HalfSplit)), ..append };
        rotated.run::<bf16>(modules, schedule).map_err(named("append half-split"))?;
        let rotated =
            Append { slots: &narrow_slots, wide: false, rotation: Some((POSITIONS, RopePairs::Interleaved)), ..append };
        rotated.run::<f16>(modules, schedule).map_err(named("append interleaved"))?;
    }
    searched(modules, spec, true, schedule).map_err(named("append 300 int64"))?;
    searched(modules, spec, false, schedule).map_err(named("append 300 int32"))?;
    // Winners that another kernel finds.
    let slots: Vec<i64> =
        (0..1030).map(|row| if row % 25 == 0 || row > 1020 { row * 7 % 27 } else { -1 - row }).collect();
    Append { slots: &slots, wide: true, page: 9, rotation: None, ..append }
        .run::<f32>(modules, schedule)
        .map_err(named("append 1030"))?;
    for (what, slot, position) in
        [("fresh", [3], [2]), ("past the cache", [24], [2]), ("negative", [-1], [2]), ("past the table", [3], [6])]
    {
        let rotation = (spec.row.rope_dims > 0).then_some((&position[..], RopePairs::HalfSplit));
        let one = Append { slots: &slot, wide: true, rotation, ..append };
        one.run::<bf16>(modules, schedule).map_err(named(&format!("append 1, {what}")))?;
    }
    read(modules, spec, 5, schedule).map_err(named("read"))?;
    Ok(())
}

/// More rows than are compared at once. The last ones name slots that one row far below has, slots that only
/// they have, and one slot all; in between no slot exists, but some share their low word with these.
fn searched(modules: &Modules, spec: &'static FamilySpec, wide: bool, schedule: Schedule) -> Result<(), String> {
    const ROWS: i64 = 300;
    let slots: Vec<i64> = (0..ROWS)
        .map(|row| match (row / 11, row % 11) {
            _ if row >= ROWS - 8 => 25,
            _ if row >= ROWS - 30 => row * 7 % 27,
            (slot @ 0..25, 2) => slot,
            (low, 4) if wide => (row << 32) + low,
            _ => -1 - row,
        })
        .collect();
    Append { spec, page: 9, slots: &slots, wide, rotation: None }.run::<bf16>(modules, schedule)
}

/// What every run of a module finds wrong, under the first schedule that does; none: nothing.
pub fn fault_of(modules: &Modules, module: &str) -> Option<String> {
    SCHEDULES.into_iter().find_map(|schedule| {
        if module == "winners" {
            return many_rows(modules, schedule).err();
        }
        let mut lines = FAMILY_TABLE.iter().filter(|spec| record_module(spec).is_ok_and(|name| name == module));
        lines.find_map(|spec| run_line(modules, spec, schedule).err())
    })
}

#[test]
fn caches_are_written_and_read_as_on_the_cpu_under_every_schedule() {
    let lines: Vec<_> = FAMILY_TABLE.iter().flat_map(|spec| SCHEDULES.map(|schedule| (spec, schedule))).collect();
    let mut failures: Vec<_> =
        lines.par_iter().filter_map(|(spec, schedule)| run_line(&COMMITTED, spec, *schedule).err()).collect();
    failures.extend(SCHEDULES.iter().filter_map(|schedule| many_rows(&COMMITTED, *schedule).err()));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    for name in FAMILY_TABLE.iter().map(|spec| record_module(spec).expect("a module for every line")).chain(["winners"])
    {
        require_reached(name, MOST_MISSED);
    }
}

/// Fails if more instructions of an entry point than `most` were reached by no run.
pub fn require_reached(module: &str, most: usize) {
    for entry in &COMMITTED[module].entries {
        let missed = entry.code.iter().filter(|one| !one.reached.load(Relaxed));
        let lines: Vec<_> = missed.map(|one| format!("line {} `{}`", one.line, one.text)).collect();
        let (count, all) = (lines.len(), entry.code.len());
        assert!(count <= most, "{module} {}: no run reaches {count} of {all}: {}", entry.name, lines.join(", "));
    }
}

#[test]
fn the_records_of_the_kernels_are_those_of_the_family_table() {
    for spec in FAMILY_TABLE {
        let module = &COMMITTED[record_module(spec).expect("a module for every line")];
        let record = module.variables.iter().find(|variable| variable.bytes.len() == 16).expect("a shape");
        let numbers: Vec<_> =
            record.bytes.chunks_exact(4).map(|x| i32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
        let row = &spec.row;
        let want = [row.quantised_dims, row.group, row.code_bytes(), row.scale_bytes()];
        assert_eq!(numbers, want.map(|x| x as i32), "{} {}", spec.family, spec.format);
    }
}

#[test]
fn writers_refuse_by_name_what_a_launch_cannot_hold() {
    let spec = &FAMILY_TABLE[0];
    let layout = PageLayout::new(spec, geometry(spec, 64), "").expect("a layout");
    let slots = Some(RowNumbers { pointer: 256, wide: true });
    let launches = |num_rows: usize, pages: usize, short_by: usize| {
        let cache = CacheOnDevice { pointer: 256, pages, layout };
        let latent_type = OutType::Bf16;
        let write = WriteOnDevice {
            spec,
            cache,
            latent: 256,
            latent_type,
            num_rows,
            slots,
            rotation: None,
            kv_global_scale: 1.0,
        };
        let bytes = write.workspace_bytes() - short_by;
        write_launches(&write, Workspace { pointer: 256, bytes }).map_err(|error| error.to_string())
    };
    // 2^32 slots: too many for the table of slots that more than 1,024 rows need.
    assert!(launches(1024, 1 << 26, 0).is_ok());
    assert!(launches(1025, 1 << 25, 0).is_ok());
    let refused = launches(1025, 1 << 26, 0).expect_err("too many slots");
    assert!(refused.contains("`cache` must be of fewer than 4294967295 slots"), "{refused}");
    let refused = launches(1025, 4, 1).expect_err("a short workspace");
    assert!(refused.contains("`workspace` must be at least 132 bytes, got 131"), "{refused}");
    let refused = launches(1 << 31, 4, 0).expect_err("too many rows");
    assert!(refused.contains("`latent` must be at most 2147483647 rows"), "{refused}");
}

/// More rows than are compared: another kernel finds who wins. Some of the slots share an entry of its table.
fn many_rows(modules: &Modules, schedule: Schedule) -> Result<(), String> {
    const SLOTS: [i64; 9] = [1, 4182, 6766, 2, 2586, 6767, 0, 4181, 6899];
    let spec = FAMILY_TABLE.iter().find(|spec| spec.row.bytes_per_token() == 288).ok_or("a small record")?;
    let mut random = Lcg(1);
    // Several rounds over lower rows; then, once, more rows of a block than it has threads.
    let counts: &[usize] = if matches!(schedule, Schedule::Forward) { &[8200, 66_000] } else { &[8200] };
    for &rows in counts {
        let mut slot = |row| match row {
            600 | 8100 => 5000,
            3000..8000 if row % 40 != 0 => -1,
            8150.. if row % 211 != 0 => 6900 + row as i64,
            _ => SLOTS[random.below(SLOTS.len() as u64) as usize],
        };
        let slots: Vec<i64> = (0..rows).map(&mut slot).collect();
        let append = Append { spec, page: 2300, slots: &slots, wide: rows < 10_000, rotation: None };
        append.run::<bf16>(modules, schedule).map_err(|why| format!("{rows} rows ({schedule:?}): {why}"))?;
    }
    Ok(())
}
