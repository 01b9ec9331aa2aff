"""Plain Python answers for eligibility and geometry, written from the documented rules only.

Nothing here imports the package under test, so a rule that is wrong in both places was misread twice.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BruteConfig:
    """The config class as a frozen dataclass: 13 fields in their order, three queries."""

    d_qk: int
    page_block_size: int
    max_num_tokens: int
    topks: frozenset[int]
    min_topk: int
    max_num_heads: int
    kv_cache_format: str = "fp8"
    bytes_per_token: int = 0
    head_counts: frozenset[int] | None = None
    topk_is_runtime: bool = True
    extra_page_block_sizes: frozenset[int] = frozenset()
    page_block_sizes: frozenset[int] = frozenset()
    page_block_size_is_runtime: bool = False

    def supported_num_heads(self) -> tuple[int, ...]:
        if self.head_counts is not None:
            return tuple(sorted(self.head_counts))
        return tuple(range(1, self.max_num_heads + 1))

    def supported_topk(self, num_heads: int | None = None) -> tuple[int, ...]:
        return tuple(sorted(self.topks)) if num_heads is None or self._in_envelope(num_heads) else ()

    def supports_decode(
        self, num_heads: int, topk: int, *, num_tokens: int = 1, page_block_size: int | None = None
    ) -> bool:
        return (
            num_tokens <= self.max_num_tokens
            and self._accepts_page(self.page_block_size if page_block_size is None else page_block_size)
            and self._in_envelope(num_heads)
            and (topk >= self.min_topk if self.topk_is_runtime else topk in self.topks)
        )

    def _in_envelope(self, num_heads: int) -> bool:
        if self.head_counts is not None:
            return num_heads in self.head_counts
        return 1 <= num_heads <= self.max_num_heads

    def _accepts_page(self, size: int) -> bool:
        if self.page_block_size_is_runtime:
            return size > 0
        if self.page_block_sizes:
            return size in self.page_block_sizes
        return size == self.page_block_size


@dataclass(frozen=True)
class Record:
    """Packed bytes of one token: `data` then `scales`, in one row or in two regions of the page."""

    d_qk: int
    d_v: int
    data: int
    scales: int
    inline: bool
    min_topk: int = 1

    @property
    def size(self) -> int:
        return self.data + self.scales

    def dense_page(self, page: int) -> int:
        return -(-page * self.size // 16) * 16


RECORDS = {
    ("dsv4", "fp8"): Record(512, 512, 448 + 128, 8, inline=False),
    ("dsv3_2", "fp8"): Record(576, 512, 512 + 128, 16, inline=True),
    ("glm_nsa", "fp8"): Record(576, 512, 512 + 128, 16, inline=True),
    ("glm53_nope", "fp8"): Record(512, 512, 512, 16, inline=True),
    ("dots3_swa", "fp8"): Record(1088, 1024, 1024 + 128, 8, inline=False, min_topk=513),
    ("dsv4_1", "fp8"): Record(512, 512, 512, 16, inline=False),
    ("dsv4_1_inline", "fp8"): Record(512, 512, 512, 16, inline=True),
    ("dsv4", "nvfp4"): Record(512, 512, 224 + 128, 32, inline=False),
    ("glm_nsa", "nvfp4"): Record(576, 512, 256 + 128, 32, inline=True),
}
EXTRA_ONLY = {
    ("dsv4_1", "fp4"): Record(512, 512, 256, 32, inline=False),
    ("dsv4_1_inline", "fp4"): Record(512, 512, 256, 32, inline=True),
}
FAMILIES = tuple(dict.fromkeys(family for family, _ in RECORDS))


def secondary(family: str, kv_cache_format: str, fp4: bool) -> Record | None:
    """Record of the secondary cache beside a primary one, None where there is no such form."""
    if fp4:
        return EXTRA_ONLY.get((family, "fp4")) if kv_cache_format == "fp8" else None
    if family in ("dsv4", "dsv4_1", "dsv4_1_inline"):
        return RECORDS.get((family, kv_cache_format))
    return None


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """bfloat16 bits of float32 values, truncated."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def random_bits(seed: int, *shape: int) -> np.ndarray:
    """bfloat16 bits of standard normal values."""
    return bf16_bits(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def aligned_bytes(size: int, offset: int = 0, fill: int = 0) -> np.ndarray:
    """`size` bytes whose address is `offset` past a multiple of 64."""
    whole = np.full(size + 64 + offset, fill, np.uint8)
    start = -whole.ctypes.data % 64 + offset
    return whole[start : start + size]


def strided_cache(
    record: Record,
    pages: int,
    page: int,
    *,
    page_stride: int | None = None,
    row_stride: int | None = None,
    offset: int = 0,
    width: int | None = None,
) -> np.ndarray:
    """A zeroed cache view [pages, page, bytes] with any strides, legal or not, inside its own allocation."""
    width = record.size if width is None else width
    row_stride = record.size if row_stride is None else row_stride
    if page_stride is None:
        page_stride = -(-page * row_stride // 16) * 16
    size = max(pages - 1, 0) * page_stride + max(page - 1, 0) * row_stride + width
    strides = (page_stride, row_stride, 1)
    return np.ndarray((pages, page, width), np.uint8, aligned_bytes(size, offset), strides=strides)


def span(cache: np.ndarray) -> np.ndarray:
    """Every byte from the first to the last of a byte view, gaps included."""
    size = 1 + sum((count - 1) * stride for count, stride in zip(cache.shape, cache.strides, strict=True))
    return np.lib.stride_tricks.as_strided(cache, (size,), (1,))
