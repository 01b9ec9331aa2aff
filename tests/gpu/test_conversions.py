"""repage and convert on a GPU: the very bytes of the CPU, which test_convert.py compares with the oracle."""

import numpy as np
import oracle
import pytest
import sparse_mla
from oracle import BF16, RECORDS
from test_writers import adversarial, scale_of, to_cuda, words


def there_is_one(a, b):
    try:
        sparse_mla.convert_kv_cache(np.zeros((0, 64, a.bpt), np.uint8), **names(a, b))
    except ValueError:
        return False
    return True


def names(a, b):
    return {"from_family": a.family, "to_family": b.family, "from_format": a.fmt, "to_format": b.fmt}


PAIRS = [(a, b) for a in oracle.ALL for b in oracle.ALL if there_is_one(a, b)]
LOSSY = [
    (a, b)
    for a, b in PAIRS
    if (a.code, a.group, a.scale) != (b.code, b.group, b.scale) and (a.scale, b.scale) != ("pow2", "fp32")
]


def strides_of(rec, page, gap, padded):
    """Strides as keyword arguments; `padded`: with gaps between rows, where rows may have them, and between pages."""
    row = rec.bpt + 48 if padded and rec.inline else None
    stride = -(-(page * (row or rec.bpt) + gap) // 16) * 16 if padded else None
    return {"page_block_size": page, "row_stride": row, "page_stride": stride}


def on_gpu(torch, cache):
    """The same bytes under the same strides, in CUDA memory."""
    raw = np.zeros(cache.shape[0] * cache.strides[0], np.uint8)
    flat = oracle.flat(cache)
    raw[: len(flat)] = flat
    return torch.from_numpy(raw).cuda().as_strided(cache.shape, cache.strides)


def noisy(rng, cache):
    """Every other page becomes any bytes whatever: NaN codes, scales that are infinite, negative, subnormal or NaN."""
    for page in cache[::2]:
        page[...] = rng.integers(0, 256, page.shape, dtype=np.uint8)
    return cache


def check(torch, cache, pair, scales, **words):
    want = sparse_mla.convert_kv_cache(cache, **names(*pair), **scales, **words)
    got = sparse_mla.convert_kv_cache(on_gpu(torch, cache), **names(*pair), **scales, **words)
    assert tuple(got.shape) == want.shape
    whole = got.as_strided((len(want) * got.stride(0),), (1,)).cpu().numpy()
    raw = oracle.flat(want)
    np.testing.assert_array_equal(whole[: len(raw)], raw)
    assert not whole[len(raw) :].any()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].id}-to-{pair[1].id}")
def test_bytes_of_the_cpu(torch, pair, rng):
    """Every pair between dense, odd and padded pages, of all slots and of some, whatever the records hold."""
    a, b = pair
    for old, new, factor in (
        ((7, 0, False), (64, 0, False), 0.37),
        ((64, 0, False), (5, 90, True), 1.0),
        ((9, 70, True), (4, 2100, True), 3e38),
        ((64, 0, False), (64, 0, False), 0.37),
    ):
        latent = adversarial(rng, a, 700, np.float32)
        from_words = {**words(a), "kv_global_scale": factor if scale_of(a) != 1 else 1.0}
        cache = noisy(rng, sparse_mla.pack_kv_cache(latent, **strides_of(a, *old), **from_words))
        scales = {
            "from_kv_global_scale": from_words["kv_global_scale"],
            "to_kv_global_scale": factor if scale_of(b) != 1 else 1.0,
        }
        held = cache.shape[0] * cache.shape[1]
        for slots in (None, held - 3, 1, 0):
            check(torch, cache, pair, scales, **strides_of(b, *new), num_slots=slots)


