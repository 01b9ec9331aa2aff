//! `mma.sync` m16n8: dense and block-scaled.
//!
//! Products are exact and summed in f64, with the accumulator last, then rounded to f32 once. Tensor cores keep fewer
//! bits between products and differ from this in the last places.

use sparse_mla::half::f16;
use sparse_mla::half::slice::HalfFloatSliceExt;

use super::formats::Format;
use super::{Decoded, Raw};
use crate::fault::Fault;
use crate::machine::{Context, Flow, LANES};
use crate::operand::{Operand, Source};

/// Largest k.
const MAX_K: usize = 64;

/// How an operand's elements lie in its registers.
#[derive(Clone, Copy)]
enum Elements {
    F16,
    Bf16,
    /// Codes of `bits` bits, `shift` bits up in their container.
    Codes {
        format: &'static Format,
        container: u32,
        shift: u32,
    },
}

impl Elements {
    /// `dense`: 4-bit elements two a byte (mxf4); else every element has a byte, e2m1 in its bits 2 to 5.
    fn named(name: &str, dense: bool) -> Result<Self, String> {
        Ok(match name {
            "f16" => Self::F16,
            "bf16" => Self::Bf16,
            "e4m3" | "e5m2" | "e2m1" | "e3m2" | "e2m3" => {
                let format = Format::named(name).ok_or("a format")?;
                if dense && format.bits != 4 {
                    return Err(format!("{name} where 4-bit elements are expected"));
                }
                let shift = if !dense && format.bits == 4 { 2 } else { 0 };
                Self::Codes { format, container: if dense { 4 } else { 8 }, shift }
            }
            _ => return Err(format!("elements of type {name}")),
        })
    }

    fn per_register(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::Codes { container, .. } => 32 / container as usize,
        }
    }

    /// Elements of one register of every lane, lane by lane.
    fn values(self, register: &[u32; LANES], out: &mut [f32; 8 * LANES]) {
        match self {
            Self::F16 => {
                let mut halves = [f16::ZERO; 2 * LANES];
                for (pair, bits) in halves.chunks_exact_mut(2).zip(register) {
                    pair[0] = f16::from_bits(*bits as u16);
                    pair[1] = f16::from_bits((bits >> 16) as u16);
                }
                halves.convert_to_f32_slice(&mut out[..2 * LANES]);
            }
            Self::Bf16 => {
                for (pair, bits) in out.chunks_exact_mut(2).zip(register) {
                    pair[0] = f32::from_bits(bits << 16);
                    pair[1] = f32::from_bits(bits & 0xffff_0000);
                }
            }
            Self::Codes { format, container, shift } => {
                let last = format.values.len() - 1;
                for (values, bits) in out.chunks_exact_mut(self.per_register()).zip(register) {
                    for (index, value) in values.iter_mut().enumerate() {
                        *value = format.values[(bits >> (container * index as u32 + shift)) as usize & last];
                    }
                }
            }
        }
    }
}

/// Scales of one side: a register, and which of its bytes and lanes count.
struct Scales {
    register: Source,
    byte: Source,
    thread: Source,
}

impl Scales {
    fn parse(raw: &Raw<'_>, index: usize) -> Result<Self, String> {
        let [byte, thread] = raw.operand(index + 1)?.parts() else { return Err("no pair of byte and thread".into()) };
        Ok(Self { register: raw.source(index, 4)?, byte: byte.any_source()?, thread: thread.any_source()? })
    }

    /// Scale of every row (or column) and block of k. `lane_of`: from row and thread id to the lane that holds it.
    fn values(
        &self,
        c: &Context<'_>,
        form: &ScaleForm,
        rows: usize,
        lane_of: impl Fn(usize, usize) -> usize,
        threads: u32,
    ) -> Result<[[f64; 4]; 16], Fault> {
        let byte = self.byte.uniform(c, "a scale's byte id")?;
        let thread = self.thread.uniform(c, "a scale's thread id")?;
        if !form.bytes.contains(&byte) || thread >= threads {
            return Err(Fault::new(format!(
                "byte id {byte} and thread id {thread} of a scale; bytes are {:?}",
                form.bytes
            )));
        }
        let registers = self.register.u32s(c);
        let mut values = [[1.0; 4]; 16];
        for (row, values) in values.iter_mut().enumerate().take(rows) {
            let word = registers[lane_of(row, thread as usize)];
            for (block, value) in values.iter_mut().enumerate().take(form.blocks) {
                let code = word >> (8 * (byte as usize + block)) & 255;
                *value = f64::from(form.format.values[code as usize]);
            }
        }
        Ok(values)
    }
}

/// Blocks of k with a scale each.
struct ScaleForm {
    blocks: usize,
    format: &'static Format,
    /// Byte ids that are allowed.
    bytes: &'static [u32],
}

/// What the opcode says.
struct Shape {
    k: usize,
    a: Elements,
    b: Elements,
    scales: Option<ScaleForm>,
}

