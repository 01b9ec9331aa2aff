//! The same attention, naive and in float64: the yardstick that the tests hold every backend to.

use ndarray::{Array2, Array3, Axis, s};

use crate::support::explain_decode;
use crate::{DecodeInputs, Element, Error};

/// Outputs `[T, H, d_v]` and log-sum-exps `[T, H]` (in the inputs' base) of [`crate::decode`], in float64.
pub fn decode(inputs: &DecodeInputs<'_>) -> Result<(Array3<f64>, Array2<f64>), Error> {
    explain_decode(&inputs.request()).into_result()?;
    inputs.check()?;
    let (num_tokens, num_heads, d_qk) = inputs.q.dim();
    let d_v = inputs.kv_cache.spec().d_v;
    let mut out = Array3::zeros((num_tokens, num_heads, d_v));
    let mut lse = Array2::zeros((num_tokens, num_heads));
    for token in 0..num_tokens {
        let rows: Vec<Vec<f64>> = inputs
            .candidates(token)
            .iter()
            .map(|candidate| {
                let mut row = vec![0f32; d_qk];
                candidate.dequantise(&mut row);
                row.into_iter().map(f64::from).collect()
            })
            .collect();
        for head in 0..num_heads {
            let q = inputs.q.index_axis(Axis(0), token);
            let scores: Vec<f64> = rows
                .iter()
                .map(|row| {
                    let dot: f64 = row.iter().zip(q.row(head)).map(|(k, q)| k * f64::from(Element::to_f32(*q))).sum();
                    dot * f64::from(inputs.sm_scale)
                })
                .collect();
            let sink = inputs.attn_sink.map_or(f64::NEG_INFINITY, |sink| f64::from(sink[head]));
            let max = scores.iter().copied().fold(sink, f64::max);
            let mut normaliser = if sink == f64::NEG_INFINITY { 0.0 } else { (sink - max).exp() };
            let mut sums = vec![0f64; d_v];
            for (score, row) in scores.iter().zip(&rows) {
                let weight = (score - max).exp();
                normaliser += weight;
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
            }
            if normaliser > 0.0 {
                out.slice_mut(s![token, head, ..]).iter_mut().zip(sums).for_each(|(out, sum)| *out = sum / normaliser);
            }
            lse[[token, head]] = inputs.lse_base.of_natural(max + normaliser.ln());
        }
    }
    Ok((out, lse))
}
