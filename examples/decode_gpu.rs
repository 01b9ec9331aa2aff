//! Pack and decode on a CUDA GPU through cudarc's slices, compared with the CPU, and what a warm call costs the host.
//!
//! ```text
//! cargo run --release --features cuda --example decode_gpu
//! ```

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use sparse_mla::cuda::cudarc::driver::{CudaContext, CudaStream, DriverError};
use sparse_mla::cuda::{CandidateSlices, DecodeSlices, PreparedCache, PreparedDecode, device, probe};
use sparse_mla::half::{bf16, slice::HalfFloatSliceExt};
use sparse_mla::ndarray::{Array2, Array3};
use sparse_mla::{
    CacheView, DecodeInputs, DecodeOutputs, DecodeRequest, Error, Family, FamilySpec, Geometry, KvCacheFormat, LseBase,
    decode, pack_kv_cache,
};

/// Calls that are timed, and how many of them are on their way at a time.
const CALLS: usize = 2000;
const IN_FLIGHT: usize = 50;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("decode_gpu: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    // The first call that opens the driver; without one it says so.
    let driver = probe()?;
    let device = device(0)?;
    println!("{}, driver for CUDA {}", driver.devices[0].name, driver.version);
    let context = CudaContext::new(0).map_err(refused)?;
    // With one stream, cudarc needs no events between calls; with several it adds some per slice.
    let stream = context.default_stream();
    for (num_tokens, num_heads) in [(1, 16), (64, 128)] {
        compare(device, &stream, num_tokens, num_heads)?;
    }
    Ok(())
}

fn compare(
    device: &'static sparse_mla::cuda::Device,
    stream: &Arc<CudaStream>,
    num_tokens: usize,
    num_heads: usize,
) -> Result<(), Error> {
    let spec = FamilySpec::find(Family::Dsv3_2, KvCacheFormat::Fp8)?;
    let wave = |row: usize, dim: usize| bf16::from_f32(((row * 7 + dim * 13) % 101) as f32 / 50.0 - 1.0);
    let latent = Array2::from_shape_fn((8192, spec.d_qk()), |(row, dim)| wave(row, dim));
    let packed = pack_kv_cache(spec, latent.view(), Geometry::default(), 1.0)?;
    let shape = (num_tokens, num_heads, spec.d_qk());
    let q = Array3::from_shape_fn(shape, |(token, head, dim)| wave(token * 11 + head, dim + 3));
    let indices = Array2::from_shape_fn((num_tokens, 2048), |(token, k)| ((k * 4 + token) % 8192) as i32);

    // Planned once; the kernels are loaded here.
    let request = DecodeRequest {
        num_tokens: num_tokens as i64,
        ..DecodeRequest::new(spec.family, num_heads as i64, indices.ncols() as i64)
    };
    let prepared = PreparedDecode::new(device, &request, false)?;
    let plan = prepared.plan();
    println!("T {num_tokens}, H {num_heads}: {} x {}, {} splits", plan.kernel.entry, plan.grid(), plan.splits);

    let sm_scale = 0.04;
    let q_bits = q.as_slice().unwrap_or_default().reinterpret_cast();
    let device_q = stream.clone_htod(q_bits).map_err(refused)?;
    let device_latent = stream.clone_htod(latent.as_slice().unwrap_or_default().reinterpret_cast()).map_err(refused)?;
    let mut device_cache = stream.alloc_zeros::<u8>(packed.bytes.len()).map_err(refused)?;
    let writer = PreparedCache::new(device, spec, Geometry::default(), 1.0)?;
    writer.pack::<u16>(stream, &device_latent.as_view(), &mut device_cache.as_view_mut(), packed.pages)?;
    let same = stream.clone_dtoh(&device_cache).map_err(refused)? == packed.bytes;
    println!("  the cache has {} bytes", if same { "the CPU's" } else { "other" });
    let device_indices = stream.clone_htod(indices.as_slice().unwrap_or_default()).map_err(refused)?;
    let rows = num_tokens * num_heads;
    let mut out = stream.alloc_zeros::<f32>(rows * spec.d_v).map_err(refused)?;
    let mut lse = stream.alloc_zeros::<f32>(rows).map_err(refused)?;
    let mut workspace = stream.alloc_zeros::<u8>(plan.workspace_bytes().max(1)).map_err(refused)?;
    let mut slices = DecodeSlices {
        q: device_q.as_view(),
        main: CandidateSlices {
            cache: device_cache.as_view(),
            pages: packed.pages,
            indices: device_indices.as_view(),
            lengths: None,
        },
        extra: None,
        sink: None,
        sm_scale,
        lse_base: LseBase::Two,
        kv_global_scale: 1.0,
        out: out.as_view_mut(),
        lse: Some(lse.as_view_mut()),
        workspace: workspace.as_view_mut(),
    };
    prepared.enqueue(stream, &mut slices)?;
    let call_us = median_us(stream, || prepared.enqueue(stream, &mut slices))?;
    let got = stream.clone_dtoh(&out).map_err(refused)?;

    let cache = CacheView::new(spec, Geometry::default(), packed.pages, &packed.bytes, 1.0)?;
    let mut want = Array3::<f32>::zeros((num_tokens, num_heads, spec.d_v));
    decode(
        &DecodeInputs::new(q.view(), cache, indices.view(), sm_scale),
        DecodeOutputs { out: want.view_mut(), lse: None },
    )?;
    let error: f64 = got.iter().zip(&want).map(|(got, want)| f64::from(got - want).powi(2)).sum();
    let norm: f64 = want.iter().map(|want| f64::from(*want).powi(2)).sum();
    println!("  relative error against the CPU {:.1e}", (error / norm).sqrt());
    println!("  a warm call takes the host {call_us:.2} us (median of {CALLS})");
    Ok(())
}

/// Median host time of a call, with the stream emptied often enough that no call waits for room.
fn median_us(stream: &CudaStream, mut call: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    let mut times = Vec::with_capacity(CALLS);
    for round in 0..CALLS {
        if round % IN_FLIGHT == 0 {
            stream.synchronize().map_err(refused)?;
        }
        let start = Instant::now();
        call()?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[CALLS / 2])
}

fn refused(error: DriverError) -> Error {
    Error::Device(format!("the CUDA driver refused a call: {error}"))
}
