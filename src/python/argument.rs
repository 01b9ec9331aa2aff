//! Scalar arguments, whose wrong types are refused by name.

use std::borrow::Cow;

use num_bigint::BigInt;
use pyo3::prelude::*;

use super::int::Int;
use crate::Error;

/// A type that a scalar argument may have.
pub(super) trait Scalar: Sized {
    /// The type in an error text.
    const EXPECTED: &'static str;

    /// The value, if the object is of the type.
    fn of(object: &Bound<'_, PyAny>) -> Option<Self>;
}

/// A word: of the caller, or a default, which costs nothing.
pub(super) type Word = Cow<'static, str>;

impl Scalar for Word {
    const EXPECTED: &'static str = "a str";

    fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        object.extract().ok().map(Self::Owned)
    }
}

impl Scalar for bool {
    const EXPECTED: &'static str = "a bool";

    fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        object.extract().ok()
    }
}

impl Scalar for f64 {
    const EXPECTED: &'static str = "a float";

    fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        object.extract().ok()
    }
}

impl Scalar for Int {
    const EXPECTED: &'static str = "an int";

    fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        match object.extract::<i64>() {
            Ok(value) => Some(Self::Small(value)),
            Err(_) => object.extract::<BigInt>().ok().map(Self::Large),
        }
    }
}

/// An argument as it came. Conversion cannot fail before the argument's name is at hand.
pub(super) enum Argument<T> {
    Right(T),
    /// Name of the type that came instead.
    Wrong(String),
}

impl<T: Scalar> Argument<T> {
    /// The value, or a refusal that names the argument.
    pub fn named(self, name: &str) -> Result<T, Error> {
        match self {
            Self::Right(value) => Ok(value),
            Self::Wrong(got) => Err(Error::wrong_type(name, T::EXPECTED, got)),
        }
    }
}

impl Argument<f64> {
    /// The value as an FP32 number, finite there, or a refusal that names the argument.
    pub fn named_finite_f32(self, name: &str) -> Result<f32, Error> {
        let value = self.named(name)?;
        let narrow = value as f32;
        if narrow.is_finite() { Ok(narrow) } else { Err(Error::value(name, "a finite FP32 number", value)) }
    }
}

impl Argument<Int> {
    /// The value as 64 bits, or a refusal that names the argument.
    pub fn named_i64(self, name: &str) -> Result<i64, Error> {
        match self.named(name)? {
            Int::Small(value) => Ok(value),
            Int::Large(value) => Err(Error::value(name, "an integer of at most 64 bits", value)),
        }
    }
}

impl<'a, 'py, T: Scalar> FromPyObject<'a, 'py> for Argument<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(T::of(&object).map_or_else(|| Self::Wrong(type_name(&object)), Self::Right))
    }
}

/// The name of an object's type, for error texts.
pub(super) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "another type".into(), |name| name.to_string())
}

/// The default value of a str argument.
pub(super) fn word(text: &'static str) -> Argument<Word> {
    Argument::Right(Cow::Borrowed(text))
}

/// The default value of an int argument.
pub(super) fn int(value: i64) -> Argument<Int> {
    Argument::Right(Int::Small(value))
}
