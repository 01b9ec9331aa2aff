//! Arrays of other libraries: numpy's own, and everything that speaks DLPack. Nothing is copied.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::cell::{Cell, OnceCell};
use std::ffi::c_void;

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLTensor};
use dlpark::python::consumer::exchange::ExchangeApi;
use dlpark::python::consumer::stream::cuda as cuda_stream_argument;
use dlpark::python::{DlpackStream, ImportRequest, ImportedDlpack, StreamArg};
use numpy::npyffi::{NPY_TYPES, flags::NPY_ARRAY_WRITEABLE};
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::argument::type_name;
use super::array::{DType, Place};
use crate::Error;

/// An array as its library describes it.
pub(super) struct Imported {
    /// None: a type that no argument has; `dtype_name` says which.
    pub dtype: Option<DType>,
    pub dtype_name: Cow<'static, str>,
    pub shape: Vec<usize>,
    /// In bytes.
    pub strides: Vec<isize>,
    pub data: *mut u8,
    pub itemsize: usize,
    pub writeable: bool,
    pub place: Place,
    /// Keeps the memory, where the Python object alone would not.
    _owner: Option<ImportedDlpack>,
}

impl Imported {
    /// The same address, without a hold on the memory.
    pub fn alias(&self) -> Self {
        Self {
            dtype: self.dtype,
            dtype_name: Cow::Borrowed(""),
            shape: Vec::new(),
            strides: Vec::new(),
            data: self.data,
            itemsize: self.itemsize,
            writeable: self.writeable,
            place: self.place,
            _owner: None,
        }
    }
}

/// Imports the arrays of one call, all for the same CUDA stream: the one the caller names, else the current stream of the
/// first array's library.
pub(super) struct Importer {
    stream: Cell<Option<usize>>,
    /// Where arrays must live; None: not known before the first.
    place: Cell<Option<Place>>,
    /// The first exchange table and the type it came from: the arrays of a call are mostly of one type.
    exchange: OnceCell<(Py<PyType>, ExchangeApi)>,
}

impl Importer {
    /// For calls that serve host arrays only.
    pub fn host_only() -> Self {
        Self { place: Cell::new(Some(Place::Host)), ..Self::on_stream(None) }
    }

    /// For calls that serve CUDA arrays on a stream (None: the current one).
    pub fn on_stream(stream: Option<usize>) -> Self {
        Self { stream: Cell::new(stream), place: Cell::new(None), exchange: OnceCell::new() }
    }

    /// The stream that the imported arrays are ready on; 0: the default stream.
    pub fn stream(&self) -> usize {
        self.stream.get().unwrap_or(0)
    }

    /// Describes an array. The first fixes where the others must live.
    pub fn import(&self, name: &str, object: &Bound<'_, PyAny>) -> PyResult<Imported> {
        let imported = self.describe(name, object)?;
        self.require_place(name, imported.place)?;
        self.place.set(Some(imported.place));
        Ok(imported)
    }

    fn require_place(&self, name: &str, place: Place) -> Result<(), Error> {
        match self.place.get() {
            Some(expected) if expected != place => {
                Err(Error::value(name, format!("an array on {expected}"), format!("one on {place}")))
            }
            _ => Ok(()),
        }
    }

