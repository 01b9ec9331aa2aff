//! Joining partial attention results over disjoint candidates.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Zip};

use crate::{Element, Error, LseBase};

/// A partial result: N = tokens times heads rows.
#[derive(Debug, Clone, Copy)]
pub struct PartialState<'a, O> {
    /// `[N, d_v]`.
    pub out: ArrayView2<'a, O>,
    /// Log-sum-exps `[N]`; -inf = no candidates, and `out` is ignored, whatever it holds.
    pub lse: ArrayView1<'a, f32>,
}

/// Joins two partial results over disjoint candidates into `out` `[N, d_v]` and `lse` `[N]`, all in `lse_base`.
///
/// At most one side may have counted a sink.
pub fn merge_states<O: Element>(
    a: &PartialState<'_, O>,
    b: &PartialState<'_, O>,
    lse_base: LseBase,
    out: &mut ArrayViewMut2<'_, O>,
    lse: &mut ArrayViewMut1<'_, f32>,
) -> Result<(), Error> {
    let (rows, d_v) = a.out.dim();
    for (name, dim) in [("out_b", b.out.dim()), ("out", out.dim())] {
        if dim != (rows, d_v) {
            return Err(Error::value(name, format!("of shape {:?} like `out_a`", (rows, d_v)), format!("{dim:?}")));
        }
    }
    for (name, length) in [("lse_a", a.lse.len()), ("lse_b", b.lse.len()), ("lse", lse.len())] {
        if length != rows {
            return Err(Error::value(name, format!("{rows} long like `out_a`"), length));
        }
    }
    Zip::indexed(out.outer_iter_mut()).and(lse).for_each(|row, mut out, lse| {
        let natural = |state: &PartialState<'_, O>| lse_base.to_natural(f64::from(state.lse[row]));
        let (natural_a, natural_b) = (natural(a), natural(b));
        let max = natural_a.max(natural_b);
        let (weight_a, weight_b) = (weight(natural_a, max), weight(natural_b, max));
        let sum = weight_a + weight_b;
        let (share_a, share_b) = if sum == 0.0 { (0.0, 0.0) } else { (weight_a / sum, weight_b / sum) };
        Zip::from(&mut out).and(a.out.row(row)).and(b.out.row(row)).for_each(|out, value_a, value_b| {
            *out = O::from_f32((part(*value_a, share_a) + part(*value_b, share_b)) as f32);
        });
        *lse = match (weight_a == 0.0, weight_b == 0.0) {
            (false, true) => a.lse[row],
            (true, false) => b.lse[row],
            _ => lse_base.of_natural(max + sum.ln()) as f32,
        };
    });
    Ok(())
}

/// exp(x - max), where -inf minus itself counts as nothing and +inf minus itself as everything.
fn weight(x: f64, max: f64) -> f64 {
    if x == f64::NEG_INFINITY {
        0.0
    } else if x == max {
        1.0
    } else {
        (x - max).exp()
    }
}

/// A weighted value; nothing of weight 0 counts, not even NaN.
fn part<O: Element>(value: O, share: f64) -> f64 {
    if share == 0.0 { 0.0 } else { f64::from(value.to_f32()) * share }
}
