"""Every code, tie and saturation of E4M3, E2M1 and bfloat16, through pack and unpack, against ml_dtypes."""

import numpy as np
import oracle
import pytest
from oracle import BF16, E2M1, E4M3, RECORDS
from sparse_mla import pack_kv_cache, unpack_kv_cache

E4M3_RECORDS = [r for r in oracle.ALL if r.code == "e4m3"]
E2M1_RECORDS = [r for r in oracle.ALL if r.code == "e2m1"]
WITH_ROPE = [r for r in oracle.ALL if r.rope]
LATENT_DTYPES = [BF16, np.float16, np.float32]
E4M3_FINITE = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8).view(E4M3).astype(np.float32)
E2M1_VALUES = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float32)


def groups(rec, values, anchor):
    """Latents whose groups hold `values` behind one `anchor` element that makes the group's scale 1.0."""
    width = rec.group - 1
    values = np.append(values, np.zeros(-len(values) % width, np.float32)).astype(np.float32)
    filled = np.insert(values.reshape(-1, width), 0, anchor, axis=1)
    n = -(-len(filled) // rec.n_scales)
    x = np.zeros((n, rec.n_scales, rec.group), np.float32)
    x.reshape(-1, rec.group)[: len(filled)] = filled
    return np.concatenate([x.reshape(n, rec.dims), np.zeros((n, rec.d_qk - rec.dims), np.float32)], 1), len(filled)


def pack_parts(rec, latent, **kwargs):
    """Codes (one a byte), scale bytes and RoPE bits that the package writes for `latent`."""
    page = max(2, len(latent) + len(latent) % 2)
    cache = pack_kv_cache(latent, family=rec.family, kv_cache_format=rec.fmt, page_block_size=page, **kwargs)
    layout = oracle.Layout(rec, page)
    codes, scales, rope = layout.read(oracle.flat(cache), np.arange(len(latent)))
    if rec.code == "e2m1":
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), rec.dims)
    return codes, scales, np.ascontiguousarray(rope).view(np.uint16)


def packed_values(rec, values, anchor, dtype=np.float32):
    """Codes the package writes for `values` at scale 1.0."""
    x, n = groups(rec, values, anchor)
    codes, _, _ = pack_parts(rec, x.astype(dtype))
    return codes.reshape(-1, rec.group)[:n, 1:].reshape(-1)[: len(values)]


def midpoints(values):
    """Ties between neighbouring values, and the float32 on each side of every tie."""
    values = np.unique(values)
    mid = (values[1:] + values[:-1]) / np.float32(2)
    return np.concatenate([np.nextafter(mid, np.float32(-np.inf)), mid, np.nextafter(mid, np.float32(np.inf))])


@pytest.mark.parametrize("rec", E4M3_RECORDS, ids=oracle.ids)
def test_every_e4m3_code_decodes(rec):
    """Each of the 256 bytes at scale 1.0, NaN codes included."""
    cache = oracle.empty(rec, 1, 2)
    codes = np.resize(np.arange(256, dtype=np.uint8), (2, rec.dims))
    one = {"ue8m0": np.full((2, rec.scale_bytes), 127, np.uint8)}.get(rec.scale)
    scales = one if one is not None else np.ones((2, 4), "<f4").view(np.uint8)
    cache.layout.write(cache.raw, np.arange(2), (codes, scales, np.zeros((2, 2 * rec.rope), np.uint8)))
    got = unpack_kv_cache(cache.view(), family=rec.family, kv_cache_format=rec.fmt)
    np.testing.assert_array_equal(got[:, : rec.dims], codes.view(E4M3).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(got[:, : rec.dims]) & (got[:, : rec.dims] == 0), codes == 0x80)


@pytest.mark.parametrize("rec", E2M1_RECORDS, ids=oracle.ids)
def test_every_e2m1_code_and_scale_decodes(rec):
    """Each code with each of the 256 E4M3 scale bytes; a NaN scale makes NaN of every code."""
    n = 256 // rec.n_scales + 1
    cache = oracle.empty(rec, 1, n)
    codes = np.resize(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), (n, rec.code_bytes))
    scales = np.zeros((n, rec.scale_bytes), np.uint8)
    scales[:, : rec.n_scales] = np.resize(np.arange(256, dtype=np.uint8), (n, rec.n_scales))
    cache.layout.write(cache.raw, np.arange(n), (codes, scales, np.zeros((n, 2 * rec.rope), np.uint8)))
    got = unpack_kv_cache(cache.view(), family=rec.family, kv_cache_format=rec.fmt)
    np.testing.assert_array_equal(got, cache.rows(np.arange(n)).astype(np.float32))


