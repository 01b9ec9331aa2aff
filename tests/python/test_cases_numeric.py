"""Situations that users of such kernels ran into, named by their id: numerics, addressing and shapes."""

import hashlib
import inspect
import mmap
import sys

import numpy as np
import oracle
import pytest
import sparse_mla
from numpy.lib.stride_tricks import as_strided
from oracle import BF16, E4M3, LOG2E, RECORDS, check, problem
from sparse_mla import append_kv_cache, pack_kv_cache, unpack_kv_cache

DSV4, DSV3_2, GLM, GLM53 = (RECORDS[f, "fp8"] for f in ("dsv4", "dsv3_2", "glm_nsa", "glm53_nope"))
DOTS3, DSV4_1 = RECORDS["dots3_swa", "fp8"], RECORDS["dsv4_1", "fp8"]
each_record = pytest.mark.parametrize("rec", oracle.READABLE, ids=oracle.ids)


def bits(pair):
    """The bytes of out and lse."""
    return [np.ascontiguousarray(x).tobytes() for x in pair]


def verify(backend, p, base="2", **kwargs):
    """Runs a problem and holds it to the accuracy contract; returns out and lse."""
    out, lse = backend.run(p, lse_base=base, **kwargs)
    ref, ref_lse = p.reference(base)
    check(out, ref, lse, ref_lse)
    return out, lse


def joined(backend, states, **kwargs):
    """Folds (out, lse) states into one."""
    first, *rest = states
    for state in rest:
        first = backend.merge_states(*map(backend.array, (*first, *state)), **kwargs)
        first = tuple(map(backend.numpy, first))
    return first


# ---------------------------------------------------------------------------------------------------------------
# B: wrong numbers


@pytest.mark.parametrize("rec", [DSV3_2, GLM, GLM53], ids=oracle.ids)
def test_b1_fp32_scales_are_not_floored_to_powers_of_two(backend, rec):
    """A stored scale of 0.75 means 0.75 in every family with FP32 scales."""
    cache = oracle.empty(rec, 1)
    codes = np.full((64, 512), np.float32(2).astype(E4M3).view(np.uint8))
    scales = np.full((64, 4), 0.75, "<f4").view(np.uint8)
    cache.layout.write(cache.raw, np.arange(64), (codes, scales, np.zeros((64, 2 * rec.rope), np.uint8)))
    assert (unpack_kv_cache(cache.view(), family=rec.family)[:, :512] == 1.5).all()
    q = np.zeros((1, 2, rec.d_qk), BF16)
    q[..., 0] = 1
    out, _ = verify(backend, oracle.Problem(cache, q, np.arange(64, dtype=np.int32)[None], 1.0))
    assert (out == 1.5).all()


def test_b1_writers_choose_the_scale_of_their_family():
    """amax 336: 0.75 in the families with arbitrary scales, 1.0 in the power-of-two one."""
    for rec, scale in ((DSV3_2, 1.0), (GLM, 0.75), (GLM53, 0.75)):
        cache = pack_kv_cache(np.full((1, rec.d_qk), 336, np.float32), family=rec.family, page_block_size=1)
        assert cache[0, 0, 512:528].view("<f4").tolist() == [scale] * 4


def test_b2_pow2_scale_fields():
    """Tiles of 336, zero, 448 and just above 448 give 1.0, 2^-13, 1.0 and 2.0 bit for bit."""
    x = np.zeros((1, 576), np.float32)
    x[0, 0], x[0, 256], x[0, 384] = 336, 448, 448.0001
    cache = pack_kv_cache(x, family="dsv3_2", page_block_size=1)
    assert cache[0, 0, 512:528].view("<f4").tolist() == [1.0, 0.0001220703125, 1.0, 2.0]


@each_record
def test_b3_positive_index_outside_the_pool(backend, rng, rec):
    """2^30, num_slots and 2^31 - 1 are absent, num_slots - 1 is not."""
    p = problem(rng, rec, 2, 4, 40, slots=128)
    p.indices[:, :4] = [2**30, p.cache.slots, p.cache.slots - 1, 2**31 - 1]
    out = verify(backend, p)
    p.indices[:, [0, 1, 3]] = -1
    assert bits(backend.run(p)) == bits(out)


@pytest.mark.parametrize("sink", [None, -1e30, -5.0, 0.0, 1e4])
@pytest.mark.parametrize("sides", ["single", "both empty", "primary empty", "extra empty"])
def test_b4_empty_rows(backend, rng, sides, sink):
    """No spurious unit probability: 0 and -inf, or the sink's value."""
    p = problem(rng, DSV4, 3, 2, 30, extra=None if sides == "single" else "fp8", extra_k=20)
    p.sink = None if sink is None else np.full(2, sink, np.float32)
    if sides != "extra empty":
        p.indices[0], p.length = -1, np.array([30, 0, 30], np.int32)
    if sides in ("both empty", "extra empty"):
        p.extra_indices[0], p.extra_length = -1, np.array([20, 0, 20], np.int32)
    out, lse = backend.run(p)
    ref, ref_lse = p.reference()
    check(out, ref)
    np.testing.assert_allclose(lse, ref_lse, rtol=2**-23, atol=1e-3)
    if sides in ("single", "both empty"):
        assert not out[:2].any()
        assert np.isneginf(lse[:2]).all() if sink is None else np.allclose(lse[:2], sink * LOG2E, rtol=2**-23)


