//! `decode` and `merge_states` on numpy arrays.

use half::{bf16, f16};
use ndarray::{ArrayView1, ArrayView2};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::argument::{Argument, word};
use super::array::{Array, DType, ViewElement};
use crate::{
    CacheView, DecodeInputs, DecodeOutputs, DecodeRequest, Element, Error, ExtraCandidates, FamilySpec, Geometry,
    KvCacheFormat, LseBase, PartialState, explain_decode,
};

const OUT_TYPES: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

/// Sparse-MLA attention of every query token over the cache rows its indices name.
#[pyfunction]
#[pyo3(signature = (q, kv_cache, indices, *, family, sm_scale, kv_cache_format=word("fp8"), topk_length=None,
                    attn_sink=None, extra_kv_cache=None, extra_indices=None, extra_topk_length=None,
                    extra_kv_fp4=Argument::Right(false), out=None, lse=None, return_lse=Argument::Right(false),
                    lse_base=word("2"), compute_precision=word("auto"), batch_invariant=Argument::Right(false),
                    kv_global_scale=Argument::Right(1.0), workspace=None, stream=None),
       text_signature = "(q, kv_cache, indices, *, family, sm_scale, kv_cache_format='fp8', topk_length=None, \
                         attn_sink=None, extra_kv_cache=None, extra_indices=None, extra_topk_length=None, \
                         extra_kv_fp4=False, out=None, lse=None, return_lse=False, lse_base='2', \
                         compute_precision='auto', batch_invariant=False, kv_global_scale=1.0, workspace=None, \
                         stream=None)")]
