"""decode and merge_states against float64 attention over the dequantised cache."""

import hashlib

import numpy as np
import oracle
import pytest
import sparse_mla
from oracle import BF16, DOTS3_WINDOW, LOG2E, RECORDS, check

ABSENT = np.array([-1, -7, -(2**31)])
DUAL_IDS = [f"{family}-{fmt}+{extra}" for family, fmt, extra in oracle.DUAL]
SINKS = np.array([-np.inf, -1e30, -40.0, 0.0, 3.0, 60.0, 1e30], np.float32)
each_record = pytest.mark.parametrize("rec", oracle.READABLE, ids=oracle.ids)
each_dual = pytest.mark.parametrize(("family", "fmt", "extra"), oracle.DUAL, ids=DUAL_IDS)


def bits(*arrays):
    """The bytes of results, for bitwise comparison."""
    return [np.ascontiguousarray(a).tobytes() for a in arrays]


def verify(backend, p, base="2", **kwargs):
    """Runs a problem and holds it to the accuracy contract; returns out and lse."""
    out, lse = backend.run(p, lse_base=base, **kwargs)
    ref, ref_lse = p.reference(base)
    assert lse.dtype == np.float32
    check(out, ref, lse, ref_lse)
    return out, lse


def verify_f32(backend, p, tol=None):
    """As `verify` with a float32 output, which shows errors that bfloat16 rounding would cover."""
    buffer = backend.array(np.full((*p.q.shape[:2], p.cache.rec.d_v), np.nan, np.float32))
    out, lse = backend.run(p, out=buffer)
    check(out, *p.reference()[:1], lse, p.reference()[1], tol=tol or backend.f32_tol)
    return out, lse


def scattered(rng, indices, slots, keep):
    """`indices` [T, keep] spread over rows twice as wide, the other positions absent in every possible way."""
    tokens, width = len(indices), 2 * keep
    kinds = np.concatenate([ABSENT, [slots, slots + 1, 2**30, 2**31 - 1]])
    wide = rng.choice(kinds, (tokens, width)).astype(np.int32)
    for t in range(tokens):
        wide[t, np.sort(rng.choice(width, keep, replace=False))] = indices[t]
    return wide


# ---------------------------------------------------------------------------------------------------------------
# The bar itself