@each_record
def test_b5_page_stride_is_honoured(backend, rng, rec):
    """Pages of one layer in a block of several: pages from 1 on are read at their own place."""
    p = problem(rng, rec, 2, 3, 40, page=16, slots=128)
    layers = p.cache.relaid(16, 5 * p.cache.layout.stride, fill=0x7F)
    assert bits(backend.run(p.but(cache=layers))) == bits(verify(backend, p))


@each_record
def test_b6_page_128_equals_page_64_after_relayout(backend, rng, rec):
    p = problem(rng, rec, 2, 3, 100, page=64, slots=256)
    assert bits(backend.run(p.but(cache=p.cache.relaid(128)))) == bits(verify(backend, p))


@pytest.mark.parametrize("rec", [r for r in oracle.ALL if not r.inline], ids=oracle.ids)
def test_b7_footers_belong_to_the_page(rec, rng):
    """Equal values from other bytes; a reshaped page of 256 is not four pages of 64."""
    words = {"family": rec.family, "kv_cache_format": rec.fmt}
    x = oracle.latents(rng, 256, rec)
    one, four = pack_kv_cache(x, page_block_size=256, **words), pack_kv_cache(x, page_block_size=64, **words)
    values = unpack_kv_cache(four, **words)
    np.testing.assert_array_equal(unpack_kv_cache(one, **words), values)
    assert one.tobytes() != four.tobytes()
    assert not np.array_equal(unpack_kv_cache(one.reshape(4, 64, rec.bpt), **words), values, equal_nan=True)


@each_record
def test_b8_strided_lse_out_and_indices(backend, rng, rec):
    """lse = big[:, :H] with a row stride of 2H, out and indices likewise: guards of 1234.5 survive."""
    p = problem(rng, rec, 4, 6, 30)
    k = p.indices.shape[1]
    lse = backend.array(np.full((4, 12), 1234.5, np.float32))
    out = backend.array(np.full((4, 12, rec.d_v), 1234.5, np.float32))
    wide = backend.array(np.concatenate([p.indices, np.zeros_like(p.indices)], 1))
    arrays = {name: backend.array(x) for name, x in p.arrays().items()}
    arrays["indices"] = backend.view(wide, np.s_[:, :k])
    views = {"out": backend.view(out, np.s_[:, :6]), "lse": backend.view(lse, np.s_[:, :6])}
    backend.decode(**arrays, **p.words(), **views)
    out, lse = backend.numpy(out), backend.numpy(lse)
    check(out[:, :6], p.reference()[0], lse[:, :6], p.reference()[1])
    assert (lse[:, 6:] == 1234.5).all()
    assert (out[:, 6:] == 1234.5).all()


@pytest.mark.parametrize("rec", [DSV3_2, GLM, GLM53, DOTS3, RECORDS["glm_nsa", "nvfp4"]], ids=oracle.ids)
def test_b9_families_without_a_secondary_cache_refuse_one(backend, rng, rec):
    p = problem(rng, rec)
    p.extra, p.extra_indices = p.cache, p.indices
    out = backend.array(np.full((2, 4, rec.d_v), 7, np.float32))
    with pytest.raises(ValueError, match="extra"):
        backend.run(p, out=out)
    assert (backend.numpy(out) == 7).all()


def test_b9_a_secondary_cache_changes_the_result(backend, rng):
    p = problem(rng, DSV4, extra="fp8")
    single = p.but(extra=None, extra_indices=None)
    assert oracle.rel_l2(verify(backend, p)[0], verify(backend, single)[0]).min() > 0.1


def test_b10_sinks_count_for_the_576_family(backend, rng):
    """H = 8, sinks in [-2, 4]: the reference is met, and ignoring them would be 0.1 away."""
    p = problem(rng, GLM, 4, 8, 10)
    p.sink = np.linspace(-2, 4, 8, dtype=np.float32)
    out, _ = verify(backend, p)
    assert oracle.rel_l2(out, p.but(sink=None).reference()[0]).min() > 0.1


@pytest.mark.parametrize("sink", [np.zeros(8), np.zeros(8, np.int32), np.zeros(7, np.float32), np.zeros((8, 1), "f4")])
def test_b10_a_wrong_sink_is_refused(backend, rng, sink):
    p = problem(rng, GLM, 1, 8, 4)
    with pytest.raises((ValueError, TypeError), match="attn_sink"):
        backend.run(p.but(sink=sink))


@pytest.mark.parametrize("sink", [False, True])
@each_record
def test_b11_lse_bases(backend, rng, rec, sink):
    """Base 2 by default, ln on request, the sink included in both; they differ by ln 2, the outputs not at all."""
    p = problem(rng, rec, 2, 3, 30)
    p.sink = rng.normal(0, 2, 3).astype(np.float32) if sink else None
    out2, lse2 = verify(backend, p)
    oute, lsee = verify(backend, p, "e")
    np.testing.assert_allclose(lse2 / LOG2E, lsee, rtol=1e-6, atol=1e-6)
    assert bits([out2]) == bits([oute])
    assert oracle.lse_error(lsee, p.reference("2")[1]) > 0.1


@each_record
def test_b12_row_independent_of_batch_mates(backend, rng, rec):
    """One row among 1, 2, 7, 33 others of any length: the same bits."""
    p = problem(rng, rec, 34, 4, 70)
    p.indices[:, 70:] = -1
    expect = None
    for mates in (0, 1, 7, 33):
        order = rng.permutation(33)[:mates] + 1
        at = int(rng.integers(0, mates + 1))
        rows = np.insert(order, at, 0)
        length = np.where(rows == 0, 61, rng.integers(0, 71, mates + 1)).astype(np.int32)
        out, lse = backend.run(p.tokens(rows).but(length=length), batch_invariant=True)
        expect = expect or bits((out[at], lse[at]))
        assert bits((out[at], lse[at])) == expect