@pytest.mark.parametrize("rec", [r for r in E4M3_RECORDS if r.scale == "ue8m0"], ids=oracle.ids)
def test_every_ue8m0_byte_decodes(rec):
    """b means 2^(b-127) down to b = 0; 255 is NaN."""
    n = -(-256 // rec.n_scales)
    cache = oracle.empty(rec, 1, n)
    scales = np.zeros((n, rec.scale_bytes), np.uint8)
    scales[:, : rec.n_scales] = np.resize(np.arange(256, dtype=np.uint8), (n, rec.n_scales))
    codes = np.full((n, rec.dims), np.float32(1).astype(E4M3).view(np.uint8))
    cache.layout.write(cache.raw, np.arange(n), (codes, scales, np.zeros((n, 2 * rec.rope), np.uint8)))
    got = unpack_kv_cache(cache.view(), family=rec.family)[:, : rec.dims : rec.group].reshape(-1)[:256]
    expect = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))
    np.testing.assert_array_equal(got, expect)


@pytest.mark.parametrize("rec", [r for r in E4M3_RECORDS if r.inline and r.scale in ("fp32", "pow2")], ids=oracle.ids)
def test_fp32_scales_are_used_as_they_are(rec):
    """Also where they are no powers of two, and in the family that writes only powers of two."""
    cache = oracle.pack(rec, np.ones((1, rec.d_qk), np.float32), 2)
    scale = np.array([[0.75, 1 / 3, 3e-30, 1.7e38]], "<f4")
    codes = np.full((1, rec.dims), np.float32(1).astype(E4M3).view(np.uint8))
    cache.layout.write(cache.raw, np.arange(1), (codes, scale.view(np.uint8), np.zeros((1, 2 * rec.rope), np.uint8)))
    got = unpack_kv_cache(cache.view(), family=rec.family)
    np.testing.assert_array_equal(got[0, : rec.dims : rec.group], scale[0])


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
@pytest.mark.parametrize("rec", E4M3_RECORDS, ids=oracle.ids)
def test_e4m3_representable_values_are_kept(rec, dtype):
    """With 448 in the group the scale is 1.0, so every finite code survives a round trip."""
    x, n = groups(rec, E4M3_FINITE, 448)
    codes, _, _ = pack_parts(rec, x.astype(dtype))
    got = codes.reshape(-1, rec.group)[:n, 1:].reshape(-1)[: len(E4M3_FINITE)]
    np.testing.assert_array_equal(got, E4M3_FINITE.astype(E4M3).view(np.uint8))


@pytest.mark.parametrize("rec", E4M3_RECORDS, ids=oracle.ids)
def test_e4m3_ties_go_to_even(rec):
    """All 252 ties and the float32 neighbours on both sides, subnormal codes included."""
    values = midpoints(E4M3_FINITE)
    np.testing.assert_array_equal(packed_values(rec, values, 448), values.astype(E4M3).view(np.uint8))


@pytest.mark.parametrize("rec", E4M3_RECORDS, ids=oracle.ids)
def test_e4m3_tiny_values_become_signed_zeros(rec):
    values = np.array([2**-10, 2**-10 * (1 + 2**-23), 1e-30, 1e-45, 0, -(2**-10), -1e-45, -0.0], np.float32)
    np.testing.assert_array_equal(packed_values(rec, values, 448), [0, 1, 0, 0, 0, 0x80, 0x80, 0x80])


