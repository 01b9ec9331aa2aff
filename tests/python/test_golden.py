"""Published bytes as literals: goldens, layout offsets, payload sizes, scale edges and non-finite values."""

import hashlib

import numpy as np
import oracle
import pytest
import sparse_mla
from oracle import RECORDS, ramp
from sparse_mla import pack_kv_cache, unpack_kv_cache

NAN, INF = np.float32(np.nan), np.float32(np.inf)
UE8M0 = [r for r in oracle.ALL if r.scale == "ue8m0"]
FP32 = [r for r in oracle.ALL if r.scale in ("pow2", "fp32")]
POW2 = [r for r in oracle.ALL if r.scale in ("pow2", "ue8m0")]
FP4 = [r for r in oracle.ALL if r.code == "e2m1"]


def one_row(family, values, fmt="fp8", at=0):
    """Bytes (codes, scales, RoPE) of one token whose dims from `at` on hold `values`, all others zero."""
    rec = RECORDS[family, fmt]
    x = np.zeros((1, rec.d_qk), np.float32)
    x[0, at : at + len(values)] = values
    cache = pack_kv_cache(x, family=family, kv_cache_format=fmt, page_block_size=2)
    codes, scales, rope = oracle.Layout(rec, 2).read(oracle.flat(cache), np.arange(1))
    return codes[0], scales[0], rope[0]


def scale_of(rec, amax):
    """Stored scale of a first group with this largest magnitude, as a float."""
    _, scales, _ = one_row(rec.family, [amax], rec.fmt)
    if rec.scale == "ue8m0":
        return np.ldexp(1.0, int(scales[0]) - 127)
    return float(scales[:4].view("<f4")[0])


def test_golden_pow2_group_of_64():
    codes, scales, _ = one_row("dsv4", ramp(np.arange(64)))
    assert codes[:16].tobytes().hex(" ") == "f2 70 eb 75 d0 f6 69 f1 72 e8 76 58 f4 6c ef 73"
    assert hashlib.sha256(codes[:64].tobytes()).hexdigest().startswith("ffb71857cf160406")
    assert scales.tolist() == [120, 114, 114, 114, 114, 114, 114, 0]
    assert not codes[64:].any()


@pytest.mark.parametrize("family", ["dsv3_2", "dots3_swa", "dsv4_1", "dsv4_1_inline"])
def test_golden_pow2_codes_do_not_depend_on_the_group_width(family):
    """The ramp's largest magnitude is in each 32-wide half closely enough for the same power of two."""
    codes, scales, _ = one_row(family, ramp(np.arange(64)))
    assert hashlib.sha256(codes[:64].tobytes()).hexdigest().startswith("ffb71857cf160406")
    assert (scales[3] == 0x3C and scales[2] == 0) if family == "dsv3_2" else scales[0] == 120  # 2^-7


@pytest.mark.parametrize("family", ["glm_nsa", "glm53_nope"])
def test_golden_arbitrary_fp32(family):
    codes, scales, _ = one_row(family, ramp(np.arange(64)))
    assert scales[:4].tobytes().hex(" ") == "25 49 92 3b"
    assert codes[:16].tobytes().hex(" ") == "f9 76 f2 7b d6 fc 70 f8 78 ee 7d 5e fb 72 f5 7a"
    assert hashlib.sha256(codes[:64].tobytes()).hexdigest().startswith("dd857dc6623d0781")


@pytest.mark.parametrize("rec", FP4, ids=oracle.ids)
def test_golden_fp4_groups(rec):
    codes, scales, _ = one_row(rec.family, ramp(np.arange(64)), rec.fmt)
    assert scales[:4].tobytes().hex() == "2a2b2a2a"
    assert codes[:32].tobytes().hex() == "5e7cf8e4b6174e6dfae2c5963f5d7be0d4a6275e6df9e3c5074f6d7be1d5a62f"


@pytest.mark.parametrize("rec", FP4, ids=oracle.ids)
def test_golden_fp4_zero_and_tiny_groups(rec):
    """FP4 has a scale floor of 2^-9, NVFP4 none; negative tiny values are minus zero."""
    codes, scales, _ = one_row(rec.family, 2.0**-14 * (np.arange(16) - 8), rec.fmt)
    floor = 1 if rec.scale == "fp4" else 0
    assert codes[:8].tobytes().hex() == "8888888800000000"
    assert (scales[: rec.n_scales] == floor).all()
    assert not codes[8:].any()


