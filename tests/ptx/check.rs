//! Results against other results: of the CPU backend, of the interpreter.

use sparse_mla::cuda::OutType;

use crate::case::{Case, Inputs, Outputs};

/// Relative L2 error of a head's output beside the rounding of the output itself, and error of a log-sum-exp.
#[derive(Debug, Default, Clone, Copy)]
pub struct Differences {
    /// Of outputs whose own rounding counts for nothing: float32.
    pub out: f64,
    pub lse: f64,
}

/// Of a kernel against the CPU backend.
pub const FROM_CPU: Differences = Differences { out: 2e-3, lse: 1e-3 };
/// Of a kernel on a device against the interpreter: both sum the same exact products, in another order and precision.
pub const FROM_INTERPRETER: Differences = Differences { out: 1e-3, lse: 5e-4 };

impl Differences {
    pub fn max(self, other: Self) -> Self {
        Self { out: self.out.max(other.out), lse: self.lse.max(other.lse) }
    }
}

/// Rounding of the output type, relative.
fn rounding(out_type: OutType) -> f64 {
    match out_type {
        OutType::F32 => 0.0,
        OutType::F16 => 2f64.powi(-11),
        OutType::Bf16 => 2f64.powi(-8),
    }
}

/// Checks every head by itself; what is exact must be equal.
pub fn compare(
    case: &Case,
    inputs: &Inputs,
    got: &Outputs,
    want: &Outputs,
    bounds: Differences,
) -> Result<Differences, String> {
    let mut largest = Differences::default();
    for token in 0..case.tokens {
        for head in 0..case.heads {
            let place = format!("token {token} head {head}");
            // Without a log-sum-exp there is nothing to compare: equal.
            let lse_of = |outputs: &Outputs| outputs.lse.as_ref().map_or(0.0, |lse| f64::from(lse[[token, head]]));
            let (got_lse, want_lse) = (lse_of(got), lse_of(want));
            let row = |outputs: &Outputs| outputs.out.slice(ndarray::s![token, head, ..]).to_vec();
            let (got_row, want_row) = (row(got), row(want));
            if !inputs.is_present(token) {
                if got_row.iter().any(|x| x.to_bits() != 0) {
                    return Err(format!("{place}: output is not exactly 0 where no candidate is present"));
                }
                if got_lse.to_bits() != want_lse.to_bits() {
                    return Err(format!(
                        "{place}: log-sum-exp {got_lse} where no candidate is present, not {want_lse}"
                    ));
                }
                continue;
            }
            let squares = |f: &dyn Fn(usize) -> f64| (0..want_row.len()).map(|at| f(at).powi(2)).sum::<f64>().sqrt();
            // Where a sink leaves nothing of the values, what is left is compared as it is.
            let norm = Some(squares(&|at| f64::from(want_row[at]))).filter(|norm| *norm > 1e-30).unwrap_or(1.0);
            let error = squares(&|at| f64::from(got_row[at]) - f64::from(want_row[at])) / norm;
            let lse = (got_lse - want_lse).abs();
            // A NaN must fail.
            let within = |error: f64, bound: f64| error.is_finite() && error <= bound;
            if !within(error, bounds.out + rounding(case.out_type)) {
                return Err(format!("{place}: relative L2 error {error:.2e} of the output"));
            }
            if !within(lse, bounds.lse) {
                return Err(format!("{place}: log-sum-exp {got_lse}, not {want_lse}"));
            }
            let out = if case.out_type == OutType::F32 { error } else { 0.0 };
            largest = largest.max(Differences { out, lse });
        }
    }
    Ok(largest)
}
