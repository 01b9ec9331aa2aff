"""pack, append and unpack on a GPU: the very bytes of the CPU, which test_caches.py compares with the oracle."""

import numpy as np
import oracle
import pytest
import sparse_mla
from oracle import BF16, RECORDS

GUARD = 0xAB
DTYPES = [BF16, np.float16, np.float32]
SPECIAL = np.array(
    [0, 1e-45, 1e-40, 2**-14, 1e-4, 448e-4, 2**-10, 6 * 2**-10, 6 * 2**-9, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6,
     448, 449, 464, 2688, 3.4e38, np.inf, np.nan],
    np.float32,
)  # fmt: skip


def words(rec):
    return {"family": rec.family, "kv_cache_format": rec.fmt, "kv_global_scale": scale_of(rec)}


def scale_of(rec):
    return 0.37 if rec.scale == "nvfp4" and rec.inline else 1.0


def adversarial(rng, rec, rows, dtype):
    """Latents whose groups of 16 differ in kind: any bits, normal of any size, ties of the codes, special values."""
    shape = rows, -(-rec.d_qk // 16), 16
    normal = rng.standard_normal(shape)
    sign = rng.choice([-1, 1], shape)
    kinds = [
        rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32),
        normal * 2.0 ** rng.integers(-40, 40, shape[:2])[..., None],
        sign * rng.integers(0, 65, shape) / 16 * 2.0 ** rng.integers(-14, 9, shape[:2])[..., None],
        sign * rng.choice(SPECIAL[:-2], shape),
        sign * rng.choice(SPECIAL, shape),
        normal,
        normal,
        normal,
    ]
    with np.errstate(all="ignore"):
        x = np.choose(rng.integers(0, len(kinds), shape[:2])[..., None], kinds).astype(np.float32)
        if dtype != np.float32:  # any bits of the narrow type, too
            narrow = x.astype(dtype)
            bits = rng.integers(0, 2**16, shape, dtype=np.uint16).view(dtype)
            return (
                np.where(rng.random(shape[:2])[..., None] < 0.1, bits, narrow).reshape(rows, -1)[:, : rec.d_qk].copy()
            )
    return x.reshape(rows, -1)[:, : rec.d_qk].copy()