@pytest.mark.parametrize(
    ("family", "fmt", "page", "row", "payload"),
    [
        ("dsv4", "fp8", 64, 584, 37_376),
        ("dsv4", "fp8", 128, 584, 74_752),
        ("dsv4", "fp8", 256, 584, 149_504),
        ("dsv3_2", "fp8", 64, 656, 41_984),
        ("glm_nsa", "fp8", 64, 656, 41_984),
        ("glm53_nope", "fp8", 64, 528, 33_792),
        ("dots3_swa", "fp8", 64, 1160, 74_240),
        ("dsv4_1", "fp8", 64, 528, 33_792),
        ("dsv4_1_inline", "fp8", 64, 528, 33_792),
        ("dsv4", "nvfp4", 64, 384, 24_576),
        ("glm_nsa", "nvfp4", 64, 416, 26_624),
        ("dsv4_1", "fp4", 64, 288, 18_432),
        ("dsv4_1_inline", "fp4", 64, 288, 18_432),
        ("dsv4", "fp8", 1, 584, 592),
        ("dsv4", "fp8", 3, 584, 1_760),
        ("dsv4", "fp8", 2, 584, 1_168),
        ("dots3_swa", "fp8", 1, 1160, 1_168),
        ("dots3_swa", "fp8", 5, 1160, 5_808),
        ("dsv4_1", "fp4", 1, 288, 288),
        ("glm_nsa", "fp8", 3, 656, 1_968),
    ],
)
def test_page_bytes(family, fmt, page, row, payload):
    """Shape and page pitch that pack chooses: dense, odd pages of 8-mod-16 rows rounded up to 16."""
    x = np.zeros((page + 1, RECORDS[family, fmt].d_qk), np.float32)
    cache = pack_kv_cache(x, family=family, kv_cache_format=fmt, page_block_size=page)
    assert (cache.shape, cache.dtype) == ((2, page, row), np.uint8)
    assert cache.strides[0] == payload
    assert cache.ctypes.data % 16 == 0


OFFSETS = [  # family, format, page 4: first code, first scale, first RoPE byte of row 1
    ("dsv3_2", "fp8", 656, 656 + 512, 656 + 528),
    ("glm_nsa", "fp8", 656, 656 + 512, 656 + 528),
    ("glm53_nope", "fp8", 528, 528 + 512, None),
    ("dsv4_1_inline", "fp8", 528, 528 + 512, None),
    ("dsv4_1_inline", "fp4", 288, 288 + 256, None),
    ("glm_nsa", "nvfp4", 416, 416 + 256, 416 + 288),
    ("dsv4", "fp8", 576, 4 * 576 + 8, 576 + 448),
    ("dots3_swa", "fp8", 1152, 4 * 1152 + 8, 1152 + 1024),
    ("dsv4_1", "fp8", 512, 4 * 512 + 16, None),
    ("dsv4_1", "fp4", 256, 4 * 256 + 32, None),
    ("dsv4", "nvfp4", 352, 4 * 352 + 32, 352 + 224),
]


@pytest.mark.parametrize(("family", "fmt", "code", "scale", "rope"), OFFSETS)
def test_byte_offsets(family, fmt, code, scale, rope):
    """A marked code, scale and RoPE lane of token 1 land at the published offsets and nowhere else."""
    rec = RECORDS[family, fmt]

    def packed(dim, value):
        x = np.zeros((4, rec.d_qk), np.float32)
        x[1, dim] = value
        cache = pack_kv_cache(x, family=family, kv_cache_format=fmt, page_block_size=4)
        return np.array(cache).reshape(-1)

    blank = packed(0, 0)
    scales = set(range(scale, scale + rec.scale_bytes))
    first, last = (set(np.flatnonzero(packed(dim, 1.0) != blank)) - scales for dim in (0, rec.dims - 1))
    assert (first, last) == ({code}, {code + rec.code_bytes - 1})
    changed = set(np.flatnonzero(packed(rec.dims - 1, 448.0) != blank)) - {code + rec.code_bytes - 1}
    width = rec.scale_bytes // rec.n_scales if rec.inline and rec.scale in ("fp32", "pow2") else 1
    at = scale + (rec.n_scales - 1) * width
    assert changed
    assert changed <= set(range(at, at + width))
    if rope is not None:
        lanes = np.flatnonzero(packed(rec.dims, 1.0) != blank).tolist()
        assert lanes == [rope, rope + 1]  # 0x3F80, little-endian
        assert packed(rec.dims, 1.0)[rope : rope + 2].tolist() == [0x80, 0x3F]
        assert packed(rec.d_qk - 1, 1.0)[rope + 126 : rope + 128].tolist() == [0x80, 0x3F]


