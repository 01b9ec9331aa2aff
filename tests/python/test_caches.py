"""pack, append and unpack of every family and format, byte for byte against the oracle, in every layout."""

import hashlib

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import BF16, RECORDS
from sparse_mla import append_kv_cache, pack_kv_cache, unpack_kv_cache

INLINE = [r for r in oracle.ALL if r.inline]
FOOTER = [r for r in oracle.ALL if not r.inline]
GUARD = 0xAB
RECORD = st.sampled_from(oracle.ALL)
property_test = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def words(rec):
    """Keyword arguments that name a record."""
    return {"family": rec.family, "kv_cache_format": rec.fmt}


def assert_same_bytes(cache, expect):
    """A cache from `pack` equals the oracle's flat bytes, gaps included."""
    np.testing.assert_array_equal(cache, expect.view())
    raw = oracle.flat(cache)
    np.testing.assert_array_equal(raw, expect.raw[: len(raw)])


def assert_unpacks(cache, expect):
    """`unpack` of a view equals the oracle's values rounded once to float32."""
    with np.errstate(all="ignore"):
        values = expect.rows(np.arange(expect.slots)).astype(np.float32)
    got = unpack_kv_cache(cache, **words(expect.rec))
    assert (got.dtype, got.shape) == (np.float32, (expect.slots, expect.rec.d_qk))
    np.testing.assert_array_equal(got, values)


def random_f32(seed, shape, finite):
    """float32 of random bits: all exponents, subnormals, and unless `finite` also NaN and infinities."""
    bits = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)
    if finite:
        bits = np.where((bits >> 23 & 0xFF) == 0xFF, bits & np.uint32(0xBFFFFFFF), bits)
    return bits.view(np.float32)


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_pack_matches_the_oracle(rec, dtype, rng):
    """Three pages, the last one partly used, of realistic latents."""
    x = oracle.latents(rng, 150, rec, dtype)
    expect = oracle.pack(rec, x)
    cache = pack_kv_cache(x, **words(rec))
    assert (cache.shape, cache.dtype) == ((3, 64, rec.bpt), np.uint8)
    assert cache.flags.writeable
    assert_same_bytes(cache, expect)
    assert_unpacks(cache, expect)


@property_test
@given(rec=RECORD, seed=st.integers(0, 2**32 - 1), n=st.integers(0, 9), page=st.integers(1, 5), finite=st.booleans())
def test_pack_of_any_float32(rec, seed, n, page, finite):
    """Any bit pattern, any page size; bfloat16 payloads of NaN RoPE lanes are left to the rounding of float32."""
    x = random_f32(seed, (n, rec.d_qk), finite)
    nan_rope = np.isnan(x[:, rec.dims :])
    expect = oracle.pack(rec, x, page)
    cache = pack_kv_cache(x, page_block_size=page, **words(rec))
    if nan_rope.any():
        slots = np.arange(n)
        got, want = expect.layout.read(oracle.flat(cache), slots), expect.layout.read(expect.raw, slots)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
        got, want = (np.ascontiguousarray(parts[2]).view(np.uint16) for parts in (got, want))
        np.testing.assert_array_equal(got[~nan_rope], want[~nan_rope])
        assert np.isnan(got[nan_rope].view(BF16).astype(np.float32)).all()
    else:
        assert_same_bytes(cache, expect)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            unpack_kv_cache(cache, **words(rec))[:n], expect.rows(np.arange(n)).astype(np.float32)
        )


@property_test
@given(rec=RECORD, seed=st.integers(0, 2**32 - 1), page=st.integers(1, 7))
def test_unpack_of_any_bytes(rec, seed, page):
    """Codes, scales and RoPE lanes of random bytes read as the format says."""
    cache = oracle.empty(rec, 2, page)
    cache.raw[:] = np.random.default_rng(seed).integers(0, 256, len(cache.raw), dtype=np.uint8)
    assert_unpacks(cache.view(), cache)