@pytest.mark.parametrize("rec", [r for r in E4M3_RECORDS if r.scale == "fp32"], ids=oracle.ids)
def test_e4m3_saturates_where_the_division_exceeds_448(rec, rng):
    """amax / (amax / 448) can round above 448: never a NaN code."""
    x = np.exp(rng.uniform(-8, 80, (64, rec.d_qk))).astype(np.float32)
    codes, scales, _ = pack_parts(rec, x)
    expect = oracle.quantise(rec, x)
    np.testing.assert_array_equal(codes, expect[0])
    np.testing.assert_array_equal(scales, expect[1])
    assert not ((codes & 0x7F) == 0x7F).any()
    assert (codes.reshape(-1, rec.group).max(1) == 0x7E).all()


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
@pytest.mark.parametrize("rec", E2M1_RECORDS, ids=oracle.ids)
def test_e2m1_codes_are_kept(rec, dtype):
    """With 6 in the group the scale is 1.0, so every code survives, minus zero too."""
    np.testing.assert_array_equal(packed_values(rec, E2M1_VALUES, 6, dtype), np.arange(16))


@pytest.mark.parametrize("rec", E2M1_RECORDS, ids=oracle.ids)
def test_e2m1_listed_ties(rec):
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    expect = np.array([0, 2, 2, 4, 4, 6, 6])  # codes of 0, 1, 1, 2, 2, 4, 4
    np.testing.assert_array_equal(packed_values(rec, ties, 6), expect)
    np.testing.assert_array_equal(packed_values(rec, -ties, 6), expect | 8)
    np.testing.assert_array_equal(packed_values(rec, np.array([-1e-9, -0.0, 1e-9], np.float32), 6), [8, 8, 0])


@pytest.mark.parametrize("rec", E2M1_RECORDS, ids=oracle.ids)
def test_e2m1_neighbours_of_ties(rec):
    values = midpoints(E2M1_VALUES)
    np.testing.assert_array_equal(packed_values(rec, values, 6), values.astype(E2M1).view(np.uint8))


@pytest.mark.parametrize("rec", E2M1_RECORDS, ids=oracle.ids)
def test_e2m1_saturates_when_the_scale_rounds_down_or_clips(rec):
    """amax / 6 rounds down to an E4M3 scale or clips at 448: the largest values still get code 7."""
    for amax, scale in ((6.3, 0x38), (-1.94, 0x2A), (1e4, 0x7E), (3e38, 0x7E)):
        x = np.zeros((1, rec.d_qk), np.float32)
        x[0, 5] = amax
        codes, scales, _ = pack_parts(rec, x)
        assert scales[0, 0] == scale
        assert codes[0, 5] == (7 if amax > 0 else 15)