#[expect(clippy::too_many_arguments, reason = "the documented signature")]
pub(super) fn decode<'py>(
    q: &Bound<'py, PyAny>,
    kv_cache: &Bound<'py, PyAny>,
    indices: &Bound<'py, PyAny>,
    family: Argument<String>,
    sm_scale: Argument<f64>,
    kv_cache_format: Argument<String>,
    topk_length: Option<&Bound<'py, PyAny>>,
    attn_sink: Option<&Bound<'py, PyAny>>,
    extra_kv_cache: Option<&Bound<'py, PyAny>>,
    extra_indices: Option<&Bound<'py, PyAny>>,
    extra_topk_length: Option<&Bound<'py, PyAny>>,
    extra_kv_fp4: Argument<bool>,
    out: Option<&Bound<'py, PyAny>>,
    lse: Option<&Bound<'py, PyAny>>,
    return_lse: Argument<bool>,
    lse_base: Argument<String>,
    compute_precision: Argument<String>,
    batch_invariant: Argument<bool>,
    kv_global_scale: Argument<f64>,
    workspace: Option<&Bound<'py, PyAny>>,
    stream: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    // A row's result never depends on other rows here, so the flag has nothing to switch.
    batch_invariant.named("batch_invariant")?;
    let return_lse = return_lse.named("return_lse")?;
    let sm_scale = sm_scale.named_finite_f32("sm_scale")?;
    let kv_global_scale = kv_global_scale.named_finite_f32("kv_global_scale")?;
    refuse_gpu_argument("workspace", workspace)?;
    refuse_gpu_argument("stream", stream)?;
    let lse_base: LseBase = lse_base.named("lse_base")?.parse()?;

    let q = Queries::new(q)?;
    let main = Candidates::new(["kv_cache", "indices", "topk_length"], Some(kv_cache), Some(indices), topk_length, &q)?;
    let extra = Candidates::new(
        ["extra_kv_cache", "extra_indices", "extra_topk_length"],
        extra_kv_cache,
        extra_indices,
        extra_topk_length,
        &q,
    )?;
    let Some(main) = main else {
        return Err(Error::value("kv_cache", "given", "None").into());
    };

    let mut request = DecodeRequest {
        kv_cache_format: KvCacheFormat::primary(&kv_cache_format.named("kv_cache_format")?)?,
        num_tokens: q.num_tokens() as i64,
        extra_topk: extra.as_ref().map_or(0, |extra| extra.width() as i64),
        extra_kv_fp4: extra_kv_fp4.named("extra_kv_fp4")?,
        compute_precision: compute_precision.named("compute_precision")?.parse()?,
        ..DecodeRequest::new(family.named("family")?.parse()?, q.num_heads() as i64, main.width() as i64)
    };
    let spec = FamilySpec::find_primary(request.family, request.kv_cache_format)?;
    let (pages, geometry) = main.cache.cache_geometry(spec)?;
    request.geometry = geometry;
    let mut extra_parts = None;
    if let Some(extra) = &extra {
        // A family without this secondary cache is refused by the predicate, in its words.
        request.extra_geometry = Some(Geometry::default());
        if spec.secondary.contains(&request.extra_format()) {
            let extra_spec = FamilySpec::find(request.family, request.extra_format())?;
            let (pages, geometry) = extra.cache.cache_geometry(extra_spec)?;
            request.extra_geometry = Some(geometry);
            extra_parts = Some((extra, extra_spec, pages, geometry));
        }
    }
    explain_decode(&request).into_result()?;

    let sink = Array::optional("attn_sink", attn_sink, &[DType::F32])?;
    let mut inputs = DecodeInputs {
        topk_length: main.lengths()?,
        attn_sink: sink.as_ref().map(Array::view::<f32, 1>).transpose()?,
        lse_base,
        compute_precision: request.compute_precision,
        ..DecodeInputs::new(
            q.flat.view::<bf16, 3>()?,
            CacheView::new(spec, geometry, pages, main.cache.bytes(), kv_global_scale)?,
            main.slots()?,
            sm_scale,
        )
    };
    if let Some((extra, spec, pages, geometry)) = extra_parts {
        inputs.extra = Some(ExtraCandidates {
            kv_cache: CacheView::new(spec, geometry, pages, extra.cache.bytes(), 1.0)?,
            indices: extra.slots()?,
            topk_length: extra.lengths()?,
        });
    }
    inputs.check()?;

    let (out_object, out) = q.output("out", out, &[spec.d_v], &q.original.object.getattr("dtype")?, OUT_TYPES)?;
    let lse = if return_lse || lse.is_some() {
        let dtype = "float32".into_pyobject(q.original.object.py())?.into_any();
        Some(q.output("lse", lse, &[], &dtype, &[DType::F32])?)
    } else {
        None
    };
    let (lse_object, mut lse) = lse.unzip();
    let mut read = vec![&q.original];
    read.extend(main.arrays());
    read.extend(extra.iter().flat_map(Candidates::arrays));
    read.extend(&sink);
    for written in std::iter::once(&out).chain(&lse) {
        written.require_writeable()?;
        written.require_no_self_overlap()?;
        for array in &read {
            written.require_apart_from(array)?;
        }
    }
    if let Some(lse) = &lse {
        lse.require_apart_from(&out)?;
    }
    match out.dtype {
        DType::Bf16 => run::<bf16>(&inputs, out, lse.as_mut())?,
        DType::F16 => run::<f16>(&inputs, out, lse.as_mut())?,
        _ => run::<f32>(&inputs, out, lse.as_mut())?,
    }
    match lse_object {
        Some(lse) if return_lse => Ok(PyTuple::new(lse.py(), [out_object, lse])?.into_any()),
        _ => Ok(out_object),
    }
}

fn run<O: ViewElement + Element>(
    inputs: &DecodeInputs<'_>,
    mut out: Array<'_>,
    lse: Option<&mut Array<'_>>,
) -> PyResult<()> {
    let py = out.object.py();
    let lse = lse.map(Array::view_mut::<f32, 2>).transpose()?;
    let outputs = DecodeOutputs { out: out.view_mut::<O, 3>()?, lse };
    Ok(py.detach(|| crate::decode(inputs, outputs))?)
}

fn refuse_gpu_argument(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    match value {
        None => Ok(()),
        Some(value) => Err(Error::value(name, "None for numpy arrays, which the CPU backend serves", value).into()),
    }
}

/// The queries as passed, and as `[T, H, d_qk]`.
struct Queries<'py> {
    original: Array<'py>,
    flat: Array<'py>,
}

impl<'py> Queries<'py> {
    fn new(q: &Bound<'py, PyAny>) -> PyResult<Self> {
        let original = Array::new("q", q, &[DType::Bf16])?;
        if !matches!(original.shape.len(), 3 | 4) {
            let accepted = "of shape [T, H, d_qk] or [B, Q, H, d_qk]";
            return Err(Error::value("q", accepted, format!("{:?}", original.shape)).into());
        }
        original.require_contiguous()?;
        let flat = Array::new("q", q, &[DType::Bf16])?.flatten_leading(2)?;
        Ok(Self { original, flat })
    }

