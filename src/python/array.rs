//! Array arguments: what came, checked against what is needed, as `ndarray` views.
#![allow(unsafe_code)]

use std::ops::Range;

use half::{bf16, f16};
use ndarray::{ArrayView, ArrayViewMut, Dim, Dimension, IntoDimension, Ix, ShapeBuilder};
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods, npyffi::flags::NPY_ARRAY_WRITEABLE};
use pyo3::prelude::*;

use super::argument::type_name;
use crate::{Error, FamilySpec, Geometry, geometry_of_shape, layout::ALIGNMENT};

/// Element types of array arguments. numpy holds bfloat16 as uint16 bits or as ml_dtypes.bfloat16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DType {
    U8,
    I32,
    I64,
    Bf16,
    F16,
    F32,
}

impl DType {
    fn as_str(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::Bf16 => "bfloat16 (uint16 bits)",
            Self::F16 => "float16",
            Self::F32 => "float32",
        }
    }
}

/// A Rust type that views an array's elements.
pub(super) trait ViewElement: Copy {
    const DTYPE: DType;
}

macro_rules! view_elements {
    ($($element:ty => $dtype:ident),+) => {
        $(impl ViewElement for $element { const DTYPE: DType = DType::$dtype; })+
    };
}
view_elements!(u8 => U8, i32 => I32, i64 => I64, bf16 => Bf16, f16 => F16, f32 => F32);

/// A host array that a caller passed, alive and unmoved as long as `object` is.
pub(super) struct Array<'py> {
    pub name: &'static str,
    pub object: Bound<'py, PyAny>,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// In bytes.
    pub strides: Vec<isize>,
    data: *mut u8,
    itemsize: usize,
    writeable: bool,
}

impl<'py> Array<'py> {
    /// Takes an argument that must be a host array of one of the `accepted` types.
    pub fn new(name: &'static str, object: &Bound<'py, PyAny>, accepted: &[DType]) -> PyResult<Self> {
        let Ok(array) = object.cast::<PyUntypedArray>() else {
            return Err(not_an_array(name, object)?.into());
        };
        let descr = array.dtype();
        let native = descr.is_native_byteorder() != Some(false);
        let dtype = dtype_of(&descr.typeobj().name()?.to_string())
            .filter(|dtype| native && accepted.contains(dtype))
            .ok_or_else(|| {
            let words: Vec<_> = accepted.iter().map(|dtype| dtype.as_str()).collect();
            Error::wrong_type(name, format!("an array of {}", words.join(" or ")), format!("dtype {descr}"))
        })?;
        // SAFETY: `array` is a numpy array, whose header is valid while it is borrowed.
        let (data, flags) = unsafe {
            let header = array.as_array_ptr();
            ((*header).fields.data.cast::<u8>(), (*header).fields.flags)
        };
        let itemsize = descr.itemsize();
        let mut strides = array.strides().to_vec();
        let mut dense = itemsize as isize;
        for (stride, length) in strides.iter_mut().zip(array.shape()).rev() {
            // Strides of axes of length 1 and of empty arrays mean nothing, and producers put anything there.
            if *length == 1 || array.is_empty() {
                *stride = dense;
            }
            dense *= *length as isize;
        }
        let array = Self {
            name,
            object: object.clone(),
            dtype,
            shape: array.shape().to_vec(),
            strides,
            data,
            itemsize,
            writeable: flags & NPY_ARRAY_WRITEABLE != 0,
        };
        let mut addresses = array.strides.iter().map(|stride| stride.unsigned_abs()).chain([data as usize]);
        if !array.is_empty() && addresses.any(|address| !address.is_multiple_of(itemsize)) {
            let got = format!("address {data:p} and strides {:?}", array.strides);
            return Err(Error::value(name, format!("aligned to its {itemsize}-byte elements"), got).into());
        }
        Ok(array)
    }

    /// An optional argument.
    pub fn optional(
        name: &'static str,
        object: Option<&Bound<'py, PyAny>>,
        accepted: &[DType],
    ) -> PyResult<Option<Self>> {
        object.map(|object| Self::new(name, object, accepted)).transpose()
    }

    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Refuses what can't be written.
    pub fn require_writeable(&self) -> Result<(), Error> {
        if self.writeable { Ok(()) } else { Err(Error::value(self.name, "writeable", "a read-only array")) }
    }