@pytest.mark.parametrize("rec", E2M1_RECORDS, ids=oracle.ids)
def test_fp4_scale_is_rounded_to_nearest_even(rec):
    """amax / 6 on and beside every E4M3 tie, divided in float32."""
    normal = E4M3_FINITE[E4M3_FINITE >= 2**-6]
    amax = np.concatenate([normal, midpoints(normal)]) * np.float32(6)
    x = np.zeros((-(-len(amax) // rec.n_scales), rec.d_qk), np.float32)
    padded = np.append(amax, np.zeros(x.shape[0] * rec.n_scales - len(amax), np.float32))
    x[:, : rec.dims : rec.group] = padded.reshape(len(x), rec.n_scales)
    _, scales, _ = pack_parts(rec, x)
    got = scales[:, : rec.n_scales].reshape(-1)[: len(amax)]
    np.testing.assert_array_equal(got, (amax / np.float32(6)).astype(E4M3).view(np.uint8))


@pytest.mark.parametrize("rec", WITH_ROPE, ids=oracle.ids)
def test_rope_lanes_keep_every_bf16_bit(rec):
    """All 65,536 bfloat16 patterns, NaN payloads, infinities and subnormals included, as uint16 and as ml_dtypes."""
    latent = np.zeros((1024, rec.d_qk), np.uint16)
    latent[:, rec.dims :] = np.arange(65536).reshape(1024, 64)
    for form in (latent, latent.view(BF16)):
        codes, _, rope = pack_parts(rec, form)
        np.testing.assert_array_equal(rope, latent[:, rec.dims :])
        assert not codes.any()


@pytest.mark.parametrize("rec", WITH_ROPE, ids=oracle.ids)
def test_rope_lanes_of_fp32_round_to_nearest_even(rec, rng):
    """Ties, their neighbours, overflow to infinity, subnormals and random bit patterns; NaN stays NaN."""
    upper = rng.integers(0, 2**16, 24 * 64, dtype=np.uint32) << 16
    bits = np.concatenate([upper | low for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    bits = np.concatenate([bits, np.resize(np.array([0x7F7FFFFF, 0xFF7FFFFF, 1, 0x80000001], np.uint32), 64)])
    latent = np.zeros((len(bits) // 64, rec.d_qk), np.float32)
    latent[:, rec.dims :] = bits.view(np.float32).reshape(-1, 64)
    _, _, rope = pack_parts(rec, latent)
    expect = oracle.to_bf16_bits(latent[:, rec.dims :])
    nan = np.isnan(latent[:, rec.dims :])
    np.testing.assert_array_equal(rope[~nan], expect[~nan])
    assert np.isnan(rope[nan].view(BF16).astype(np.float32)).all()


@pytest.mark.parametrize("rec", WITH_ROPE, ids=oracle.ids)
def test_rope_lanes_of_fp16_round_to_nearest_even(rec):
    """All 65,536 float16 patterns."""
    latent = np.zeros((1024, rec.d_qk), np.float16)
    latent[:, rec.dims :] = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(1024, 64)
    _, _, rope = pack_parts(rec, latent)
    nan = np.isnan(latent[:, rec.dims :])
    np.testing.assert_array_equal(rope[~nan], oracle.to_bf16_bits(latent[:, rec.dims :])[~nan])
    assert np.isnan(rope[nan].view(BF16).astype(np.float32)).all()


@pytest.mark.parametrize("rec", WITH_ROPE, ids=oracle.ids)
def test_rope_lanes_unpack_exactly(rec):
    cache = oracle.pack(rec, np.zeros((1024, rec.d_qk), np.float32))
    bits = np.arange(65536, dtype=np.uint16).reshape(1024, 64)
    parts = cache.layout.read(cache.raw, np.arange(1024))
    cache.layout.write(cache.raw, np.arange(1024), [*parts[:2], bits.view(np.uint8)])
    got = unpack_kv_cache(cache.view(), family=rec.family, kv_cache_format=rec.fmt)[:, rec.dims :]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, bits.view(BF16).astype(np.float32))


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_bf16_bits_and_ml_dtypes_and_widened_latents_agree(rec, rng):
    """The same numbers as uint16 bits, bfloat16, float32 and (where exact) float16 give the same bytes."""
    x = oracle.latents(rng, 5, rec).astype(np.float16).astype(BF16)
    forms = [x, x.view(np.uint16), x.astype(np.float32), x.astype(np.float16)]
    first, *others = (
        pack_kv_cache(f, family=rec.family, kv_cache_format=rec.fmt, page_block_size=6).tobytes() for f in forms
    )
    assert all(other == first for other in others)


def test_glm_nvfp4_divides_by_the_global_scale_first(rng):
    """In float32, before the group maximum is taken; RoPE lanes are left alone."""
    rec = RECORDS["glm_nsa", "nvfp4"]
    for scale in (1.0, 0.37, 3e-3, 1024.0):
        x = oracle.latents(rng, 7, rec, np.float32)
        cache = pack_kv_cache(x, family="glm_nsa", kv_cache_format="nvfp4", page_block_size=8, kv_global_scale=scale)
        expect = oracle.pack(rec, x, 8, global_scale=scale)
        np.testing.assert_array_equal(cache, expect.view())
        got = unpack_kv_cache(cache, family="glm_nsa", kv_cache_format="nvfp4", kv_global_scale=scale)
        np.testing.assert_allclose(got[:7], expect.rows(np.arange(7)), rtol=2e-7)


@pytest.mark.parametrize("scale", [7, 15, 61, 117])
def test_glm_nvfp4_division_is_no_product_with_the_reciprocal(scale):
    """Multiples of E2M1 ties by numbers whose float32 reciprocal would push some of them off the tie."""
    rec, scale = RECORDS["glm_nsa", "nvfp4"], np.float32(scale)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    assert (ties * scale / scale == ties).all()
    assert (ties * scale * (1 / scale) != ties).any()
    x, n = groups(rec, ties * scale, 6 * scale)
    codes, scales, _ = pack_parts(rec, x, kv_global_scale=float(scale))
    assert scales[0, 0] == 0x38
    np.testing.assert_array_equal(codes.reshape(-1, 16)[:n, 1:8].reshape(-1), [0, 2, 2, 4, 4, 6, 6])
