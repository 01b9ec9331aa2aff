//! The extension module `sparse_mla._core`: extract, call the core, convert. No policy lives here.

mod argument;
mod array;
mod caches;
mod caches_on_device;
mod config;
mod convert;
mod decode;
mod device_array;
mod import;
mod int;
mod merge;
mod on_device;
mod output;
mod plan;
mod registry;
mod support;

use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::Error;

pyo3::create_exception!(
    sparse_mla,
    UnsupportedError,
    PyValueError,
    "A shape, family or format that no kernel serves; the text is the reasons of `explain_decode`."
);

pyo3::create_exception!(
    sparse_mla,
    DeviceError,
    PyRuntimeError,
    "The GPU cannot be used: no driver, an old driver, no such device, or a driver call that failed."
);

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error {
            Error::Type { .. } => PyTypeError::new_err(text),
            Error::Value { .. } => PyValueError::new_err(text),
            Error::Unsupported { .. } => UnsupportedError::new_err(text),
            Error::Device(_) => DeviceError::new_err(text),
        }
    }
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("UnsupportedError", module.py().get_type::<UnsupportedError>())?;
    module.add("DeviceError", module.py().get_type::<DeviceError>())?;
    module.add_class::<config::ConfigQueries>()?;
    module.add_class::<support::PyDecodeSupport>()?;
    module.add_class::<device_array::DeviceArray>()?;
    module.add_function(wrap_pyfunction!(support::explain_decode, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_decode, module)?)?;
    module.add_function(wrap_pyfunction!(plan::known_devices, module)?)?;
    module.add_function(wrap_pyfunction!(decode::decode, module)?)?;
    module.add_function(wrap_pyfunction!(merge::merge_states, module)?)?;
    module.add_function(wrap_pyfunction!(caches::pack_kv_cache, module)?)?;
    module.add_function(wrap_pyfunction!(caches::append_kv_cache, module)?)?;
    module.add_function(wrap_pyfunction!(caches::unpack_kv_cache, module)?)?;
    module.add_function(wrap_pyfunction!(convert::convert_kv_cache, module)?)?;
    module.add_function(wrap_pyfunction!(convert::repage_kv_cache, module)?)?;
    module.add_function(wrap_pyfunction!(on_device::warmup, module)?)?;
    module.add_function(wrap_pyfunction!(registry::families, module)?)?;
    module.add_function(wrap_pyfunction!(registry::show_config, module)?)?;
    module.add_function(wrap_pyfunction!(registry::registry, module)?)?;
    Ok(())
}
