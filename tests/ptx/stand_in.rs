//! A stand-in for the driver: the launches of a decode, on buffers at made-up addresses.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use sparse_mla::cuda::{Launch, MODULES, Workspace, decode_launches};

use crate::case::{Case, Inputs, Outputs};
use crate::global::{Access, Global};
use crate::module::Module;
use crate::placed::{Memory, Placed};
use crate::schedule::{self, Executed, Schedule};

/// Modules by name.
pub type Modules = HashMap<&'static str, Arc<Module>>;

/// The committed modules.
pub static COMMITTED: LazyLock<Modules> = LazyLock::new(|| {
    let parsed = |text: &str| Module::parse(text).unwrap_or_else(|why| panic!("{why}"));
    MODULES.iter().map(|(name, text)| (*name, Arc::new(parsed(text)))).collect()
});

/// What became of a run.
pub struct Ran {
    pub outputs: Outputs,
    pub executed: Executed,
}

impl Memory for Global {
    fn place(&mut self, name: &str, bytes: Vec<u8>, payload: &dyn Fn(usize) -> bool, misalignment: u64) -> u64 {
        self.place_next(name, bytes, payload, Access::Input, misalignment)
    }

    fn place_output(&mut self, name: &str, size: usize, misalignment: u64) -> u64 {
        self.place_next(name, vec![0xa5; size], &|_| false, Access::Output, misalignment)
    }

    fn fetch(&self, address: u64, size: usize) -> (Vec<u8>, Vec<bool>) {
        self.contents(address, size)
    }
}

/// Runs a case; an error is a fault, or what is wrong with the bytes that were written.
pub fn run(modules: &Modules, case: &Case, inputs: &Inputs, schedule: Schedule) -> Result<Ran, String> {
    let plan = case.plan();
    let mut global = Global::default();
    let placed = Placed::new(&mut global, case, inputs);
    let bytes = plan.workspace_bytes();
    let garbage = (0..bytes).map(|at| schedule.garbage().to_le_bytes()[at % 4]).collect();
    let pointer = global.place_next("workspace", garbage, &|_| false, Access::Scratch, 0);
    let workspace = Workspace { pointer, bytes };
    let launches = decode_launches(&plan, &placed.decode, workspace).map_err(|error| error.to_string())?;
    let executed = run_launches(modules, launches.flatten().flatten(), &mut global, schedule)?;
    Ok(Ran { outputs: placed.outputs(&global, case)?, executed })
}

/// Runs launches one after another.
pub fn run_launches(
    modules: &Modules,
    launches: impl Iterator<Item = Launch>,
    global: &mut Global,
    schedule: Schedule,
) -> Result<Executed, String> {
    let mut executed = Executed::default();
    let mut running_since = 0;
    for (number, launch) in launches.enumerate() {
        if !launch.after_previous {
            running_since = number as u32;
        }
        let module = &modules[launch.module];
        let entry = module.entry(launch.entry).ok_or_else(|| format!("no entry point {}", launch.entry))?;
        let launch = schedule::Launch {
            entry,
            grid: [launch.grid[0], launch.grid[1], 1],
            threads: launch.threads,
            dynamic_shared: launch.shared_bytes,
            parameters: launch.parameter_bytes(),
            running_since: launch.after_previous.then_some(running_since),
            number: number as u32,
        };
        let buffers = global.len();
        for variable in &module.variables {
            let bytes = variable.bytes.clone();
            global.place_at("a variable of the module", variable.address, bytes, &|_| true, Access::Input);
        }
        executed += schedule::run(&launch, global, schedule).map_err(|report| report.to_string())?;
        global.truncate(buffers);
    }
    Ok(executed)
}
