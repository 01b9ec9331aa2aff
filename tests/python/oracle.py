"""An independent numpy model of the packed caches and of sparse-MLA attention, in float64.

Nothing here comes from the package under test: family facts, byte layouts, quantisation rules and attention are
written down a second time, so that an agreement between the two says something.
"""

import functools
import itertools
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = ml_dtypes.float4_e2m1fn
LOG2E = float(np.log2(np.e))
FLOOR = np.float32(1e-4)
DOTS3_WINDOW = 513


@dataclass(frozen=True)
class Record:
    """Facts of one packed token: `dims` quantised values, then `rope` bfloat16 lanes, scales inline or in a footer."""

    family: str
    fmt: str
    d_qk: int
    d_v: int
    dims: int
    rope: int
    code: str
    scale: str
    group: int
    scale_bytes: int
    inline: bool

    @property
    def code_bytes(self):
        return self.dims if self.code == "e4m3" else self.dims // 2

    @property
    def data_bytes(self):
        """Bytes of a footer family's data row."""
        return self.code_bytes + 2 * self.rope

    @property
    def bpt(self):
        return self.data_bytes + self.scale_bytes

    @property
    def n_scales(self):
        return self.dims // self.group

    @property
    def id(self):
        return f"{self.family}-{self.fmt}"


RECORDS = {
    (r.family, r.fmt): r
    for r in (
        Record("dsv4", "fp8", 512, 512, 448, 64, "e4m3", "ue8m0", 64, 8, False),
        Record("dsv3_2", "fp8", 576, 512, 512, 64, "e4m3", "pow2", 128, 16, True),
        Record("glm_nsa", "fp8", 576, 512, 512, 64, "e4m3", "fp32", 128, 16, True),
        Record("glm53_nope", "fp8", 512, 512, 512, 0, "e4m3", "fp32", 128, 16, True),
        Record("dots3_swa", "fp8", 1088, 1024, 1024, 64, "e4m3", "ue8m0", 128, 8, False),
        Record("dsv4_1", "fp8", 512, 512, 512, 0, "e4m3", "ue8m0", 32, 16, False),
        Record("dsv4_1_inline", "fp8", 512, 512, 512, 0, "e4m3", "ue8m0", 32, 16, True),
        Record("dsv4", "nvfp4", 512, 512, 448, 64, "e2m1", "nvfp4", 16, 32, False),
        Record("glm_nsa", "nvfp4", 576, 512, 512, 64, "e2m1", "nvfp4", 16, 32, True),
        Record("dsv4_1", "fp4", 512, 512, 512, 0, "e2m1", "fp4", 16, 32, False),
        Record("dsv4_1_inline", "fp4", 512, 512, 512, 0, "e2m1", "fp4", 16, 32, True),
    )
}
ALL = tuple(RECORDS.values())
READABLE = tuple(r for r in ALL if r.fmt != "fp4")  # primary caches of `decode`
DUAL = (  # family, format of the primary cache, format of the secondary one
    ("dsv4", "fp8", "fp8"),
    ("dsv4", "nvfp4", "nvfp4"),
    ("dsv4_1", "fp8", "fp8"),
    ("dsv4_1", "fp8", "fp4"),
    ("dsv4_1_inline", "fp8", "fp8"),
    ("dsv4_1_inline", "fp8", "fp4"),
)
MIN_TOPK = {"dots3_swa": DOTS3_WINDOW}


def ids(record):
    """Readable pytest ids for records."""
    return record.id if isinstance(record, Record) else None


# ---------------------------------------------------------------------------------------------------------------
# Layout