    fn num_tokens(&self) -> usize {
        self.flat.shape[0]
    }

    fn num_heads(&self) -> usize {
        self.flat.shape[1]
    }

    /// `[T]`, or `[B, Q]` for 4-D queries.
    fn leading(&self) -> &[usize] {
        &self.original.shape[..self.original.shape.len() - 2]
    }

    /// An output of shape `[T, H, *last]` or `[B, Q, H, *last]`, the caller's or a new one: its object, and flat.
    fn output(
        &self,
        name: &'static str,
        given: Option<&Bound<'py, PyAny>>,
        last: &[usize],
        dtype: &Bound<'py, PyAny>,
        accepted: &[DType],
    ) -> PyResult<(Bound<'py, PyAny>, Array<'py>)> {
        let shape_after = |leading: &[usize]| [leading, &[self.num_heads()], last].concat();
        let object = match given {
            Some(object) => object.clone(),
            None => {
                let shape = PyTuple::new(dtype.py(), shape_after(self.leading()))?;
                dtype.py().import("numpy")?.call_method1("empty", (shape, dtype))?
            }
        };
        let array = Array::new(name, &object, accepted)?;
        let (own, flat) = (shape_after(self.leading()), shape_after(&[self.num_tokens()]));
        if array.shape != own && array.shape != flat {
            return Err(Error::value(name, format!("of shape {own:?}"), format!("{:?}", array.shape)).into());
        }
        array.require_dense_rows()?;
        Ok((object, array.flatten_leading(1 + last.len())?))
    }
}

/// A cache with the slots that are read from it.
struct Candidates<'py> {
    cache: Array<'py>,
    indices: Array<'py>,
    lengths: Option<Array<'py>>,
}

impl<'py> Candidates<'py> {
    /// Cache and indices come together, lengths only with them. `names` are those of cache, indices and lengths.
    fn new(
        names: [&'static str; 3],
        cache: Option<&Bound<'py, PyAny>>,
        indices: Option<&Bound<'py, PyAny>>,
        lengths: Option<&Bound<'py, PyAny>>,
        q: &Queries<'_>,
    ) -> PyResult<Option<Self>> {
        let (cache, indices) = match (cache, indices, lengths) {
            (Some(cache), Some(indices), _) => (cache, indices),
            (None, None, None) => return Ok(None),
            (None, _, _) => {
                return Err(missing(names[0], if indices.is_some() { names[1] } else { names[2] }));
            }
            (_, None, _) => return Err(missing(names[1], names[0])),
        };
        let cache = Array::new(names[0], cache, &[DType::U8])?;
        let indices = per_token(Array::new(names[1], indices, &[DType::I32])?, q, true)?;
        let lengths = Array::optional(names[2], lengths, &[DType::I32])?;
        let lengths = lengths.map(|lengths| per_token(lengths, q, false)).transpose()?;
        Ok(Some(Self { cache, indices, lengths }))
    }

    fn width(&self) -> usize {
        self.indices.shape[1]
    }

    fn slots(&self) -> Result<ArrayView2<'_, i32>, Error> {
        self.indices.view::<i32, 2>()
    }

    fn lengths(&self) -> Result<Option<ArrayView1<'_, i32>>, Error> {
        self.lengths.as_ref().map(Array::view::<i32, 1>).transpose()
    }

    fn arrays(&self) -> impl Iterator<Item = &Array<'py>> {
        [&self.cache, &self.indices].into_iter().chain(&self.lengths)
    }
}

fn missing(name: &str, partner: &str) -> PyErr {
    Error::value(name, format!("given together with `{partner}`"), "None").into()
}

