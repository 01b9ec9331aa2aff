//! Executes the committed PTX on the CPU, more strictly than hardware does; `docs/ptx-execution.md`.

mod barrier;
mod case;
mod cases;
mod check;
#[path = "../common/mod.rs"]
mod common;
mod copies;
mod edit;
mod fault;
mod global;
mod isa;
mod machine;
mod mbarrier;
mod module;
mod mutants;
mod on_device;
mod operand;
mod order;
mod placed;
mod probe;
mod schedule;
mod shared;
mod stand_in;
mod syntax;
mod test_formats;
mod test_instructions;
mod test_mma;
mod test_rules;

use std::time::Instant;

use rayon::prelude::*;

use case::Case;
use check::Differences;
use schedule::{Executed, Schedule};
use stand_in::COMMITTED;

/// Orders of warps, blocks and landing copies that every case runs under.
const SCHEDULES: [Schedule; 3] = [Schedule::Forward, Schedule::Backward, Schedule::Random(0x5eed)];

/// Runs a case under every schedule; results must agree bit for bit, and with the CPU backend within bounds.
fn run_case(modules: &stand_in::Modules, seed: u64, case: &Case) -> Result<(Executed, Differences), String> {
    let inputs = case.inputs(seed);
    let mut executed = Executed::default();
    let mut first: Option<case::Outputs> = None;
    for schedule in SCHEDULES {
        let ran = stand_in::run(modules, case, &inputs, schedule).map_err(|why| format!("{schedule:?}: {why}"))?;
        executed += ran.executed;
        let Some(first) = &first else {
            first = Some(ran.outputs);
            continue;
        };
        let differs = |a: &f32, b: &f32| a.to_bits() != b.to_bits();
        let out = first.out.iter().zip(&ran.outputs.out).any(|(a, b)| differs(a, b));
        if out || first.lse.iter().zip(&ran.outputs.lse).any(|(a, b)| differs(a, b)) {
            return Err(format!("{schedule:?} and the first schedule give different bits"));
        }
    }
    let got = first.ok_or("no schedule")?;
    Ok((executed, check::compare(case, &got, &inputs.reference(case), check::FROM_CPU)?))
}

#[test]
fn every_case_agrees_with_the_cpu_under_every_schedule() {
    let start = Instant::now();
    let cases = cases::all();
    let results: Vec<_> = cases.par_iter().map(|(seed, case)| (case, run_case(&COMMITTED, *seed, case))).collect();
    let (mut executed, mut largest, mut failures) = (Executed::default(), Differences::default(), Vec::new());
    for (case, result) in results {
        match result {
            Ok((ran, differences)) => {
                executed += ran;
                largest = largest.max(differences);
            }
            Err(why) => failures.push(format!("{} decode_{}, {}: {why}", case.family, case.tile, case.name)),
        }
    }
    println!(
        "PTX: {} cases under {} schedules: {} launches, {} blocks, {} warp instructions in {:.1} s; largest errors {:.1e} (out, relative L2 of a head, float32), {:.1e} (lse)",
        cases.len(),
        SCHEDULES.len(),
        executed.launches,
        executed.blocks,
        executed.instructions,
        start.elapsed().as_secs_f64(),
        largest.out,
        largest.lse
    );
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
#[ignore = "needs a GPU"]
fn every_case_agrees_with_the_interpreter_on_a_device() {
    on_device::compare_every_case(&cases::all());
}

#[test]
#[ignore = "takes minutes; `make mutants` runs it"]
fn every_mutant_is_caught() {
    mutants::run();
}
