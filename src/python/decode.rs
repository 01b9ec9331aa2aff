//! `decode`: arrays in, checks, one call of the core on the host or on a device, arrays out.

use half::{bf16, f16};
use ndarray::{ArrayView1, ArrayView2};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::argument::{Argument, Word, word};
use super::array::{Array, DType, Place, ViewElement};
use super::import::{Importer, stream_handle};
use super::output;
use crate::attention::check_shapes;
use crate::layout::check_global_scale;
use crate::{
    CacheView, DecodeInputs, DecodeOutputs, DecodeRequest, Element, Error, ExtraCandidates, FamilySpec, Geometry,
    KvCacheFormat, LseBase, explain_decode,
};

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
    family: Argument<Word>,
    sm_scale: Argument<f64>,
    kv_cache_format: Argument<Word>,
    topk_length: Option<&Bound<'py, PyAny>>,
    attn_sink: Option<&Bound<'py, PyAny>>,
    extra_kv_cache: Option<&Bound<'py, PyAny>>,
    extra_indices: Option<&Bound<'py, PyAny>>,
    extra_topk_length: Option<&Bound<'py, PyAny>>,
    extra_kv_fp4: Argument<bool>,
    out: Option<&Bound<'py, PyAny>>,
    lse: Option<&Bound<'py, PyAny>>,
    return_lse: Argument<bool>,
    lse_base: Argument<Word>,
    compute_precision: Argument<Word>,
    batch_invariant: Argument<bool>,
    kv_global_scale: Argument<f64>,
    workspace: Option<&Bound<'py, PyAny>>,
    stream: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let importer = Importer::on_stream(stream.map(stream_handle).transpose()?);
    let q = Queries::new(q, &importer)?;
    let main = [Some(kv_cache), Some(indices), topk_length];
    let main = Candidates::new(["kv_cache", "indices", "topk_length"], main, &q, &importer)?;
    let extra = [extra_kv_cache, extra_indices, extra_topk_length];
    let extra = Candidates::new(["extra_kv_cache", "extra_indices", "extra_topk_length"], extra, &q, &importer)?;
    let Some(mut main) = main else { return Err(Error::value("kv_cache", "given", "None").into()) };

    let request = DecodeRequest {
        kv_cache_format: KvCacheFormat::primary(&kv_cache_format.named("kv_cache_format")?)?,
        extra_topk: extra.as_ref().map_or(0, |extra| extra.width() as i64),
        extra_kv_fp4: extra_kv_fp4.named("extra_kv_fp4")?,
        num_tokens: q.num_tokens() as i64,
        compute_precision: compute_precision.named("compute_precision")?.parse()?,
        ..DecodeRequest::new(family.named("family")?.parse()?, q.num_heads() as i64, main.width() as i64)
    };
    let spec = FamilySpec::find_primary(request.family, request.kv_cache_format)?;
    main.read_geometry(spec)?;
    let mut call = Call {
        sink: attn_sink.map(|sink| Array::import("attn_sink", sink, &[DType::F32], &importer)).transpose()?,
        sm_scale: sm_scale.named_finite_f32("sm_scale")?,
        kv_global_scale: kv_global_scale.named_finite_f32("kv_global_scale")?,
        lse_base: lse_base.named("lse_base")?.parse()?,
        batch_invariant: batch_invariant.named("batch_invariant")?,
        request: DecodeRequest { geometry: main.geometry, ..request },
        q,
        main,
        extra: None,
    };
    if let Some(mut extra) = extra {
        // A family without this secondary cache is refused by the predicate, in its words.
        if spec.secondary.contains(&request.extra_format()) {
            extra.read_geometry(FamilySpec::find(request.family, request.extra_format())?)?;
        }
        call.request.extra_geometry = Some(extra.geometry);
        call.extra = Some(extra);
    }
    call.refuse_unsupported()?;
    if let Some(sink) = &call.sink
        && sink.shape.len() != 1
    {
        return Err(Error::value("attn_sink", "1-dimensional", format!("shape {:?}", sink.shape)).into());
    }
    check_shapes(spec, call.q.width(), call.q.num_heads(), call.sink.as_ref().map(|sink| sink.shape.iter().product()))?;

    check_global_scale(spec, call.kv_global_scale)?;

    let return_lse = return_lse.named("return_lse")?;
    let (out_object, out) = output::array(&call.q, "out", out, Some(spec.d_v), &importer)?;
    let (lse_object, lse) = match (return_lse, lse) {
        (false, None) => (None, None),
        (_, given) => {
            let (object, lse) = output::array(&call.q, "lse", given, None, &importer)?;
            (Some(object), Some(lse))
        }
    };
    call.require_apart(&out, lse.as_ref())?;
    match call.q.place() {
        Place::Host => {
            refuse_gpu_argument("workspace", workspace)?;
            refuse_gpu_argument("stream", stream)?;
            call.run_on_host(out, lse)?;
        }
        Place::Cuda(ordinal) => super::on_device::run(&call, &out, lse.as_ref(), ordinal, workspace, &importer)?,
    }
    match lse_object {
        Some(lse) if return_lse => Ok(PyTuple::new(lse.py(), [out_object, lse])?.into_any()),
        _ => Ok(out_object),
    }
}