def test_b13_the_tail_keeps_its_weight(backend):
    """One logit at 0, 2,047 at -7, V all ones: the answer is 1."""
    x = np.ones((2048, 576), np.float32)
    x[:, 512:] = 0
    x[1:, 512] = -7
    q = np.zeros((1, 4, 576), BF16)
    q[..., 512] = 1
    p = oracle.Problem(oracle.pack(DSV3_2, x), q, np.arange(2048, dtype=np.int32)[None], 1.0)
    out, lse = verify(backend, p)
    np.testing.assert_allclose(out.astype(np.float32), 1, rtol=2**-8)
    np.testing.assert_allclose(lse, np.log2(1 + 2047 * np.exp(-7.0)), atol=1e-3)


@each_record
def test_b14_nan_behind_masked_candidates(backend, rng, rec):
    """NaN rows at slot 0 and under every masked position: finite, and bit for bit what clean memory gives."""
    p = problem(rng, rec, 3, 4, 60, slots=200)
    p.length = np.array([20, 60, 0], np.int32)
    p.indices[p.indices == 0] = 1
    p.indices[:, 7:15], p.indices[0, 20:] = -1, 0
    expect = bits(verify(backend, p))
    present = np.concatenate([oracle.Source(p.cache, p.indices, p.length).present(t) for t in range(3)])
    poisoned = oracle.empty(rec, p.cache.pages, fill=0xFF)
    poisoned.layout.write(poisoned.raw, present, p.cache.layout.read(p.cache.raw, present))
    assert 0 not in present
    assert bits(backend.run(p.but(cache=poisoned))) == expect


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse anonymous memory")
@pytest.mark.parametrize(("rec", "page"), [(DSV4, 64), (DSV4_1, 1), (GLM, 64), (GLM53, 256)], ids=oracle.ids)
def test_b15_offsets_beyond_32_bits(backend, rng, rec, page):
    """Slots around 2 GiB and 4 GiB: what lies at the wrapped addresses is another token."""
    no_reserve = 0x4000
    stride = oracle.Layout(rec, page).stride
    pages = (2**32 + 2**26) // stride
    memory = mmap.mmap(-1, pages * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    cache = oracle.Cache(oracle.Layout(rec, page), np.frombuffer(memory, np.uint8))
    around = np.array([2**31 // stride, 2**32 // stride])[:, None] + np.arange(-1, 2)
    wrapped = np.array([0, 1, 2**31 // stride - 2])
    slots = (np.append(around, wrapped)[:, None] * page + [0, page - 1]).reshape(-1)
    slots = np.unique(np.append(slots, pages * page - 1))
    append_kv_cache(oracle.latents(rng, len(slots), rec), slots, cache.view(), family=rec.family)
    expect = oracle.pack(rec, np.zeros((len(slots), rec.d_qk), np.float32), len(slots))
    parts = cache.layout.read(cache.raw, slots)
    expect.layout.write(expect.raw, np.arange(len(slots)), parts)
    assert all(part.any(1).all() for part in parts[:2])
    q, sm_scale = oracle.queries(rng, 2, 4, expect)
    indices = np.stack([rng.permutation(slots) for _ in range(2)]).astype(np.int32)
    verify(backend, oracle.Problem(cache, q, indices, sm_scale))


@each_record
def test_b16_length_beyond_the_width_is_clamped(backend, rng, rec):
    """Width 128, length 133; valid-looking indices behind the row are not read."""
    width = max(128, oracle.MIN_TOPK.get(rec.family, 1))
    p = problem(rng, rec, 3, 2, width)
    p.length = np.full(3, width + 5, np.int32)
    wide = backend.array(np.concatenate([p.indices, np.ones((3, 16), np.int32)], 1))
    arrays = {name: backend.array(x) for name, x in p.arrays().items()}
    arrays["indices"] = backend.view(wide, np.s_[:, :width])
    out, lse = map(backend.numpy, backend.decode(**arrays, **p.words(), return_lse=True))
    check(out, p.reference()[0], lse, p.reference()[1])


@each_record
def test_b17_padding_in_the_middle_or_at_the_end(backend, rng, rec):
    """-1 anywhere, -1 at the end, compacted with a length, padded from 192 to 512: one answer."""
    p = problem(rng, rec, 2, 3, 576)
    valid = p.indices[:, :192].copy()
    p.indices[:] = -1
    end, middle = p.indices.copy(), p.indices.copy()
    end[:, :192] = valid
    where = np.sort(rng.choice(513, 192, replace=False))
    middle[:, where] = valid
    expect = bits(verify(backend, p.but(indices=end)))
    lengths = np.full(2, 192, np.int32)
    if not backend.compacts:
        verify(backend, p.but(indices=middle))
        verify(backend, p.but(indices=np.where(end < 0, 5, end), length=lengths))
        return
    assert bits(backend.run(p.but(indices=middle))) == expect
    assert bits(backend.run(p.but(indices=np.where(end < 0, 5, end), length=lengths))) == expect


def test_b18_reserved_row_bytes_are_left_alone(backend, rng):
    """append into 656-byte rows of the 528-byte family: bytes 528..655 and neighbours stay, decode skips them."""
    pool = np.full((2, 64, 656), 0xAB, np.uint8)
    x = oracle.latents(rng, 5, GLM53)
    slots = np.array([3, 64, 65, 127, 0])
    append_kv_cache(x, slots, pool, family="glm53_nope")
    rows = pool.reshape(128, 656)
    assert (rows[:, 528:] == 0xAB).all()
    assert (np.delete(rows, slots, 0) == 0xAB).all()
    dense = oracle.pack(GLM53, x, 5)
    np.testing.assert_array_equal(rows[slots, :528], dense.view()[0])
    q, sm_scale = oracle.queries(rng, 1, 4, dense)
    p = oracle.Problem(dense, q, np.arange(5, dtype=np.int32)[None], sm_scale)
    expect = bits(verify(backend, p))
    for form in (pool, pool[..., :528], pool[:, None], pool[:, :, None]):
        arrays = {name: backend.array(a) for name, a in p.arrays().items()}
        arrays |= {"kv_cache": backend.array(form), "indices": backend.array(slots[None].astype(np.int32))}
        got = backend.decode(**arrays, **p.words(), return_lse=True)
        assert bits(map(backend.numpy, got)) == expect


def test_b19_many_rows_at_64_heads(backend, rng):
    """No row of a long run goes wrong: every cosine at least 0.99 (here: the full contract)."""
    p = problem(rng, GLM, 250, 64, 8, slots=2048)
    out, lse = backend.run(p)
    ref, ref_lse = p.reference()
    assert oracle.cosine(out, ref).min() > 0.99
    check(out, ref, lse, ref_lse)


@each_record
def test_b20_output_never_outgrows_the_values(backend, rng, rec):
    """Every output row is at most as long as the longest value row."""
    p = problem(rng, rec, 4, 8, 50, spread=4.0)
    longest = np.linalg.norm(p.cache.rows(np.arange(p.cache.slots))[:, : rec.d_v], axis=1).max()
    out, _ = verify(backend, p)
    assert np.linalg.norm(out.astype(np.float64), axis=-1).max() <= longest * (1 + 2**-8)


def test_b21_no_entry_point_modifies_its_inputs(backend, rng):
    """Hashes of every input before and after pack, append, unpack, decode and merge."""
    p = problem(rng, DSV4, 3, 4, 40, extra="fp8")
    p.sink, p.length, p.extra_length = np.ones(4, np.float32), np.full(3, 30, np.int32), np.full(3, 9, np.int32)
    x, slots = oracle.latents(rng, 4, DSV4), np.arange(4)
    out, lse = backend.run(p)
    inputs = [*p.arrays().values(), p.cache.raw, p.extra.raw, x, slots, out, lse]
    before = [hashlib.sha256(a.tobytes()).digest() for a in inputs]
    backend.run(p)
    backend.merge_states(*map(backend.array, (out, lse, out, lse)))
    append_kv_cache(x, slots, pack_kv_cache(x, family="dsv4"), family="dsv4")
    unpack_kv_cache(p.cache.view(), family="dsv4")
    assert before == [hashlib.sha256(a.tobytes()).digest() for a in inputs]


def test_b23_scales_that_alternate_between_tiles(backend, rng):
    """Row scales 2^-6 and 2^6 by tiles of 64: every repetition right and equal."""
    x = rng.standard_normal((1024, 576)).astype(np.float32)
    x[:, :512] *= np.where(np.arange(1024) // 64 % 2, 2.0**6, 2.0**-6)[:, None]
    cache = oracle.pack(DSV3_2, x)
    q = rng.standard_normal((1, 64, 576)).astype(BF16)
    p = oracle.Problem(cache, q, np.arange(1024, dtype=np.int32)[None], 2.0**-10)
    expect = bits(verify(backend, p))
    assert all(bits(backend.run(p)) == expect for _ in range(5))


@each_record
def test_b24_one_hot_probes(backend, rec):
    """q = e_i against the single key c e_j: the logit is c where i = j and 0 elsewhere, and V lands in column j."""
    lanes = [0, 1, 7, 8, 15, 16, 31, 32, 63, 64, 127, 447, 448, 511, 512, 575, 1023, 1024, 1087]
    lanes = np.array([lane for lane in lanes if lane < rec.d_qk])
    n = len(lanes)
    x = np.zeros((n, rec.d_qk), np.float32)
    x[np.arange(n), lanes] = 6  # exact in every format
    cache = oracle.pack(rec, x, n + n % 2)
    q = np.zeros((n, n, rec.d_qk), BF16)
    q[:, np.arange(n), lanes] = 1
    indices = np.full((n, oracle.MIN_TOPK.get(rec.family, 1)), -1, np.int32)
    indices[:, 0] = np.arange(n)
    out, lse = backend.run(oracle.Problem(cache, q, indices, 1.0), lse_base="e")
    np.testing.assert_allclose(lse, 6 * np.eye(n), rtol=1e-6, atol=1e-6)
    expect = np.broadcast_to(x[:, None, : rec.d_v], out.shape)
    np.testing.assert_array_equal(out.astype(np.float32), expect)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("k", [513, 576, 1024])
def test_b25_dots3(backend, rng, heads, k):
    """Wide rows, several pages, padded pages: right values, and nothing written behind `out`."""
    p = problem(rng, DOTS3, 2, heads, k, page=16, slots=1100)
    p = p.but(cache=p.cache.relaid(16, p.cache.layout.stride + 1024, fill=0x7F))
    verify(backend, p)
    guarded = backend.array(np.full((3, heads, 1024), -3, BF16))
    backend.run(p, out=backend.view(guarded, np.s_[:2]))
    check(backend.numpy(guarded)[:2], p.reference()[0])
    assert (backend.numpy(guarded)[2] == -3).all()


def test_b26_no_width_is_truncated(backend, rng):
    """The last of 256 (or 2,051) candidates counts as the first does."""
    for k in (133, 192, 256, 2051):
        p = problem(rng, GLM53, 1, 2, k, slots=2304).but(sm_scale=0.0)  # every candidate weighs 1 / k
        cache = oracle.Cache(p.cache.layout, p.cache.raw.copy())
        cache.store([p.indices[0, -1]], np.full((1, 512), 200, np.float32))
        out, _ = verify(backend, p.but(cache=cache))
        assert oracle.rel_l2(out, p.reference()[0]).min() > 0.02


# ---------------------------------------------------------------------------------------------------------------
# C: crashes of others, as far as shapes and numbers go


@each_record
def test_c1_stale_padded_rows(backend, rng, rec):
    """Rows of a padded batch with stale indices and lengths neither fail nor disturb the real ones."""
    p = problem(rng, rec, 8, 4, 64)
    p.length = np.array([64, 50, 64, 1, 30, 64, 2**31 - 1, -(2**31)], np.int32)
    real = bits(backend.run(p.tokens(slice(6)), batch_invariant=True))
    p.indices[6:] = rng.integers(-(2**31), 2**31, (2, p.indices.shape[1]))
    out, lse = verify(backend, p, batch_invariant=True)
    assert bits((out[:6], lse[:6])) == real


@each_record
def test_c6_index_rank_does_not_matter(backend, rng, rec):
    """[T, K] and [T, 1, K]."""
    p = problem(rng, rec, 5, 2, 30)
    assert bits(backend.run(p.but(indices=p.indices[:, None]))) == bits(verify(backend, p))


def test_c7_sixteen_tokens_of_32_heads_at_192(backend, rng):
    verify(backend, problem(rng, DSV4, 16, 32, 192, slots=512))


@pytest.mark.parametrize("round_", range(6))
def test_c8_soak_of_random_shapes(backend, rng, round_):
    """Random family, sizes, page, lengths and holes between guard bytes of NaN."""
    for _ in range(4):
        rec = oracle.READABLE[rng.integers(len(oracle.READABLE))]
        tokens, heads, page = int(rng.integers(1, 6)), int(rng.integers(1, 20)), int(rng.integers(1, 70))
        p = problem(rng, rec, tokens, heads, int(rng.integers(1, 90)), page=page, slots=150)
        p = p.but(cache=p.cache.relaid(page, p.cache.layout.stride + 16 * int(rng.integers(0, 9)), fill=0xFF))
        p.length = rng.integers(-3, p.indices.shape[1] + 9, tokens).astype(np.int32)
        p.indices[rng.random(p.indices.shape) < 0.2] = rng.choice([-1, 2**31 - 1, p.cache.slots])
        verify(backend, p)


@each_record
def test_c9_indices_up_to_the_end_of_the_pool(backend, rng, rec):
    """The last slots of the last page, which need not be a full multiple of anything."""
    p = problem(rng, rec, 1, 3, 10, page=7, slots=70)
    p.indices[0, :10], p.indices[0, 10:] = np.arange(p.cache.slots - 10, p.cache.slots), -1
    verify(backend, p)


@each_record
def test_c12_zero_tokens(backend, rec):
    """T = 0 gives an empty result; pack, append and unpack of nothing do nothing."""
    words = {"family": rec.family, "kv_cache_format": rec.fmt}
    none = np.zeros((0, rec.d_qk), BF16)
    cache = pack_kv_cache(none, **words)
    assert cache.shape == (0, 64, rec.bpt)
    some = oracle.empty(rec, 1)
    append_kv_cache(none, np.zeros(0, np.int64), some.view(), **words)
    assert not some.raw.any()
    assert unpack_kv_cache(cache, **words).shape == (0, rec.d_qk)
    out, lse = backend.run(oracle.Problem(some, np.zeros((0, 8, rec.d_qk), BF16), np.zeros((0, 640), np.int32), 1.0))
    assert (out.shape, lse.shape) == ((0, 8, rec.d_v), (0, 8))


@each_record
def test_c14_query_rank_does_not_route(backend, rng, rec):
    """[6, H, D], [3, 2, H, D], [6, 1, H, D] with matching indices: identical rows."""
    p = problem(rng, rec, 6, 3, 30)
    expect = bits(verify(backend, p))
    for shape in ((3, 2), (6, 1), (1, 6)):
        q, indices = p.q.reshape(*shape, 3, -1), p.indices.reshape(*shape, -1)
        out, lse = backend.run(p.but(q=q, indices=indices))
        assert out.shape == (*shape, 3, rec.d_v)
        assert bits((out, lse)) == expect


@pytest.mark.parametrize("base", ["2", "e"])
def test_c15_a_rank_that_owns_no_selected_token(backend, rng, base):
    """Every index non-local on one of three ranks: the merge of all ranks is the joint answer."""
    p = problem(rng, GLM, 2, 8, 60)
    owner = np.where(p.indices % 2 == 0, 0, 2)
    states = [backend.run(p.but(indices=np.where(owner == r, p.indices, -1)), lse_base=base) for r in range(3)]
    assert np.isneginf(states[1][1]).all()
    out, lse = joined(backend, states, lse_base=base)
    ref, ref_lse = p.reference(base)
    check(out, ref, lse, ref_lse, tol=2e-3 + 2**-8)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_c17_small_per_request_queries(backend, rng, batch):
    """q_len 1 to 8 at eight heads."""
    for q_len in range(1, 9):
        p = problem(rng, DSV4, batch * q_len, 8, 24, slots=128)
        q, indices = p.q.reshape(batch, q_len, 8, 512), p.indices.reshape(batch, q_len, -1)
        out, lse = backend.run(p.but(q=q, indices=indices))
        check(out.reshape(-1, 8, 512), p.reference()[0], lse, p.reference()[1])


@pytest.mark.parametrize("family", ["dsv4", "dsv4_1"])
def test_c18_wide_rows_equal_their_merged_slices(backend, rng, family):
    """Primary 512 beside extra 512 in one call, against 128-wide slices joined by LSE, sink and extra on slice 0."""
    p = problem(rng, RECORDS[family, "fp8"], 2, 4, 512, slots=700, extra="fp8", extra_k=512)
    p.sink = rng.normal(0, 1, 4).astype(np.float32)
    slices = [p.but(indices=np.ascontiguousarray(p.indices[:, i : i + 128])) for i in range(0, 512, 128)]
    slices[1:] = [s.but(extra=None, extra_indices=None, sink=None) for s in slices[1:]]
    states = [backend.run(s, out=backend.array(np.zeros((2, 4, 512), np.float32))) for s in slices]
    ref, ref_lse = p.reference()
    out, lse = joined(backend, states)
    check(out, ref, lse, ref_lse, tol=backend.f32_tol)
    verify(backend, p)


# ---------------------------------------------------------------------------------------------------------------
# D: shapes that had no kernel


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("width", [192, 256])
def test_d1_draft_widths(backend, rng, heads, width):
    """133 valid of 192 or 256, five tokens."""
    p = problem(rng, DSV4, 5, heads, width, slots=400)
    p.indices[:, 133:] = -1
    verify(backend, p)


@pytest.mark.parametrize(
    ("page", "extra_page"), [(64, 32), (64, 128), (64, 256), (64, 2), (128, 64), (256, 128), (32, 64)]
)
@pytest.mark.parametrize("extra", ["fp8", "fp4"])
def test_d2_d3_d16_page_sizes_of_both_caches(backend, rng, page, extra_page, extra):
    """Every pair gives the bits of (64, 64) after re-layout."""
    p = problem(rng, DSV4_1, 2, 8, 128, slots=512, extra=extra, extra_k=256)
    expect = bits(verify(backend, p))
    assert bits(backend.run(p.but(cache=p.cache.relaid(page), extra=p.extra.relaid(extra_page)))) == expect


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("valid", [2051, 2176])
def test_d4_nope_without_padding(backend, rng, heads, valid):
    """Natively 512 wide: what a zero-padded 576-wide cache gives, to 1e-2."""
    p = problem(rng, GLM53, 1, heads, 2176, slots=2304)
    p.indices[:, valid:] = -1
    x = p.cache.rows(np.arange(p.cache.slots)).astype(np.float32)
    padded = p.but(cache=oracle.pack(GLM, np.pad(x, ((0, 0), (0, 64)))), q=np.pad(p.q, ((0, 0), (0, 0), (0, 64))))
    assert oracle.rel_l2(verify(backend, p)[0], backend.run(padded)[0]).max() < 1e-2


@pytest.mark.parametrize("base", ["2", "e"])
def test_d5_context_parallel_ranks(backend, rng, base):
    """Four ranks with all heads gathered: each sees its own tokens; merged they give the joint answer."""
    p = problem(rng, GLM, 3, 32, 100)
    p.sink = rng.normal(0, 1, 32).astype(np.float32)
    states = []
    for rank in range(4):
        local = np.where(p.indices % 4 == rank, p.indices, -1)
        states.append(backend.run(p.but(indices=local, sink=p.sink if rank == 0 else None), lse_base=base))
    assert states[0][0].shape == (3, 32, 512)
    out, lse = joined(backend, states, lse_base=base)
    ref, ref_lse = p.reference(base)
    check(out, ref, lse, ref_lse, tol=2e-3 + 2 * 2**-8)


@pytest.mark.parametrize("heads", [11, 22, 24, 48, 66, 72, 80])
@pytest.mark.parametrize("rec", [DSV4, GLM], ids=oracle.ids)
def test_d6_heads_of_three_and_six_ranks(backend, rng, rec, heads):
    verify(backend, problem(rng, rec, 2, heads, 64))


@pytest.mark.parametrize("rec", [r for r in oracle.ALL if r.code == "e2m1"], ids=oracle.ids)
def test_d7_four_bit_round_trip(rec, rng):
    """No value moves by more than one E2M1 step of its group (2 scales at the top), RoPE lanes by a bfloat16 step."""
    x = oracle.latents(rng, 64, rec, np.float32)
    words = {"family": rec.family, "kv_cache_format": rec.fmt}
    got = unpack_kv_cache(pack_kv_cache(x, **words), **words)
    parts = x[:, : rec.dims].reshape(64, rec.n_scales, rec.group)
    scale = np.abs(parts).max(-1, keepdims=True) / 6 + 2.0**-9
    assert (np.abs(got[:, : rec.dims].reshape(parts.shape) - parts) <= 2 * scale).all()
    assert (np.abs(got - x)[:, rec.dims :] <= np.abs(x[:, rec.dims :]) * 2.0**-8).all()


@pytest.mark.parametrize("width", [352, 416, 432, 288, 584, 383, 385])
def test_d7_unknown_record_widths_are_refused(backend, rng, width):
    """Only 384-byte records are dsv4 NVFP4; the message names what came or what is needed."""
    p = problem(rng, RECORDS["dsv4", "nvfp4"], 1, 2, 4)
    arrays = {name: backend.array(x) for name, x in p.arrays().items()}
    arrays["kv_cache"] = backend.array(np.zeros((2, 64, width), np.uint8))
    with pytest.raises(ValueError, match="384"):
        backend.decode(**arrays, **p.words())


@pytest.mark.parametrize("family", ["dsv4_1", "dsv4_1_inline"])
def test_d8_native_records_with_fp4_extra(backend, rng, family):
    """528-byte primary records beside 288-byte FP4 ones."""
    p = problem(rng, RECORDS[family, "fp8"], 4, 16, 128, slots=512, extra="fp4", extra_k=512)
    p.sink = rng.normal(0, 1, 16).astype(np.float32)
    verify(backend, p)


@pytest.mark.parametrize("dtype", [BF16, np.uint16, np.float16, np.float32, np.int8])
def test_d9_unpacked_caches_are_refused(backend, rng, dtype):
    """A BF16 cache is no packed cache: refused by name, never read as bytes."""
    p = problem(rng, GLM, 1, 2, 4)
    arrays = {name: backend.array(x) for name, x in p.arrays().items()}
    arrays["kv_cache"] = backend.array(np.zeros((2, 64, 656), dtype))
    with pytest.raises((TypeError, ValueError), match="kv_cache"):
        backend.decode(**arrays, **p.words())


def test_d10_dense_attention_by_counting(backend, rng):
    """Window candidates and all compressed entries 0..n-1, with a sink, no top-k choice."""
    p = problem(rng, DSV4, 2, 4, 128, slots=512, extra="fp8", extra_k=250)
    p.extra_indices = np.tile(np.arange(250, dtype=np.int32), (2, 1))
    p.sink = rng.normal(0, 1, 4).astype(np.float32)
    verify(backend, p)


def test_d11_many_query_tokens(backend, rng):
    """Prefill-sized calls are served by the same entry."""
    verify(backend, problem(rng, GLM, 257, 4, 16, slots=512))


@each_record
def test_d12_pages_of_256_without_a_copy(backend, rng, rec):
    """Native page 256 (padded to a multiple of 576 as engines do) gives the bits of page 64."""
    p = problem(rng, rec, 2, 4, 100, slots=512)
    large = p.cache.relaid(256, -(-256 * rec.bpt // 576) * 576)
    assert rec is not DSV4 or large.layout.stride == 149_760
    assert bits(backend.run(p.but(cache=large))) == bits(verify(backend, p))


@pytest.mark.parametrize("page", [1, 2, 3, 48, 100])
@each_record
def test_d13_any_positive_page_size(backend, rng, rec, page):
    p = problem(rng, rec, 2, 3, 40, slots=128)
    assert bits(backend.run(p.but(cache=p.cache.relaid(page)))) == bits(backend.run(p))


def test_d14_indices_and_cache_edited_between_calls(backend, rng):
    """The same array objects with new contents: every call reads what stands there now."""
    p = problem(rng, DSV4, 2, 4, 30)
    first = bits(verify(backend, p))
    p.indices[:] = oracle.distinct(rng, 2, 30, p.cache.slots)
    second = bits(verify(backend, p))
    p.cache.store(p.indices[0, :5], oracle.latents(rng, 5, DSV4))
    assert len({*map(tuple, (first, second, bits(verify(backend, p))))}) == 3


# ---------------------------------------------------------------------------------------------------------------
# G: calls as frameworks make them


@pytest.mark.parametrize("tokens", [1, 6, 64, 65, 300])
@pytest.mark.parametrize("rec", [DSV3_2, GLM], ids=oracle.ids)
def test_g1_vllm_576_family(backend, rng, rec, tokens):
    """q [T, 1, H, 576], cache [P, 1, 64, 656], indices [T, 1, K] padded with -1, preallocated out [T, 1, H, 512]."""
    p = problem(rng, rec, tokens, 4, 24, slots=512)
    p.indices[:, 20:] = -1
    out = backend.array(np.zeros((tokens, 1, 4, 512), BF16))
    got = backend.decode(
        backend.array(p.q[:, None]),
        backend.array(p.cache.view()[:, None]),
        backend.array(p.indices[:, None]),
        out=out,
        **p.words(),
    )
    assert got is out
    check(backend.numpy(out)[:, 0], p.reference()[0])


def test_g2_vllm_dsv4_two_pools(backend, rng):
    """Window and compressed pools with their own lengths, NHD views of padded pages, sink, out a slice; 64 and 256."""
    p = problem(rng, DSV4, 3, 8, 128, slots=512, extra="fp8", extra_k=200)
    p.length, p.extra_length = np.array([128, 5, 133], np.int32), np.array([0, 200, 77], np.int32)
    p.sink = rng.normal(0, 1, 8).astype(np.float32)
    ref, ref_lse = p.reference()
    for page, stride in ((64, 37_440), (256, 149_760)):
        padded = p.but(cache=p.cache.relaid(page, stride, fill=0xAB), extra=p.extra.relaid(page, stride, fill=0xAB))
        arrays = {name: backend.array(x) for name, x in padded.arrays().items()}
        for name in ("kv_cache", "extra_kv_cache"):
            arrays[name] = backend.view(arrays[name], np.s_[:, :, None])
        wide = backend.array(np.full((5, 8, 512), 9, BF16))
        out, lse = backend.decode(**arrays, **p.words(), out=backend.view(wide, np.s_[1:4]), return_lse=True)
        check(backend.numpy(out), ref, backend.numpy(lse), ref_lse)
        assert (backend.numpy(wide)[[0, 4]] == 9).all()


def test_g3_signatures_can_be_introspected():
    """Engines probe for keywords before they call."""
    kinds = inspect.Parameter
    decode = inspect.signature(sparse_mla.decode).parameters
    assert list(decode)[:3] == ["q", "kv_cache", "indices"]
    assert decode["kv_cache_format"].default == "fp8"
    assert decode["lse_base"].default == "2"
    assert all(decode[name].kind is kinds.KEYWORD_ONLY for name in list(decode)[3:])
    for name in ("merge_states", "pack_kv_cache", "append_kv_cache", "unpack_kv_cache", "explain_decode"):
        assert inspect.signature(getattr(sparse_mla, name)).parameters


def test_g5_sglang_padding_and_sinks(backend, rng):
    """Widths padded with -1 plus made-up lengths, sinks as views at offsets of one persistent allocation."""
    p = problem(rng, DSV4, 4, 16, 512, page=256, slots=512)
    p.indices[:, 133:], p.length = -1, np.full(4, 512, np.int32)
    layers = rng.normal(0, 2, (3, 16)).astype(np.float32)
    results = [bits(verify(backend, p.but(sink=layers[layer]))) for layer in range(3)]
    assert len(set(map(tuple, results))) == 3


def test_g6_sglang_glm_rows(backend, rng):
    """656-byte rows with arbitrary FP32 scales, page 64."""
    verify(backend, problem(rng, GLM, 2, 16, 256, slots=512))


@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_g7_an_all_zero_tile_is_no_division_by_zero(rec):
    words = {"family": rec.family, "kv_cache_format": rec.fmt}
    assert not unpack_kv_cache(pack_kv_cache(np.zeros((2, rec.d_qk), np.float32), **words), **words).any()


@each_record
def test_g8_pages_move_as_raw_blocks(backend, rng, rec):
    """Pages copied byte by byte to other places are the same pages: the layout has no hidden state."""
    p = problem(rng, rec, 2, 3, 60, page=16, slots=160)
    order = rng.permutation(p.cache.pages)
    blocks = p.cache.raw.reshape(p.cache.pages, -1)
    moved = oracle.Cache(p.cache.layout, np.ascontiguousarray(blocks[np.argsort(order)]).reshape(-1))
    page, row = np.divmod(p.indices, 16)
    assert bits(backend.run(p.but(cache=moved, indices=(order[page] * 16 + row).astype(np.int32)))) == bits(
        verify(backend, p)
    )


def test_g9_output_is_sized_by_the_query_heads(backend, rng):
    """All-gathered heads exceed any module's own count; -1 marks tokens of other ranks."""
    p = problem(rng, GLM, 2, 128, 40)
    p.indices[:, 1::2] = -1
    out, lse = verify(backend, p)
    assert (out.shape, lse.shape) == ((2, 128, 512), (2, 128))


def test_g10_framework_writer_contract(rng):
    """int64 slots with -1, the first of two rows for one slot wins, a cache of no pages is no error (I4, I5)."""
    x = oracle.latents(rng, 6, GLM)
    slots = np.array([5, -1, 63, 5, 64, 128], np.int64)
    cache = oracle.empty(GLM, 2, fill=0xAB)
    expect = oracle.Cache(cache.layout, cache.raw.copy())
    expect.store([5, 63, 64], x[[0, 2, 4]])
    append_kv_cache(x, slots, cache.view(), family="glm_nsa")
    np.testing.assert_array_equal(cache.raw, expect.raw)
    append_kv_cache(x, slots, np.zeros((0, 64, 656), np.uint8), family="glm_nsa")


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.int16, np.float32])
def test_i6_indices_of_another_type_are_refused(backend, rng, dtype):
    p = problem(rng, GLM, 1, 2, 4)
    with pytest.raises((TypeError, ValueError), match=r"indices.*int32|int32.*indices"):
        backend.run(p.but(indices=p.indices.astype(dtype)))


def test_i7_padded_queries_are_read_right_or_refused(backend, rng):
    """q as a view of wider rows (last dimension dense): never read as if it were contiguous."""
    p = problem(rng, GLM, 2, 4, 30)
    wide = np.zeros((2, 4, 640), BF16)
    wide[..., :576] = p.q
    refusal = ""
    try:
        out, _ = backend.run(p.but(q=wide[..., :576]))
    except (TypeError, ValueError) as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith("`q`")
    else:
        check(out, p.reference()[0])


@each_record
def test_size_one_dimensions_may_have_odd_strides(backend, rng, rec):
    """A single page, or a single token, has no meaningful stride there."""
    p = problem(rng, rec, 1, 2, 20, page=64, slots=64)
    expect = bits(verify(backend, p))
    view = p.cache.view()
    odd = as_strided(view, view.shape, (8, *view.strides[1:]), writeable=False)
    arrays = {name: backend.array(x) for name, x in p.arrays().items()}
    arrays |= {
        "kv_cache": backend.array(odd),
        "indices": backend.array(as_strided(p.indices, p.indices.shape, (12, 4))),
    }
    got = backend.decode(**arrays, **p.words(), return_lse=True)
    assert bits(map(backend.numpy, got)) == expect
