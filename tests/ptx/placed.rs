//! The arrays of a decode in some device memory, with gaps where they may have them.

use ndarray::{Array2, Array3};
use sparse_mla::cuda::{CacheOnDevice, CandidatesOnDevice, DecodeOnDevice, OutType};
use sparse_mla::half::{bf16, f16};

use crate::case::{Cache, Case, Inputs, Outputs};

/// Device memory, made up or real.
pub trait Memory {
    /// Places a buffer `misalignment` bytes past a multiple of 256. Bytes that are not `payload` are nobody's.
    fn place(&mut self, name: &str, bytes: Vec<u8>, payload: &dyn Fn(usize) -> bool, misalignment: u64) -> u64;

    /// Places a buffer that kernels write.
    fn place_output(&mut self, name: &str, size: usize, misalignment: u64) -> u64;

    /// The bytes of an output, and which of them a kernel wrote.
    fn fetch(&self, address: u64, size: usize) -> (Vec<u8>, Vec<bool>);
}

/// Elements of an output in every dimension and between them.
#[derive(Clone, Copy)]
struct Strided {
    address: u64,
    rows: [usize; 3],
    strides: [usize; 3],
    element: usize,
}

impl Strided {
    fn place(memory: &mut impl Memory, name: &str, rows: [usize; 3], gaps: usize, element: usize) -> Self {
        let row = rows[2] + gaps;
        let strides = [rows[1] * row + gaps, row, 1];
        let last: usize = rows.iter().zip(strides).map(|(rows, stride)| (rows - 1) * stride).sum();
        let address = memory.place_output(name, (last + 1) * element, (gaps * element) as u64);
        Self { address, rows, strides, element }
    }

    /// Bytes of every element in order; an error if other bytes were written, or not all of these.
    fn fetch(&self, memory: &impl Memory, name: &str) -> Result<Vec<Vec<u8>>, String> {
        let last: usize = self.rows.iter().zip(self.strides).map(|(rows, stride)| (rows - 1) * stride).sum();
        let (bytes, mut written) = memory.fetch(self.address, (last + 1) * self.element);
        let mut found = Vec::new();
        for a in 0..self.rows[0] {
            for b in 0..self.rows[1] {
                for c in 0..self.rows[2] {
                    let at = (a * self.strides[0] + b * self.strides[1] + c * self.strides[2]) * self.element;
                    if written[at..at + self.element].contains(&false) {
                        return Err(format!("`{name}` [{a}, {b}, {c}] was not written"));
                    }
                    written[at..at + self.element].fill(false);
                    found.push(bytes[at..at + self.element].to_vec());
                }
            }
        }
        match written.iter().position(|written| *written) {
            Some(at) => Err(format!("byte {at} of `{name}` was written, which is in a gap")),
            None => Ok(found),
        }
    }
}

/// A case's arrays in a memory.
pub struct Placed {
    pub decode: DecodeOnDevice,
    out: Strided,
    lse: Strided,
}

impl Placed {
    pub fn new(memory: &mut impl Memory, case: &Case, inputs: &Inputs) -> Self {
        let misalignment = if case.gaps > 0 { 4 } else { 0 };
        let everything = &|_: usize| true;
        let q = inputs.q.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect();
        let element = if case.out_type == OutType::F32 { 4 } else { 2 };
        let out = Strided::place(memory, "out", [case.tokens, case.heads, inputs.spec.d_v], case.gaps, element);
        let lse = Strided::place(memory, "lse", [1, case.tokens, case.heads], case.gaps, 4);
        let sink = inputs.sink.as_ref().map_or(0, |sink| {
            let bytes = sink.iter().flat_map(|x| x.to_le_bytes()).collect();
            memory.place("attn_sink", bytes, everything, misalignment)
        });
        let extra = inputs.extra.as_ref().map(|extra| {
            let rows: Vec<Vec<i32>> = extra.indices.outer_iter().map(|row| row.to_vec()).collect();
            let lengths = extra.lengths.as_ref().map(|lengths| lengths.to_vec());
            candidates(
                memory,
                ["extra_kv_cache", "extra_indices", "extra_topk_length"],
                &extra.cache,
                &rows,
                lengths,
                case.gaps,
            )
        });
        let rows: Vec<Vec<i32>> = inputs.indices.outer_iter().map(|row| row.to_vec()).collect();
        let lengths = inputs.lengths.as_ref().map(|lengths| lengths.to_vec());
        let decode = DecodeOnDevice {
            q: memory.place("q", q, everything, 0),
            main: candidates(memory, ["kv_cache", "indices", "topk_length"], &inputs.cache, &rows, lengths, case.gaps),
            extra,
            sink,
            out: out.address,
            out_type: case.out_type,
            out_strides: [out.strides[0] as i64, out.strides[1] as i64],
            lse: if case.lse { lse.address } else { 0 },
            lse_stride: lse.strides[1] as i64,
            sm_scale: inputs.sm_scale,
            lse_base: case.lse_base,
            kv_global_scale: inputs.kv_global_scale,
        };
        Self { decode, out, lse }
    }

    /// Reads the results back.
    pub fn outputs(&self, memory: &impl Memory, case: &Case) -> Result<Outputs, String> {
        let value = |bytes: &Vec<u8>| match case.out_type {
            OutType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            OutType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            OutType::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        };
        let out: Vec<f32> = self.out.fetch(memory, "out")?.iter().map(value).collect();
        let number = |bytes: &Vec<u8>| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let lse = case.lse.then(|| self.lse.fetch(memory, "lse")).transpose()?;
        let lse = lse.map(|lse| Array2::from_shape_vec([case.tokens, case.heads], lse.iter().map(number).collect()));
        Ok(Outputs {
            out: Array3::from_shape_vec(self.out.rows, out).map_err(|error| error.to_string())?,
            lse: lse.transpose().map_err(|error| error.to_string())?,
        })
    }
}

fn candidates(
    memory: &mut impl Memory,
    [cache_name, indices_name, lengths_name]: [&str; 3],
    cache: &Cache,
    rows: &[Vec<i32>],
    lengths: Option<Vec<i32>>,
    gaps: usize,
) -> CandidatesOnDevice {
    let misalignment = if gaps > 0 { 4 } else { 0 };
    let bytes = cache.packed.bytes[..cache.extent()].to_vec();
    let topk = rows[0].len();
    let stride = topk + gaps;
    let mut indices: Vec<u8> = Vec::new();
    for row in rows {
        indices.extend(row.iter().flat_map(|index| index.to_le_bytes()));
        indices.extend(vec![0xa5; 4 * gaps]);
    }
    indices.truncate(4 * ((rows.len() - 1) * stride + topk));
    CandidatesOnDevice {
        cache: CacheOnDevice {
            pointer: memory.place(cache_name, bytes, &|at| cache.is_payload(at), 16),
            pages: cache.packed.pages,
            layout: cache.packed.layout,
        },
        indices: memory.place(indices_name, indices, &|at| at / 4 % stride < topk, misalignment),
        indices_stride: stride as i64,
        lengths: lengths.map_or(0, |lengths| {
            let bytes = lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
            memory.place(lengths_name, bytes, &|_| true, misalignment)
        }),
    }
}
