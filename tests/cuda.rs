//! The GPU through cudarc's slices: the CPU's answers, guard bytes, refusals by name. Without a driver every test says so
//! and passes.

mod common;

use std::sync::Arc;

use common::{Lcg, packed, queries, relative_l2};
use ndarray::{Array1, Array2, Array3};
use sparse_mla::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use sparse_mla::cuda::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use sparse_mla::cuda::{
    CandidateSlices, DecodeSlices, Device, MergeOnDevice, OutType, PreparedDecode, StateOnDevice, device, probe,
};
use sparse_mla::half::{bf16, slice::HalfFloatSliceExt};
use sparse_mla::{
    CacheView, DecodeInputs, DecodeOutputs, DecodeRequest, Error, ExtraCandidates, FAMILY_TABLE, FamilySpec, Geometry,
    LseBase, PackedCache, PartialState, decode, merge_states,
};

/// Elements before and after every output, and what they hold.
const GUARD: usize = 64;
const JUNK: f32 = -12345.0;

struct Gpu {
    device: &'static Device,
    stream: Arc<CudaStream>,
}

impl Gpu {
    fn open() -> Option<Self> {
        match probe() {
            Ok(_) => {
                Some(Self { device: device(0).unwrap(), stream: CudaContext::new(0).unwrap().new_stream().unwrap() })
            }
            Err(error) => {
                eprintln!("skipped: {error}");
                None
            }
        }
    }

    fn guarded(&self, elements: usize) -> CudaSlice<f32> {
        self.stream.clone_htod(&vec![JUNK; elements + 2 * GUARD]).unwrap()
    }

    /// What lies between the guards, which are checked.
    fn inner(&self, slice: &CudaSlice<f32>) -> Vec<f32> {
        let all = self.stream.clone_dtoh(slice).unwrap();
        let (head, rest) = all.split_at(GUARD);
        let (inner, tail) = rest.split_at(rest.len() - GUARD);
        assert!(head.iter().chain(tail).all(|value| *value == JUNK), "bytes around an output were written");
        inner.to_vec()
    }
}

/// A decode on the host, and its slices on the device.
struct Problem {
    spec: &'static FamilySpec,
    q: Array3<bf16>,
    cache: PackedCache,
    indices: Array2<i32>,
    lengths: Array1<i32>,
    sink: Array1<f32>,
    dual: bool,
}

struct OnDevice {
    q: CudaSlice<u16>,
    cache: CudaSlice<u8>,
    indices: CudaSlice<i32>,
    lengths: CudaSlice<i32>,
    sink: CudaSlice<f32>,
    out: CudaSlice<f32>,
    lse: CudaSlice<f32>,
    workspace: CudaSlice<u8>,
}

impl Problem {
    fn new(spec: &'static FamilySpec, num_tokens: usize, num_heads: usize) -> Self {
        let mut random = Lcg(7);
        let topk = 700;
        Self {
            spec,
            q: queries(num_tokens, num_heads, spec.d_qk(), 3),
            cache: packed(spec, 1000, Geometry::default(), 5),
            indices: Array2::from_shape_fn((num_tokens, topk), |_| random.below(1100) as i32 - 40),
            lengths: Array1::from_shape_fn(num_tokens, |token| 700 - 90 * token as i32),
            sink: Array1::from_shape_fn(num_heads, |head| head as f32 * 0.1 - 1.0),
            dual: !spec.secondary.is_empty(),
        }
    }

    fn request(&self) -> DecodeRequest {
        let (num_tokens, topk) = self.indices.dim();
        DecodeRequest {
            num_tokens: num_tokens as i64,
            kv_cache_format: self.spec.format,
            extra_topk: if self.dual { topk as i64 } else { 0 },
            ..DecodeRequest::new(self.spec.family, self.q.dim().1 as i64, topk as i64)
        }
    }