/// One row (`[T, K]`, `[T, 1, K]`, `[B, Q, K]`) or one number (`[T]`, `[B, Q]`) per query token, as `[T, K]` or `[T]`.
fn per_token<'py>(array: Array<'py>, q: &Queries<'_>, rows: bool) -> PyResult<Array<'py>> {
    let kept = usize::from(rows);
    let tokens = q.num_tokens();
    let leading = array.shape.len().checked_sub(kept).map_or(&[][..], |count| &array.shape[..count]);
    let fits = leading == [tokens] || leading == q.leading() || (rows && leading == [tokens, 1]);
    if !fits {
        let accepted = match (q.leading(), rows) {
            ([_], true) => format!("of shape [{tokens}, K] or [{tokens}, 1, K], like `q`"),
            ([_], false) => format!("of shape [{tokens}], like `q`"),
            (leading, true) => format!("of shape [{tokens}, K] or {leading:?} followed by K, like `q`"),
            (leading, false) => format!("of shape [{tokens}] or {leading:?}, like `q`"),
        };
        return Err(Error::value(array.name, accepted, format!("{:?}", array.shape)).into());
    }
    if rows {
        array.require_dense_rows()?;
    }
    Ok(array.flatten_leading(kept)?)
}

/// Joins two partial attention results over disjoint candidates.
#[pyfunction]
#[pyo3(signature = (out_a, lse_a, out_b, lse_b, *, lse_base=word("2")),
       text_signature = "(out_a, lse_a, out_b, lse_b, *, lse_base='2')")]
pub(super) fn merge_states<'py>(
    out_a: &Bound<'py, PyAny>,
    lse_a: &Bound<'py, PyAny>,
    out_b: &Bound<'py, PyAny>,
    lse_b: &Bound<'py, PyAny>,
    lse_base: Argument<String>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let lse_base: LseBase = lse_base.named("lse_base")?.parse()?;
    let out_a = Array::new("out_a", out_a, OUT_TYPES)?;
    let out_b = Array::new("out_b", out_b, &[out_a.dtype])?;
    let lse_a = Array::new("lse_a", lse_a, &[DType::F32])?;
    let lse_b = Array::new("lse_b", lse_b, &[DType::F32])?;
    let Some((_, leading)) = out_a.shape.split_last() else {
        return Err(Error::value("out_a", "of shape [..., H, d_v]", "a scalar").into());
    };
    for (array, expected) in [(&out_b, &out_a.shape[..]), (&lse_a, leading), (&lse_b, leading)] {
        if array.shape != expected {
            let accepted = format!("of shape {expected:?} like `out_a`");
            return Err(Error::value(array.name, accepted, format!("{:?}", array.shape)).into());
        }
    }
    let empty_like = |array: &Array<'py>| {
        let shape = PyTuple::new(array.object.py(), &array.shape)?;
        array.object.py().import("numpy")?.call_method1("empty", (shape, array.object.getattr("dtype")?))
    };
    let (out, lse) = (empty_like(&out_a)?, empty_like(&lse_a)?);
    let results = (Array::new("out", &out, OUT_TYPES)?, Array::new("lse", &lse, &[DType::F32])?);
    let inputs = [out_a, lse_a, out_b, lse_b];
    match inputs[0].dtype {
        DType::Bf16 => merge::<bf16>(inputs, lse_base, results)?,
        DType::F16 => merge::<f16>(inputs, lse_base, results)?,
        _ => merge::<f32>(inputs, lse_base, results)?,
    }
    Ok((out, lse))
}

fn merge<O: ViewElement + Element>(
    inputs: [Array<'_>; 4],
    lse_base: LseBase,
    (out, lse): (Array<'_>, Array<'_>),
) -> PyResult<()> {
    let py = out.object.py();
    let [out_a, lse_a, out_b, lse_b] = inputs;
    let (out_a, out_b) = (out_a.flatten_leading(1)?, out_b.flatten_leading(1)?);
    let (lse_a, lse_b) = (lse_a.flatten_leading(0)?, lse_b.flatten_leading(0)?);
    let (mut out, mut lse) = (out.flatten_leading(1)?, lse.flatten_leading(0)?);
    let a = PartialState { out: out_a.view::<O, 2>()?, lse: lse_a.view::<f32, 1>()? };
    let b = PartialState { out: out_b.view::<O, 2>()?, lse: lse_b.view::<f32, 1>()? };
    let (mut out, mut lse) = (out.view_mut::<O, 2>()?, lse.view_mut::<f32, 1>()?);
    Ok(py.detach(|| crate::merge_states(&a, &b, lse_base, &mut out, &mut lse))?)
}