    fn describe(&self, name: &str, object: &Bound<'_, PyAny>) -> PyResult<Imported> {
        if let Ok(array) = object.cast::<PyUntypedArray>() {
            return of_numpy(array);
        }
        let kind = object.get_type();
        let known = self.exchange.get().filter(|(known, _)| known.is(&kind)).map(|(_, api)| api);
        let found = if known.is_none() { ExchangeApi::from_object(object.as_borrowed())? } else { None };
        if let Some(api) = known.or(found.as_ref()) {
            let (imported, producer) = api.with_tensor_view_no_sync(object.as_borrowed(), |tensor, stream| {
                // SAFETY: the view's shape and strides are valid in this callback.
                (unsafe { of_tensor(name, tensor) }, stream as usize)
            })?;
            let imported = imported?;
            self.require_place(name, imported.place)?; // before a stream of another device is met
            if let Place::Cuda(ordinal) = imported.place {
                self.order_after(ordinal, producer)?;
            }
            if let Some(api) = found {
                let _ = self.exchange.set((kind.unbind(), api));
            }
            return Ok(imported);
        }
        if !object.hasattr("__dlpack__")? {
            return Err(Error::wrong_type(name, "an array (numpy's, or one with __dlpack__)", type_name(object)).into());
        }
        let request = ImportRequest::new(object.as_borrowed())?;
        let place = place_of(name, request.device()?)?;
        self.require_place(name, place)?; // before the producer is asked for memory
        if let Place::Cuda(ordinal) = place {
            crate::cuda::device(ordinal as usize)?;
        }
        let consumer;
        let stream: Option<&dyn DlpackStream> = match place {
            Place::Host => None,
            Place::Cuda(_) => {
                if self.stream.get().is_none() {
                    self.stream.set(Some(current_stream(object)?));
                }
                consumer = Consumer(self.stream());
                Some(&consumer)
            }
        };
        let owner = request.import(stream, None)?;
        let read_only = owner.flags().contains(dlpark::DlpackFlags::READ_ONLY);
        let tensor = owner.validate().map_err(|error| Error::value(name, "a valid DLPack tensor", error))?;
        let strides =
            tensor.strides_or_compact().map_err(|error| Error::value(name, "a valid DLPack tensor", error))?;
        let (dtype, dtype_name, itemsize) = describe(tensor.dtype());
        let imported = Imported {
            dtype,
            dtype_name,
            shape: tensor.shape().iter().map(|length| *length as usize).collect(),
            strides: strides.iter().map(|stride| *stride as isize * itemsize as isize).collect(),
            data: tensor.data_ptr().cast::<u8>().cast_mut(),
            itemsize,
            writeable: !read_only,
            place,
            _owner: None,
        };
        Ok(Imported { _owner: Some(owner), ..imported })
    }

    /// Work of `producer` on the array comes before what this call enqueues.
    fn order_after(&self, ordinal: i32, producer: usize) -> PyResult<()> {
        match self.stream.get() {
            None => {
                self.stream.set(Some(producer));
                Ok(())
            }
            Some(stream) if stream == producer => Ok(()),
            Some(stream) => wait_for(ordinal, stream, producer),
        }
    }
}

fn wait_for(ordinal: i32, stream: usize, producer: usize) -> PyResult<()> {
    let device = crate::cuda::device(ordinal as usize)?;
    // SAFETY: both are live streams of the device: the caller's, and its library's current one.
    Ok(unsafe { device.wait_for(stream as crate::cuda::CUstream, producer as crate::cuda::CUstream) }?)
}

/// The stream an array's library works on, as far as the library says.
fn current_stream(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    let py = object.py();
    let module = object.get_type().module()?.to_string();
    match module.split('.').next() {
        Some("torch") => py
            .import("torch.cuda")?
            .call_method1("current_stream", (object.getattr("device")?,))?
            .getattr("cuda_stream")?
            .extract(),
        Some("cupy") => py.import("cupy.cuda")?.call_method0("get_current_stream")?.getattr("ptr")?.extract(),
        _ => Ok(0),
    }
}

/// A stream argument: an int, or a stream object of torch, cupy or cuda-python.
pub(super) fn stream_handle(stream: &Bound<'_, PyAny>) -> PyResult<usize> {
    if let Ok(handle) = stream.extract::<usize>() {
        return Ok(handle);
    }
    for attribute in ["cuda_stream", "ptr", "handle"] {
        match stream.getattr(attribute) {
            Ok(value) => return value.extract(),
            Err(error) if error.is_instance_of::<PyAttributeError>(stream.py()) => {}
            Err(error) => return Err(error),
        }
    }
    let accepted = "None, a CUstream handle, or a stream object (cuda_stream, ptr or handle)";
    Err(Error::wrong_type("stream", accepted, type_name(stream)).into())
}

/// The consumer's stream in the DLPack protocol.
struct Consumer(usize);

// SAFETY: the handle is the caller's live stream, or 0 for the default stream.
unsafe impl DlpackStream for Consumer {
    fn as_python_arg(&self, _py: Python<'_>, _device: DLDevice) -> PyResult<StreamArg> {
        Ok(cuda_stream_argument(self.0 as *mut c_void))
    }
}