@property_test
@given(
    rec=RECORD,
    seed=st.integers(0, 2**32 - 1),
    page=st.integers(1, 6),
    slots=st.lists(st.integers(-3, 20), max_size=12),
    wide=st.booleans(),
    pad=st.integers(0, 3),
)
def test_append_changes_only_addressed_bytes(rec, seed, page, slots, wide, pad):
    """Any mix of fresh, repeated, negative and too large slots, padded pages: the lowest row wins, gaps stay."""
    rng = np.random.default_rng(seed)
    stride = oracle.Layout(rec, page).stride + 16 * pad
    cache = oracle.empty(rec, 3, page, stride, fill=GUARD)
    expect = oracle.Cache(cache.layout, cache.raw.copy())
    x = oracle.latents(rng, len(slots), rec)
    for row in reversed(range(len(slots))):
        if 0 <= slots[row] < cache.slots:
            expect.store([slots[row]], x[row : row + 1])
    append_kv_cache(x, np.array(slots, np.int64 if wide else np.int32), cache.view(), **words(rec))
    np.testing.assert_array_equal(cache.raw, expect.raw)


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_append_equals_pack(rec, rng):
    """Appending shuffled rows, in several calls, to a zeroed cache gives the bytes that pack gives."""
    x = oracle.latents(rng, 128, rec)
    cache = oracle.empty(rec, 2)
    for part in np.array_split(rng.permutation(128), 5):
        append_kv_cache(x[part], part.astype(np.int64), cache.view(), **words(rec))
    np.testing.assert_array_equal(cache.view(), pack_kv_cache(x, **words(rec)))


@pytest.mark.parametrize("n", [2, 257, 600])
@pytest.mark.parametrize("rec", [RECORDS["dsv4", "nvfp4"], RECORDS["dsv4_1", "fp8"]], ids=oracle.ids)
def test_lowest_row_wins_among_many_duplicates(rec, n, rng):
    """Every row names one of two slots, whatever the number of threads."""
    x = oracle.latents(rng, n, rec)
    slots = rng.integers(5, 7, n)
    cache = oracle.empty(rec, 1, 8, fill=GUARD)
    expect = oracle.Cache(cache.layout, cache.raw.copy())
    for slot in np.unique(slots):
        first = int(np.argmax(slots == slot))
        expect.store([slot], x[first : first + 1])
    append_kv_cache(x, slots, cache.view(), **words(rec))
    np.testing.assert_array_equal(cache.raw, expect.raw)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_skipped_slots(dtype, rng):
    """Negative, one past the end and extreme slots write nothing, and do not stop their neighbours."""
    rec = RECORDS["dsv3_2", "fp8"]
    info = np.iinfo(dtype)
    slots = np.array([-1, 8, info.min, info.max, 7, -8, 0], dtype)
    x = oracle.latents(rng, len(slots), rec)
    cache = oracle.empty(rec, 2, 4, fill=GUARD)
    expect = oracle.Cache(cache.layout, cache.raw.copy())
    expect.store([7, 0], x[[4, 6]])
    append_kv_cache(x, slots, cache.view(), **words(rec))
    np.testing.assert_array_equal(cache.raw, expect.raw)


def test_slots_beyond_32_bits_are_skipped_not_truncated(rng):
    rec = RECORDS["glm_nsa", "fp8"]
    cache = oracle.empty(rec, 1, 4, fill=GUARD)
    slots = np.array([2**32, 2**32 + 1, -(2**32) + 2, 2**63 - 1], np.int64)
    append_kv_cache(oracle.latents(rng, 4, rec), slots, cache.view(), **words(rec))
    assert (cache.raw == GUARD).all()


# ---------------------------------------------------------------------------------------------------------------
# Layouts


