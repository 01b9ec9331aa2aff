//! Arrays in device memory of our own, for callers whose library cannot be asked for one.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::python::{CudaStreamRequest, DlpackExporter, ExportRequest, export_dlpack};
use dlpark::{DlpackFlags, Managed, ManagedTensorBase};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::array::DType;
use crate::cuda::{CUstream, Device, DeviceMemory};
use crate::{Error, cuda};

/// A dense row-major array on a CUDA device, to be taken over by another library through DLPack.
#[pyclass(frozen, name = "DeviceArray", module = "sparse_mla")]
pub(super) struct DeviceArray {
    memory: Arc<DeviceMemory>,
    shape: Vec<usize>,
    dtype: DType,
}

impl DeviceArray {
    /// Elements of any value. Refused on a capturing stream, since the memory would be no part of the graph.
    pub fn empty(
        name: &str,
        device: &'static Device,
        stream: CUstream,
        shape: &[usize],
        dtype: DType,
    ) -> Result<Self, Error> {
        // SAFETY: the stream is the caller's.
        if unsafe { device.is_capturing(stream) }? {
            return Err(Error::value(name, "given while the stream is being captured", "None"));
        }
        let bytes = shape.iter().product::<usize>() * dtype.itemsize();
        Ok(Self { memory: Arc::new(DeviceMemory::new(device, bytes)?), shape: shape.to_vec(), dtype })
    }

    fn export<M: ManagedTensorBase>(&self) -> PyResult<Managed<M>> {
        let shape: Vec<i64> = self.shape.iter().map(|length| *length as i64).collect();
        let prepared = Dynamic::compact(shape).prepare_as::<M>();
        let mut tensor =
            prepared.map_err(|error| PyBufferError::new_err(error.to_string()))?.initialize(Arc::clone(&self.memory));
        tensor.set_data(self.memory.pointer() as *mut c_void).set_device(self.device()).set_dtype(match self.dtype {
            DType::F16 => DLDataType::scalar(DLDataTypeCode::FLOAT, 16),
            DType::F32 => DLDataType::scalar(DLDataTypeCode::FLOAT, 32),
            DType::U8 => DLDataType::scalar(DLDataTypeCode::UINT, 8),
            DType::I32 => DLDataType::scalar(DLDataTypeCode::INT, 32),
            DType::I64 => DLDataType::scalar(DLDataTypeCode::INT, 64),
            DType::Bf16 => DLDataType::scalar(DLDataTypeCode::BFLOAT, 16),
        });
        // SAFETY: the memory is as long as shape and type say and lives as long as the tensor; it may be written.
        Ok(unsafe { tensor.finish() })
    }
}

impl DlpackExporter for DeviceArray {
    fn device(&self) -> DLDevice {
        DLDevice::cuda(self.memory.device().ordinal() as i32)
    }

    fn flags(&self) -> DlpackFlags {
        DlpackFlags::empty()
    }

    fn prepare_export(&self, _py: Python<'_>, request: &ExportRequest<'_>) -> PyResult<()> {
        let stream = match request.cuda_stream()? {
            CudaStreamRequest::NoSync => return Ok(()),
            CudaStreamRequest::Omitted | CudaStreamRequest::LegacyDefault => cuda::LEGACY_STREAM,
            CudaStreamRequest::PerThreadDefault => cuda::PER_THREAD_STREAM,
            CudaStreamRequest::Pointer(handle) => handle as CUstream,
        };
        // SAFETY: the stream is the consumer's.
        Ok(unsafe { self.memory.make_ready(stream) }?)
    }

    fn export_legacy(&self, _py: Python<'_>) -> PyResult<Managed<DLManagedTensor>> {
        self.export()
    }

    fn export_versioned(&self, _py: Python<'_>) -> PyResult<Managed<DLManagedTensorVersioned>> {
        self.export()
    }
}

#[pymethods]
impl DeviceArray {
    /// Lengths of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.short_name()
    }

    fn __dlpack_device__(&self) -> (u32, i32) {
        let device = self.device();
        (device.device_type.0, device.device_id)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        export_dlpack(self, py, ExportRequest::parse(stream, max_version, dl_device, copy)?)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let ordinal = self.memory.device().ordinal();
        Ok(format!("DeviceArray(shape={}, dtype='{}', device={ordinal})", self.shape(py)?.repr()?, self.dtype()))
    }
}

/// If an output is an array of ours: consumers wait for what `stream` was given so far.
pub(super) fn mark_written(output: &Bound<'_, PyAny>, stream: CUstream) -> Result<(), Error> {
    match output.cast::<DeviceArray>() {
        // SAFETY: the stream is the one that the output was written on.
        Ok(array) => unsafe { array.get().memory.mark_written(stream) },
        Err(_) => Ok(()),
    }
}
