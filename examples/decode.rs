//! The crate without Python and without features: what is supported, a packed cache, attention.
//!
//! ```text
//! cargo run --release --example decode
//! ```

use sparse_mla::half::bf16;
use sparse_mla::ndarray::{Array2, Array3};
use sparse_mla::{
    CacheView, DecodeInputs, DecodeOutputs, DecodeRequest, Error, Family, FamilySpec, Geometry, KvCacheFormat, decode,
    explain_decode, pack_kv_cache, reference, supported_sparse_mla_sm120_configs,
};

fn main() -> Result<(), Error> {
    // The registry: what a serving engine asks at start-up.
    for (family, config) in supported_sparse_mla_sm120_configs(KvCacheFormat::Fp8) {
        println!("{family:<14} calibrated {:?}, 64 x 1152: {}", config.supported_topk(None), {
            config.supports_decode(64, 1152, 1, None)
        });
    }

    // A refusal comes with every reason.
    let refused = explain_decode(&DecodeRequest { extra_topk: 512, ..DecodeRequest::new(Family::Dsv3_2, 256, 2048) });
    for reason in refused.reasons {
        println!("refused: {reason}");
    }

    // 4,096 latents of DeepSeek-V4 in pages of 256 tokens, the stride rounded up to a multiple of 576 bytes.
    let spec = FamilySpec::find(Family::Dsv4, KvCacheFormat::Fp8)?;
    let geometry = Geometry { page_block_size: Some(256), page_stride: Some(149_760), row_stride: None };
    let wave = |row: usize, dim: usize| bf16::from_f32(((row * 7 + dim * 13) % 101) as f32 / 50.0 - 1.0);
    let latent = Array2::from_shape_fn((4096, spec.d_qk()), |(row, dim)| wave(row, dim));
    let packed = pack_kv_cache(spec, latent.view(), geometry, 1.0)?;
    println!("{} pages, {} bytes per token", packed.pages, spec.row.bytes_per_token());

    // Two query tokens of 11 heads over 512 rows each.
    let q = Array3::from_shape_fn((2, 11, spec.d_qk()), |(token, head, dim)| wave(token * 11 + head, dim + 3));
    let indices = Array2::from_shape_fn((2, 512), |(token, k)| (k * 7 + token) as i32);
    let cache = CacheView::new(spec, geometry, packed.pages, &packed.bytes, 1.0)?;
    let inputs = DecodeInputs::new(q.view(), cache, indices.view(), 0.04);
    let mut out = Array3::<f32>::zeros((2, 11, spec.d_v));
    let mut lse = Array2::zeros((2, 11));
    decode(&inputs, DecodeOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) })?;

    let (exact, _) = reference::decode(&inputs)?;
    let error: f64 = out.iter().zip(&exact).map(|(got, want)| (f64::from(*got) - want).powi(2)).sum();
    let norm: f64 = exact.iter().map(|want| want.powi(2)).sum();
    println!("decoded {:?}, relative error against float64 {:.1e}", out.dim(), (error / norm).sqrt());
    Ok(())
}