pub(super) fn refuse_gpu_argument(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    match value {
        None => Ok(()),
        Some(value) => Err(Error::value(name, "None for arrays on the CPU", value).into()),
    }
}

/// Everything a decode reads.
pub(super) struct Call<'py> {
    pub q: Queries<'py>,
    pub main: Candidates<'py>,
    pub extra: Option<Candidates<'py>>,
    pub sink: Option<Array<'py>>,
    pub request: DecodeRequest,
    pub sm_scale: f32,
    pub kv_global_scale: f32,
    pub lse_base: LseBase,
    pub batch_invariant: bool,
}

impl<'py> Call<'py> {
    /// What the predicate refuses, in its words; for a device it is asked with the device's capability.
    fn refuse_unsupported(&self) -> PyResult<()> {
        if self.q.place() == Place::Host {
            explain_decode(&self.request).into_result()?;
        }
        Ok(())
    }

    fn require_apart(&self, out: &Array<'py>, lse: Option<&Array<'py>>) -> PyResult<()> {
        let read = || [&self.q.original].into_iter().chain(self.main.arrays()).chain(&self.sink);
        let extra = || self.extra.iter().flat_map(Candidates::arrays);
        for written in std::iter::once(out).chain(lse) {
            written.require_writeable()?;
            written.require_no_self_overlap()?;
            for array in read().chain(extra()) {
                written.require_apart_from(array)?;
            }
        }
        lse.map_or(Ok(()), |lse| lse.require_apart_from(out))
    }

    fn run_on_host(&self, out: Array<'py>, lse: Option<Array<'py>>) -> PyResult<()> {
        let spec = FamilySpec::find_primary(self.request.family, self.request.kv_cache_format)?;
        let mut inputs = DecodeInputs {
            topk_length: self.main.lengths_view()?,
            attn_sink: self.sink.as_ref().map(Array::view::<f32, 1>).transpose()?,
            lse_base: self.lse_base,
            compute_precision: self.request.compute_precision,
            ..DecodeInputs::new(
                self.q.flat.view::<bf16, 3>()?,
                self.main.cache_view(spec, self.kv_global_scale)?,
                self.main.slots_view()?,
                self.sm_scale,
            )
        };
        if let Some(extra) = &self.extra {
            let spec = FamilySpec::find(self.request.family, self.request.extra_format())?;
            inputs.extra = Some(ExtraCandidates {
                kv_cache: extra.cache_view(spec, 1.0)?,
                indices: extra.slots_view()?,
                topk_length: extra.lengths_view()?,
            });
        }
        match out.dtype {
            DType::Bf16 => run::<bf16>(&inputs, out, lse),
            DType::F16 => run::<f16>(&inputs, out, lse),
            _ => run::<f32>(&inputs, out, lse),
        }
    }
}