    /// Refuses strides other than those of a dense row-major array.
    pub fn require_contiguous(&self) -> Result<(), Error> {
        let mut dense = self.itemsize as isize;
        for (length, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *length > 1 && *stride != dense && !self.is_empty() {
                let got = format!("shape {:?} with strides of {:?} bytes", self.shape, self.strides);
                return Err(Error::value(self.name, "contiguous", got));
            }
            dense *= *length as isize;
        }
        Ok(())
    }

    /// Refuses a last dimension with gaps, and negative strides anywhere.
    pub fn require_dense_rows(&self) -> Result<(), Error> {
        let last = self.shape.len().saturating_sub(1);
        let gaps = self.shape.last().is_some_and(|n| *n > 1) && self.strides[last] != self.itemsize as isize;
        if gaps || self.strides.iter().any(|stride| *stride < 0) {
            let got = format!("strides of {:?} bytes", self.strides);
            return Err(Error::value(self.name, "dense in its last dimension, with non-negative strides", got));
        }
        Ok(())
    }

    /// Refuses elements that share bytes with one another.
    pub fn require_no_self_overlap(&self) -> Result<(), Error> {
        let mut axes: Vec<_> = self.shape.iter().zip(&self.strides).filter(|(length, _)| **length > 1).collect();
        axes.sort_unstable_by_key(|(_, stride)| **stride);
        let mut extent = self.itemsize as isize;
        for (length, stride) in axes {
            if *stride < extent && !self.is_empty() {
                let got = format!("shape {:?} with strides of {:?} bytes", self.shape, self.strides);
                return Err(Error::value(self.name, "free of overlap with itself", got));
            }
            extent += stride * (*length as isize - 1);
        }
        Ok(())
    }

    /// Refuses bytes shared with `other`.
    pub fn require_apart_from(&self, other: &Self) -> PyResult<()> {
        let (mine, theirs) = (self.byte_range(), other.byte_range());
        if mine.start >= theirs.end || theirs.start >= mine.end {
            return Ok(());
        }
        // The ranges cross, yet interleaved views of one buffer need not share a byte: numpy decides exactly.
        let numpy = self.object.py().import("numpy")?;
        if numpy.call_method1("shares_memory", (&self.object, &other.object))?.extract()? {
            let accepted = format!("apart from `{}`", other.name);
            return Err(Error::value(self.name, accepted, "arrays that share memory").into());
        }
        Ok(())
    }

    fn byte_range(&self) -> Range<usize> {
        let start = self.data as usize;
        if self.is_empty() {
            return start..start;
        }
        let (mut low, mut high) = (0isize, self.itemsize as isize);
        for (length, stride) in self.shape.iter().zip(&self.strides) {
            let reach = stride * (*length as isize - 1);
            low += reach.min(0);
            high += reach.max(0);
        }
        start.wrapping_add_signed(low)..start.wrapping_add_signed(high)
    }

    /// The leading dimensions before the last `kept` ones as one, which their strides must allow.
    pub fn flatten_leading(mut self, kept: usize) -> Result<Self, Error> {
        let leading = self.shape.len() - kept;
        let mut axes: Vec<(usize, isize)> =
            self.shape.iter().copied().zip(self.strides.iter().copied()).take(leading).collect();
        let tokens = axes.iter().map(|(length, _)| length).product();
        axes.retain(|(length, _)| *length != 1);
        if tokens != 0 && !axes.windows(2).all(|pair| pair[0].1 == pair[1].1 * pair[1].0 as isize) {
            let got = format!("shape {:?} with strides of {:?} bytes", self.shape, self.strides);
            return Err(Error::value(self.name, "evenly strided over its leading dimensions", got));
        }
        let stride = axes.last().map_or(0, |(_, stride)| *stride);
        self.shape.splice(..leading, [tokens]);
        self.strides.splice(..leading, [stride]);
        Ok(self)
    }

