"""The Python face of the config class: a frozen dataclass whose checks and queries run in Rust."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_mla import _core

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import SupportsIndex

__all__ = ["SparseMLASm120DecodeConfig", "supported_sparse_mla_sm120_configs"]


@dataclass(frozen=True)
class SparseMLASm120DecodeConfig(_core.ConfigQueries):
    """Decode envelope of one family.

    Set fields take any iterable of ints and come back as frozensets; ints may have any size and may be numpy's.

    Raises:
        TypeError: a field has the wrong type; the text names it.
        ValueError: `kv_cache_format` is an unknown word.

    Source: `python/sparse_mla/_config.py`, `src/config.rs`.
    """

    d_qk: int
    """Query/key head dimension."""
    page_block_size: int
    """Default KV page size in tokens; the only one unless one of the last two fields widens it."""
    max_num_tokens: int
    """Largest number of query tokens that counts as decode, inclusive."""
    topks: frozenset[int]
    """Calibrated widths of the indices row; the exact legal set only when `topk_is_runtime` is false."""
    min_topk: int
    """Smallest legal width (513 for the sliding-window family, whose window must fit)."""
    max_num_heads: int
    """Upper bound of the head envelope."""
    kv_cache_format: str = "fp8"
    """``"fp8"`` or ``"nvfp4"``."""
    bytes_per_token: int = 0
    """Logical packed bytes per token; 0 = unspecified."""
    head_counts: frozenset[int] | None = None
    """Exact head counts; None = every count from 1 to `max_num_heads`."""
    topk_is_runtime: bool = True
    """Whether every width from `min_topk` up is legal."""
    extra_page_block_sizes: frozenset[int] = frozenset()
    """Page sizes of the secondary cache; empty = unspecified (not "none")."""
    page_block_sizes: frozenset[int] = frozenset()
    """Page sizes accepted beside the default; empty = only `page_block_size`."""
    page_block_size_is_runtime: bool = False
    """Whether every positive page size is accepted."""

    if TYPE_CHECKING:  # what the constructor takes is wider than what the fields hold

        def __init__(
            self,
            d_qk: SupportsIndex,
            page_block_size: SupportsIndex,
            max_num_tokens: SupportsIndex,
            topks: Iterable[SupportsIndex],
            min_topk: SupportsIndex,
            max_num_heads: SupportsIndex,
            kv_cache_format: str = "fp8",
            bytes_per_token: SupportsIndex = 0,
            head_counts: Iterable[SupportsIndex] | None = None,
            topk_is_runtime: bool = True,
            extra_page_block_sizes: Iterable[SupportsIndex] = frozenset(),
            page_block_sizes: Iterable[SupportsIndex] = frozenset(),
            page_block_size_is_runtime: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name, value in self._normalised().items():
            object.__setattr__(self, name, value)


# Where users find the class; pickles name it.
SparseMLASm120DecodeConfig.__module__ = "sparse_mla"


def supported_sparse_mla_sm120_configs(*, kv_cache_format: str = "fp8") -> dict[str, SparseMLASm120DecodeConfig]:
    """The configs of every family that serves a cache format. Needs no GPU, no driver, no compiler, no file.

    Args:
        kv_cache_format: ``"fp8"`` or ``"nvfp4"``.

    Returns:
        A new dict from family to config, in the order of the family table. `glm_nsa` is the same object as `dsv3_2`
        in the FP8 registry.

    Raises:
        ValueError: any other word; the text lists the accepted ones.

    Source: `src/family.rs`.
    """
    configs: dict[str, SparseMLASm120DecodeConfig] = {}
    for family, shared, fields in _core._registry(kv_cache_format):
        configs[family] = configs[shared] if shared else SparseMLASm120DecodeConfig(**fields)
    return configs
