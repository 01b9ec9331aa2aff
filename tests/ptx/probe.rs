//! Small programs in PTX for tests of the interpreter itself.

use crate::global::{Access, Global};
use crate::module::Module;
use crate::schedule::{self, Launch, Schedule};

/// A program, its launch, and what it reads.
pub struct Probe<'a> {
    pub body: &'a str,
    pub threads: u32,
    pub blocks: u32,
    pub shared: u32,
    /// At `%rd2`; `%rd1` is this thread's word of it.
    pub input: &'a [u8],
    /// Words of output; `%rd0` is this thread's, `%rd3` the first.
    pub words: usize,
}

impl Default for Probe<'_> {
    fn default() -> Self {
        Self { body: "", threads: 32, blocks: 1, shared: 1024, input: &[0; 128], words: 32 }
    }
}

impl Probe<'_> {
    /// The program's output words; 0 where it wrote none. `%r0` is the thread.
    pub fn run(&self, schedule: Schedule) -> Result<Vec<u32>, String> {
        let text = format!(
            ".version 8.6\n.target sm_90\n.address_size 64\n.extern .shared .align 128 .b8 shared_memory[];\n\
             .visible .entry probe(.param .u64 probe_param_0, .param .u64 probe_param_1)\n.maxntid 1024, 1, 1\n{{\n\
             .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .b64 %rd<16>; .reg .f32 %f<32>; .reg .b8 %b<8>;\n\
             mov.u32 %r0, %tid.x; mul.wide.u32 %rd15, %r0, 4; ld.param.u64 %rd3, [probe_param_0];\n\
             ld.param.u64 %rd2, [probe_param_1]; add.s64 %rd0, %rd3, %rd15; add.s64 %rd1, %rd2, %rd15;\n{}\nret;\n}}\n",
            self.body
        );
        let module = Module::parse(&text)?;
        let mut global = Global::default();
        let output = global.place_next("output", vec![0; 4 * self.words], &|_| false, Access::Output, 0);
        let input = global.place_next("input", self.input.to_vec(), &|_| true, Access::Input, 0);
        let launch = Launch {
            entry: &module.entries[0],
            grid: [self.blocks, 1, 1],
            threads: self.threads,
            dynamic_shared: self.shared,
            parameters: [output.to_le_bytes(), input.to_le_bytes()].concat(),
            running_since: None,
            number: 0,
        };
        schedule::run(&launch, &mut global, schedule).map_err(|report| report.to_string())?;
        let (bytes, _) = global.contents(output, 4 * self.words);
        Ok(bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect())
    }

    /// The same output under every schedule.
    pub fn output(&self) -> Vec<u32> {
        let outputs = crate::SCHEDULES.map(|schedule| self.run(schedule).unwrap_or_else(|why| panic!("{why}")));
        assert!(outputs.iter().all(|output| *output == outputs[0]), "schedules differ");
        outputs[0].clone()
    }
}

/// Words as input bytes.
pub fn bytes(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// What each of 32 lanes computes from its own word `%r1`, into `%r2`.
pub fn per_lane(code: &str, words: &[u32]) -> Vec<u32> {
    let body = format!("ld.global.u32 %r1, [%rd1];\n{code}\nst.global.u32 [%rd0], %r2;");
    let threads = words.len().next_multiple_of(32);
    let mut padded = words.to_vec();
    padded.resize(threads, 0);
    let input = bytes(padded);
    let probe = Probe { body: &body, threads: threads as u32, input: &input, words: threads, ..Probe::default() };
    probe.output()[..words.len()].to_vec()
}