def layouts(rec):
    """(page, page stride, row stride) that serving engines use: padded pages, padded rows, odd pages."""
    dense = oracle.Layout(rec, 4).stride
    yield from ((1, None, None), (3, None, None), (48, None, None), (4, dense + 16, None), (4, dense + 4096, None))
    if not rec.inline:
        rounded = -(-64 * rec.bpt // 576) * 576
        yield 64, rounded, None
    else:
        yield from ((4, None, rec.bpt + 16), (4, None, 1088), (5, 5 * 1088 + 160, 1088), (1, 1088, None))


CASES = [(rec, *layout) for rec in oracle.ALL for layout in layouts(rec)]
CASE_IDS = [f"{rec.id}-page{page}-{pitch}-{row}" for rec, page, pitch, row in CASES]


@pytest.mark.parametrize(("rec", "page", "page_stride", "row_stride"), CASES, ids=CASE_IDS)
def test_strides_in_pack_append_and_unpack(rec, page, page_stride, row_stride, rng):
    """pack zeroes every gap, append leaves every gap, unpack reads through the strides."""
    n = 2 * page + 1
    x = oracle.latents(rng, n, rec)
    expect = oracle.pack(rec, x, page, page_stride, row_stride)
    cache = pack_kv_cache(x, page_block_size=page, page_stride=page_stride, row_stride=row_stride, **words(rec))
    assert cache.shape == (3, page, rec.bpt)
    assert cache.strides[0] == expect.layout.stride
    assert page == 1 or cache.strides[1:] == (expect.layout.row, 1)
    assert_same_bytes(cache, expect)
    assert_unpacks(cache, expect)
    guarded = oracle.empty(rec, 3, page, page_stride, row_stride, fill=GUARD)
    want = oracle.Cache(guarded.layout, guarded.raw.copy())
    want.store(np.arange(n), x)
    append_kv_cache(x, np.arange(n), guarded.view(), **words(rec))
    np.testing.assert_array_equal(guarded.raw, want.raw)
    assert_unpacks(guarded.view(), guarded)


def forms(cache):
    """The accepted shapes of one cache: 2-D (dense rows only), 3-D, HND and NHD."""
    view = cache.view()
    if cache.layout.row == cache.rec.bpt:
        yield cache.raw.reshape(cache.pages, -1)[:, : cache.layout.page * cache.rec.bpt]
    yield from (view, view[:, None], view[:, :, None])


@pytest.mark.parametrize("page", [1, 2, 5, 64])
@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_shape_forms(rec, page, rng):
    """2-D, 3-D, HND and NHD views of padded pages read alike and are written alike."""
    stride = -(-page * rec.bpt // 576) * 576
    x = oracle.latents(rng, 3 * page, rec)
    for number in range(4):
        cache = oracle.empty(rec, 3, page, stride, fill=GUARD)
        expect = oracle.Cache(cache.layout, cache.raw.copy())
        expect.store(np.arange(3 * page), x)
        form = list(forms(cache))[number]
        append_kv_cache(x, np.arange(3 * page), form, **words(rec))
        np.testing.assert_array_equal(cache.raw, expect.raw)
        assert_unpacks(form, expect)


@pytest.mark.parametrize("rec", INLINE, ids=oracle.ids)
def test_transposed_nhd_and_padded_row_forms(rec, rng):
    """An NHD pool seen as HND, and rows padded inside a wider pool, in 3-D and 4-D."""
    pitch = rec.bpt + 128
    cache = oracle.empty(rec, 2, 6, None, pitch, fill=GUARD)
    cache.store(np.arange(12), oracle.latents(rng, 12, rec))
    pool = cache.raw.reshape(2, 6, pitch)
    for form in (
        pool[..., : rec.bpt],
        pool[:, :, None, : rec.bpt],
        pool[:, :, None, : rec.bpt].transpose(0, 2, 1, 3),
        pool[:, None, :, : rec.bpt],
    ):
        assert_unpacks(form, cache)


def test_physical_656_rows_of_the_528_byte_family(rng):
    """A 656-wide pool, its 528-wide slice and a dense 528 pool hold the same values."""
    rec = RECORDS["glm53_nope", "fp8"]
    dense = oracle.filled(rng, rec, 128)
    wide = dense.relaid(64, None, 656, fill=0xFF)
    pool = wide.raw.reshape(2, 64, 656)
    for form in (pool, pool[..., :528], pool[:, None], pool[:, :, None, :528]):
        assert_unpacks(form, dense)


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_one_layers_pages_inside_a_wider_block(rec, rng):
    """Three layers share each block; writing the middle one leaves the others alone."""
    page = 4
    inner = -(-page * rec.bpt // 16) * 16
    block = np.full((5, 3, inner), GUARD, np.uint8)
    layer = block[:, 1, : page * rec.bpt]
    x = oracle.latents(rng, 20, rec)
    append_kv_cache(x, np.arange(20), layer, **words(rec))
    expect = oracle.empty(rec, 5, page, 3 * inner, fill=GUARD)
    expect.store(np.arange(20), x)
    np.testing.assert_array_equal(block.reshape(-1)[inner:], expect.raw[: len(expect.raw) - inner])
    assert (block[:, [0, 2]] == GUARD).all()
    assert_unpacks(layer, expect)
    assert_unpacks(layer.reshape(5, page, rec.bpt), expect)


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_pages_may_be_any_size(rec, rng):
    """The same tokens in pages of 1 to 256: the same values under the same slot ids."""
    x = oracle.latents(rng, 256, rec)
    reference = unpack_kv_cache(pack_kv_cache(x, page_block_size=64, **words(rec)), **words(rec))
    for page in (1, 2, 3, 7, 32, 48, 100, 128, 256):
        got = unpack_kv_cache(pack_kv_cache(x, page_block_size=page, **words(rec)), **words(rec))
        np.testing.assert_array_equal(got[:256], reference)
        assert not got[256:].any() or rec.scale == "ue8m0"


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_three_dimensional_latents(rec, rng):
    """[pages, page, d_qk] packs like its flattened rows."""
    x = oracle.latents(rng, 12, rec)
    flat = pack_kv_cache(x, page_block_size=4, **words(rec))
    np.testing.assert_array_equal(pack_kv_cache(x.reshape(3, 4, -1), page_block_size=4, **words(rec)), flat)


def test_three_dimensional_latents_must_match_the_page_size(rng):
    x = oracle.latents(rng, 12, RECORDS["dsv4", "fp8"]).reshape(3, 4, -1)
    with pytest.raises(ValueError, match="latent"):
        pack_kv_cache(x, family="dsv4", page_block_size=6)


# ---------------------------------------------------------------------------------------------------------------
# Nothing to do, and nothing disturbed


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_zero_tokens_and_zero_pages(rec):
    none = np.zeros((0, rec.d_qk), BF16)
    cache = pack_kv_cache(none, **words(rec))
    assert cache.shape == (0, 64, rec.bpt)
    assert unpack_kv_cache(cache, **words(rec)).shape == (0, rec.d_qk)
    append_kv_cache(none, np.zeros(0, np.int64), cache, **words(rec))
    some = oracle.empty(rec, 1, 4, fill=GUARD)
    append_kv_cache(none, np.zeros(0, np.int32), some.view(), **words(rec))
    assert (some.raw == GUARD).all()


def test_append_to_a_cache_without_pages_skips_every_row():
    """Profiling runs pass such a cache."""
    x = np.ones((3, 576), BF16)
    append_kv_cache(x, np.arange(3), np.zeros((0, 64, 656), np.uint8), family="glm_nsa")


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_inputs_stay_as_they_were(rec, rng):
    """Read-only latents, slots and (for reading) caches are accepted and unchanged."""
    x, slots = oracle.latents(rng, 9, rec), np.array([3, -1, 99, 3, 0, 1, 2, 4, 5], np.int32)
    source = oracle.filled(rng, rec, 8, 8)
    for array in (x, slots, source.raw):
        array.setflags(write=False)
    before = [hashlib.sha256(a.tobytes()).digest() for a in (x, slots, source.raw)]
    pack_kv_cache(x, page_block_size=4, **words(rec))
    append_kv_cache(x, slots, oracle.empty(rec, 1, 8).view(), **words(rec))
    unpack_kv_cache(source.view(), **words(rec))
    assert before == [hashlib.sha256(a.tobytes()).digest() for a in (x, slots, source.raw)]


def test_read_only_cache_is_not_written(rng):
    cache = oracle.empty(RECORDS["dsv4", "fp8"], 1, 4)
    cache.raw.setflags(write=False)
    with pytest.raises((ValueError, TypeError), match="cache"):
        append_kv_cache(oracle.latents(rng, 1, cache.rec), np.zeros(1, np.int32), cache.view(), family="dsv4")


BAD_APPENDS = {
    "one slot too few": lambda x, s, c: (x, s[:2], c),
    "slots in float": lambda x, s, c: (x, s.astype(np.float32), c),
    "slots in 2-D": lambda x, s, c: (x, s[:, None], c),
    "narrow latent": lambda x, s, c: (np.ascontiguousarray(x[:, :512]), s, c),
    "latent in float64": lambda x, s, c: (x.astype(np.float64), s, c),
    "cache in int8": lambda x, s, c: (x, s, c.view(np.int8)),
    "narrow rows": lambda x, s, c: (x, s, c[..., :640]),
    "no singleton head axis": lambda x, s, c: (x, s, c.reshape(2, 2, 2, -1)),
    "overlapping rows": lambda x, s, c: (x, s, np.lib.stride_tricks.as_strided(c, c.shape, (c.strides[0], 640, 1))),
    "misaligned": lambda x, s, c: (x, s, c.reshape(-1)[8:][: 656 * 7].reshape(1, 7, 656)),
}


@pytest.mark.parametrize("name", BAD_APPENDS)
def test_bad_append_writes_nothing(name, rng):
    cache = oracle.empty(RECORDS["glm_nsa", "fp8"], 2, 4, fill=GUARD)
    x = oracle.latents(rng, 3, cache.rec)
    args = BAD_APPENDS[name](x, np.arange(3), cache.view())
    with pytest.raises((ValueError, TypeError)):
        append_kv_cache(*args, family="glm_nsa")
    assert (cache.raw == GUARD).all()


@pytest.mark.parametrize("rec", FOOTER, ids=oracle.ids)
def test_footer_rows_cannot_be_padded(rec, rng):
    """Their tokens are no contiguous rows, so a row pitch would be meaningless."""
    wide = np.zeros((2, 4, rec.bpt + 16), np.uint8)
    for cache in (wide, wide[..., : rec.bpt]):
        with pytest.raises(ValueError, match=r"tightly packed|last dimension"):
            unpack_kv_cache(cache, **words(rec))


@pytest.mark.parametrize("family", ["dsv4", "dsv3_2", "glm_nsa", "glm53_nope", "dots3_swa"])
def test_fp4_is_a_format_of_two_families_only(family):
    with pytest.raises(ValueError, match="fp4"):
        pack_kv_cache(np.zeros((1, 512), BF16), family=family, kv_cache_format="fp4")


@pytest.mark.parametrize(("width", "what"), [(352, "FlashMLA"), (416, "GLM-5.2"), (432, "B12X")])
@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_records_of_other_engines_are_named(rec, width, what):
    """D7: refused even where they could pass for padded rows; a slice of padded rows is taken."""
    pool = np.zeros((2, 4, width), np.uint8)
    if width == rec.bpt:
        assert unpack_kv_cache(pool, **words(rec)).shape == (8, rec.d_qk)
        return
    for cache in (pool, pool[:, None], pool[:, :, None]):
        with pytest.raises(ValueError, match=f"`cache` must be {rec.bpt} bytes .*got {width}, probably .*{what}"):
            unpack_kv_cache(cache, **words(rec))
    if rec.inline and rec.bpt < width:
        assert unpack_kv_cache(pool[..., : rec.bpt], **words(rec)).shape == (8, rec.d_qk)


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_unquantised_caches_are_named(rec):
    """As bf16 elements, and as the bytes of such."""
    rows = np.zeros((2, 4, rec.d_qk), BF16)
    for cache in (rows, rows.view(np.uint16), rows.astype(np.float32)):
        with pytest.raises(TypeError, match=r"`cache` must be an array of uint8, got .*probably an unquantised cache"):
            unpack_kv_cache(cache, **words(rec))
    with pytest.raises(ValueError, match=f"probably unquantised bf16 rows of {rec.d_qk} dimensions"):
        unpack_kv_cache(rows.view(np.uint8), **words(rec))


# ---------------------------------------------------------------------------------------------------------------
# Re-layout


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_pages_of_256_and_of_64_hold_the_same_tokens(rec, rng):
    """Equal values; equal bytes only where rows are inline; a reshape of footer pages is not a re-layout."""
    x = oracle.latents(rng, 256, rec)
    one, four = (pack_kv_cache(x, page_block_size=page, **words(rec)) for page in (256, 64))
    values = unpack_kv_cache(one, **words(rec))
    np.testing.assert_array_equal(values, unpack_kv_cache(four, **words(rec)))
    reshaped = np.ascontiguousarray(one).reshape(4, 64, rec.bpt)
    assert np.array_equal(reshaped, four) == rec.inline
    assert np.array_equal(unpack_kv_cache(reshaped, **words(rec)), values, equal_nan=True) == rec.inline


@pytest.mark.parametrize("rec", [r for r in oracle.ALL if r.scale in ("ue8m0", "pow2")], ids=oracle.ids)
def test_pack_of_unpacked_values_is_stable(rec, rng):
    """With power-of-two scales, quantisation settles after one step: the values come back exactly."""
    once = unpack_kv_cache(pack_kv_cache(oracle.latents(rng, 8, rec), page_block_size=8, **words(rec)), **words(rec))
    twice = unpack_kv_cache(pack_kv_cache(once, page_block_size=8, **words(rec)), **words(rec))
    np.testing.assert_array_equal(twice, once)


@property_test
@given(rec=RECORD, seed=st.integers(0, 2**32 - 1), exponent=st.integers(-6, 6))
def test_round_trip_error_is_within_half_a_step(rec, seed, exponent):
    """|unpack(pack(x)) - x| is bounded by half a code step plus what rounding and clipping the scale can cost."""
    rng = np.random.default_rng(seed)
    x = oracle.latents(rng, 4, rec, np.float32) * np.float32(10.0**exponent)
    got = unpack_kv_cache(pack_kv_cache(x, page_block_size=4, **words(rec)), **words(rec)).astype(np.float64)
    error, size = np.abs(got - x), np.abs(x).astype(np.float64)
    amax = size[:, : rec.dims].reshape(4, rec.n_scales, rec.group).max(-1).repeat(rec.group, 1)
    if rec.code == "e4m3":
        step, slip = np.maximum(size[:, : rec.dims] * 2**-4, np.maximum(2 * amax / 448, 2**-12) * 2**-10), 0
    else:
        ratio = amax / 6
        slip = np.maximum(ratio * 2**-4, 2**-10) + np.maximum(ratio - 448, 0)
        step = np.maximum(size[:, : rec.dims], np.clip(ratio, 2**-9, 448) + slip) / 4
    assert (error[:, : rec.dims] <= (step + 6 * slip) * (1 + 1e-5)).all()
    assert (error[:, rec.dims :] <= size[:, rec.dims :] * 2**-8).all()


# ---------------------------------------------------------------------------------------------------------------
# Rotation of the RoPE lanes on the way into the cache

ROPE = [r for r in oracle.ALL if r.rope]


def rotated(rec, x, cos_sin, positions, interleaved):
    """`x` as float32 with its RoPE lanes rotated and rounded to bfloat16, one float32 operation at a time."""
    x = oracle.to_f32(x).copy()
    lanes = x[:, rec.dims :]
    half = rec.rope // 2
    first = slice(0, None, 2) if interleaved else slice(0, half)
    second = slice(1, None, 2) if interleaved else slice(half, None)
    a, b = lanes[:, first].copy(), lanes[:, second].copy()
    c, s = cos_sin[positions, :half], cos_sin[positions, half:]
    lanes[:, first] = (a * c - b * s).astype(BF16)
    lanes[:, second] = (a * s + b * c).astype(BF16)
    return x


@property_test
@given(
    rec=st.sampled_from(ROPE),
    seed=st.integers(0, 2**32 - 1),
    interleaved=st.booleans(),
    wide=st.booleans(),
    dtype=st.sampled_from([BF16, np.float16, np.float32]),
)
def test_append_with_rope_is_append_of_rotated_rows(rec, seed, interleaved, wide, dtype):
    rng = np.random.default_rng(seed)
    x = oracle.latents(rng, 9, rec, dtype)
    cos_sin = rng.standard_normal((20, rec.rope)).astype(np.float32)
    positions = rng.integers(0, 20, 9).astype(np.int64 if wide else np.int32)
    slots = rng.integers(-1, 9, 9).astype(np.int32 if wide else np.int64)
    got, want = oracle.empty(rec, 2, 4, fill=GUARD), oracle.empty(rec, 2, 4, fill=GUARD)
    rope = {"rope_cos_sin": cos_sin, "rope_positions": positions, "rope_interleaved": interleaved}
    append_kv_cache(x, slots, got.view(), **rope, **words(rec))
    append_kv_cache(rotated(rec, x, cos_sin, positions, interleaved), slots, want.view(), **words(rec))
    np.testing.assert_array_equal(got.raw, want.raw)


def test_rope_by_hand():
    """A quarter turn and a half angle, in both pairings; lanes 2 and 33 stand still."""
    rec = RECORDS["dsv3_2", "fp8"]
    x = np.zeros((1, 576), np.float32)
    x[0, 512], x[0, 513], x[0, 544] = 3, 5, 7
    cos_sin = np.zeros((2, 64), np.float32)
    cos_sin[1, :32], cos_sin[1, 0], cos_sin[1, 32] = 1, 0, 1  # the first pair turns by 90 degrees
    for interleaved, lanes in ((True, {0: -5, 1: 3, 32: 7}), (False, {0: -7, 1: 5, 32: 3})):
        cache = oracle.empty(rec, 1, 1)
        rope = {"rope_cos_sin": cos_sin, "rope_positions": np.ones(1, np.int32), "rope_interleaved": interleaved}
        append_kv_cache(x, np.zeros(1, np.int32), cache.view(), **rope, **words(rec))
        got = cache.rows([0])[0, 512:]
        assert {int(lane): got[lane] for lane in np.flatnonzero(got)} == lanes


def test_a_row_without_a_position_is_skipped():
    """It takes its slot with it: the lowest row is chosen first."""
    rec = RECORDS["dsv4", "fp8"]
    x = np.ones((4, 512), np.float32)
    cache = oracle.empty(rec, 1, 4, fill=GUARD)
    rope = {"rope_cos_sin": np.ones((3, 64), np.float32), "rope_positions": np.array([3, 0, -1, 2])}
    append_kv_cache(x, np.array([0, 0, 1, 2]), cache.view(), **rope, **words(rec))
    written = [slot for slot in range(4) if cache.raw[slot * 576] != GUARD]
    assert written == [2]


@pytest.mark.parametrize("family", ["glm53_nope", "dsv4_1", "dsv4_1_inline"])
def test_rope_needs_lanes_of_its_own(family):
    rec = RECORDS[family, "fp8"]
    rope = {"rope_cos_sin": np.ones((3, 64), np.float32), "rope_positions": np.zeros(1, np.int32)}
    with pytest.raises(ValueError, match=f"`rope_cos_sin` must be None for family {family}"):
        append_kv_cache(
            np.ones((1, 512), np.float32), np.zeros(1, np.int32), oracle.empty(rec, 1, 1).view(), **rope, **words(rec)
        )


def test_rope_arguments_are_checked():
    rec = RECORDS["glm_nsa", "fp8"]
    x, slots, cache = np.ones((2, 576), np.float32), np.zeros(2, np.int32), oracle.empty(rec, 1, 1, fill=GUARD)
    table, positions = np.ones((3, 64), np.float32), np.zeros(2, np.int64)
    for error, match, rope in (
        (ValueError, "`rope_positions` must be given together", {"rope_cos_sin": table}),
        (ValueError, "`rope_cos_sin` must be given together", {"rope_positions": positions}),
        (
            ValueError,
            r"`rope_cos_sin` must be of shape \[max_position, 64\]",
            {"rope_cos_sin": np.ones((3, 32), np.float32), "rope_positions": positions},
        ),
        (
            ValueError,
            r"`rope_positions` must be one position per row",
            {"rope_cos_sin": table, "rope_positions": positions[:1]},
        ),
        (TypeError, "`rope_cos_sin`", {"rope_cos_sin": table.astype(np.float64), "rope_positions": positions}),
        (TypeError, "`rope_positions`", {"rope_cos_sin": table, "rope_positions": positions.astype(np.float32)}),
        (
            TypeError,
            "`rope_interleaved` must be a bool",
            {"rope_cos_sin": table, "rope_positions": positions, "rope_interleaved": "yes"},
        ),
    ):
        with pytest.raises(error, match=match):
            append_kv_cache(x, slots, cache.view(), **rope, **words(rec))
    assert (cache.raw == GUARD).all()
