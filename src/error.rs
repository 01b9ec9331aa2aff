//! The one error type. A refusal is data: its sentences are made in [`crate::support`] and [`crate::layout`].

/// Why a call was not carried out. Nothing has been written when one is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument of the wrong type (element type, rank, kind of object).
    #[error("`{argument}` must be {accepted}, got {got}")]
    Type {
        /// Name of the argument.
        argument: String,
        /// What would have been accepted.
        accepted: String,
        /// What came.
        got: String,
    },
    /// An argument of the right type with a value that cannot be right.
    #[error("`{argument}` must be {accepted}, got {got}")]
    Value {
        /// Name of the argument.
        argument: String,
        /// What would have been accepted.
        accepted: String,
        /// What came.
        got: String,
    },
    /// A request that no kernel serves: every reason of [`crate::explain_decode`].
    #[error("{}", reasons.join("; "))]
    Unsupported {
        /// One sentence per reason.
        reasons: Vec<String>,
    },
    /// The GPU cannot be used: no driver, an old driver, no such device, or a driver call that failed.
    #[error("{0}")]
    Device(String),
}

impl Error {
    /// An [`Error::Type`] about `argument`.
    pub fn wrong_type(argument: impl Into<String>, accepted: impl Into<String>, got: impl ToString) -> Self {
        Self::Type { argument: argument.into(), accepted: accepted.into(), got: got.to_string() }
    }

    /// An [`Error::Value`] about `argument`.
    pub fn value(argument: impl Into<String>, accepted: impl Into<String>, got: impl ToString) -> Self {
        Self::Value { argument: argument.into(), accepted: accepted.into(), got: got.to_string() }
    }

    /// The same refusal under the name that the argument has elsewhere.
    #[cfg(feature = "cuda")]
    pub(crate) fn about(self, argument: &str) -> Self {
        match self {
            Self::Value { accepted, got, .. } => Self::value(argument, accepted, got),
            Self::Unsupported { reasons } => Self::Unsupported {
                reasons: reasons
                    .iter()
                    .map(|text| text.replace("`kv_cache_format`", &format!("`{argument}`")))
                    .collect(),
            },
            other => other,
        }
    }

    /// An [`Error::Unsupported`] with one reason.
    pub fn unsupported(reason: impl Into<String>) -> Self {
        Self::Unsupported { reasons: vec![reason.into()] }
    }
}