@dataclass(frozen=True)
class Layout:
    """Where tokens lie: strides in bytes, `None` meaning what the writers choose."""

    rec: Record
    page: int = 64
    page_stride: int | None = None
    row_stride: int | None = None

    @property
    def row(self):
        return self.row_stride or self.rec.bpt

    @property
    def stride(self):
        return self.page_stride or -(-self.page * self.row // 16) * 16

    @property
    def payload(self):
        """Bytes of a page that carry data, row gaps included, the last one not."""
        return (self.page - 1) * self.row + self.rec.bpt

    def at(self, slots):
        """Byte offsets of the codes, scales and RoPE lanes of `slots`."""
        rec = self.rec
        page, row = np.divmod(np.asarray(slots, np.int64), self.page)
        if rec.inline:
            codes = page * self.stride + row * self.row
            scales = codes + rec.code_bytes
            return codes, scales, scales + rec.scale_bytes
        codes = page * self.stride + row * rec.data_bytes
        return codes, page * self.stride + self.page * rec.data_bytes + row * rec.scale_bytes, codes + rec.code_bytes

    def write(self, raw, slots, parts):
        """Stores quantised `parts` (codes, scales, RoPE bytes) of `slots` into the flat bytes `raw`."""
        for base, part in zip(self.at(slots), parts, strict=True):
            raw[base[:, None] + np.arange(part.shape[1])] = part

    def read(self, raw, slots):
        """The stored parts of `slots`."""
        widths = self.rec.code_bytes, self.rec.scale_bytes, 2 * self.rec.rope
        return [raw[base[:, None] + np.arange(width)] for base, width in zip(self.at(slots), widths, strict=True)]


def flat(cache):
    """The bytes under an array from its first to its last element, gaps included, as one flat view."""
    extent = 1 + sum((n - 1) * s for n, s in zip(cache.shape, cache.strides, strict=True)) if cache.size else 0
    return as_strided(cache, (extent,), (1,), writeable=cache.flags.writeable)


# ---------------------------------------------------------------------------------------------------------------
# Quantisation


def to_bf16_bits(x):
    """Bits of `x` rounded to bfloat16, ties to even; bfloat16 passes bit for bit."""
    if x.dtype == np.uint16 or x.dtype == BF16:
        return x.view(np.uint16)
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(BF16).view(np.uint16)


def to_f32(x):
    """Exact float32 values of a bfloat16 (also as uint16 bits), float16 or float32 array."""
    with np.errstate(all="ignore"):
        return (x.view(BF16) if x.dtype == np.uint16 else x).astype(np.float32)


def encode_e4m3(x):
    """E4M3 codes of finite `x`: round to nearest even, saturating."""
    return np.clip(x, np.float32(-448), np.float32(448)).astype(E4M3).view(np.uint8)


def encode_e2m1(x):
    """E2M1 codes of finite `x`: round to nearest even, saturating, -0.0 kept."""
    return np.clip(x, np.float32(-6), np.float32(6)).astype(E2M1).view(np.uint8)


def pow2_exponent(amax):
    """k of the smallest allowed power of two 2^k >= max(amax / 448, 1e-4), from the bits of the quotient."""
    ratio = np.maximum(np.maximum(amax, FLOOR) / np.float32(448), FLOOR)
    bits = ratio.view(np.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)


def quantise(rec, latent, global_scale=1.0):
    """Parts (codes, scales, RoPE bytes), uint8 [N, .], of latents [N, d_qk]."""
    n = len(latent)
    x = to_f32(latent[:, : rec.dims]).reshape(n, rec.n_scales, rec.group)
    with np.errstate(all="ignore"):
        if rec.inline and rec.scale == "nvfp4":
            x = x / np.float32(global_scale)
        codes, scales = _quantise_groups(rec, x)
    codes = codes.reshape(n, rec.dims)
    if rec.code == "e2m1":
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = scales.view(np.uint8).reshape(n, rec.n_scales * scales.dtype.itemsize)
    scales = np.pad(scales, ((0, 0), (0, rec.scale_bytes - scales.shape[1])))
    rope = np.ascontiguousarray(to_bf16_bits(latent[:, rec.dims :])).view(np.uint8).reshape(n, 2 * rec.rope)
    return codes, scales, rope


def _quantise_groups(rec, x):
    nan, bad = np.isnan(x).any(-1, keepdims=True), ~np.isfinite(x).all(-1, keepdims=True)
    finite = np.where(np.isfinite(x), x, np.float32(0))
    amax = np.abs(np.where(bad, np.float32(0), x)).max(-1, keepdims=True)
    if rec.code == "e2m1":
        ratio = amax / np.float32(6)
        floor = np.float32(2**-9 if rec.scale == "fp4" else 0)
        byte = encode_e4m3(np.clip(ratio, floor, np.float32(448)))
        scale = byte.view(E4M3).astype(np.float32)
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        codes = encode_e2m1(finite / scale if rec.scale == "fp4" else finite * inverse)
        return np.where(bad, np.uint8(0), codes), np.where(bad, np.uint8(0x7F), byte)
    if rec.scale == "fp32":
        scale = np.maximum(amax, FLOOR) / np.float32(448)
        codes = encode_e4m3(finite / scale)
    else:
        k = pow2_exponent(amax)
        scale = np.ldexp(np.float32(1), k)
        codes = encode_e4m3(np.ldexp(finite, -k))
    signed_zero = np.where(np.signbit(x), np.uint8(0x80), np.uint8(0))
    codes = np.where(bad, np.where(nan | ~np.isfinite(x), np.uint8(0x7F), signed_zero), codes)
    if rec.scale == "ue8m0":
        return codes, np.where(bad, 255, k + 127).astype(np.uint8)
    return codes, np.where(bad, np.uint32(0x7FC00000), scale.astype("<f4").view(np.uint32))


def dequantise(rec, parts, global_scale=1.0):
    """float64 [N, d_qk] of stored parts."""
    codes, scales, rope = (np.ascontiguousarray(part) for part in parts)
    n = len(codes)
    if rec.code == "e2m1":
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(n, rec.dims).view(E2M1)
    else:
        codes = codes.view(E4M3)
    if rec.scale == "ue8m0":
        scale = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(np.int32) - 127))
    elif rec.code == "e2m1":
        scale = scales.view(E4M3).astype(np.float64)
    else:
        scale = scales.view("<f4").astype(np.float64)
    if rec.inline and rec.scale == "nvfp4":
        scale = scale * float(np.float32(global_scale))
    with np.errstate(all="ignore"):
        values = codes.astype(np.float64).reshape(n, rec.n_scales, rec.group) * scale[:, : rec.n_scales, None]
        rope = rope.view(BF16).astype(np.float64)
    return np.concatenate([values.reshape(n, rec.dims), rope], 1)


