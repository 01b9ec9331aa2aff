"""Conversion between formats, page sizes and strides, against unpack and pack of the oracle."""

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import RECORDS
from sparse_mla import convert_kv_cache, repage_kv_cache

property_test = settings(max_examples=80, deadline=None, derandomize=True, database=None)
RECORD = st.sampled_from(oracle.ALL)
PAIRS = [
    (a, b) for a in oracle.ALL for b in oracle.ALL if (a.dims, a.rope) == (b.dims, b.rope) and {a.family, b.family} != {
        "glm53_nope", "dsv4_1"} and {a.family, b.family} != {"glm53_nope", "dsv4_1_inline"}
]  # fmt: skip
EXACT = [(a, b) for a, b in PAIRS if (a.code, a.group) == (b.code, b.group) and (a.scale, b.scale) != ("fp32", "pow2")]


def words(a, b):
    return {"from_family": a.family, "to_family": b.family, "from_format": a.fmt, "to_format": b.fmt}


def scale_of(rec):
    return 0.37 if rec.inline and rec.scale == "nvfp4" else 1.0


def strides_of(rec, page, row_gap, page_gap):
    """Strides as keyword arguments; a gap of 0 leaves the choice to the library."""
    row = rec.bpt + 16 * row_gap if rec.inline and row_gap else None
    dense = -(-page * (row or rec.bpt) // 16) * 16
    return {"page_block_size": page, "row_stride": row, "page_stride": dense + 16 * page_gap if page_gap else None}


def layout_of(rec, strides):
    return oracle.Layout(rec, strides["page_block_size"], strides["page_stride"], strides["row_stride"])


def pair_ids(pair):
    return f"{pair[0].id}-to-{pair[1].id}"


@property_test
@given(
    rec=RECORD,
    seed=st.integers(0, 2**32 - 1),
    pages=st.integers(0, 4),
    old=st.tuples(st.integers(1, 9), st.integers(0, 2), st.integers(0, 2)),
    new=st.tuples(st.integers(1, 9), st.integers(0, 2), st.integers(0, 2)),
)
def test_repage_there_and_back_is_the_identity(rec, seed, pages, old, new):
    """Any bytes whatever, between any pages and strides; gaps are zero, records keep every bit."""
    old, new = strides_of(rec, *old), strides_of(rec, *new)
    cache = oracle.empty(rec, pages, old["page_block_size"], old["page_stride"], old["row_stride"])
    slots = np.arange(cache.slots)
    rng = np.random.default_rng(seed)
    parts = [
        rng.integers(0, 256, (len(slots), n), dtype=np.uint8) for n in (rec.code_bytes, rec.scale_bytes, 2 * rec.rope)
    ]
    cache.layout.write(cache.raw, slots, parts)
    name = {"family": rec.family, "kv_cache_format": rec.fmt}
    there = repage_kv_cache(cache.view(), **new, **name)
    want = cache.relaid(new["page_block_size"], new["page_stride"], new["row_stride"])
    np.testing.assert_array_equal(there, want.view())
    raw = oracle.flat(there)
    np.testing.assert_array_equal(raw, want.raw[: len(raw)])
    back = repage_kv_cache(there, **old, num_slots=cache.slots, **name)
    np.testing.assert_array_equal(back, cache.view())
    raw = oracle.flat(back)
    np.testing.assert_array_equal(raw, cache.raw[: len(raw)])


@pytest.mark.parametrize("pair", PAIRS, ids=pair_ids)
def test_conversion_is_unpack_and_pack(pair, rng):
    """Exact ones keep every value; lossy ones give what the oracle's writer makes of the oracle's values."""
    a, b = pair
    from_scale, to_scale = scale_of(a), scale_of(b)
    source = oracle.Cache(oracle.Layout(a, 7), np.zeros(3 * oracle.Layout(a, 7).stride, np.uint8), from_scale)
    source.store(np.arange(21), oracle.latents(rng, 21, a))
    scales = {"from_kv_global_scale": from_scale, "to_kv_global_scale": to_scale}
    got, error = convert_kv_cache(source.view(), **words(a, b), **scales, page_block_size=5, return_error=True)
    values = source.rows(np.arange(21))
    want = oracle.Cache(oracle.Layout(b, 5), np.zeros(5 * oracle.Layout(b, 5).stride, np.uint8), to_scale)
    if pair in EXACT:
        assert error == 0
        want.layout.write(want.raw, np.arange(21), source.layout.read(source.raw, np.arange(21)))
        np.testing.assert_array_equal(want.rows(np.arange(21)), values)
    else:
        want.store(np.arange(21), values.astype(np.float32))
        before, after = values[:, : a.dims], want.rows(np.arange(21))[:, : a.dims]
        assert error == pytest.approx(np.linalg.norm(after - before) / np.linalg.norm(before), rel=1e-4)
        assert 0 < error < (0.04 if b.code == "e4m3" else 0.15)
    np.testing.assert_array_equal(got, want.view())


def test_same_scale_rules_copy_codes(rng):
    """dsv3_2 to glm_nsa: the very bytes. Back: powers of two again, which round the codes."""
    cache = oracle.filled(rng, RECORDS["dsv3_2", "fp8"], 64)
    glm = convert_kv_cache(cache.view(), from_family="dsv3_2", to_family="glm_nsa")
    np.testing.assert_array_equal(glm, cache.view())
    back, error = convert_kv_cache(glm, from_family="glm_nsa", to_family="dsv3_2", return_error=True)
    assert error == 0  # the scales were powers of two
    assert back.shape == glm.shape


def test_rope_lanes_keep_every_bit(rng):
    """Signalling NaNs, too, where the values are quantised anew."""
    cache = oracle.filled(rng, RECORDS["dsv4", "fp8"], 8, 8)
    lanes = rng.integers(0, 2**16, (8, 64), dtype=np.uint16)
    lanes[0, :2] = 0x7F81, 0xFF80
    codes, scales, _ = cache.layout.read(cache.raw, np.arange(8))
    cache.layout.write(cache.raw, np.arange(8), [codes, scales, lanes.view(np.uint8).reshape(8, 128)])
    got = convert_kv_cache(cache.view(), from_family="dsv4", to_family="dsv4", to_format="nvfp4")
    kept = oracle.Layout(RECORDS["dsv4", "nvfp4"], 8).read(oracle.flat(got), np.arange(8))[2]
    np.testing.assert_array_equal(np.ascontiguousarray(kept).view(np.uint16), lanes)


def test_rows_of_528_and_656_bytes(rng):
    cache = oracle.filled(rng, RECORDS["glm53_nope", "fp8"], 128)
    wide = repage_kv_cache(cache.view(), family="glm53_nope", row_stride=656)
    assert wide.strides == (64 * 656, 656, 1)
    np.testing.assert_array_equal(wide, cache.view())
    np.testing.assert_array_equal(repage_kv_cache(wide, family="glm53_nope"), cache.view())


def test_a_part_of_the_slots(rng):
    cache = oracle.filled(rng, RECORDS["dsv4", "fp8"], 64)
    got = repage_kv_cache(cache.view(), family="dsv4", page_block_size=4, num_slots=6)
    want = cache.relaid(4)
    want.layout.write(want.raw, [6, 7], [np.zeros((2, n), np.uint8) for n in (448, 8, 128)])
    np.testing.assert_array_equal(got, want.view()[:2])


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("`to_family` must be a family with 448 quantised and 64 RoPE dimensions", {"to_family": "glm_nsa"}),
        ("`to_family` must be 'dsv4'", {"to_family": "dsv5"}),
        ("`to_format` must be .* for family dsv4, got 'fp4'", {"to_format": "fp4"}),
        ("`from_format` must be", {"from_format": "int8"}),
        ("`num_slots` must be at most 64", {"num_slots": 65}),
        ("`num_slots` must be at least 0", {"num_slots": -1}),
        ("`page_stride` must be a multiple of 16", {"page_stride": 100}),
        ("`to_kv_global_scale`|`kv_global_scale`", {"to_kv_global_scale": 2.0}),
    ],
)
def test_refusals_name_the_argument(match, change, rng):
    cache = oracle.filled(rng, RECORDS["dsv4", "fp8"], 64)
    with pytest.raises(ValueError, match=match):
        convert_kv_cache(cache.view(), **{"from_family": "dsv4", "to_family": "dsv4", **change})