fn run<O: ViewElement + Element>(
    inputs: &DecodeInputs<'_>,
    mut out: Array<'_>,
    mut lse: Option<Array<'_>>,
) -> PyResult<()> {
    let py = out.object.py();
    let lse = lse.as_mut().map(Array::view_mut::<f32, 2>).transpose()?;
    let outputs = DecodeOutputs { out: out.view_mut::<O, 3>()?, lse };
    Ok(py.detach(|| crate::decode(inputs, outputs))?)
}

/// The queries as passed, and as `[T, H, d_qk]`.
pub(super) struct Queries<'py> {
    pub original: Array<'py>,
    pub flat: Array<'py>,
}

impl<'py> Queries<'py> {
    fn new(q: &Bound<'py, PyAny>, importer: &Importer) -> PyResult<Self> {
        let original = Array::import("q", q, &[DType::Bf16], importer)?;
        if !matches!(original.shape.len(), 3 | 4) {
            let accepted = "of shape [T, H, d_qk] or [B, Q, H, d_qk]";
            return Err(Error::value("q", accepted, format!("{:?}", original.shape)).into());
        }
        original.require_contiguous()?;
        let flat = original.alias().flatten_leading(2)?;
        Ok(Self { original, flat })
    }

    pub fn place(&self) -> Place {
        self.original.place()
    }

    pub fn num_tokens(&self) -> usize {
        self.flat.shape[0]
    }

    pub fn num_heads(&self) -> usize {
        self.flat.shape[1]
    }

    fn width(&self) -> usize {
        self.flat.shape[2]
    }

    /// `[T]`, or `[B, Q]` for 4-D queries.
    pub fn leading(&self) -> &[usize] {
        &self.original.shape[..self.original.shape.len() - 2]
    }
}

/// A cache with the slots that are read from it.
pub(super) struct Candidates<'py> {
    pub cache: Array<'py>,
    pub indices: Array<'py>,
    pub lengths: Option<Array<'py>>,
    pub pages: usize,
    pub geometry: Geometry,
}

impl<'py> Candidates<'py> {
    /// Cache and indices come together, lengths only with them; `names` and `given` in this order.
    fn new(
        names: [&'static str; 3],
        given: [Option<&Bound<'py, PyAny>>; 3],
        q: &Queries<'py>,
        importer: &Importer,
    ) -> PyResult<Option<Self>> {
        let (cache, indices, lengths) = match given {
            [Some(cache), Some(indices), lengths] => (cache, indices, lengths),
            [None, None, None] => return Ok(None),
            [None, indices, _] => return Err(missing(names[0], names[if indices.is_some() { 1 } else { 2 }])),
            [_, None, _] => return Err(missing(names[1], names[0])),
        };
        let lengths = lengths.map(|lengths| Array::import(names[2], lengths, &[DType::I32], importer)).transpose()?;
        Ok(Some(Self {
            cache: Array::import(names[0], cache, &[DType::U8], importer)?,
            indices: per_token(Array::import(names[1], indices, &[DType::I32], importer)?, q, true)?,
            lengths: lengths.map(|lengths| per_token(lengths, q, false)).transpose()?,
            pages: 0,
            geometry: Geometry::default(),
        }))
    }

    fn read_geometry(&mut self, spec: &FamilySpec) -> Result<(), Error> {
        (self.pages, self.geometry) = self.cache.cache_geometry(spec)?;
        Ok(())
    }

    pub fn width(&self) -> usize {
        self.indices.shape[1]
    }

    fn cache_view(&self, spec: &'static FamilySpec, kv_global_scale: f32) -> Result<CacheView<'_>, Error> {
        CacheView::new(spec, self.geometry, self.pages, self.cache.bytes(), kv_global_scale)
    }

    fn slots_view(&self) -> Result<ArrayView2<'_, i32>, Error> {
        self.indices.view::<i32, 2>()
    }

    fn lengths_view(&self) -> Result<Option<ArrayView1<'_, i32>>, Error> {
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