    fn on_host(&self) -> (Array3<f32>, Array2<f32>) {
        let (num_tokens, num_heads, _) = self.q.dim();
        let cache = CacheView::new(self.spec, Geometry::default(), self.cache.pages, &self.cache.bytes, 1.0).unwrap();
        let (indices, lengths) = (self.indices.view(), Some(self.lengths.view()));
        let extra = ExtraCandidates { kv_cache: cache, indices, topk_length: None };
        let inputs = DecodeInputs {
            topk_length: lengths,
            attn_sink: Some(self.sink.view()),
            extra: self.dual.then_some(extra),
            lse_base: LseBase::E,
            ..DecodeInputs::new(self.q.view(), cache, indices, 0.05)
        };
        let mut out = Array3::zeros((num_tokens, num_heads, self.spec.d_v));
        let mut lse = Array2::zeros((num_tokens, num_heads));
        decode(&inputs, DecodeOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) }).unwrap();
        (out, lse)
    }

    fn on_device(&self, gpu: &Gpu, prepared: &PreparedDecode) -> OnDevice {
        let stream = &gpu.stream;
        let (num_tokens, num_heads, _) = self.q.dim();
        let rows = num_tokens * num_heads;
        OnDevice {
            q: stream.clone_htod(self.q.as_slice().unwrap().reinterpret_cast()).unwrap(),
            cache: stream.clone_htod(&self.cache.bytes).unwrap(),
            indices: stream.clone_htod(self.indices.as_slice().unwrap()).unwrap(),
            lengths: stream.clone_htod(self.lengths.as_slice().unwrap()).unwrap(),
            sink: stream.clone_htod(self.sink.as_slice().unwrap()).unwrap(),
            out: gpu.guarded(rows * self.spec.d_v),
            lse: gpu.guarded(rows),
            workspace: stream.alloc_zeros(prepared.plan().workspace_bytes() + 16).unwrap(),
        }
    }

    fn slices<'a>(&self, device: &'a mut OnDevice) -> DecodeSlices<'a, u16, f32> {
        let (out, lse) = (device.out.len() - GUARD, device.lse.len() - GUARD);
        let (cache, indices) = (device.cache.as_view(), device.indices.as_view());
        let pages = self.cache.pages;
        DecodeSlices {
            q: device.q.as_view(),
            main: CandidateSlices { cache, pages, indices, lengths: Some(device.lengths.as_view()) },
            extra: self.dual.then(|| CandidateSlices {
                cache: device.cache.as_view(),
                pages,
                indices: device.indices.as_view(),
                lengths: None,
            }),
            sink: Some(device.sink.as_view()),
            sm_scale: 0.05,
            lse_base: LseBase::E,
            kv_global_scale: 1.0,
            out: device.out.slice_mut(GUARD..out),
            lse: Some(device.lse.slice_mut(GUARD..lse)),
            workspace: device.workspace.as_view_mut(),
        }
    }

    fn check(&self, gpu: &Gpu, device: &OnDevice) {
        let (out, lse) = self.on_host();
        let wide = |values: Vec<f32>| values.into_iter().map(f64::from);
        let error = relative_l2(wide(gpu.inner(&device.out)), out.iter().copied().map(f64::from));
        assert!(error <= 2e-3, "{}: {error}", self.spec.family);
        for (got, want) in gpu.inner(&device.lse).iter().zip(&lse) {
            assert!((got - want).abs() <= 1e-3, "{}: {got} {want}", self.spec.family);
        }
    }
}

fn gpu_specs() -> impl Iterator<Item = &'static FamilySpec> {
    FAMILY_TABLE.iter().filter(|spec| spec.registry.is_some())
}

#[test]
fn slices_decode_as_the_cpu_does() {
    let Some(gpu) = Gpu::open() else { return };
    for spec in gpu_specs() {
        for (num_tokens, num_heads, batch_invariant) in [(1, 11, false), (7, 40, false), (3, 128, true)] {
            let problem = Problem::new(spec, num_tokens, num_heads);
            let prepared = PreparedDecode::new(gpu.device, &problem.request(), batch_invariant).unwrap();
            let mut device = problem.on_device(&gpu, &prepared);
            for _ in 0..2 {
                prepared.enqueue(&gpu.stream, &mut problem.slices(&mut device)).unwrap();
            }
            problem.check(&gpu, &device);
        }
    }
}

/// What the wrong arguments are made of.
struct Spare {
    good: OnDevice,
    odd_q: CudaSlice<u16>,
    foreign_lengths: CudaSlice<i32>,
}