# ---------------------------------------------------------------------------------------------------------------
# Caches


@dataclass
class Cache:
    """A packed cache: flat bytes and where tokens lie in them."""

    layout: Layout
    raw: np.ndarray
    global_scale: float = 1.0

    @property
    def rec(self):
        return self.layout.rec

    @property
    def pages(self):
        return len(self.raw) // self.layout.stride

    @property
    def slots(self):
        return self.pages * self.layout.page

    def view(self):
        """uint8 [pages, page, bytes per token], strided as the layout says."""
        shape = self.pages, self.layout.page, self.rec.bpt
        return as_strided(self.raw, shape, (self.layout.stride, self.layout.row, 1))

    def store(self, slots, latent):
        """Quantises `latent` into `slots`."""
        self.layout.write(self.raw, np.asarray(slots), quantise(self.rec, latent, self.global_scale))

    def rows(self, slots):
        """float64 [n, d_qk] of `slots`."""
        return dequantise(self.rec, self.layout.read(self.raw, slots), self.global_scale)

    def relaid(self, page, page_stride=None, row_stride=None, fill=0):
        """The same tokens under the same slot ids in another layout."""
        layout = Layout(self.rec, page, page_stride, row_stride)
        pages = -(-self.slots // page)
        other = Cache(layout, np.full(pages * layout.stride, fill, np.uint8), self.global_scale)
        slots = np.arange(self.slots)
        layout.write(other.raw, slots, self.layout.read(self.raw, slots))
        return other


def empty(rec, pages, page=64, page_stride=None, row_stride=None, fill=0, global_scale=1.0):
    """A cache of `fill` bytes, 16-byte aligned as numpy allocates."""
    layout = Layout(rec, page, page_stride, row_stride)
    return Cache(layout, np.full(pages * layout.stride, fill, np.uint8), global_scale)


def pack(rec, latent, page=64, page_stride=None, row_stride=None, global_scale=1.0):
    """What a writer must produce for latents [N, d_qk] in slots 0..N-1."""
    cache = empty(rec, -(-len(latent) // page), page, page_stride, row_stride, 0, global_scale)
    cache.store(np.arange(len(latent)), latent)
    return cache


# ---------------------------------------------------------------------------------------------------------------
# Attention


@dataclass
class Source:
    """One candidate list: a cache, slot ids [T, K] and optional lengths [T]."""

    cache: Cache
    indices: np.ndarray
    length: np.ndarray | None = None

    def present(self, t):
        """Slot ids of the candidates of token `t` that count, in order."""
        row = np.asarray(self.indices[t], np.int64)
        end = len(row) if self.length is None else min(max(int(self.length[t]), 0), len(row))
        window = DOTS3_WINDOW if self.cache.rec.family == "dots3_swa" else len(row)
        row = row[: min(end, window)]
        return row[(row >= 0) & (row < self.cache.slots)]

    def keys(self, tokens):
        """float64 rows of the present candidates of each token."""
        present = [self.present(t) for t in range(tokens)]
        named, inverse = np.unique(np.concatenate(present), return_inverse=True)
        table = self.cache.rows(named)
        return [table[part] for part in np.split(inverse, np.cumsum([len(p) for p in present])[:-1])]


def attend(q, sources, sm_scale, *, sink=None, base="2"):
    """float64 out [T, H, d_v] and lse [T, H] of queries [T, H, d_qk] over one joint softmax of all sources."""
    q = np.asarray(q).astype(np.float64)
    tokens, heads, _ = q.shape
    d_v = sources[0].cache.rec.d_v
    out, lse = np.zeros((tokens, heads, d_v)), np.full((tokens, heads), -np.inf)
    sink_nat = np.full(heads, -np.inf) if sink is None else np.asarray(sink).astype(np.float64)
    if not tokens:
        return out, lse
    for t, parts in enumerate(zip(*(s.keys(tokens) for s in sources), strict=True)):
        keys = np.concatenate(parts) if len(parts) > 1 else parts[0]
        scores = sm_scale * (q[t] @ keys.T)
        top = np.maximum(scores.max(1, initial=-np.inf), sink_nat)
        shift = np.where(np.isfinite(top), top, 0)
        weights = np.exp(scores - shift[:, None])
        total = weights.sum(1) + np.exp(sink_nat - shift)
        out[t] = weights @ keys[:, :d_v] / np.where(total > 0, total, 1)[:, None]
        with np.errstate(divide="ignore"):
            lse[t] = shift + np.log(total)
    return out, lse * LOG2E if base == "2" else lse


@dataclass
class Problem:
    """All inputs of one decode call."""

    cache: Cache
    q: np.ndarray
    indices: np.ndarray
    sm_scale: float
    length: np.ndarray | None = None
    sink: np.ndarray | None = None
    extra: Cache | None = None
    extra_indices: np.ndarray | None = None
    extra_length: np.ndarray | None = None

    def arrays(self):
        """Every array the call is given, by argument name."""
        views = {"kv_cache": self.cache, "extra_kv_cache": self.extra}
        named = {
            "q": self.q,
            "indices": self.indices,
            "topk_length": self.length,
            "attn_sink": self.sink,
            "extra_indices": self.extra_indices,
            "extra_topk_length": self.extra_length,
            **{name: cache and cache.view() for name, cache in views.items()},
        }
        return {name: value for name, value in named.items() if value is not None}

    def words(self):
        """The arguments that are no arrays."""
        rec = self.cache.rec
        words = {"family": rec.family, "kv_cache_format": rec.fmt, "sm_scale": self.sm_scale}
        if self.extra is not None and self.extra.rec.fmt == "fp4":
            words["extra_kv_fp4"] = True
        if self.cache.global_scale != 1:
            words["kv_global_scale"] = self.cache.global_scale
        return words

    def but(self, **changes):
        """The same problem with some fields changed."""
        return replace(self, **changes)

    def tokens(self, rows):
        """The problem of some of the tokens only."""
        picked = ("q", "indices", "length", "extra_indices", "extra_length")
        return self.but(**{n: getattr(self, n)[rows] for n in picked if getattr(self, n) is not None})

    def reference(self, base="2"):
        """float64 out and lse."""
        sources = [Source(self.cache, self.indices, self.length)]
        if self.extra is not None:
            sources.append(Source(self.extra, self.extra_indices, self.extra_length))
        return attend(self.q, sources, self.sm_scale, sink=self.sink, base=base)


# ---------------------------------------------------------------------------------------------------------------
# Error metrics


def rel_l2(got, ref):
    """Relative L2 error of each query row (all heads of a token), 0 where both are zero."""
    got, ref = (np.asarray(a).astype(np.float64).reshape(len(a), -1) for a in (got, ref))
    error, size = np.linalg.norm(got - ref, axis=1), np.linalg.norm(ref, axis=1)
    return np.where(size > 0, error / np.where(size > 0, size, 1), np.where(error > 0, np.inf, 0))


def cosine(got, ref):
    """Cosine of each query row, 1 where the reference is zero."""
    got, ref = (np.asarray(a).astype(np.float64).reshape(len(a), -1) for a in (got, ref))
    norms = np.linalg.norm(got, axis=1) * np.linalg.norm(ref, axis=1)
    return np.where(norms > 0, (got * ref).sum(1) / np.where(norms > 0, norms, 1), 1)


def lse_error(got, ref):
    """Largest absolute LSE error; infinities must agree exactly."""
    got, ref = np.asarray(got).astype(np.float64), np.asarray(ref)
    same = got == ref
    with np.errstate(invalid="ignore"):
        return float(np.where(same, 0, np.abs(got - ref)).max(initial=0))


def rounding(ref, dtype):
    """Relative L2 per query row that storing `ref` in `dtype` costs by itself."""
    return rel_l2(np.asarray(ref).astype(np.float32).astype(dtype), ref)


def check(out, ref, lse=None, ref_lse=None, *, tol=2e-3, lse_tol=1e-3):
    """Asserts the accuracy contract for every query row; empty rows must be exactly zero."""
    out = np.asarray(out)
    assert out.size == np.size(ref), f"shape {out.shape}"
    out = out.reshape(np.shape(ref))
    error, limit = rel_l2(out, ref), tol + rounding(ref, out.dtype)
    assert np.isfinite(out.astype(np.float64)).all(), "output is not finite"
    assert (error <= limit).all(), f"relative L2 {error.max():.3e}, limit {limit[error.argmax()]:.3e}"
    assert (cosine(out, ref) >= 0.9999).all(), "cosine"
    if lse is not None:
        worst = lse_error(np.asarray(lse).reshape(np.shape(ref_lse)), ref_lse)
        assert worst <= lse_tol, f"LSE error {worst:.3e}, limit {lse_tol:.1e}"


# ---------------------------------------------------------------------------------------------------------------
# Realistic data


def latents(rng, n, rec, dtype=BF16):
    """Latents [n, d_qk] with channel-dependent size, a few outlier channels and larger RoPE lanes."""
    channel = np.exp(rng.normal(0, 0.5, rec.d_qk)).astype(np.float32)
    channel[rng.choice(rec.d_qk, 4, replace=False)] *= 12
    channel[rec.d_qk - 64 :] *= 2
    x = rng.standard_normal((n, rec.d_qk), np.float32) * channel
    return x.astype(dtype)


def queries(rng, tokens, heads, cache, spread=1.0):
    """bfloat16 queries [T, H, d_qk] and a softmax scale that give logits of about `spread` standard deviations."""
    q = rng.standard_normal((tokens, heads, cache.rec.d_qk), np.float32)
    sample = cache.rows(rng.integers(0, cache.slots, 64))
    q /= np.sqrt((sample**2).mean(0) + 1e-6).astype(np.float32)
    return q.astype(BF16), spread / np.sqrt(cache.rec.d_qk)


@functools.cache
def pool(rec):
    """Quantised parts of 2,560 realistic tokens, made once."""
    return quantise(rec, latents(np.random.default_rng(ALL.index(rec)), 2560, rec))


def filled(rng, rec, slots, page=64, **layout):
    """A packed cache of at least `slots` tokens of realistic latents, a random choice from the pool."""
    made = empty(rec, -(-slots // page), page, **layout)
    pick = rng.choice(2560, made.slots, replace=made.slots > 2560)
    made.layout.write(made.raw, np.arange(made.slots), [part[pick] for part in pool(rec)])
    return made


def problem(
    rng, rec, tokens=2, heads=4, k=96, *, page=64, slots=300, spread=1.0, extra=None, extra_k=80, extra_page=64
):
    """A realistic decode call, with a secondary cache where `extra` names its format."""
    k = max(k, MIN_TOPK.get(rec.family, 1))
    cache = filled(rng, rec, slots, page)
    q, sm_scale = queries(rng, tokens, heads, cache, spread)
    made = Problem(cache, q, distinct(rng, tokens, k, cache.slots), sm_scale)
    if extra:
        made.extra = filled(rng, RECORDS[rec.family, extra], slots, extra_page)
        made.extra_indices = distinct(rng, tokens, extra_k, made.extra.slots)
    return made


def distinct(rng, tokens, k, slots):
    """int32 [T, K] slot ids, without repetition in a row where there are enough slots."""
    return np.stack([rng.choice(slots, k, replace=k > slots) for _ in range(tokens)]).astype(np.int32)


def ramp(i):
    """The values ((37 i + 11) mod 64 - 32) / 16 that the published golden bytes were made from."""
    return (((37 * np.asarray(i) + 11) % 64 - 32) / 16).astype(np.float32)


def sampled_grid(seed, count, **axes):
    """`count` seeded picks from the product of `axes`, every value of every axis used about equally often."""
    rng = np.random.default_rng(seed)
    columns = []
    for values in axes.values():
        order = list(itertools.islice(itertools.cycle(range(len(values))), count))
        columns.append([values[i] for i in rng.permutation(order)])
    return list(zip(*columns, strict=True))