@pytest.mark.parametrize("pair", LOSSY, ids=lambda pair: f"{pair[0].id}-to-{pair[1].id}")
def test_every_code_under_every_byte_of_a_scale(torch, pair, rng):
    """All 256 codes or pairs of codes beside each other, under all 256 scale bytes, or as many FP32 scales."""
    a, b = pair
    layout = oracle.Layout(a, 64)
    cache = oracle.Cache(layout, np.zeros(16 * layout.stride, np.uint8), scale_of(a))
    slots = np.arange(1024)
    codes = np.stack([rng.permutation(np.tile(np.arange(256, dtype=np.uint8), 2))[: a.code_bytes] for _ in slots])
    # Groups of one kind now and then: few codes, no NaN codes, one code.
    for row in codes[::2]:
        row[...] = rng.choice(rng.integers(0, 0x7F, 4, dtype=np.uint8), a.code_bytes)
    stored = rng.integers(0, 256, (1024, a.scale_bytes), dtype=np.uint8)
    stored[:, 0] = slots % 256
    if a.scale in ("fp32", "pow2"):
        stored[1::2] = (2.0 ** rng.uniform(-20, 20, (512, a.scale_bytes // 4))).astype(np.float32).view(np.uint8)
    cache.layout.write(cache.raw, slots, [codes, stored, rng.integers(0, 256, (1024, 2 * a.rope), dtype=np.uint8)])
    scales = {"from_kv_global_scale": scale_of(a), "to_kv_global_scale": scale_of(b)}
    check(torch, cache.view(), pair, scales)


def test_exact_conversions_know_their_error(torch, rng):
    cache = sparse_mla.pack_kv_cache(rng.standard_normal((64, 512)).astype(BF16), family="dsv4_1")
    name = {"from_family": "dsv4_1", "to_family": "dsv4_1_inline"}
    _, error = sparse_mla.convert_kv_cache(on_gpu(torch, cache), **name, return_error=True)
    assert error == 0


def test_mistakes_are_named(torch):
    cache = torch.zeros(1, 64, 584, dtype=torch.uint8, device="cuda")
    name = {"from_family": "dsv4", "to_family": "dsv4", "to_format": "nvfp4"}
    for text, change in {
        "`return_error` must be False for a lossy conversion on a GPU": {"return_error": True},
        "`to_kv_global_scale` must be 1.0": {"to_kv_global_scale": 2.0},
        "`num_slots` must be at most 64": {"num_slots": 65},
        "`to_family` must be a family with 448": {"to_family": "dsv4_1", "to_format": "fp8"},
        "`page_stride` must be a multiple of 16": {"page_stride": 100},
    }.items():
        with pytest.raises(ValueError, match=text):
            sparse_mla.convert_kv_cache(cache, **{**name, **change})


def test_in_a_graph(torch, rng):
    """Captured after one eager call, then the cache changes under it."""
    a, b = RECORDS["dsv4", "fp8"], RECORDS["dsv4", "nvfp4"]
    cache = on_gpu(torch, sparse_mla.pack_kv_cache(rng.standard_normal((128, a.d_qk)).astype(BF16), **words(a)))
    sparse_mla.convert_kv_cache(cache, **names(a, b))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        converted = sparse_mla.convert_kv_cache(cache, **names(a, b))
    for _ in range(3):
        packed = sparse_mla.pack_kv_cache(rng.standard_normal((128, a.d_qk)).astype(BF16), **words(a))
        cache.copy_(to_cuda(torch, packed))
        graph.replay()
        np.testing.assert_array_equal(converted.cpu().numpy(), sparse_mla.convert_kv_cache(packed, **names(a, b)))


def test_offsets_beyond_4_gib(torch, rng):
    """The old cache's slots lie past 2^32 bytes, by page stride."""
    a, b = RECORDS["glm_nsa", "nvfp4"], RECORDS["glm_nsa", "fp8"]
    pages, stride = 40, 1 << 27
    pool = torch.zeros(pages * stride, dtype=torch.uint8, device="cuda")
    packed = sparse_mla.pack_kv_cache(rng.standard_normal((pages * 64, a.d_qk)).astype(BF16), family=a.family,
                                      kv_cache_format=a.fmt)  # fmt: skip
    cache = pool.as_strided(packed.shape, (stride, a.bpt, 1))
    cache.copy_(to_cuda(torch, packed))
    got = sparse_mla.convert_kv_cache(cache, **names(a, b), page_block_size=256)
    want = sparse_mla.convert_kv_cache(packed, **names(a, b), page_block_size=256)
    np.testing.assert_array_equal(got.cpu().numpy(), want)
