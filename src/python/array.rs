//! Array arguments: what came, checked against what is needed, as `ndarray` views or device addresses.
#![allow(unsafe_code)]

use std::ops::Range;

use half::{bf16, f16};
use ndarray::{ArrayView, ArrayViewMut, Dim, Dimension, IntoDimension, Ix, ShapeBuilder};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::import::{Imported, Importer};
use crate::layout::require_aligned;
use crate::{Error, FamilySpec, Geometry, geometry_of_shape};

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

/// Where an array lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Host memory.
    Host,
    /// The memory of a CUDA device.
    Cuda(i32),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("the CPU"),
            Self::Cuda(ordinal) => write!(f, "CUDA device {ordinal}"),
        }
    }
}

impl DType {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::Bf16 => "bfloat16 (uint16 bits)",
            Self::F16 => "float16",
            Self::F32 => "float32",
        }
    }

    /// Whether elements are floating-point numbers.
    pub fn is_float(self) -> bool {
        matches!(self, Self::Bf16 | Self::F16 | Self::F32)
    }

    /// The name alone.
    pub fn short_name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            other => other.as_str(),
        }
    }

    /// Bytes of an element.
    pub fn itemsize(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 => 8,
        }
    }

    /// The name in numpy, which has no bfloat16 but its bits.
    pub fn numpy_name(self) -> &'static str {
        match self {
            Self::Bf16 => "uint16",
            other => other.as_str(),
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

/// An array that a caller passed, alive and unmoved as long as `object` and `imported` are.
pub(super) struct Array<'py> {
    pub name: &'static str,
    pub object: Bound<'py, PyAny>,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// In bytes.
    pub strides: Vec<isize>,
    /// From the first to the last byte of any element.
    byte_range: Range<usize>,
    imported: Imported,
}

impl<'py> Array<'py> {
    /// Takes an argument that must be a host array of one of the `accepted` types.
    pub fn new(name: &'static str, object: &Bound<'py, PyAny>, accepted: &[DType]) -> PyResult<Self> {
        Self::import(name, object, accepted, &Importer::host_only())
    }

    /// Takes an argument of one of the `accepted` types, wherever it lives.
    pub fn import(
        name: &'static str,
        object: &Bound<'py, PyAny>,
        accepted: &[DType],
        importer: &Importer,
    ) -> PyResult<Self> {
        let mut imported = importer.import(name, object)?;
        let dtype = imported.dtype.filter(|dtype| accepted.contains(dtype)).ok_or_else(|| {
            let words: Vec<_> = accepted.iter().map(|dtype| dtype.as_str()).collect();
            let mut got = format!("dtype {}", imported.dtype_name);
            if accepted == [DType::U8] && name.ends_with("cache") && imported.dtype.is_some_and(DType::is_float) {
                got.push_str(", probably an unquantised cache (`pack_kv_cache` makes packed ones)");
            }
            Error::wrong_type(name, format!("an array of {}", words.join(" or ")), got)
        })?;
        let (shape, mut strides) = (std::mem::take(&mut imported.shape), std::mem::take(&mut imported.strides));
        let itemsize = imported.itemsize;
        let is_empty = shape.contains(&0);
        let mut dense = itemsize as isize;
        for (stride, length) in strides.iter_mut().zip(&shape).rev() {
            // Strides of axes of length 1 and of empty arrays mean nothing, and producers put anything there.
            if *length == 1 || is_empty {
                *stride = dense;
            }
            dense *= *length as isize;
        }
        let mut addresses = strides.iter().map(|stride| stride.unsigned_abs()).chain([imported.data as usize]);
        if !is_empty && addresses.any(|address| !address.is_multiple_of(itemsize)) {
            let got = format!("address {:p} and strides {strides:?}", imported.data);
            return Err(Error::value(name, format!("aligned to its {itemsize}-byte elements"), got).into());
        }
        let byte_range = byte_range(imported.data as usize, itemsize, &shape, &strides);
        Ok(Self { name, object: object.clone(), dtype, shape, strides, byte_range, imported })
    }

    /// The same memory again; `self` keeps it alive for its library, as `object` does.
    pub fn alias(&self) -> Self {
        Self {
            name: self.name,
            object: self.object.clone(),
            dtype: self.dtype,
            shape: self.shape.clone(),
            strides: self.strides.clone(),
            byte_range: self.byte_range.clone(),
            imported: self.imported.alias(),
        }
    }

    /// Where the array lives.
    pub fn place(&self) -> Place {
        self.imported.place
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.imported.data as u64
    }

    /// Stride of an axis in elements.
    pub fn element_stride(&self, axis: usize) -> i64 {
        self.strides[axis] as i64 / self.imported.itemsize as i64
    }

    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Refuses what can't be written.
    pub fn require_writeable(&self) -> Result<(), Error> {
        if self.imported.writeable { Ok(()) } else { Err(Error::value(self.name, "writeable", "a read-only array")) }
    }

    /// Refuses strides other than those of a dense row-major array.
    pub fn require_contiguous(&self) -> Result<(), Error> {
        if self.is_contiguous() {
            return Ok(());
        }
        let got = format!("shape {:?} with strides of {:?} bytes", self.shape, self.strides);
        Err(Error::value(self.name, "contiguous", got))
    }

    fn is_contiguous(&self) -> bool {
        let mut dense = self.imported.itemsize as isize;
        self.is_empty()
            || self.shape.iter().zip(&self.strides).rev().all(|(length, stride)| {
                let fits = *length <= 1 || *stride == dense;
                dense *= *length as isize;
                fits
            })
    }