def test_e2m1_nibbles():
    """Element 2j lies in the low nibble of byte j."""
    for rec in FP4:
        codes, _, _ = one_row(rec.family, [6.0, -1.0, 0.5, 6.0], rec.fmt)
        assert codes[:2].tolist() == [0xA7, 0x71]


def test_pad_bytes_of_scale_rows_are_zero(rng):
    for family, fmt, used in (("dsv4", "fp8", 7), ("dsv4", "nvfp4", 28)):
        _, scales, _ = one_row(family, rng.standard_normal(512), fmt)
        assert scales[:used].all()
        assert not scales[used:].any()


def test_readers_ignore_pad_bytes(rng):
    for key in (("dsv4", "fp8"), ("dsv4", "nvfp4")):
        cache = oracle.filled(rng, RECORDS[key], 8, 8)
        before = unpack_kv_cache(cache.view(), family=key[0], kv_cache_format=key[1])
        _, scales, _ = cache.layout.at(np.arange(8))
        cache.raw[scales[:, None] + np.arange(cache.rec.n_scales, cache.rec.scale_bytes)] = 0xFF
        after = unpack_kv_cache(cache.view(), family=key[0], kv_cache_format=key[1])
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_family_table_states_these_facts(rec):
    """The package's own table against the published one."""
    fact = next(f for f in sparse_mla.families() if (f["family"], f["kv_cache_format"]) == (rec.family, rec.fmt))
    names = ("d_qk", "d_v", "quantised_dims", "rope_dims", "group", "scales_per_token", "bytes_per_token", "min_topk")
    expect = (rec.d_qk, rec.d_v, rec.dims, rec.rope, rec.group, rec.n_scales, rec.bpt)
    assert tuple(fact[n] for n in names) == (*expect, oracle.MIN_TOPK.get(rec.family, 1))


# ---------------------------------------------------------------------------------------------------------------
# Scale edges


@pytest.mark.parametrize("rec", POW2, ids=oracle.ids)
@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (336.0, 1.0),
        (448.0, 1.0),
        (448.0001, 2.0),
        (np.nextafter(np.float32(448), INF), 2.0),
        (np.nextafter(np.float32(448), np.float32(0)), 1.0),
        (224.0, 0.5),
        (np.nextafter(np.float32(224), INF), 1.0),
        (0.0, 2.0**-13),
        (1e-4, 2.0**-13),
        (0.0448, 2.0**-13),
        (448 * 2.0**-13, 2.0**-13),
        (448 * 2.0**-13 * (1 + 2.0**-22), 2.0**-12),
        (1e-45, 2.0**-13),
        (896.0, 2.0),
        (3.4028235e38, 2.0**120),
        (448 * 2.0**119, 2.0**119),
    ],
)
def test_pow2_scale_edges(rec, amax, scale):
    """Exponents from bits: exact at powers of two, one more an ulp above, never below 2^-13."""
    assert scale_of(rec, amax) == scale
    assert scale_of(rec, -np.float32(amax)) == scale