    /// The elements, under the array's own shape and strides.
    pub fn view<T: ViewElement, const N: usize>(&self) -> Result<ArrayView<'_, T, Dim<[Ix; N]>>, Error>
    where
        Dim<[Ix; N]>: Dimension,
        [Ix; N]: IntoDimension<Dim = Dim<[Ix; N]>>,
    {
        let [shape, strides] = self.dimensions::<T, N>()?;
        // SAFETY: the array's shape and strides describe memory that lives as long as `self.object`; the element type
        // was checked against the dtype, the address against its alignment, and strides are non-negative.
        Ok(unsafe { ArrayView::from_shape_ptr(shape.strides(strides), self.data.cast::<T>()) })
    }

    /// The elements, to write.
    pub fn view_mut<T: ViewElement, const N: usize>(&mut self) -> Result<ArrayViewMut<'_, T, Dim<[Ix; N]>>, Error>
    where
        Dim<[Ix; N]>: Dimension,
        [Ix; N]: IntoDimension<Dim = Dim<[Ix; N]>>,
    {
        self.require_writeable()?;
        self.require_no_self_overlap()?;
        let [shape, strides] = self.dimensions::<T, N>()?;
        // SAFETY: as in `view`; the array is writeable and no two elements share bytes.
        Ok(unsafe { ArrayViewMut::from_shape_ptr(shape.strides(strides), self.data.cast::<T>()) })
    }

    /// Shape and strides in elements of type `T`.
    fn dimensions<T: ViewElement, const N: usize>(&self) -> Result<[Dim<[Ix; N]>; 2], Error>
    where
        [Ix; N]: IntoDimension<Dim = Dim<[Ix; N]>>,
    {
        if T::DTYPE != self.dtype {
            return Err(Error::wrong_type(self.name, T::DTYPE.as_str(), self.dtype.as_str()));
        }
        let ranks = || Error::value(self.name, format!("{N}-dimensional"), format!("shape {:?}", self.shape));
        if self.strides.iter().any(|stride| *stride < 0) {
            return Err(Error::value(self.name, "non-negatively strided", format!("{:?}", self.strides)));
        }
        let shape: [Ix; N] = self.shape.clone().try_into().map_err(|_| ranks())?;
        let elements: Vec<Ix> = self.strides.iter().map(|stride| *stride as usize / self.itemsize).collect();
        let strides: [Ix; N] = elements.try_into().map_err(|_| ranks())?;
        Ok([shape.into_dimension(), strides.into_dimension()])
    }

    /// Pages and geometry of a packed cache.
    pub fn cache_geometry(&self, spec: &FamilySpec) -> Result<(usize, Geometry), Error> {
        let (pages, geometry) = geometry_of_shape(spec, self.name, &self.shape, &self.strides)?;
        if pages > 0 && !(self.data as usize).is_multiple_of(ALIGNMENT) {
            let got = format!("address {:p}", self.data);
            return Err(Error::value(self.name, format!("{ALIGNMENT}-byte aligned"), got));
        }
        Ok((pages, geometry))
    }

    /// All bytes from the first to the last element.
    pub fn bytes(&self) -> &[u8] {
        let range = self.byte_range();
        // SAFETY: the range lies inside the memory that the array describes and keeps alive, all of it initialised.
        unsafe { std::slice::from_raw_parts(range.start as *const u8, range.len()) }
    }

    /// All bytes from the first to the last element, to write.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], Error> {
        self.require_writeable()?;
        let range = self.byte_range();
        // SAFETY: as in `bytes`, and the array is writeable.
        Ok(unsafe { std::slice::from_raw_parts_mut(range.start as *mut u8, range.len()) })
    }
}

fn dtype_of(name: &str) -> Option<DType> {
    Some(match name {
        "uint8" => DType::U8,
        "int32" => DType::I32,
        "int64" => DType::I64,
        "uint16" | "bfloat16" => DType::Bf16,
        "float16" => DType::F16,
        "float32" => DType::F32,
        _ => return None,
    })
}

/// The refusal of an object that is no numpy array, which names the device of an array that lives elsewhere.
fn not_an_array(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Error> {
    if let Ok(device) = object.call_method0("__dlpack_device__") {
        let (kind, ordinal): (i32, i32) = device.extract()?;
        let got = format!("an array on DLPack device ({kind}, {ordinal})");
        let accepted = "a numpy array (this build has no GPU kernels; numpy.asarray takes arrays of other libraries)";
        return Ok(Error::value(name, accepted, got));
    }
    Ok(Error::wrong_type(name, "a numpy array", type_name(object)))
}
