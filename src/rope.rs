//! Rotary position embedding of the RoPE lanes, on their way into a cache.

use half::bf16;
use ndarray::ArrayView2;

use crate::{Error, FamilySpec};

/// Which lanes are rotated together. P = half the number of RoPE lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// Lanes 2p and 2p + 1 (GPT-J).
    Interleaved,
    /// Lanes p and p + P (NeoX).
    HalfSplit,
}

/// The rotation of every latent row.
///
/// With a = first and b = second lane of pair p, c and s = cosine and sine of the row's position: a becomes `a * c - b * s`
/// and b becomes `a * s + b * c`, in float32, products and sum rounded one by one, then rounded once to bf16; a NaN becomes
/// 0x7fc0.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// `[max_position, rope_dims]`: cosines of the P pairs, then their sines.
    pub cos_sin: ArrayView2<'a, f32>,
    /// A position per row. A row whose position is not in the table is skipped.
    pub positions: &'a [i64],
    /// The pairs.
    pub pairs: RopePairs,
}

impl<'a> Rotation<'a> {
    /// Refuses a family without RoPE lanes, a table of another width, and a wrong number of positions.
    pub(crate) fn check(&self, spec: &FamilySpec, num_rows: usize) -> Result<(), Error> {
        check_shapes(spec, self.cos_sin.dim(), self.positions.len(), num_rows)
    }

    /// Cosines and sines of a row; `None` where its position is not in the table.
    pub(crate) fn of_row(&self, row: usize) -> Option<RowRotation<'a>> {
        let position = usize::try_from(self.positions[row]).ok().filter(|position| *position < self.cos_sin.nrows())?;
        Some(RowRotation { cos_sin: self.cos_sin.slice_move(ndarray::s![position, ..]), pairs: self.pairs })
    }
}

/// The checks of [`Rotation`], for arrays wherever they live.
pub(crate) fn check_shapes(
    spec: &FamilySpec,
    table: (usize, usize),
    positions: usize,
    num_rows: usize,
) -> Result<(), Error> {
    let lanes = spec.row.rope_dims;
    if lanes == 0 {
        let accepted = format!("None for family {}, whose records have no RoPE lanes of their own", spec.family);
        return Err(Error::value("rope_cos_sin", accepted, "an array"));
    }
    if table.1 != lanes {
        let accepted = format!("of shape [max_position, {lanes}] for family {}", spec.family);
        return Err(Error::value("rope_cos_sin", accepted, format!("{:?}", [table.0, table.1])));
    }
    if positions != num_rows {
        let accepted = format!("one position per row of `latent` ({num_rows})");
        return Err(Error::value("rope_positions", accepted, format!("{positions} positions")));
    }
    Ok(())
}

/// The rotation of one row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowRotation<'a> {
    cos_sin: ndarray::ArrayView1<'a, f32>,
    pairs: RopePairs,
}

impl RowRotation<'_> {
    /// Rotates the lanes that `lane` yields into the bf16 numbers of `out`.
    pub fn apply(&self, lane: impl Fn(usize) -> f32, out: &mut [u8]) {
        let pairs = out.len() / 4;
        for pair in 0..pairs {
            let (first, second) = match self.pairs {
                RopePairs::Interleaved => (2 * pair, 2 * pair + 1),
                RopePairs::HalfSplit => (pair, pair + pairs),
            };
            let (a, b) = (lane(first), lane(second));
            let (cosine, sine) = (self.cos_sin[pair], self.cos_sin[pairs + pair]);
            for (at, rotated) in [(first, a * cosine - b * sine), (second, a * sine + b * cosine)] {
                let rounded = if rotated.is_nan() { bf16::NAN } else { bf16::from_f32(rotated) };
                out[2 * at..2 * at + 2].copy_from_slice(&rounded.to_le_bytes());
            }
        }
    }
}
