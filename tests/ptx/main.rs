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
mod test_caches;
mod test_conversions;
mod test_formats;
mod test_instructions;
mod test_merge_states;
mod test_mma;
mod test_rules;

use std::io::Write;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use rayon::prelude::*;

use case::Case;
use check::Differences;
use schedule::{Executed, Schedule};
use stand_in::COMMITTED;

/// Orders of warps, blocks and landing copies that every case runs under.
const SCHEDULES: [Schedule; 3] = [Schedule::Forward, Schedule::Backward, Schedule::Random(0x5eed)];

/// Runs a case under every schedule; results must agree bit for bit, and with the CPU backend within bounds.
fn run_case(modules: &stand_in::Modules, case: &Case) -> Result<(Executed, Differences), String> {
    let inputs = case.inputs();
    let mut executed = Executed::default();
    let mut first: Option<case::Outputs> = None;
    for schedule in SCHEDULES {
        let ran = stand_in::run(modules, case, &inputs, schedule).map_err(|why| format!("{schedule:?}: {why}"))?;
        executed += ran.executed;
        let Some(first) = &first else {
            first = Some(ran.outputs);
            continue;
        };
        if !first.same_bits(&ran.outputs) {
            return Err(format!("{schedule:?} and the first schedule give different bits"));
        }
    }
    let got = first.ok_or("no schedule")?;
    Ok((executed, check::compare(case, &inputs, &got, &inputs.reference(case), check::FROM_CPU)?))
}

/// Prints a line that the test harness does not hold back.
fn tell(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Instructions of an entry point that no case needs to reach: 64-bit divisions for operands beyond 2^32, log2 of infinity,
/// a loop that no thread skips.
const MOST_MISSED: usize = 7;
/// Entry points with tests of their own (`test_merge_states.rs`, `test_caches.rs`, `test_conversions.rs`).
const WITHOUT_CASES: [&str; 4] = ["merge_states", "write", "read", "find_winners"];
const CONVERSIONS: [&str; 2] = ["move", "convert"];

/// The kind of a module: its name up to the first underscore.
fn prefix(module: &str) -> &str {
    module.split('_').next().unwrap_or(module)
}

#[test]
fn every_case_agrees_with_the_cpu_under_every_schedule() {
    let start = Instant::now();
    let cases = cases::all();
    let results: Vec<_> = cases.par_iter().map(|case| (case, run_case(&COMMITTED, case))).collect();
    let (mut executed, mut largest, mut failures) = (Executed::default(), Differences::default(), Vec::new());
    for (case, result) in results {
        match result {
            Ok((ran, differences)) => {
                executed += ran;
                largest = largest.max(differences);
            }
            Err(why) => failures.push(format!("{}: {why}", case.title())),
        }
    }
    let Executed { launches, blocks, instructions } = executed;
    tell(&format!(
        "PTX executed: {} cases under {} schedules, {launches} launches, {blocks} blocks, {instructions} warp instructions, \
         {:.0} s; largest errors against the CPU backend {:.1e} (out, relative L2 of a head, float32), {:.1e} (lse)",
        cases.len(),
        SCHEDULES.len(),
        start.elapsed().as_secs_f64(),
        largest.out,
        largest.lse
    ));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    for (name, module) in COMMITTED.iter().filter(|(name, _)| !CONVERSIONS.contains(&prefix(name))) {
        for entry in &module.entries {
            if WITHOUT_CASES.contains(&entry.name.as_str()) {
                continue;
            }
            if !cases.iter().any(|case| case.launches(name, &entry.name)) {
                failures.push(format!("{name} {}: no case launches it", entry.name));
            }
            let missed = entry.code.iter().filter(|one| !one.reached.load(Relaxed));
            let lines: Vec<_> = missed.map(|one| format!("line {} `{}`", one.line, one.text)).collect();
            if lines.len() > MOST_MISSED {
                let (count, all) = (lines.len(), entry.code.len());
                failures.push(format!("{name} {}: no case reaches {count} of {all}: {}", entry.name, lines.join(", ")));
            }
        }
    }
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