impl Shape {
    fn parse(parts: &[&str]) -> Result<Self, String> {
        let (mut k, mut kind, mut vector, mut scaled) = (0, None, None, false);
        let mut types = Vec::new();
        let (mut row, mut col) = (false, false);
        for part in parts {
            match *part {
                "m16n8k8" => k = 8,
                "m16n8k16" => k = 16,
                "m16n8k32" => k = 32,
                "m16n8k64" => k = 64,
                "row" => row = true,
                "col" => col = true,
                "kind::f8f6f4" | "kind::mxf8f6f4" | "kind::mxf4" | "kind::mxf4nvf4" => kind = Some(&part[6..]),
                "block_scale" => scaled = true,
                "scale_vec::1X" => vector = Some(1),
                "scale_vec::2X" => vector = Some(2),
                "scale_vec::4X" => vector = Some(4),
                name => types.push(name),
            }
        }
        if !(row && col) {
            return Err("not row.col".into());
        }
        let (Some("f32"), Some("f32")) = (types.first().copied(), types.get(3).copied()) else {
            return Err("accumulators that are not f32".into());
        };
        let dense = matches!(kind, Some("mxf4" | "mxf4nvf4"));
        let (a, b) = (Elements::named(types[1], dense)?, Elements::named(types[2], dense)?);
        let scales = match (kind, scaled, vector, types.get(4).copied()) {
            (None | Some("f8f6f4"), false, None, None) => None,
            (Some("mxf8f6f4"), true, None | Some(1), Some("ue8m0")) => Some((1, "ue8m0", &[0, 1, 2, 3][..])),
            (Some("mxf4"), true, None | Some(2), Some("ue8m0")) | (Some("mxf4nvf4"), true, Some(2), Some("ue8m0")) => {
                Some((2, "ue8m0", &[0, 2][..]))
            }
            (Some("mxf4nvf4"), true, Some(4), Some(scale @ ("ue4m3" | "ue8m0"))) => Some((4, scale, &[0][..])),
            _ => return Err("the interpreter does not know this kind of mma".into()),
        };
        let scales = scales.map(|(blocks, name, bytes)| {
            Format::named(name).map(|format| ScaleForm { blocks, format, bytes }).ok_or("a format")
        });
        let narrow = |elements: Elements| elements.per_register() == 2;
        let allowed: &[usize] = match (narrow(a), dense) {
            (true, _) => &[8, 16],
            (false, true) => &[64],
            (false, false) if kind.is_none() => &[16, 32],
            (false, false) => &[32],
        };
        if !allowed.contains(&k) || narrow(a) != narrow(b) {
            return Err(format!("k = {k} for these elements"));
        }
        Ok(Self { k, a, b, scales: scales.transpose()? })
    }
}

pub fn decode(raw: &Raw<'_>) -> Decoded {
    let ["mma", "sync", "aligned", ref parts @ ..] = raw.parts[..] else { return Ok(None) };
    let shape = Shape::parse(parts)?;
    raw.expect(if shape.scales.is_some() { 8 } else { 4 })?;
    let per = shape.a.per_register();
    let targets = registers(raw.operand(0)?, 4, |part| part.target(4))?;
    let a = registers(raw.operand(1)?, shape.k / (2 * per), |part| part.source(4))?;
    let b = registers(raw.operand(2)?, shape.k / (4 * per), |part| part.source(4))?;
    let sums = registers(raw.operand(3)?, 4, |part| part.source(4))?;
    let scales = match shape.scales {
        None => None,
        Some(_) => Some((Scales::parse(raw, 4)?, Scales::parse(raw, 6)?)),
    };
    Ok(Some(Box::new(move |c| {
        if !c.converged(!0) {
            return Ok(Flow::Diverged);
        }
        let k = shape.k;
        let mut left = [[0f64; MAX_K]; 16];
        let mut right = [[0f64; 8]; MAX_K];
        let mut values = [0f32; 8 * LANES];
        for (r, register) in a.iter().enumerate() {
            shape.a.values(&register.u32s(c), &mut values);
            for (lane, elements) in values.chunks_exact(per).take(LANES).enumerate() {
                let row = &mut left[lane / 4 + 8 * (r & 1)][per * (lane % 4) + 4 * per * (r >> 1)..][..per];
                row.iter_mut().zip(elements).for_each(|(to, from)| *to = f64::from(*from));
            }
        }
        for (r, register) in b.iter().enumerate() {
            shape.b.values(&register.u32s(c), &mut values);
            for (lane, elements) in values.chunks_exact(per).take(LANES).enumerate() {
                let first = per * (lane % 4) + 4 * per * r;
                elements.iter().enumerate().for_each(|(e, from)| right[first + e][lane / 4] = f64::from(*from));
            }
        }
        if let (Some(form), Some((of_a, of_b))) = (&shape.scales, &scales) {
            let of_a = of_a.values(c, form, 16, |row, thread| 4 * (row % 8) + 2 * thread + row / 8, 2)?;
            let of_b = of_b.values(c, form, 8, |column, thread| 4 * column + thread, 4)?;
            let block = k / form.blocks;
            for (row, scales) in left.iter_mut().zip(&of_a) {
                row[..k].iter_mut().enumerate().for_each(|(at, value)| *value *= scales[at / block]);
            }
            for (at, row) in right.iter_mut().enumerate().take(k) {
                row.iter_mut().zip(&of_b).for_each(|(value, scales)| *value *= scales[at / block]);
            }
        }
        let mut product = [[0f64; 8]; 16];
        for (product, left) in product.iter_mut().zip(&left) {
            for (a, right) in left[..k].iter().zip(&right) {
                product.iter_mut().zip(right).for_each(|(sum, b)| *sum += a * b);
            }
        }
        for (i, (to, from)) in targets.iter().zip(&sums).enumerate() {
            let from = from.f32s(c);
            let sum = |lane: usize| {
                let product = product[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
                ((product + f64::from(from[lane])) as f32).to_bits()
            };
            c.set32(*to, std::array::from_fn(sum));
        }
        Ok(Flow::Next)
    })))
}

fn registers<R>(operand: &Operand, count: usize, f: impl Fn(&Operand) -> Result<R, String>) -> Result<Vec<R>, String> {
    let parts = operand.parts();
    if parts.len() != count {
        return Err(format!("{} registers where {count} are expected", parts.len()));
    }
    parts.iter().map(f).collect()
}