@pytest.mark.parametrize("k", [16, 128, 513, 2176])
def test_the_bar_rejects_zeros_a_dropped_candidate_and_a_wrong_base(k, rng):
    """An all-zero output, one candidate of average weight missing, natural-log LSE: each fails the check."""
    p = oracle.problem(rng, RECORDS["glm53_nope", "fp8"], 2, 4, k, slots=2304)
    ref, ref_lse = p.reference()
    check(ref.astype(BF16), ref, ref_lse, ref_lse)
    scores = p.sm_scale * (p.q[0].astype(np.float64) @ p.cache.rows(p.indices[0]).T)
    weights = np.exp(scores - scores.max(1, keepdims=True)).mean(0)
    typical = np.argsort(weights)[k // 2]
    dropped, dropped_lse = p.but(indices=np.where(np.arange(k) == typical, -1, p.indices)).reference()
    for wrong, wrong_lse in ((0 * ref, ref_lse), (dropped, ref_lse), (ref, dropped_lse), (ref, ref_lse / LOG2E)):
        with pytest.raises(AssertionError):
            check(wrong.astype(BF16), ref, wrong_lse, ref_lse, lse_tol=1e-3 if k < 2000 else 3e-4)
    one_head = ref.copy()
    one_head[1, 2] = 0
    with pytest.raises(AssertionError):
        check(one_head.astype(BF16), ref)


# ---------------------------------------------------------------------------------------------------------------
# Shapes

GRID = oracle.sampled_grid(
    20260923,
    54,
    rec=oracle.READABLE,
    heads=[1, 2, 3, 8, 16, 24, 33, 64, 128],
    k=[1, 2, 31, 64, 65, 133, 192, 513, 640],
    tokens=[1, 1, 2, 3, 5, 9],
    page=[1, 2, 3, 16, 48, 64, 100, 128, 256],
    base=["2", "e"],
)


@pytest.mark.parametrize(
    ("rec", "heads", "k", "tokens", "page", "base"), GRID, ids=["-".join([g[0].id, *map(str, g[1:])]) for g in GRID]
)
def test_sampled_grid(backend, rng, rec, heads, k, tokens, page, base):
    """Random shapes with random holes, out-of-range slots, lengths, a sink and duplicates."""
    p = oracle.problem(rng, rec, tokens, heads, k, page=page)
    k = p.indices.shape[1]
    if k > 2:
        p.indices[rng.random((tokens, k)) < 0.1] = -1
        p.indices[rng.random((tokens, k)) < 0.05] = p.cache.slots
        p.indices[:, k // 2] = p.indices[:, 0]
        p.length = rng.integers(k // 2, k + 3, tokens).astype(np.int32)
    if rng.random() < 0.5:
        p.sink = rng.normal(0, 2, heads).astype(np.float32)
    verify(backend, p, base)


@each_record
def test_float32_output(backend, rng, rec):
    """The bar that bfloat16 rounding does not hide."""
    verify_f32(backend, oracle.problem(rng, rec, 3, 5, 200, spread=2.0))


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_out_dtypes(backend, rng, dtype):
    """`out` decides the dtype, is returned itself, and holds the same numbers up to its rounding."""
    p = oracle.problem(rng, RECORDS["dsv4", "fp8"])
    buffer = backend.array(np.zeros((2, 4, 512), dtype))
    lse = backend.array(np.zeros((2, 4), np.float32))
    arrays = {name: backend.array(x) for name, x in p.arrays().items()}
    got = backend.decode(**arrays, **p.words(), out=buffer, lse=lse, return_lse=True)
    assert got[0] is buffer
    assert got[1] is lse
    assert backend.numpy(buffer).dtype == dtype
    check(backend.numpy(buffer), p.reference()[0], backend.numpy(lse), p.reference()[1])


def test_result_form_follows_q(rng):
    """uint16 bits in, uint16 bits out; ml_dtypes in, ml_dtypes out; the bits are the same."""
    p = oracle.problem(rng, RECORDS["dsv3_2", "fp8"])
    arrays = p.arrays()
    typed = sparse_mla.decode(**arrays, **p.words())
    arrays["q"] = arrays["q"].view(np.uint16)
    raw = sparse_mla.decode(**arrays, **p.words())
    assert (typed.dtype, raw.dtype) == (np.dtype(BF16), np.uint16)
    np.testing.assert_array_equal(typed.view(np.uint16), raw)
    buffer = np.zeros((2, 4, 512), np.uint16)
    assert sparse_mla.decode(**arrays, **p.words(), out=buffer) is buffer
    np.testing.assert_array_equal(buffer, raw)


@each_record
def test_any_number_of_tokens(backend, rng, rec):
    """No cliff at 64: a row's bits are the same at T = 1, 63, 64, 65 and 130."""
    p = oracle.problem(rng, rec, 130, 2, 9, slots=600)
    p.indices[:, 9:] = -1
    out, lse = verify(backend, p, batch_invariant=True)
    for tokens in (1, 63, 64, 65):
        few = backend.run(p.tokens(slice(tokens)), batch_invariant=True)
        assert bits(*few) == bits(out[:tokens], lse[:tokens])


@pytest.mark.parametrize("heads", range(1, 25))
def test_every_small_head_count(backend, rng, heads):
    verify(backend, oracle.problem(rng, RECORDS["dsv4", "fp8"], 1, heads, 40))


@each_record
def test_no_tokens(backend, rec):
    """T = 0 returns at once, with or without buffers."""
    p = oracle.Problem(oracle.empty(rec, 1, 4), np.zeros((0, 8, rec.d_qk), BF16), np.zeros((0, 600), np.int32), 1.0)
    out, lse = backend.run(p)
    assert (out.shape, lse.shape) == ((0, 8, rec.d_v), (0, 8))
    out, _ = backend.run(p, out=backend.array(np.zeros((0, 8, rec.d_v), np.float32)))
    assert (out.shape, out.dtype) == ((0, 8, rec.d_v), np.float32)


@each_record
@pytest.mark.parametrize("sm_scale", [0.0, -0.05, 1e-30])
def test_unusual_softmax_scales(backend, rng, rec, sm_scale):
    """Nothing is added to the scale: 0 averages, a negative one prefers what a positive one rejects."""
    verify(backend, oracle.problem(rng, rec, k=33).but(sm_scale=sm_scale))


# ---------------------------------------------------------------------------------------------------------------
# Candidates


@each_record
def test_holes_anywhere_change_no_bit(backend, rng, rec):
    """Absent in the middle, absent at the end, cut off by a length, a narrower row: the same bits."""
    keep = 288
    p = oracle.problem(rng, rec, 3, 4, k=keep)
    dense = p.indices[:, :keep]
    holes = scattered(rng, dense, p.cache.slots, keep)
    if rec.family == "dots3_swa":
        holes = np.concatenate([scattered(rng, dense[:, :250], p.cache.slots, 250), np.full((3, 76), -1, np.int32)], 1)
        dense = dense[:, :250]
    width, tail = holes.shape[1], holes.shape[1] - dense.shape[1]
    padded = np.pad(dense, ((0, 0), (0, tail)), constant_values=-1)
    garbage = np.pad(dense, ((0, 0), (0, tail)), constant_values=3)
    length = np.full(3, dense.shape[1], np.int32)
    expect = bits(*verify(backend, p.but(indices=padded)))
    if not backend.compacts:  # rounding follows positions, and nothing else of an absent candidate
        other = np.where((holes < 0) | (holes >= p.cache.slots), -2, holes)
        assert bits(*verify(backend, p.but(indices=holes))) == bits(*backend.run(p.but(indices=other)))
        assert bits(*verify(backend, p.but(indices=garbage, length=length))) == bits(
            *backend.run(p.but(indices=padded, length=length))
        )
        return
    assert bits(*backend.run(p.but(indices=holes))) == expect
    assert bits(*backend.run(p.but(indices=garbage, length=length))) == expect
    assert bits(*backend.run(p.but(indices=holes, length=np.full(3, width + 5, np.int32)))) == expect
    if rec.family != "dots3_swa":
        assert bits(*backend.run(p.but(indices=np.ascontiguousarray(dense)))) == expect


@each_record
def test_lengths_are_clamped(backend, rng, rec):
    """Below 0 is 0, above K is K; at and past the length anything may stand, also what would be a fault."""
    p = oracle.problem(rng, rec, 8, 3, 70)
    k = p.indices.shape[1]
    p.length = np.array([-(2**31), -1, 0, 1, k - 1, k, k + 1, 2**31 - 1], np.int32)
    p.length[5] = min(k, 513)
    for t, length in enumerate(p.length):
        if length < 0:
            continue  # slots that exist, and must not be read all the same
        p.indices[t, length:] = rng.choice([2**30, 2**31 - 1, p.cache.slots + 10**6, -5])
    out, lse = verify(backend, p)
    assert not out[:3].any()
    assert np.isneginf(lse[:3]).all()
    assert np.isfinite(lse[3:]).all()


@each_record
def test_duplicates_count_each_time(backend, rng, rec):
    """A candidate named three times weighs three times."""
    p = oracle.problem(rng, rec, 2, 4, 9)
    p.indices[:, 9:] = -1
    p.indices[:, 1] = p.indices[:, 4] = p.indices[:, 0]
    out, lse = verify(backend, p)
    p.indices[:, 1] = p.indices[:, 4] = -1
    once = p.reference()
    assert oracle.rel_l2(out, once[0]).min() > 0.05
    assert (lse > once[1] + 0.01).all()


@each_record
def test_out_of_range_slots_are_absent(backend, rng, rec):
    """The last slot counts, the next one does not, wherever an unchecked address would land."""
    p = oracle.problem(rng, rec, 1, 3, 12, slots=64, page=16)
    p.indices[:, 12:] = -1
    p.indices[0, :6] = [p.cache.slots - 1, p.cache.slots, p.cache.slots + 1, 2**30, 2**31 - 1, -(2**31)]
    out, _ = verify(backend, p)
    p.indices[0, 0] = -1
    assert oracle.rel_l2(out, p.reference()[0]).min() > 0.01


@each_record
def test_unnamed_rows_may_hold_anything(backend, rng, rec):
    """NaN codes, NaN scales and NaN RoPE lanes in slot 0, in every unnamed slot, in gaps: no bit changes."""
    p = oracle.problem(rng, rec, 2, 4, 40, page=8)
    p.indices[p.indices == 0] = 1
    p.indices[:, ::5] = -1
    p.indices[:, 3::7] = 2**30
    clean = verify(backend, p)
    dirty = oracle.empty(rec, p.cache.pages, 8, p.cache.layout.stride + 48, fill=0xFF)
    named = np.unique(p.indices[(p.indices >= 0) & (p.indices < p.cache.slots)])
    dirty.layout.write(dirty.raw, named, p.cache.layout.read(p.cache.raw, named))
    assert bits(*backend.run(p.but(cache=dirty))) == bits(*clean)


def test_window_of_dots3(backend, rng):
    """Positions from 513 on are not read, position 512 is; absent positions inside the window still use it up."""
    p = oracle.problem(rng, RECORDS["dots3_swa", "fp8"], 2, 3, 700, slots=800)
    p.indices[:, :50] = -1
    out, lse = verify(backend, p)
    inside, outside = p.indices.copy(), p.indices.copy()
    outside[:, DOTS3_WINDOW:] = 0
    assert bits(*backend.run(p.but(indices=outside))) == bits(out, lse)
    assert bits(*backend.run(p.but(indices=np.ascontiguousarray(p.indices[:, :DOTS3_WINDOW])))) == bits(out, lse)
    assert bits(*backend.run(p.but(length=np.array([513, 699], np.int32)))) == bits(out, lse)
    inside[:, DOTS3_WINDOW - 1] = -1
    assert bits(*backend.run(p.but(indices=inside))) != bits(out, lse)


def test_index_forms(backend, rng):
    """[T, K], [T, 1, K], [B, Q, K] with 3-D and 4-D queries name the same rows."""
    p = oracle.problem(rng, RECORDS["dsv4", "fp8"], 6, 4, 50)
    p.length = rng.integers(1, 51, 6).astype(np.int32)
    out, lse = verify(backend, p)
    same = [
        p.but(indices=p.indices[:, None]),
        p.but(q=p.q[:, None], indices=p.indices[:, None], length=p.length[:, None]),
        p.but(q=p.q.reshape(3, 2, 4, 512), indices=p.indices.reshape(3, 2, 50), length=p.length.reshape(3, 2)),
        p.but(q=p.q.reshape(1, 6, 4, 512), indices=p.indices.reshape(1, 6, 50), length=p.length.reshape(1, 6)),
        p.but(q=p.q.reshape(2, 3, 4, 512), indices=p.indices.reshape(2, 3, 50)),
    ]
    for number, other in enumerate(same):
        got, got_lse = backend.run(other)
        assert got.shape == (*other.q.shape[:-1], 512), number
        assert bits(got, got_lse) == bits(out, lse), number


# ---------------------------------------------------------------------------------------------------------------
# Empty rows and sinks


@pytest.mark.parametrize("base", ["2", "e"])
@each_record
def test_empty_rows(backend, rng, rec, base):
    """All negative, all out of range, length 0: exactly 0 and -inf; with a sink exactly the sink's value."""
    p = oracle.problem(rng, rec, 4, len(SINKS), 20)
    p.indices[0], p.indices[1] = rng.choice(ABSENT), p.cache.slots
    p.length = np.array([p.indices.shape[1]] * 2 + [0, p.indices.shape[1]], np.int32)
    out, lse = verify(backend, p, base)
    assert not out[:3].any()
    assert np.isneginf(lse[:3]).all()
    out, lse = backend.run(p.but(sink=SINKS), lse_base=base)
    assert not out[:3].any()
    expect = SINKS.astype(np.float64) * (LOG2E if base == "2" else 1)
    if base == "e":
        np.testing.assert_array_equal(lse[:3], np.stack([SINKS] * 3))
    else:
        np.testing.assert_allclose(lse[:3], np.stack([expect] * 3), rtol=2**-23)  # one ulp for the change of base


@each_record
def test_a_cache_without_pages_has_no_candidates(backend, rng, rec):
    """Every index is out of range then: empty rows, no error."""
    p = oracle.problem(rng, rec, 2, 3, 8)
    out, lse = backend.run(p.but(cache=oracle.empty(rec, 0)))
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("base", ["2", "e"])
@each_record
def test_sinks(backend, rng, rec, base):
    """A sink of any size joins the normaliser and the LSE of its own head only."""
    p = oracle.problem(rng, rec, 2, len(SINKS), 40)
    ref, ref_lse = p.but(sink=SINKS).reference(base)
    out, lse = backend.run(p.but(sink=SINKS), lse_base=base)
    check(out, ref)
    np.testing.assert_allclose(lse, ref_lse, rtol=2e-7, atol=1e-3)
    for head in range(len(SINKS)):
        check(out[:, head], ref[:, head])
    plain, plain_lse = backend.run(p, lse_base=base)
    assert bits(out[:, 0], lse[:, 0]) == bits(plain[:, 0], plain_lse[:, 0])  # -inf is no sink
    with np.errstate(over="ignore"):
        gate = 1 / (1 + np.exp(SINKS - p.reference("e")[1]))
    check(out, p.reference()[0] * gate[..., None])


# ---------------------------------------------------------------------------------------------------------------
# Secondary caches


@pytest.mark.parametrize(("page", "extra_page"), [(64, 64), (64, 2), (16, 100), (3, 1), (256, 64)])
@each_dual
def test_two_caches_share_one_softmax(backend, rng, family, fmt, extra, page, extra_page):
    """Each list has its own cache, page size, holes and lengths."""
    p = oracle.problem(rng, RECORDS[family, fmt], 3, 5, 70, page=page, extra=extra, extra_k=90, extra_page=extra_page)
    p.length = np.array([70, 33, 75], np.int32)
    p.extra_length = np.array([768, 90, 41], np.int32)
    p.indices[:, 5::9] = -1
    p.extra_indices[:, ::11] = p.extra.slots
    out, lse = verify(backend, p)
    alone = p.but(extra=None, extra_indices=None, extra_length=None).reference()
    assert oracle.rel_l2(out, alone[0]).min() > 0.1
    assert (lse > alone[1] + 0.1).all()


@each_dual
def test_either_cache_may_have_no_candidates(backend, rng, family, fmt, extra):
    """One empty side gives the other side's result, both empty give an empty row."""
    p = oracle.problem(rng, RECORDS[family, fmt], 4, 3, 40, extra=extra, extra_k=30)
    p.length, p.extra_length = np.array([0, 40, 40, 0], np.int32), np.array([30, 0, 30, 0], np.int32)
    p.extra_indices[2] = -1
    out, lse = verify(backend, p)
    assert not out[3].any()
    assert np.isneginf(lse[3]).all()
    single = p.but(extra=None, extra_indices=None, extra_length=None)
    check(out[1:3], single.reference()[0][1:3])
    verify(backend, p.but(sink=np.array([-1.0, 0.5, 2.0], np.float32)))


@pytest.mark.parametrize(("slots", "extra_slots"), [(64, 16), (16, 64)])
def test_bounds_of_the_two_caches_are_their_own(backend, rng, slots, extra_slots):
    """A slot that exists in one cache only is absent in the other."""
    p = oracle.problem(rng, RECORDS["dsv4_1", "fp8"], 1, 2, 8, page=16, slots=slots, extra="fp4", extra_k=8)
    p.extra = oracle.filled(rng, RECORDS["dsv4_1", "fp4"], extra_slots, 16)
    p.indices[0], p.extra_indices[0] = [[15, 16, 63, 64, 0, 1, 2, 3]] * 2
    verify(backend, p)


@each_dual
def test_dual_float32_output(backend, rng, family, fmt, extra):
    verify_f32(backend, oracle.problem(rng, RECORDS[family, fmt], 2, 4, 60, extra=extra, spread=2.0))


# ---------------------------------------------------------------------------------------------------------------
# Layouts and buffers


@each_record
def test_layouts_of_one_cache_give_the_same_bits(backend, rng, rec):
    """Page sizes, padded pages, padded rows, and 2-D, 3-D, HND and NHD views of the same tokens."""
    p = oracle.problem(rng, rec, 2, 3, 50, slots=256)
    p.length = np.array([50, 31], np.int32)
    expect = bits(*verify(backend, p))
    pitch = None if not rec.inline else 672
    others = [p.cache.relaid(page, fill=0xFF) for page in (1, 2, 5, 16, 256)]
    others.append(p.cache.relaid(64, -(-64 * rec.bpt // 576) * 576 + 576 * 16, fill=0xFF))
    others.append(p.cache.relaid(4, None, pitch, fill=0xFF))
    for other in others:
        assert bits(*backend.run(p.but(cache=other))) == expect
        view = backend.array(other.view())
        wanted = [(slice(None), None), (slice(None), slice(None), None)]
        for key in wanted:
            arrays = {name: backend.array(x) for name, x in p.arrays().items()}
            arrays["kv_cache"] = backend.view(view, key)
            out, lse = backend.decode(**arrays, **p.words(), return_lse=True)
            assert bits(backend.numpy(out), backend.numpy(lse)) == expect
    arrays = {name: backend.array(x) for name, x in p.arrays().items()}
    arrays["kv_cache"] = backend.array(p.cache.raw.reshape(p.cache.pages, -1))
    out, lse = backend.decode(**arrays, **p.words(), return_lse=True)
    assert bits(backend.numpy(out), backend.numpy(lse)) == expect


def test_one_layer_of_a_multi_layer_block(backend, rng):
    """Pages of one layer at a 460,224-byte pitch, between pages of other layers."""
    rec = RECORDS["dsv4", "fp8"]
    p = oracle.problem(rng, rec, 2, 3, 40, page=128, slots=512)
    block = np.full((4, 460_224), 0xFF, np.uint8)
    layer = block[:, 37_440 : 37_440 + 128 * rec.bpt]
    layer[:] = p.cache.raw.reshape(4, -1)
    arrays = {name: backend.array(x) for name, x in p.arrays().items()}
    arrays["kv_cache"] = backend.array(layer)
    out, lse = backend.decode(**arrays, **p.words(), return_lse=True)
    assert bits(backend.numpy(out), backend.numpy(lse)) == bits(*backend.run(p))


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@each_record
def test_strided_outputs_and_indices(backend, rng, rec, dtype):
    """Views of wider buffers: the right values inside, every guard value outside untouched."""
    p = oracle.problem(rng, rec, 3, 5, 20)
    p.length = np.array([20, 0, 7], np.int32)
    k = p.indices.shape[1]
    outs = backend.array(np.full((4, 7, rec.d_v + 8), 1234, dtype))
    lses = backend.array(np.full((3, 10), 1234.5, np.float32))
    rows = np.zeros((3, 2 * k), np.int32)
    rows[:, :k] = p.indices
    arrays = {name: backend.array(x) for name, x in p.arrays().items()}
    arrays["indices"] = backend.view(backend.array(rows), (slice(None), slice(k)))
    inner = slice(3), slice(1, 6), slice(8, None)
    backend.decode(
        **arrays,
        **p.words(),
        out=backend.view(outs, inner),
        lse=backend.view(lses, (slice(None), slice(5))),
        return_lse=True,
    )
    outs, lses = backend.numpy(outs), backend.numpy(lses)
    check(outs[inner], p.reference()[0], lses[:, :5], p.reference()[1])
    guard = np.ones(outs.shape, bool)
    guard[inner] = False
    assert (outs[guard] == np.asarray(1234, dtype)).all()
    assert (lses[:, 5:] == 1234.5).all()


def test_lse_buffer_is_filled_without_being_returned(backend, rng):
    p = oracle.problem(rng, RECORDS["dsv4", "fp8"])
    lse = backend.array(np.full((2, 4), np.nan, np.float32))
    arrays = {name: backend.array(x) for name, x in p.arrays().items()}
    out = backend.decode(**arrays, **p.words(), lse=lse)
    check(backend.numpy(out), p.reference()[0], backend.numpy(lse), p.reference()[1])


@each_dual
def test_inputs_are_never_modified(backend, rng, family, fmt, extra):
    """Read-only inputs are accepted; their bytes are the same afterwards."""
    p = oracle.problem(rng, RECORDS[family, fmt], 3, 4, 40, extra=extra)
    p.sink = np.zeros(4, np.float32)
    p.length = p.extra_length = np.array([3, 0, 99], np.int32)
    inputs = p.arrays()
    for cache in (p.cache, p.extra):
        cache.raw.setflags(write=False)
    inputs = {**p.arrays(), "cache bytes": p.cache.raw, "extra bytes": p.extra.raw}
    for x in inputs.values():
        x.setflags(write=False)
    before = [hashlib.sha256(x.tobytes()).digest() for x in inputs.values()]
    backend.run(p)
    assert before == [hashlib.sha256(x.tobytes()).digest() for x in inputs.values()]


# ---------------------------------------------------------------------------------------------------------------
# Same bits


@each_record
def test_rows_do_not_depend_on_their_batch(backend, rng, rec):
    """Alone, in another order, beside other lengths: the same bits with batch_invariant=True."""
    p = oracle.problem(rng, rec, 9, 3, 130)
    p.length = rng.integers(0, 131, 9).astype(np.int32)
    out, lse = verify(backend, p, batch_invariant=True)
    for t in range(0, 9, 2):
        assert bits(*backend.run(p.tokens(slice(t, t + 1)), batch_invariant=True)) == bits(out[t], lse[t])
    order = rng.permutation(9)
    assert bits(*backend.run(p.tokens(order), batch_invariant=True)) == bits(out[order], lse[order])
    other = p.but(length=np.where(np.arange(9) == 4, p.length, 0).astype(np.int32))
    again, again_lse = backend.run(other, batch_invariant=True)
    assert bits(again[4], again_lse[4]) == bits(out[4], lse[4])


@each_record
def test_same_inputs_same_bits(backend, rng, rec):
    p = oracle.problem(rng, rec, 5, 8, 150)
    first = bits(*backend.run(p))
    assert all(bits(*backend.run(p)) == first for _ in range(4))


# ---------------------------------------------------------------------------------------------------------------
# Adversarial numbers


def with_scales(rng, rec, exponents, slots=192):
    """A cache whose group (slot, g) is of size 2^exponents, RoPE lanes of size 1."""
    x = rng.standard_normal((slots, rec.d_qk)).astype(np.float32)
    size = np.ldexp(np.float32(1), np.broadcast_to(exponents, (slots, rec.n_scales)))
    x[:, : rec.dims] *= size.repeat(rec.group, 1)
    return oracle.pack(rec, x)


def aimed(rng, cache, q, k, top, tokens, heads):
    """A problem whose largest |logit| is `top`."""
    indices = oracle.distinct(rng, tokens, max(k, oracle.MIN_TOPK.get(cache.rec.family, 1)), cache.slots)
    q = q.astype(BF16)
    scores = np.abs(np.einsum("thd,kd->thk", q.astype(np.float64), cache.rows(np.arange(cache.slots))))
    return oracle.Problem(cache, q.reshape(tokens, heads, -1), indices, float(top / scores.max()))


@each_record
def test_groups_of_very_different_size(backend, rng, rec):
    """Neighbouring groups 2^20 apart (2^14 with E4M3 scales), queries inversely so: every group of V is right."""
    reach = 10 if rec.code == "e4m3" else 7
    exponents = np.where(np.arange(rec.n_scales) % 2, reach, -reach)
    cache = with_scales(rng, rec, exponents)
    q = rng.standard_normal((2, 4, rec.d_qk)).astype(np.float32)
    q[..., : rec.dims] *= np.ldexp(np.float32(1), -exponents).repeat(rec.group)
    p = aimed(rng, cache, q, 100, 8, 2, 4)
    out, _ = verify(backend, p)
    f32, _ = backend.run(p, out=backend.array(np.zeros((2, 4, rec.d_v), np.float32)))
    ref = p.reference()[0]
    for start in range(0, rec.d_v, rec.group):
        part = np.s_[:, :, start : start + rec.group]
        check(out[part], ref[part])
        check(f32[part], ref[part])


@each_record
def test_rows_and_groups_of_random_size(backend, rng, rec):
    """Every group of every row of its own size: a few rows dominate, their scales decide."""
    low, high = (-10, 11) if rec.code == "e4m3" else (-7, 8)
    cache = with_scales(rng, rec, rng.integers(low, high, (192, rec.n_scales)))
    verify(backend, aimed(rng, cache, rng.standard_normal((2, 4, rec.d_qk)), 100, 30, 2, 4))


@pytest.mark.parametrize("sign", [1, -1])
@each_record
def test_huge_logits(backend, rng, rec, sign):
    """All logits about +-1e15, the best far ahead: its value row comes out, nothing overflows or turns NaN."""
    direction = rng.standard_normal(rec.d_qk).astype(np.float32)
    cache = oracle.pack(rec, sign * direction * 1.25 ** rng.permutation(12)[:, None].astype(np.float32), 4)
    p = aimed(rng, cache, np.tile(direction, (3, 2, 1)), 12, 1e15, 3, 2)
    p.indices[:] = np.pad(np.arange(12), (0, p.indices.shape[1] - 12), constant_values=-1)
    scores = p.sm_scale * (p.q[0, 0].astype(np.float64) @ cache.rows(np.arange(12)).T)
    assert (np.sign(scores) == sign).all()
    assert np.diff(np.sort(scores)[-2:]) > 1e12
    ref, ref_lse = p.reference()
    out, lse = backend.run(p)
    check(out, ref)
    assert np.abs(lse / ref_lse - 1).max() < 1e-5  # float32 cannot hold such an LSE to 1e-3


@each_record
def test_logits_of_hundreds(backend, rng, rec):
    """Sharp but not degenerate: the sum has a few terms of very different size."""
    p = oracle.problem(rng, rec, 2, 4, 120, spread=40.0)
    ref, ref_lse = p.reference()
    out, lse = backend.run(p)
    check(out, ref, lse, ref_lse)


def tail_problem(rec, logits, values):
    """Queries that see `logits` through the last lane; V is 6 * `values` in all other lanes, exact in every format."""
    n = len(logits)
    cache = oracle.empty(rec, -(-n // 64))
    x = np.zeros((n, rec.d_qk), np.float32)
    x[:, : rec.d_v] = 6 * np.asarray(values)[:, None]
    x[:, -1] = logits
    cache.store(np.arange(n), x)
    q = np.zeros((1, 2, rec.d_qk), BF16)
    q[..., -1] = 1
    return oracle.Problem(cache, q, np.arange(n, dtype=np.int32)[None], 1.0)


@pytest.mark.parametrize("tail", [-4.0, -7.0, -12.0])
@pytest.mark.parametrize("where", [0, 1500])
@pytest.mark.parametrize("rec", [r for r in oracle.READABLE if r.rope and r.family != "dots3_swa"], ids=oracle.ids)
def test_long_flat_tails(backend, rec, tail, where):
    """One logit 0 among 2,047 equal small ones: the tail's share of V is neither lost nor inflated."""
    logits, values = np.full(2048, tail), np.ones(2048)
    logits[where] = 0
    out, _ = verify(backend, tail_problem(rec, logits, values))
    np.testing.assert_allclose(out[..., :448].astype(np.float64), 6, rtol=2**-8)
    values[where] = 0
    share = 2047 * np.exp(tail) / (1 + 2047 * np.exp(tail))
    out, _ = verify(backend, tail_problem(rec, logits, values))
    np.testing.assert_allclose(out[..., :448].astype(np.float64), 6 * share, rtol=2**-7)


@each_record
def test_random_and_saturated_codes(backend, rng, rec):
    """Every finite code, half of them saturated, with scales over six powers of two."""
    cache = oracle.empty(rec, 3)
    slots = np.arange(cache.slots)
    codes = rng.integers(0, 256, (cache.slots, rec.code_bytes), np.uint8)
    full = rng.choice([0x7E, 0xFE] if rec.code == "e4m3" else [0x77, 0x7F, 0xF7, 0xFF], codes.shape).astype(np.uint8)
    codes = np.where(rng.random(codes.shape) < 0.5, full, codes)
    codes[(codes & 0x7F) == 0x7F] -= 1 if rec.code == "e4m3" else 0
    width = rec.scale_bytes
    scales = {
        "ue8m0": rng.integers(124, 130, (cache.slots, width), np.uint8),
        "nvfp4": rng.integers(0x28, 0x50, (cache.slots, width), np.uint8),
    }.get(rec.scale)
    if scales is None:
        scales = rng.uniform(0.1, 8, (cache.slots, 4)).astype("<f4").view(np.uint8)
    rope = rng.standard_normal((cache.slots, rec.rope)).astype(BF16).view(np.uint8).reshape(cache.slots, -1)
    cache.layout.write(cache.raw, slots, (codes, scales, rope))
    verify(backend, aimed(rng, cache, rng.standard_normal((2, 5, rec.d_qk)), 150, 12, 2, 5))


@each_record
def test_output_stays_in_the_convex_hull(backend, rng, rec):
    """No coordinate leaves the range of its candidates' values, no row outgrows the longest of them."""
    p = oracle.problem(rng, rec, 4, 6, 25, spread=3.0)
    out = backend.run(p)[0].astype(np.float64)
    for t in range(4):
        values = p.cache.rows(oracle.Source(p.cache, p.indices).present(t))[:, : rec.d_v]
        slack = 2**-8 * np.abs(values).max(0)
        assert (out[t] <= values.max(0) + slack).all()
        assert (out[t] >= values.min(0) - slack).all()
        assert (np.linalg.norm(out[t], axis=-1) <= np.linalg.norm(values, axis=-1).max() * (1 + 2**-8)).all()


@each_record
def test_a_single_candidate_is_returned_as_it_is(backend, rng, rec):
    """Weight exactly 1: the dequantised row, rounded once."""
    p = oracle.problem(rng, rec, 3, 2, 1)
    p.indices[:, 1:] = -1
    out, _ = verify(backend, p)
    rows = p.cache.rows(p.indices[:, 0])[:, None, : rec.d_v].astype(np.float32).astype(BF16)
    if rec.scale == "fp32" and backend.name == "cuda":  # an arbitrary scale meets its weight as float16
        np.testing.assert_allclose(
            out.astype(np.float32), np.broadcast_to(rows, out.shape).astype(np.float32), rtol=2**-7
        )
    else:
        np.testing.assert_array_equal(out, np.broadcast_to(rows, out.shape))


# ---------------------------------------------------------------------------------------------------------------
# merge_states


def halves(p, cut):
    """Two problems over disjoint parts of the indices row."""
    return p.but(indices=np.ascontiguousarray(p.indices[:, :cut])), p.but(
        indices=np.ascontiguousarray(p.indices[:, cut:]), sink=None
    )


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("base", ["2", "e"])
@pytest.mark.parametrize("cut", [1, 37, 79])
def test_merge_equals_joint_decode(backend, rng, dtype, base, cut):
    """Two halves joined give the answer over all candidates, the sink counted on one side."""
    p = oracle.problem(rng, RECORDS["glm_nsa", "fp8"], 3, 4, 80, spread=2.0)
    p.sink = rng.normal(0, 2, 4).astype(np.float32)
    states = []
    for half in halves(p, cut):
        states += backend.run(half, lse_base=base, out=backend.array(np.zeros((3, 4, 512), dtype)))
    out, lse = map(backend.numpy, backend.merge_states(*map(backend.array, states), lse_base=base))
    assert (out.dtype, lse.dtype) == (np.dtype(dtype), np.float32)
    ref, ref_lse = p.reference(base)
    inputs_rounding = 2 * oracle.rounding(ref, dtype).max()
    check(out, ref, lse, ref_lse, tol=inputs_rounding + (backend.f32_tol if dtype == np.float32 else 2e-3))


@pytest.mark.parametrize("base", ["2", "e"])
def test_merge_ignores_an_empty_side(backend, rng, base):
    """-inf on a side: the other side bit for bit, whatever stands in the ignored output, NaN included."""
    out = rng.standard_normal((2, 3, 512)).astype(BF16)
    lse = rng.normal(0, 50, (2, 3)).astype(np.float32)
    none = np.full((2, 3), -np.inf, np.float32)
    for junk in (np.nan, np.inf, 7.0):
        other = np.full((2, 3, 512), junk, BF16)
        for args in ((out, lse, other, none), (other, none, out, lse)):
            got = backend.merge_states(*map(backend.array, args), lse_base=base)
            assert bits(*map(backend.numpy, got)) == bits(out, lse)
        got, got_lse = map(backend.numpy, backend.merge_states(*map(backend.array, (other, none, other, none))))
        assert not got.astype(np.float32).any()
        assert np.isneginf(got_lse).all()


@pytest.mark.parametrize("base", ["2", "e"])
def test_merge_of_far_apart_sides(backend, rng, base):
    """LSEs up to 1e30 apart: no overflow, the larger side wins; equal sides give the mean and one more bit."""
    a, b = rng.standard_normal((2, 5, 1, 512)).astype(np.float32)
    lse_a = np.array([[1e30], [-1e30], [200.0], [3.0], [0.0]], np.float32)
    lse_b = np.array([[-1e30], [1e30], [-200.0], [3.0], [1.0]], np.float32)
    out, lse = map(backend.numpy, backend.merge_states(*map(backend.array, (a, lse_a, b, lse_b)), lse_base=base))
    np.testing.assert_array_equal(out[:3], np.stack([a[0], b[1], a[2]]))
    np.testing.assert_allclose(out[3], (a[3] + b[3]) / 2, rtol=1e-6, atol=1e-6)
    weight = 2 / 3 if base == "2" else np.e / (1 + np.e)
    np.testing.assert_allclose(out[4], (1 - weight) * a[4] + weight * b[4], rtol=1e-5, atol=1e-6)
    log = np.log2 if base == "2" else np.log
    expect = [1e30, 1e30, 200, 3 + log(2), log(1 + (2 if base == "2" else np.e))]
    np.testing.assert_allclose(lse[:, 0], expect, rtol=1e-6)


def test_merge_is_symmetric_and_keeps_its_inputs(backend, rng):
    a, b = rng.standard_normal((2, 3, 2, 64)).astype(np.float32)
    lse_a, lse_b = rng.normal(0, 3, (2, 3, 2)).astype(np.float32)
    for x in (a, b, lse_a, lse_b):
        x.setflags(write=False)
    before = bits(a, lse_a, b, lse_b)
    one = backend.merge_states(*map(backend.array, (a, lse_a, b, lse_b)))
    two = backend.merge_states(*map(backend.array, (b, lse_b, a, lse_a)))
    np.testing.assert_allclose(backend.numpy(one[0]), backend.numpy(two[0]), rtol=1e-6, atol=1e-6)
    assert bits(a, lse_a, b, lse_b) == before


# ---------------------------------------------------------------------------------------------------------------
# Arrays of other libraries


class Producer:
    """Nothing but the two methods of DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@each_record
def test_dlpack_arrays_are_read_as_numpy_ones(rec, rng):
    p = oracle.problem(rng, rec, 3, 5, 70)
    arrays, words = p.arrays(), p.words()
    out, lse = sparse_mla.decode(**arrays, **words, return_lse=True)
    plain = {name: x.view(np.uint16) if x.dtype == BF16 else x for name, x in arrays.items()}
    given = {name: Producer(x) for name, x in plain.items()}
    assert bits(*sparse_mla.decode(**given, **words, return_lse=True)) == bits(out, lse)