/// Makes one argument wrong; returns its name, or None past the last way.
fn spoil<'a>(way: usize, slices: &mut DecodeSlices<'a, u16, f32>, spare: &'a Spare) -> Option<&'static str> {
    let OnDevice { q, cache, indices, sink, .. } = &spare.good;
    let extra = slices.extra.as_mut().unwrap();
    Some(match way {
        0 => (slices.q = q.slice(1..), "`q`").1,
        1 => (slices.q = spare.odd_q.slice(1..), "`q`").1,
        2 => (slices.main.cache = cache.slice(..cache.len() - 64), "`kv_cache`").1,
        3 => ((slices.main.cache, slices.main.pages) = (cache.slice(8..), 1), "`kv_cache`").1,
        4 => (slices.main.pages = usize::MAX, "`kv_cache`").1,
        5 => (slices.main.indices = indices.slice(2..), "`indices`").1,
        6 => (slices.main.lengths = Some(indices.slice(..3)), "`topk_length`").1,
        7 => (slices.main.lengths = Some(spare.foreign_lengths.as_view()), "`topk_length`").1,
        8 => (extra.indices = indices.slice(..1), "`extra_indices`").1,
        9 => (extra.pages += 1, "`extra_kv_cache`").1,
        10 => (slices.extra = None, "`extra`").1,
        11 => (slices.sink = Some(sink.slice(1..)), "`attn_sink`").1,
        12 => (slices.sm_scale = f32::NAN, "`sm_scale`").1,
        13 => (slices.kv_global_scale = 2.0, "`kv_global_scale`").1,
        _ => return None,
    })
}

#[test]
fn wrong_slices_are_refused_by_name_and_nothing_sticks() {
    let Some(gpu) = Gpu::open() else { return };
    let problem = Problem::new(gpu_specs().next().unwrap(), 2, 16);
    let prepared = PreparedDecode::new(gpu.device, &problem.request(), false).unwrap();
    let foreign = CudaContext::new_non_primary(0, 0).unwrap().new_stream().unwrap();
    let good = problem.on_device(&gpu, &prepared);
    let spare = Spare {
        odd_q: gpu.stream.alloc_zeros(good.q.len() + 1).unwrap(),
        foreign_lengths: foreign.clone_htod(&[1, 2]).unwrap(),
        good,
    };
    let mut device = problem.on_device(&gpu, &prepared);
    for way in 0.. {
        let mut slices = problem.slices(&mut device);
        let Some(name) = spoil(way, &mut slices, &spare) else { break };
        let error = prepared.enqueue(&gpu.stream, &mut slices).unwrap_err();
        assert!(matches!(&error, Error::Value { .. }) && error.to_string().starts_with(name), "{name}: {error}");
    }
    for (name, elements) in [("`out`", device.out.len()), ("`lse`", device.lse.len())] {
        let mut other = gpu.guarded(elements);
        let mut slices = problem.slices(&mut device);
        match name {
            "`out`" => slices.out = other.as_view_mut(),
            _ => slices.lse = Some(other.as_view_mut()),
        }
        let error = prepared.enqueue(&gpu.stream, &mut slices).unwrap_err();
        assert!(error.to_string().starts_with(name), "{error}");
    }
    let mut small = gpu.stream.alloc_zeros::<u8>(prepared.plan().workspace_bytes() + 15).unwrap();
    let needed = prepared.plan().workspace_bytes();
    for (range, text) in
        [(0..needed - 1, format!("at least {needed} bytes")), (8..needed + 8, "16-byte aligned".into())]
    {
        let mut slices = problem.slices(&mut device);
        slices.workspace = small.slice_mut(range);
        let error = prepared.enqueue(&gpu.stream, &mut slices).unwrap_err().to_string();
        assert!(error.starts_with("`workspace`") && error.contains(&text), "{error}");
    }
    let error = prepared.enqueue(&foreign, &mut problem.slices(&mut device)).unwrap_err().to_string();
    assert!(error.starts_with("`stream`"), "{error}");
    assert!(gpu.inner(&device.out).iter().chain(&gpu.inner(&device.lse)).all(|value| *value == JUNK));

    prepared.enqueue(&gpu.stream, &mut problem.slices(&mut device)).unwrap();
    problem.check(&gpu, &device);
}