    /// Refuses negative strides.
    pub fn require_non_negative_strides(&self) -> Result<(), Error> {
        match self.strides.iter().any(|stride| *stride < 0) {
            true => Err(Error::value(self.name, "non-negatively strided", format!("{:?}", self.strides))),
            false => Ok(()),
        }
    }

    /// Refuses a last dimension with gaps, and negative strides anywhere.
    pub fn require_dense_rows(&self) -> Result<(), Error> {
        let last = self.shape.len().saturating_sub(1);
        let gaps = self.shape.last().is_some_and(|n| *n > 1) && self.strides[last] != self.imported.itemsize as isize;
        if gaps || self.strides.iter().any(|stride| *stride < 0) {
            let got = format!("strides of {:?} bytes", self.strides);
            return Err(Error::value(self.name, "dense in its last dimension, with non-negative strides", got));
        }
        Ok(())
    }

    /// Refuses elements that share bytes with one another.
    pub fn require_no_self_overlap(&self) -> Result<(), Error> {
        if self.is_contiguous() {
            return Ok(());
        }
        let mut axes: Vec<_> = self.shape.iter().zip(&self.strides).filter(|(length, _)| **length > 1).collect();
        axes.sort_unstable_by_key(|(_, stride)| **stride);
        let mut extent = self.imported.itemsize as isize;
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
        let (mine, theirs) = (&self.byte_range, &other.byte_range);
        if mine.start >= theirs.end || theirs.start >= mine.end {
            return Ok(());
        }
        // The ranges cross, yet interleaved views of one buffer need not share a byte: numpy decides exactly.
        let numpy = self.object.py().import("numpy")?;
        if numpy.call_method1("shares_memory", (self.outline()?, other.outline()?))?.extract()? {
            let accepted = format!("apart from `{}`", other.name);
            return Err(Error::value(self.name, accepted, "arrays that share memory").into());
        }
        Ok(())
    }

    /// A numpy array over the same addresses, for numpy's arithmetic on them; its elements must not be read.
    fn outline(&self) -> PyResult<Bound<'py, PyAny>> {
        let py = self.object.py();
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", pyo3::types::PyTuple::new(py, &self.shape)?)?;
        interface.set_item("strides", pyo3::types::PyTuple::new(py, &self.strides)?)?;
        interface.set_item("typestr", format!("|V{}", self.imported.itemsize))?;
        interface.set_item("data", (self.imported.data as usize, true))?;
        let holder = PyDict::new(py);
        holder.set_item("__array_interface__", interface)?;
        let namespace = py.import("types")?.getattr("SimpleNamespace")?.call((), Some(&holder))?;
        py.import("numpy")?.call_method1("asarray", (namespace,))
    }

    /// The leading dimensions before the last `kept` ones as one, which their strides must allow.
    pub fn flatten_leading(mut self, kept: usize) -> Result<Self, Error> {
        let leading = self.shape.len() - kept;
        if leading == 1 {
            if self.shape[0] == 1 {
                self.strides[0] = 0;
            }
            return Ok(self);
        }
        let axes = || self.shape.iter().copied().zip(self.strides.iter().copied()).take(leading);
        let tokens = axes().map(|(length, _)| length).product();
        let longer = || axes().filter(|(length, _)| *length != 1);
        let even = longer().zip(longer().skip(1)).all(|(outer, inner)| outer.1 == inner.1 * inner.0 as isize);
        if tokens != 0 && !even {
            let got = format!("shape {:?} with strides of {:?} bytes", self.shape, self.strides);
            return Err(Error::value(self.name, "evenly strided over its leading dimensions", got));
        }
        let stride = longer().next_back().map_or(0, |(_, stride)| stride);
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
        Ok(unsafe { ArrayView::from_shape_ptr(shape.strides(strides), self.imported.data.cast::<T>()) })
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
        Ok(unsafe { ArrayViewMut::from_shape_ptr(shape.strides(strides), self.imported.data.cast::<T>()) })
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
        self.require_non_negative_strides()?;
        let shape: [Ix; N] = self.shape.clone().try_into().map_err(|_| ranks())?;
        let elements: Vec<Ix> = self.strides.iter().map(|stride| *stride as usize / self.imported.itemsize).collect();
        let strides: [Ix; N] = elements.try_into().map_err(|_| ranks())?;
        Ok([shape.into_dimension(), strides.into_dimension()])
    }

    /// Pages and geometry of a packed cache.
    pub fn cache_geometry(&self, spec: &FamilySpec) -> Result<(usize, Geometry), Error> {
        let (pages, geometry) = geometry_of_shape(spec, self.name, &self.shape, &self.strides)?;
        if pages > 0 {
            require_aligned(self.name, self.address())?;
        }
        Ok((pages, geometry))
    }

    /// All bytes from the first to the last element.
    pub fn bytes(&self) -> &[u8] {
        let range = &self.byte_range;
        // SAFETY: the range lies inside the memory that the array describes and keeps alive, all of it initialised.
        unsafe { std::slice::from_raw_parts(range.start as *const u8, range.len()) }
    }

    /// All bytes from the first to the last element, to write.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], Error> {
        self.require_writeable()?;
        let range = &self.byte_range;
        // SAFETY: as in `bytes`, and the array is writeable.
        Ok(unsafe { std::slice::from_raw_parts_mut(range.start as *mut u8, range.len()) })
    }
}

fn byte_range(start: usize, itemsize: usize, shape: &[usize], strides: &[isize]) -> Range<usize> {
    let (mut low, mut high) = (0isize, itemsize as isize);
    for (length, stride) in shape.iter().zip(strides) {
        if *length == 0 {
            return start..start;
        }
        let reach = stride * (*length as isize - 1);
        low += reach.min(0);
        high += reach.max(0);
    }
    start.wrapping_add_signed(low)..start.wrapping_add_signed(high)
}
