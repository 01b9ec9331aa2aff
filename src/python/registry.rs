//! The family table, the registry and facts about the build, as Python dicts.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::argument::{Argument, Word};
use super::config::fields_of_config;
use crate::family::registry_lines;
use crate::{FAMILY_TABLE, FamilySpec, KvCacheFormat, Placement};

/// The family table: one dict per (family, kv_cache_format) record, in table order.
#[pyfunction]
pub(super) fn families(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    FAMILY_TABLE.iter().map(|spec| line(py, spec)).collect()
}

fn line<'py>(py: Python<'py>, spec: &FamilySpec) -> PyResult<Bound<'py, PyDict>> {
    let facts = PyDict::new(py);
    facts.set_item("family", spec.family.as_str())?;
    facts.set_item("kv_cache_format", spec.format.as_str())?;
    facts.set_item("d_qk", spec.d_qk())?;
    facts.set_item("d_v", spec.d_v)?;
    facts.set_item("quantised_dims", spec.row.quantised_dims)?;
    facts.set_item("rope_dims", spec.row.rope_dims)?;
    facts.set_item("code", if spec.row.scale.is_fp4() { "e2m1" } else { "e4m3" })?;
    facts.set_item("scale", spec.row.scale.as_str())?;
    facts.set_item("group", spec.row.group)?;
    facts.set_item("scales_per_token", spec.row.num_scales())?;
    facts.set_item("bytes_per_token", spec.row.bytes_per_token())?;
    let placement = if spec.row.placement == Placement::Inline { "inline" } else { "footer" };
    facts.set_item("placement", placement)?;
    facts.set_item("topks", spec.topks)?;
    facts.set_item("min_topk", spec.min_topk)?;
    facts.set_item("window", spec.window)?;
    let secondary: Vec<_> = spec.secondary.iter().map(|format| format.as_str()).collect();
    facts.set_item("secondary_formats", secondary)?;
    facts.set_item("in_registry", spec.registry.is_some())?;
    Ok(facts)
}

/// Family, family whose object it shares, constructor arguments.
type RegistryEntry<'py> = (&'static str, Option<&'static str>, Bound<'py, PyDict>);

/// (family, family whose object it shares or None, constructor arguments), in table order.
#[pyfunction]
#[pyo3(name = "_registry")]
pub(super) fn registry<'py>(py: Python<'py>, kv_cache_format: Argument<Word>) -> PyResult<Vec<RegistryEntry<'py>>> {
    registry_lines(KvCacheFormat::primary(&kv_cache_format.named("kv_cache_format")?)?)
        .map(|spec| {
            let shared = spec.registry.flatten().map(|family| family.as_str());
            Ok((spec.family.as_str(), shared, fields_of_config(py, &spec.config())?))
        })
        .collect()
}

/// Facts about this build and process. Opens the CUDA driver.
#[pyfunction]
pub(super) fn show_config(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let facts = PyDict::new(py);
    facts.set_item("version", env!("CARGO_PKG_VERSION"))?;
    facts.set_item("build_id", crate::BUILD_ID)?;
    facts.set_item("num_threads", crate::num_threads())?;
    facts.set_item("cuda_driver", cuda_driver(py)?)?;
    facts.set_item("gpu_kernels", crate::plan::KERNELS.len())?;
    let variables = PyDict::new(py);
    variables.set_item(crate::NUM_THREADS_VARIABLE, std::env::var(crate::NUM_THREADS_VARIABLE).ok())?;
    facts.set_item("environment", variables)?;
    Ok(facts)
}

fn cuda_driver(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let facts = PyDict::new(py);
    match crate::cuda::probe() {
        Ok(driver) => {
            facts.set_item("version", driver.version.to_string())?;
            let devices: Vec<_> = driver
                .devices
                .iter()
                .map(|device| (device.name.as_str(), device.compute_capability, device.multiprocessors))
                .collect();
            facts.set_item("devices", devices)?;
        }
        Err(error) => facts.set_item("unavailable", error.to_string())?,
    }
    Ok(facts)
}
