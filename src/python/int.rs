//! Python ints of any size, with their order.

use std::cmp::Ordering;
use std::fmt;

use num_bigint::{BigInt, Sign};
use pyo3::prelude::*;

/// A Python int: anything with `__index__`, numpy's included.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Int {
    /// Fits in 64 bits.
    Small(i64),
    /// Does not.
    Large(BigInt),
}

impl From<i64> for Int {
    fn from(value: i64) -> Self {
        Self::Small(value)
    }
}

impl Ord for Int {
    fn cmp(&self, other: &Self) -> Ordering {
        // A large value lies beyond every small one, on the side of its sign.
        let side = |value: &BigInt| {
            if value.sign() == Sign::Minus { Ordering::Less } else { Ordering::Greater }
        };
        match (self, other) {
            (Self::Small(a), Self::Small(b)) => a.cmp(b),
            (Self::Large(a), Self::Large(b)) => a.cmp(b),
            (Self::Large(a), Self::Small(_)) => side(a),
            (Self::Small(_), Self::Large(b)) => side(b).reverse(),
        }
    }
}

impl PartialOrd for Int {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Int {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Small(value) => value.fmt(f),
            Self::Large(value) => value.fmt(f),
        }
    }
}

impl<'py> IntoPyObject<'py> for Int {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(match self {
            Self::Small(value) => value.into_pyobject(py)?.into_any(),
            Self::Large(value) => value.into_pyobject(py)?.into_any(),
        })
    }
}