def test_pow2_scale_of_every_power_of_two():
    """448 * 2^k gives exactly 2^k over the whole float32 range; its upper neighbour gives 2^(k+1)."""
    rec = RECORDS["dsv4_1", "fp8"]
    k = np.arange(-13, 120)
    amax = np.ldexp(np.float32(448), k)
    for values, expect in ((amax, k), (np.nextafter(amax, INF), k + 1), (np.nextafter(amax, np.float32(0)), k)):
        x = np.zeros((-(-len(k) // 16), 512), np.float32)
        x[:, ::32] = np.append(values, np.zeros(x.shape[0] * 16 - len(k))).reshape(-1, 16)
        cache = pack_kv_cache(x, family="dsv4_1", page_block_size=len(x))
        scales = oracle.Layout(rec, len(x)).read(oracle.flat(cache), np.arange(len(x)))[1].reshape(-1)
        np.testing.assert_array_equal(scales[: len(k)].astype(int) - 127, expect)


@pytest.mark.parametrize("family", ["glm_nsa", "glm53_nope"])
def test_arbitrary_scale_edges(family):
    """amax / 448 in float32, floored at 1e-4 / 448."""
    rec = RECORDS[family, "fp8"]
    assert scale_of(rec, 336.0) == 0.75
    assert scale_of(rec, 448.0) == 1.0
    floor = float(np.float32(1e-4) / np.float32(448))
    assert scale_of(rec, 0.0) == floor
    assert scale_of(rec, 9.9e-5) == floor
    assert scale_of(rec, 1.0) == float(np.float32(1) / np.float32(448))
    assert scale_of(rec, 3.4028235e38) == float(np.float32(3.4028235e38) / np.float32(448))


# ---------------------------------------------------------------------------------------------------------------
# Non-finite values

SPECIAL = np.array([1.0, -2.0, 0.0, -0.0, 3.0], np.float32)
ZEROS = [0x00, 0x80, 0x00, 0x80, 0x00]


def second_group(rec, values):
    """Codes and scale bytes of group 1 holding `values`, after a group 0 of ones, and whether group 0 is intact."""
    ones = np.ones(rec.group, np.float32)
    codes, scales, _ = one_row(rec.family, np.concatenate([ones, values]), rec.fmt)
    clean_codes, clean_scales, _ = one_row(rec.family, ones, rec.fmt)
    width = 4 if rec.scale in ("pow2", "fp32") else 1
    end = rec.group if rec.code == "e4m3" else rec.group // 2
    np.testing.assert_array_equal(codes[:end], clean_codes[:end])
    np.testing.assert_array_equal(scales[:width], clean_scales[:width])
    np.testing.assert_array_equal(scales[2 * width :], clean_scales[2 * width :])
    return codes[end : 2 * end], scales[width : 2 * width]


@pytest.mark.parametrize("nan", [NAN, -NAN, np.array(0x7F800001, np.uint32).view(np.float32)[()]])
@pytest.mark.parametrize("rec", UE8M0 + FP32, ids=oracle.ids)
def test_nan_poisons_its_group_only(rec, nan):
    """Any NaN: all codes 0x7F; scale 0xFF, or the quiet NaN 0x7FC00000 in families with FP32 scales."""
    for values in (np.append(SPECIAL, nan), np.append(SPECIAL, [nan, INF])):
        codes, scale = second_group(rec, values)
        assert (codes == 0x7F).all()
        assert scale.tobytes() == (b"\xff" if rec.scale == "ue8m0" else b"\x00\x00\xc0\x7f")


@pytest.mark.parametrize("inf", [INF, -INF])
@pytest.mark.parametrize("rec", UE8M0 + FP32, ids=oracle.ids)
def test_inf_marks_itself_and_zeroes_its_group(rec, inf):
    """Any Inf without a NaN: it becomes 0x7F, finite values become signed zeros, the scale is NaN."""
    codes, scale = second_group(rec, np.append(SPECIAL, inf))
    assert codes[:6].tolist() == [*ZEROS, 0x7F]
    assert not codes[6:].any()
    assert scale.tobytes() == (b"\xff" if rec.scale == "ue8m0" else b"\x00\x00\xc0\x7f")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("rec", FP4, ids=oracle.ids)
def test_non_finite_fp4_group(rec, bad):
    """Scale 0x7F and codes 0; neighbours unaffected."""
    codes, scale = second_group(rec, np.append(SPECIAL, bad))
    assert not codes.any()
    assert scale.tolist() == [0x7F]


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_non_finite_groups_unpack_to_nan(rec):
    """What a writer marked reads back as NaN, not as a number."""
    x = np.zeros((1, rec.d_qk), np.float32)
    x[0, 3], x[0, rec.group + 3] = np.nan, np.inf
    cache = pack_kv_cache(x, family=rec.family, kv_cache_format=rec.fmt, page_block_size=2)
    got = unpack_kv_cache(cache, family=rec.family, kv_cache_format=rec.fmt)
    assert np.isnan(got[0, : 2 * rec.group]).all()
    assert not got[0, 2 * rec.group :].any()


@pytest.mark.parametrize("rec", [r for r in oracle.ALL if r.rope], ids=oracle.ids)
def test_non_finite_rope_lanes_stay_in_their_lane(rec):
    x = np.zeros((1, rec.d_qk), np.float32)
    x[0, rec.dims : rec.dims + 3] = np.nan, np.inf, -np.inf
    cache = pack_kv_cache(x, family=rec.family, kv_cache_format=rec.fmt, page_block_size=2)
    got = unpack_kv_cache(cache, family=rec.family, kv_cache_format=rec.fmt)[0]
    assert np.isnan(got[rec.dims])
    assert got[rec.dims + 1 : rec.dims + 3].tolist() == [np.inf, -np.inf]
    assert not got[: rec.dims].any()
    assert not got[rec.dims + 3 :].any()


def test_global_scale_that_overflows_marks_the_group():
    """A quotient beyond float32 is an infinity, and treated as one."""
    x = np.zeros((1, 576), np.float32)
    x[0, 0] = 3e38
    cache = pack_kv_cache(x, family="glm_nsa", kv_cache_format="nvfp4", page_block_size=1, kv_global_scale=1e-3)
    assert cache[0, 0, 256] == 0x7F
    assert not cache[0, 0, :8].any()