#[test]
fn merges_keep_to_their_rows() {
    let Some(gpu) = Gpu::open() else { return };
    gpu.device.warm_up(gpu_specs().next().unwrap()).unwrap();
    for (rows, d_v) in [(1, 1), (37, 3), (40, 66), (129, 512)] {
        let mut random = Lcg(9);
        let outs = [0, 1].map(|_| Array2::from_shape_fn((rows, d_v), |_| random.normal()));
        let lses = [0, 1]
            .map(|_| Array1::from_shape_fn(rows, |row| if row % 5 == 4 { f32::NEG_INFINITY } else { random.normal() }));
        let (mut want, mut want_lse) = (Array2::<f32>::zeros((rows, d_v)), Array1::zeros(rows));
        let state = |side: usize| PartialState { out: outs[side].view(), lse: lses[side].view() };
        merge_states(&state(0), &state(1), LseBase::Two, &mut want.view_mut(), &mut want_lse.view_mut()).unwrap();

        let stream = &gpu.stream;
        let device_outs = [0, 1].map(|side| stream.clone_htod(outs[side].as_slice().unwrap()).unwrap());
        let device_lses = [0, 1].map(|side| stream.clone_htod(lses[side].as_slice().unwrap()).unwrap());
        let (mut out, mut lse) = (gpu.guarded(rows * d_v), gpu.guarded(rows));
        let place = |out, lse| StateOnDevice { out, out_strides: [d_v as i64, 1], lse, lse_stride: 1 };
        let side = |side: usize| place(device_outs[side].device_ptr(stream).0, device_lses[side].device_ptr(stream).0);
        let behind_guard = (GUARD * 4) as u64;
        let merge = MergeOnDevice {
            a: side(0),
            b: side(1),
            merged: place(out.device_ptr_mut(stream).0 + behind_guard, lse.device_ptr_mut(stream).0 + behind_guard),
            num_rows: rows,
            d_v,
            out_type: OutType::F32,
            lse_base: LseBase::Two,
        };
        // SAFETY: the slices are as long as the rows say, and the stream is of the primary context.
        unsafe { gpu.device.merge_states(&merge, stream.cu_stream()) }.unwrap();
        let close = |got: Vec<f32>, want: &[f32]| {
            got.iter().zip(want).all(|(got, want)| got == want || (got - want).abs() <= 1e-6 * want.abs().max(1.0))
        };
        assert!(close(gpu.inner(&out), want.as_slice().unwrap()), "{rows} x {d_v}");
        assert!(close(gpu.inner(&lse), want_lse.as_slice().unwrap()), "{rows} x {d_v}");
    }
}

/// H6, H11: captured once on a stream of cudarc's, replayed with the same bits beside eager calls on another stream.
#[test]
fn a_captured_decode_replays_the_same_bits() {
    let Some(gpu) = Gpu::open() else { return };
    let problem = Problem::new(gpu_specs().next().unwrap(), 3, 24);
    let prepared = PreparedDecode::new(gpu.device, &problem.request(), false).unwrap();
    let (mut captured, mut eager) = (problem.on_device(&gpu, &prepared), problem.on_device(&gpu, &prepared));
    gpu.stream.synchronize().unwrap();
    // SAFETY: every slice is made before the capture, used on one stream at a time and freed after synchronisation.
    unsafe { gpu.stream.context().disable_event_tracking() };
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL; // other tests allocate meanwhile
    gpu.stream.begin_capture(mode).unwrap();
    let enqueued = prepared.enqueue(&gpu.stream, &mut problem.slices(&mut captured));
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = gpu.stream.end_capture(flags).unwrap().unwrap();
    enqueued.unwrap();
    let other = gpu.stream.context().new_stream().unwrap();
    let mut seen: Option<Vec<f32>> = None;
    for _ in 0..200 {
        graph.launch().unwrap();
        prepared.enqueue(&other, &mut problem.slices(&mut eager)).unwrap();
        gpu.stream.synchronize().unwrap();
        other.synchronize().unwrap();
        let got = gpu.inner(&captured.out);
        assert_eq!(got, gpu.inner(&eager.out));
        assert_eq!(*seen.get_or_insert_with(|| got.clone()), got);
    }
    problem.check(&gpu, &captured);
}
