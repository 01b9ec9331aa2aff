//! The kernels that make one cache of another, against the CPU: bytes must be equal, whatever the old cache holds.

use rayon::prelude::*;
use sparse_mla::cuda::{CacheOnDevice, ConvertOnDevice, conversion_kernel, convert_launch};
use sparse_mla::half::bf16;
use sparse_mla::{CacheView, Conversion, FAMILY_TABLE, FamilySpec, ScaleRule, convert_kv_cache, pack_kv_cache};

use crate::SCHEDULES;
use crate::common::Lcg;
use crate::global::{Access, Global};
use crate::schedule::Schedule;
use crate::stand_in::{COMMITTED, Modules};
use crate::test_caches::{execute, first_difference, geometry, latents, place, require_reached};

/// Instructions of an entry point that no run needs to reach: two 64-bit divisions for slots beyond 2^32, and the row gaps of
/// families whose pages have footers.
const MOST_MISSED: usize = 60;

/// One conversion: lines of the family table, page sizes, slots that are converted, and the factor of the side that has one.
struct Converted {
    from: &'static FamilySpec,
    to: &'static FamilySpec,
    pages: [i64; 2],
    slots: u64,
    factor: f32,
}

impl Converted {
    fn run(&self, modules: &Modules, schedule: Schedule) -> Result<(), String> {
        let Self { from, to, .. } = *self;
        let text = |error: sparse_mla::Error| error.to_string();
        let geometries = [geometry(from, self.pages[0]), geometry(to, self.pages[1])];
        let scales = [from, to].map(|spec| match spec.row.scale {
            ScaleRule::E4m3Nvfp4 { global: true } => self.factor,
            _ => 1.0,
        });
        let mut packed =
            pack_kv_cache(from, latents::<bf16>(from, 20, 13).view(), geometries[0], scales[0]).map_err(text)?;
        // Every other page is any bytes whatever: scales that are infinite, NaN, negative or subnormal, NaN codes, gaps.
        let mut random = Lcg(17);
        for page in packed.bytes.chunks_exact_mut(packed.layout.page_stride()).step_by(2) {
            page.fill_with(|| random.next() as u8);
        }
        let view = CacheView::new(from, geometries[0], packed.pages, &packed.bytes, scales[0]).map_err(text)?;
        let (want, _) = convert_kv_cache(&view, to, geometries[1], Some(self.slots), scales[1]).map_err(text)?;
        let mut global = Global::default();
        let source = place(&mut global, "cache", packed.bytes, Access::Input);
        let target = global.place_next("new cache", vec![0xcd; want.bytes.len()], &|_| false, Access::Output, 0);
        let convert = ConvertOnDevice {
            specs: [from, to],
            from: CacheOnDevice { pointer: source, pages: packed.pages, layout: packed.layout },
            to: CacheOnDevice { pointer: target, pages: want.pages, layout: want.layout },
            num_slots: self.slots as usize,
            kv_global_scales: scales,
        };
        execute(modules, &[convert_launch(&convert).map_err(text)?], &mut global, schedule)?;
        first_difference(&global.contents(target, want.bytes.len()).0, &want.bytes)
    }
}

/// Two lines of the family table.
type Pair = (&'static FamilySpec, &'static FamilySpec);

/// All pairs of lines between which there is a conversion.
fn pairs() -> impl Iterator<Item = Pair> {
    let all = FAMILY_TABLE.iter().flat_map(|from| FAMILY_TABLE.iter().map(move |to| (from, to)));
    all.filter(|(from, to)| Conversion::between(from, to).is_ok())
}

fn run_pair(modules: &Modules, (from, to): Pair, schedule: Schedule) -> Result<(), String> {
    for (pages, slots, factor) in [([5, 4], 18, 0.37), ([4, 3], 20, 1.0), ([7, 9], 10, 3.0e38)] {
        let conversion = Converted { from, to, pages, slots, factor };
        conversion.run(modules, schedule).map_err(|why| {
            format!("{} {} to {} {} ({schedule:?}): {why}", from.family, from.format, to.family, to.format)
        })?;
    }
    Ok(())
}

/// What every run of an entry point finds wrong, under the first schedule that does; none: nothing.
pub fn fault_of(modules: &Modules, module: &str, entry: &str) -> Option<String> {
    let uses_it = |(from, to): &Pair| conversion_kernel(from, to).is_ok_and(|kernel| kernel == (module, entry));
    SCHEDULES
        .into_iter()
        .find_map(|schedule| pairs().filter(uses_it).find_map(|pair| run_pair(modules, pair, schedule).err()))
}

#[test]
fn caches_are_converted_as_on_the_cpu_under_every_schedule() {
    let runs: Vec<_> = pairs().flat_map(|pair| SCHEDULES.map(|schedule| (pair, schedule))).collect();
    let failures: Vec<_> =
        runs.par_iter().filter_map(|(pair, schedule)| run_pair(&COMMITTED, *pair, *schedule).err()).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    for module in ["move", "convert_dsv4", "convert_dsv4_1", "convert_glm"] {
        require_reached(module, MOST_MISSED);
    }
}

/// Every conversion that the CPU does has a kernel, and every kernel of these modules a conversion.
#[test]
fn every_conversion_has_a_kernel() {
    let mut kernels: Vec<_> =
        pairs().map(|(from, to)| conversion_kernel(from, to).expect("a kernel for every pair")).collect();
    kernels.sort_unstable();
    kernels.dedup();
    let mut entries: Vec<_> = COMMITTED
        .iter()
        .filter(|(name, _)| **name == "move" || name.starts_with("convert_"))
        .flat_map(|(name, module)| module.entries.iter().map(|entry| (*name, entry.name.as_str())))
        .collect();
    entries.sort_unstable();
    assert_eq!(kernels, entries);
}