fn of_numpy(array: &Bound<'_, PyUntypedArray>) -> PyResult<Imported> {
    let descr = array.dtype();
    let native = descr.is_native_byteorder() != Some(false);
    // SAFETY: `array` is a numpy array, whose header is valid while it is borrowed.
    let (data, flags) = unsafe {
        let header = array.as_array_ptr();
        ((*header).fields.data.cast::<u8>(), (*header).fields.flags)
    };
    let of_another_library = descr.num() >= NPY_TYPES::NPY_USERDEF as i32;
    let known = match (descr.kind(), descr.itemsize()) {
        _ if !native => None,
        _ if of_another_library => {
            (descr.typeobj().name()?.to_str()? == "bfloat16").then_some((DType::Bf16, "bfloat16"))
        }
        (b'u', 1) => Some((DType::U8, "uint8")),
        (b'i', 4) => Some((DType::I32, "int32")),
        (b'i', 8) => Some((DType::I64, "int64")),
        (b'u', 2) => Some((DType::Bf16, "uint16")),
        (b'f', 2) => Some((DType::F16, "float16")),
        (b'f', 4) => Some((DType::F32, "float32")),
        _ => None,
    };
    // numpy's own words for a type cost microseconds.
    let (dtype, dtype_name) = match known {
        Some((dtype, name)) => (Some(dtype), name.into()),
        None => (None, descr.to_string().into()),
    };
    Ok(Imported {
        dtype,
        dtype_name,
        shape: array.shape().to_vec(),
        strides: array.strides().to_vec(),
        data,
        itemsize: descr.itemsize(),
        writeable: flags & NPY_ARRAY_WRITEABLE != 0,
        place: Place::Host,
        _owner: None,
    })
}

/// # Safety
/// The tensor's shape and strides must be valid.
unsafe fn of_tensor(name: &str, tensor: &DLTensor) -> PyResult<Imported> {
    let rank = tensor.ndim.max(0) as usize;
    let part = |pointer: *const i64| match (pointer.is_null(), rank) {
        (true, _) | (_, 0) => None,
        // SAFETY: DLPack arrays of `ndim` elements, by the caller's word.
        _ => Some(unsafe { std::slice::from_raw_parts(pointer, rank) }),
    };
    let (dtype, dtype_name, itemsize) = describe(tensor.dtype);
    let shape: Vec<usize> = part(tensor.shape).unwrap_or_default().iter().map(|length| *length as usize).collect();
    let strides = match part(tensor.strides) {
        Some(strides) => strides.iter().map(|stride| *stride as isize * itemsize as isize).collect(),
        None => {
            let mut dense = itemsize as isize;
            let mut strides = vec![0; rank];
            for (stride, length) in strides.iter_mut().zip(&shape).rev() {
                *stride = dense;
                dense *= *length as isize;
            }
            strides
        }
    };
    Ok(Imported {
        dtype,
        dtype_name,
        shape,
        strides,
        data: tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize),
        itemsize,
        writeable: true,
        place: place_of(name, tensor.device)?,
        _owner: None,
    })
}

fn place_of(name: &str, device: DLDevice) -> PyResult<Place> {
    match device.device_type {
        DLDeviceType::CPU => Ok(Place::Host),
        DLDeviceType::CUDA => Ok(Place::Cuda(device.device_id)),
        other => {
            let got = format!("DLPack device type {}", other.0);
            Err(Error::value(name, "an array on the CPU or a CUDA device", got).into())
        }
    }
}

/// The element type, its name if no argument has it, and its bytes.
fn describe(dtype: DLDataType) -> (Option<DType>, Cow<'static, str>, usize) {
    let known = match (dtype.code, dtype.bits, dtype.lanes) {
        (DLDataTypeCode::UINT, 8, 1) => Some(DType::U8),
        (DLDataTypeCode::INT, 32, 1) => Some(DType::I32),
        (DLDataTypeCode::INT, 64, 1) => Some(DType::I64),
        (DLDataTypeCode::UINT | DLDataTypeCode::BFLOAT, 16, 1) => Some(DType::Bf16),
        (DLDataTypeCode::FLOAT, 16, 1) => Some(DType::F16),
        (DLDataTypeCode::FLOAT, 32, 1) => Some(DType::F32),
        _ => None,
    };
    let bytes = (usize::from(dtype.bits) * usize::from(dtype.lanes)).div_ceil(8).max(1);
    let name = match known {
        Some(known) => known.as_str().into(),
        None => format!("DLPack code {:?}, {} bits, {} lanes", dtype.code, dtype.bits, dtype.lanes).into(),
    };
    (known, name, bytes)
}