def to_cuda(torch, x):
    if x.dtype == BF16:
        return torch.from_numpy(x.view(np.uint16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(x).cuda()


def same_values(got, want):
    """Equal bits, but for those of a NaN."""
    got, want = got.cpu().numpy(), np.asarray(want)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


def random_slots(rng, rows, slots, dtype):
    """Fresh, repeated, negative and too large slots."""
    picked = rng.integers(0, slots, rows)
    kind = rng.integers(0, 8, rows)
    info = np.iinfo(dtype)
    picked = np.where(kind == 0, rng.choice([-1, info.min, info.max, slots], rows), picked)
    return np.where(kind == 1, picked[0], picked).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("rec", oracle.ALL, ids=oracle.ids)
def test_bytes_of_the_cpu(torch, rec, dtype, rng):
    """B2, B7, B18: every format and type in dense and in padded pages, gaps and guard bytes included."""
    row = rec.bpt + 48 if rec.inline else None
    for page, gap, row_stride in ((64, None, None), (7, None, None), (5, 80, row)):
        x = adversarial(rng, rec, 3 * page + page // 2 + 60, dtype)
        stride = None if gap is None else -(-(page * (row_stride or rec.bpt) + gap) // 16) * 16
        strides = {"page_block_size": page, "page_stride": stride, "row_stride": row_stride}
        want = sparse_mla.pack_kv_cache(x, **strides, **words(rec))
        cache = sparse_mla.pack_kv_cache(to_cuda(torch, x), **strides, **words(rec))
        assert (tuple(cache.shape), cache.stride(0)) == (want.shape, want.strides[0])
        whole = cache.as_strided((want.shape[0] * want.strides[0],), (1,))
        raw = oracle.flat(want)
        np.testing.assert_array_equal(whole.cpu().numpy()[: len(raw)], raw)
        assert not whole[len(raw) :].any()
        same_values(sparse_mla.unpack_kv_cache(cache, **words(rec)), sparse_mla.unpack_kv_cache(want, **words(rec)))

        guarded = oracle.empty(rec, 4, page, stride, row_stride, fill=GUARD)
        memory = torch.from_numpy(guarded.raw.copy()).cuda()
        view = memory.as_strided(guarded.view().shape, guarded.view().strides)
        slots = random_slots(rng, len(x), guarded.slots, np.int32 if page == 7 else np.int64)
        sparse_mla.append_kv_cache(x, slots, guarded.view(), **words(rec))
        sparse_mla.append_kv_cache(to_cuda(torch, x), torch.from_numpy(slots).cuda(), view, **words(rec))
        np.testing.assert_array_equal(memory.cpu().numpy(), guarded.raw)


def test_every_bf16_and_f16_is_coded_alike(torch):
    """All 65,536 values of each narrow type, in groups under every scale of the E4M3 families."""
    for dtype in (BF16, np.float16):
        values = np.arange(65536, dtype=np.uint16).view(dtype).reshape(128, 512)
        for rec in (RECORDS["dsv4_1_inline", "fp8"], RECORDS["glm53_nope", "fp8"], RECORDS["dsv4_1_inline", "fp4"]):
            want = sparse_mla.pack_kv_cache(values, **words(rec))
            got = sparse_mla.pack_kv_cache(to_cuda(torch, values), **words(rec))
            np.testing.assert_array_equal(got.cpu().numpy(), want)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rec", [r for r in oracle.ALL if r.rope], ids=oracle.ids)
def test_rope_bytes_of_the_cpu(torch, rec, interleaved, rng):
    for dtype, wide in zip(DTYPES, (False, True, True), strict=True):
        x = adversarial(rng, rec, 150, dtype)
        table = rng.standard_normal((50, rec.rope)).astype(np.float32)
        table[7, ::5] = np.inf
        positions = rng.integers(-3, 55, 150).astype(np.int64 if wide else np.int32)
        slots = random_slots(rng, 150, 128, np.int32 if wide else np.int64)
        cache = oracle.empty(rec, 2, fill=GUARD)
        memory = torch.from_numpy(cache.raw.copy()).cuda()
        view = memory.as_strided(cache.view().shape, cache.view().strides)
        rope = {"rope_cos_sin": table, "rope_positions": positions}
        sparse_mla.append_kv_cache(x, slots, cache.view(), **words(rec), **rope, rope_interleaved=interleaved)
        rope = {name: torch.from_numpy(array).cuda() for name, array in rope.items()}
        arrays = to_cuda(torch, x), torch.from_numpy(slots).cuda(), view
        sparse_mla.append_kv_cache(*arrays, **words(rec), **rope, rope_interleaved=interleaved)
        np.testing.assert_array_equal(memory.cpu().numpy(), cache.raw)


@pytest.mark.parametrize("rows", [1, 8, 9, 64, 1000, 1024, 1025, 8192, 30000, 100_000])
def test_lowest_row_wins(torch, rows, rng):
    """I5: both ways of settling duplicates, on 3 slots and on many."""
    rec = RECORDS["dsv4", "nvfp4"]
    x = rng.standard_normal((rows, rec.d_qk)).astype(BF16)
    for slots in (rng.integers(5, 8, rows), random_slots(rng, rows, max(rows * 2 // 3, 8), np.int64)):
        cache = oracle.empty(rec, -(-rows // 64) + 1, fill=GUARD)
        memory = torch.from_numpy(cache.raw.copy()).cuda()
        view = memory.as_strided(cache.view().shape, cache.view().strides)
        sparse_mla.append_kv_cache(x, slots, cache.view(), **words(rec))
        sparse_mla.append_kv_cache(to_cuda(torch, x), torch.from_numpy(slots).cuda(), view, **words(rec))
        np.testing.assert_array_equal(memory.cpu().numpy(), cache.raw)


@pytest.mark.parametrize("rows", [40, 9000])
def test_graph_replay_follows_in_place_edits(torch, rows, rng):
    """Captured once on a side stream, then latents, slots and positions change under it; a replay allocates nothing."""
    rec = RECORDS["dsv3_2", "fp8"]
    sparse_mla.warmup(rec.family)
    table = rng.standard_normal((100, rec.rope)).astype(np.float32)
    cache = oracle.empty(rec, -(-rows // 64), fill=GUARD)
    latent = torch.zeros(rows, rec.d_qk, dtype=torch.bfloat16, device="cuda")
    slots, positions = (torch.zeros(rows, dtype=torch.int64, device="cuda") for _ in range(2))
    memory = torch.from_numpy(cache.raw.copy()).cuda()
    view = memory.as_strided(cache.view().shape, cache.view().strides)
    rope = {"rope_cos_sin": torch.from_numpy(table).cuda(), "rope_positions": positions}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla.append_kv_cache(latent, slots, view, **words(rec), **rope)
        unpacked = sparse_mla.unpack_kv_cache(view, **words(rec))
    for _ in range(3):
        x = rng.standard_normal((rows, rec.d_qk)).astype(BF16)
        where, when = rng.integers(-2, cache.slots, rows), rng.integers(0, 100, rows)
        latent.copy_(to_cuda(torch, x)), slots.copy_(torch.from_numpy(where)), positions.copy_(torch.from_numpy(when))
        graph.replay()
        sparse_mla.append_kv_cache(x, where, cache.view(), **words(rec), rope_cos_sin=table, rope_positions=when)
        np.testing.assert_array_equal(memory.cpu().numpy(), cache.raw)
    same_values(unpacked, sparse_mla.unpack_kv_cache(cache.view(), **words(rec)))


def test_on_the_callers_stream(torch, rng):
    """The latent is still being made on a side stream when append is called there; a named stream waits for it."""
    rec = RECORDS["glm_nsa", "fp8"]
    x = rng.standard_normal((64, rec.d_qk)).astype(BF16)
    want = sparse_mla.pack_kv_cache(x, **words(rec))
    slots, ready = torch.arange(64, device="cuda"), to_cuda(torch, x)
    for named in (False, True):
        side = torch.cuda.Stream()
        cache = torch.zeros(1, 64, rec.bpt, dtype=torch.uint8, device="cuda")
        late = torch.zeros_like(ready)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.current_stream() if named else side):
            torch.cuda._sleep(20_000_000)
            late.copy_(ready)
            sparse_mla.append_kv_cache(late, slots, cache, **words(rec), stream=side if named else None)
        side.synchronize()
        np.testing.assert_array_equal(cache.cpu().numpy(), want)


def test_offsets_beyond_4_gib(torch, rng):
    """B15: the slots lie past 2^32 bytes, by page and by page stride."""
    for rec, page_stride in ((RECORDS["dsv4", "fp8"], 37_440), (RECORDS["glm_nsa", "nvfp4"], 1 << 21)):
        pages = (5 << 30) // page_stride
        pool = torch.full((pages, page_stride), GUARD, dtype=torch.uint8, device="cuda")
        cache = pool[:, : 64 * rec.bpt]
        x = rng.standard_normal((128, rec.d_qk)).astype(BF16)
        slots = torch.arange((pages - 2) * 64, pages * 64, device="cuda")
        sparse_mla.append_kv_cache(to_cuda(torch, x), slots, cache, **words(rec))
        want = sparse_mla.pack_kv_cache(x, **words(rec)).reshape(2, -1)
        np.testing.assert_array_equal(cache[-2:].cpu().numpy(), want)
        assert (pool[:-2] == GUARD).all()
        del pool, cache
        torch.cuda.empty_cache()


def test_mistakes_are_named_and_nothing_sticks(torch, rng):
    rec = RECORDS["dsv3_2", "fp8"]
    x = to_cuda(torch, rng.standard_normal((8, rec.d_qk)).astype(BF16))
    cache = torch.full((1, 8, rec.bpt), GUARD, dtype=torch.uint8, device="cuda")
    slots, table = torch.arange(8, device="cuda"), torch.zeros(4, 64, device="cuda")
    shifted = torch.zeros(8 * rec.d_qk + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)
    append = sparse_mla.append_kv_cache
    for name, call in {
        "latent": lambda: append(shifted, slots, cache, family="dsv3_2"),
        "cache": lambda: append(x, slots, cache.cpu(), family="dsv3_2"),
        "slot_mapping": lambda: append(x, slots[:7], cache, family="dsv3_2"),
        "rope_positions": lambda: append(x, slots, cache, family="dsv3_2", rope_cos_sin=table),
        "rope_cos_sin": lambda: append(
            x, slots, cache, family="dsv3_2", rope_cos_sin=table[:, :32].clone(), rope_positions=slots
        ),
        "kv_global_scale": lambda: append(x, slots, cache, family="dsv3_2", kv_global_scale=2.0),
    }.items():
        with pytest.raises(ValueError, match=f"`{name}`"):
            call()
    torch.cuda.synchronize()
    assert (cache == GUARD).all()
    append(x, slots, cache, family="dsv3_2")
    want = sparse_mla.pack_kv_cache(x.cpu().view(torch.uint16).numpy(), family="dsv3_2", page_block_size=8)
    np.testing.assert_array_equal(cache.cpu().numpy(), want)


def test_nothing_to_do(torch):
    for rec in oracle.ALL:
        none = torch.zeros(0, rec.d_qk, dtype=torch.bfloat16, device="cuda")
        cache = sparse_mla.pack_kv_cache(none, **words(rec))
        assert tuple(cache.shape) == (0, 64, rec.bpt)
        assert tuple(sparse_mla.unpack_kv_cache(cache, **words(rec)).shape) == (0, rec.d_qk)
        sparse_mla.append_kv_cache(none, torch.zeros(0, dtype=torch.int32, device="cuda"), cache, **words(rec))
        some = torch.zeros(3, rec.d_qk, device="cuda")
        sparse_mla.append_kv_cache(some, torch.arange(3, device="cuda"), cache, **words(rec))


def test_cupy_arrays(torch, rng):
    cupy = pytest.importorskip("cupy")
    rec = RECORDS["dsv4", "fp8"]
    x = rng.standard_normal((9, rec.d_qk)).astype(np.float32)
    want = sparse_mla.pack_kv_cache(x, page_block_size=3, **words(rec))
    cache = sparse_mla.pack_kv_cache(cupy.asarray(x), page_block_size=3, **words(rec))
    assert isinstance(cache, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(cache), want)
    values = sparse_mla.unpack_kv_cache(cache, **words(rec))
    np.testing.assert_array_equal(cupy.asnumpy(values), sparse_mla.unpack_kv_cache(want, **words(rec)))
