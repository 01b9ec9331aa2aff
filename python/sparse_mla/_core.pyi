"""Types of the compiled extension module. `sparse_mla` re-exports everything public."""

from collections.abc import Sequence
from typing import Any, Literal, Self, final, overload

from typing_extensions import disjoint_base

__version__: str

class UnsupportedError(ValueError):
    """A shape, family or format that no kernel serves.

    The text is the reasons of `explain_decode` for the same request, joined by ``"; "``.
    """

class DeviceError(RuntimeError):
    """The GPU cannot be used: no driver, an old driver, no such device, or a driver call that failed."""

@final
class DeviceArray:
    """A result on a CUDA device whose library could not be asked for an array, as jax's cannot.

    Dense, row-major, in memory of its own; another library takes it over without a copy, as in
    ``jax.numpy.from_dlpack(out)``, and its stream then waits for the result. The memory is freed with the last of its
    owners, which waits for the device: callers in a hurry pass `out` and `lse`.

    Source: `src/python/device_array.rs`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dimensions."""

    @property
    def dtype(self) -> str:
        """``"bfloat16"``, ``"float16"`` or ``"float32"``."""

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule, as the array API standard describes it.

        Raises:
            BufferError: a copy or another device is asked for. ValueError: no CUDA stream.
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """``(2, ordinal)``: CUDA."""

@disjoint_base
class ConfigQueries:
    """The queries of `SparseMLASm120DecodeConfig`, answered in Rust from its fields."""

    def __new__(cls, *args: object, **kwargs: object) -> Self: ...
    def supported_num_heads(self) -> tuple[int, ...]:
        """Head counts the decode form serves.

        Returns:
            `head_counts` sorted, or every count from 1 to `max_num_heads` when it is None.

        Raises:
            OverflowError: `max_num_heads` is so large that the tuple could not be built.

        Source: `src/config.rs`.
        """

    def supported_topk(self, num_heads: int | None = None) -> tuple[int, ...]:
        """Calibrated widths of the indices row, sorted.

        Args:
            num_heads: query heads on this rank; None asks for no head count in particular.

        Returns:
            `topks` sorted, or ``()`` when `num_heads` lies outside the head envelope. Not affected by
            `topk_is_runtime`: a width absent here can still be supported.

        Raises:
            TypeError: `num_heads` is neither an int nor None.

        Source: `src/config.rs`.
        """

    def supports_decode(
        self,
        num_heads: int,
        topk: int,
        *,
        num_tokens: int = 1,
        page_block_size: int | None = None,
    ) -> bool:
        """Whether the decode form serves a shape. Never raises on ints, however large.

        Args:
            num_heads: query heads on this rank.
            topk: width of the indices row.
            num_tokens: query tokens of the call; at most `max_num_tokens`.
            page_block_size: tokens per KV page; None means the config's own.

        Returns:
            True if and only if tokens, page size, heads and width are all accepted.

        Raises:
            TypeError: an argument is not an int.

        Source: `src/config.rs`. See `explain_decode` for strides, secondary caches and reasons.
        """

    def _normalised(self) -> dict[str, Any]:
        """Checks the instance's fields; returns them in canonical types, by name, in order."""

    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class DecodeSupport:
    """Answer of `explain_decode`; truthy if and only if `supported`. Immutable and hashable."""

    __match_args__ = ("supported", "reasons", "kernel")

    def __new__(cls, reasons: Sequence[str], kernel: str | None) -> Self: ...
    @property
    def supported(self) -> bool:
        """Whether `decode` serves the shape."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason for a refusal: argument, value and what is accepted. Empty when supported."""

    @property
    def kernel(self) -> str | None:
        """Name of the code that serves the shape (backend, family, formats, form), None when refused."""

    def __bool__(self) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def explain_decode(
    family: str,
    *,
    num_heads: int,
    topk: int,
    num_tokens: int = 1,
    page_block_size: int | None = None,
    page_stride: int | None = None,
    row_stride: int | None = None,
    extra_topk: int = 0,
    extra_page_block_size: int | None = None,
    extra_page_stride: int | None = None,
    kv_cache_format: str = "fp8",
    compute_precision: str = "auto",
    compute_capability: tuple[int, int] | None = None,
    extra_row_stride: int | None = None,
    extra_kv_fp4: bool = False,
) -> DecodeSupport:
    """Whether `decode` serves a shape, and if not, every reason why. Needs no GPU.

    `decode` asks the same function: a shape accepted here runs, a shape refused here raises `UnsupportedError`
    with the same text.

    Args:
        family: a key of `supported_sparse_mla_sm120_configs`, such as ``"dsv4"``.
        num_heads: query heads on this rank, 1 to 128.
        topk: width of the indices row.
        num_tokens: query tokens. Any count is served; above 64 `kernel` names the prefill form.
        page_block_size: tokens per page of the primary cache; None means 64.
        page_stride: bytes from page to page; None means what `pack_kv_cache` chooses.
        row_stride: bytes from row to row of an inline family; None means the dense row.
        extra_topk: width of the secondary cache's indices row; 0 when there is none.
        extra_page_block_size: tokens per page of the secondary cache; None means 64 when there is one.
        extra_page_stride: bytes from page to page of the secondary cache.
        kv_cache_format: ``"fp8"`` or ``"nvfp4"``.
        compute_precision: ``"auto"`` or ``"f16"`` (2e-3 relative). ``"fp8"`` has no kernel yet.
        compute_capability: (major, minor) of a GPU; None means the CPU backend.
        extra_row_stride: bytes from row to row of an inline secondary cache.
        extra_kv_fp4: the secondary cache holds the FP4 records of dsv4_1 or dsv4_1_inline.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an unknown word, or an int beyond 64 bits.

    Source: `src/support.rs`.
    """

def plan_decode(
    family: str,
    *,
    num_heads: int,
    topk: int,
    compute_capability: tuple[int, int],
    multiprocessors: int,
    num_tokens: int = 1,
    extra_topk: int = 0,
    extra_kv_fp4: bool = False,
    kv_cache_format: str = "fp8",
    batch_invariant: bool = False,
) -> dict[str, Any]:
    """How `decode` would be launched on a GPU: the very plan that it makes. Needs no GPU.

    Args:
        family, num_heads, topk, num_tokens, extra_topk, extra_kv_fp4, kv_cache_format: as in `explain_decode`.
        compute_capability: (major, minor) of the GPU.
        multiprocessors: streaming multiprocessors of the GPU; `known_devices` has those of some products.
        batch_invariant: as in `decode`.

    Returns:
        kernel (module/entry point), extra_kernel (the secondary cache's own, where its records differ from the
        primary's, else None), head_tile (heads of a CTA), head_tiles (of a token), chunk (candidates loaded at once),
        chunks (of a row of full length), splits and extra_splits (CTAs that share the candidates of a token and head
        tile; more than one in all are joined by another kernel), passes (over the tokens, to bound the workspace), grid
        (CTAs), threads (of a CTA), shared_bytes (of a CTA), workspace_bytes (partial results of the splits).

    Raises:
        UnsupportedError: what `explain_decode` refuses for the GPU, with the same text.
        TypeError, ValueError: a wrong type, an unknown word, or a number that no GPU has.

    Source: `src/plan.rs`.
    """

def known_devices() -> dict[str, dict[str, Any]]:
    """Some products whose facts `plan_decode` takes, by a word: name, compute_capability, multiprocessors.

    Source: `src/known_devices.rs`.
    """

def decode(
    q: Any,
    kv_cache: Any,
    indices: Any,
    *,
    family: str,
    sm_scale: float,
    kv_cache_format: str = "fp8",
    topk_length: Any = None,
    attn_sink: Any = None,
    extra_kv_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_length: Any = None,
    extra_kv_fp4: bool = False,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    lse_base: Literal["2", "e"] = "2",
    compute_precision: str = "auto",
    batch_invariant: bool = False,
    kv_global_scale: float = 1.0,
    workspace: Any = None,
    stream: Any = None,
) -> Any:
    """Sparse-MLA attention of every query token over the rows its indices name.

    For token t and head h, over the present candidates c: ``s_c = sm_scale * <q[t, h], K_c>``,
    ``out[t, h] = sum_c softmax(s)_c * V_c`` with V the first d_v values of K, accumulated in float32.
    A candidate is absent if its index is negative, or at least the number of slots of its cache, or sits at or past
    the row's length; absent candidates never influence a bit of the result. A row without candidates gives
    exactly 0 and an LSE of -inf (or the sink's value).

    Arrays are numpy's, or any with ``__dlpack__`` (torch, cupy, jax), read in place and all on one device: on the CPU
    they run on the CPU backend, on a CUDA device (capability 9.0 or newer) on its kernels, enqueued on
    `stream`.
    With given buffers, or torch's or cupy's allocator, a GPU call allocates nothing and waits for nothing once the
    kernels are loaded, and can be captured in a CUDA graph.

    Args:
        q: bfloat16 [T, H, d_qk] or [B, Q, H, d_qk], contiguous; numpy holds bfloat16 as uint16 bits or as
            ml_dtypes.bfloat16. 1 <= H <= 128. On a GPU it starts at a multiple of 16 bytes.
        kv_cache: uint8 packed cache: [pages, page_bytes], [pages, page, bytes_per_token],
            [pages, 1, page, bytes_per_token] or [pages, page, 1, bytes_per_token]. Padded rows (inline
            families) and padded pages are read through the strides; pages start at multiples of 16 bytes.
        indices: int32 slot ids (page * page_block_size + row), [T, K], [T, 1, K] or [B, Q, K]. The row
            stride is free, the last dimension dense. Negative = absent.
        family: row of the family table, such as ``"dsv4"``.
        sm_scale: softmax scale, finite. Nothing is added to it.
        kv_cache_format: ``"fp8"`` or ``"nvfp4"``.
        topk_length: int32 [T] or [B, Q]: candidates at or past it are absent. Clamped to [0, K].
        attn_sink: float32 [H], natural-log domain: joins the normaliser (and the LSE) without a value.
        extra_kv_cache: secondary packed cache (dsv4, dsv4_1, dsv4_1_inline), joined in one softmax.
        extra_indices: int32 slot ids into it, [T, E], [T, 1, E] or [B, Q, E].
        extra_topk_length: int32 [T] or [B, Q] for `extra_indices`.
        extra_kv_fp4: the secondary cache holds FP4 records (288 bytes; dsv4_1, dsv4_1_inline).
        out: buffer to write, [T, H, d_v] (or [B, Q, H, d_v]) bfloat16, float16 or float32, last dimension
            dense, not overlapping itself or an input.
        lse: float32 buffer for the log-sum-exp, [T, H] (or [B, Q, H]), last dimension dense.
        return_lse: return ``(out, lse)``.
        lse_base: ``"2"`` or ``"e"``.
        compute_precision: ``"auto"`` or ``"f16"``.
        batch_invariant: a row's bits do not depend on the other rows. The CPU backend always has this property; on a
            GPU it fixes the splits by the row's own work.
        kv_global_scale: FP32 factor of a glm_nsa NVFP4 cache; 1.0 elsewhere.
        workspace: uint8 CUDA array for partial results (an error says how many bytes are needed); None = one that
            the library keeps per stream. Graphs that replay at the same time need one each. None on the CPU.
        stream: CUDA stream: a handle, or a stream object of torch, cupy or cuda-python; None = the current stream of
            the library of `q`. None on the CPU.

    Returns:
        `out` in the form of q (uint16 bits in, uint16 bits out; a torch tensor from torch, a cupy array from cupy; on a
        GPU a `DeviceArray` from every other library, jax included), or the `out` passed in; with `return_lse` a tuple
        ``(out, lse)``.

    Raises:
        UnsupportedError: what `explain_decode` refuses, with the same text.
        TypeError, ValueError: a wrong dtype, rank, shape, stride, alignment or device, a missing partner
            argument, a read-only or overlapping output. Nothing has been written then.
        DeviceError: the GPU cannot be used, or its stream is being captured and the kernels are not loaded.

    Source: `src/attention.rs`, `src/cuda/launch.rs`, `kernels/`.
    """

def merge_states(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    *,
    lse_base: Literal["2", "e"] = "2",
) -> tuple[Any, Any]:
    """Joins two partial attention results over disjoint candidates, as decode context parallelism needs.

    Arrays are those that `decode` takes, all on one device. On a CUDA device (capability 9.0 or newer) the work is
    enqueued on the current stream of the library of `out_a`, waits for nothing, and can be captured in a CUDA graph
    once `warmup` was called for any family.

    Args:
        out_a, out_b: bfloat16 (uint16 bits or ml_dtypes), float16 or float32 [..., H, d_v], the same shape and dtype,
            evenly strided over the leading dimensions.
        lse_a, lse_b: float32 [..., H] in `lse_base`; -inf marks a side without candidates, whose `out` is ignored.
            At most one side may have counted a sink.
        lse_base: ``"2"`` or ``"e"``.

    Returns:
        ``(out, lse)``, new arrays in the dtype of `out_a` and float32, of its library or as `decode` makes them.

    Raises:
        TypeError, ValueError: a wrong dtype, place or stride, or shapes that do not match.
        UnsupportedError: the GPU's compute capability is below 9.0.
        DeviceError: the GPU cannot be used, or its stream is being captured and the kernels are not loaded.

    Source: `src/merge.rs`, `src/cuda/merge.rs`, `kernels/merge.cu`.
    """

def pack_kv_cache(
    latent: Any,
    *,
    family: str,
    page_block_size: int = 64,
    kv_cache_format: str = "fp8",
    page_stride: int | None = None,
    row_stride: int | None = None,
    kv_global_scale: float = 1.0,
    stream: Any = None,
) -> Any:
    """Quantises latents into a new packed cache.

    Arrays are numpy's, or any with ``__dlpack__`` as in `decode`: CUDA arrays are written by a kernel, with the
    bytes that the CPU writes, enqueued on `stream`.

    Args:
        latent: bfloat16 (uint16 bits or ml_dtypes from numpy), float16 or float32, [N, d_qk] for slots 0 to N-1, or
            [pages, page, d_qk]. Contiguous; on a GPU it starts at a multiple of 16 bytes.
        family: row of the family table.
        page_block_size: tokens per page; for a 3-D latent it must equal the second dimension.
        kv_cache_format: ``"fp8"``, ``"nvfp4"``, or ``"fp4"`` for the extra caches of dsv4_1 and dsv4_1_inline.
        page_stride: bytes from page to page, a multiple of 16; None means the dense page rounded up to 16.
        row_stride: bytes from row to row (inline families), a multiple of 16; None means the dense row.
        kv_global_scale: glm_nsa NVFP4 only: every value is divided by it first.
        stream: as in `decode`. None on the CPU.

    Returns:
        uint8 [pages, page_block_size, bytes_per_token]; gaps between rows and pages and unused slots are zero bytes. A
        torch tensor from torch, a cupy array from cupy; other libraries get a `DeviceArray` (dense pages only).

    Raises:
        UnsupportedError: the family has no such format. TypeError, ValueError: bad latent, sizes or strides.
        DeviceError: as in `decode`.

    Source: `src/cache.rs`, `src/codec/`; `src/cuda/caches.rs`, `kernels/include/write.cuh`.
    """

def append_kv_cache(
    latent: Any,
    slot_mapping: Any,
    cache: Any,
    *,
    family: str,
    kv_cache_format: str = "fp8",
    kv_global_scale: float = 1.0,
    rope_cos_sin: Any = None,
    rope_positions: Any = None,
    rope_interleaved: bool = True,
    stream: Any = None,
) -> None:
    """Quantises latents into the named slots of a packed cache, in place.

    CUDA arrays are written by a kernel, with the bytes that the CPU writes. A GPU call allocates nothing (but, once, a
    workspace for calls of more than 1,024 rows), waits for nothing, and can be captured in a CUDA graph after `warmup`.

    With `rope_cos_sin` the RoPE lanes are rotated before they are stored. With a and b the lanes of pair p, c and s the
    cosine and sine of pair p at the row's position, a becomes ``a * c - b * s`` and b becomes ``a * s + b * c``, in
    float32, products and sum rounded one by one, then rounded once to bfloat16 (NaN: 0x7fc0).

    Args:
        latent: as in `pack_kv_cache`, [N, d_qk].
        slot_mapping: int32 or int64 [N]. A negative or too large slot skips its row; of several rows for one slot
            the lowest row wins.
        cache: writable packed cache in any form that `decode` reads. Only the addressed bytes change.
        family, kv_cache_format, kv_global_scale: as in `pack_kv_cache`.
        rope_cos_sin: float32 [max_position, 64]: the cosines of the 32 pairs, then their sines. Contiguous; on a GPU it
            starts at a multiple of 16 bytes. Only for formats with BF16 RoPE lanes (dsv4, dsv3_2, glm_nsa, dots3_swa).
        rope_positions: int32 or int64 [N], with `rope_cos_sin`. A position outside the table skips its row, and with it
            the row's slot.
        rope_interleaved: pair p is lanes 2p and 2p + 1 (GPT-J); False: lanes p and p + 32 (NeoX).
        stream: as in `decode`. None on the CPU.

    Raises:
        UnsupportedError, TypeError, ValueError, DeviceError: as in `pack_kv_cache`. Nothing has been written then.

    Source: `src/cache.rs`, `src/rope.rs`; `src/cuda/caches.rs`, `kernels/include/write.cuh`.
    """

def unpack_kv_cache(
    cache: Any,
    *,
    family: str,
    kv_cache_format: str = "fp8",
    kv_global_scale: float = 1.0,
    stream: Any = None,
) -> Any:
    """Dequantises every slot of a packed cache, on the device where it lies.

    Args:
        cache: packed cache in any form that `decode` reads.
        family, kv_cache_format, kv_global_scale: as in `pack_kv_cache`.
        stream: as in `decode`. None on the CPU.

    Returns:
        float32 [pages * page_block_size, d_qk], in the library of `cache` (`DeviceArray` where it is neither numpy,
        torch nor cupy). The same numbers on CPU and GPU; of a NaN not the same bits.

    Raises:
        UnsupportedError, TypeError, ValueError, DeviceError: as in `pack_kv_cache`.

    Source: `src/cache.rs`; `src/cuda/caches.rs`, `kernels/include/read.cuh`.
    """

@overload
def convert_kv_cache(
    cache: Any,
    *,
    from_family: str,
    to_family: str,
    from_format: str = "fp8",
    to_format: str = "fp8",
    page_block_size: int | None = None,
    page_stride: int | None = None,
    row_stride: int | None = None,
    num_slots: int | None = None,
    from_kv_global_scale: float = 1.0,
    to_kv_global_scale: float = 1.0,
    return_error: Literal[False] = False,
    stream: Any = None,
) -> Any: ...
@overload
def convert_kv_cache(
    cache: Any,
    *,
    from_family: str,
    to_family: str,
    from_format: str = "fp8",
    to_format: str = "fp8",
    page_block_size: int | None = None,
    page_stride: int | None = None,
    row_stride: int | None = None,
    num_slots: int | None = None,
    from_kv_global_scale: float = 1.0,
    to_kv_global_scale: float = 1.0,
    return_error: Literal[True],
    stream: Any = None,
) -> tuple[Any, float]:
    """Converts a packed cache into another family or format that holds the same dimensions, under the same slot ids.

    Exact, codes and scales kept: dsv3_2 to glm_nsa (a power of two is an FP32 scale like any other), dsv4_1 to and from
    dsv4_1_inline (also FP4), and a format to itself. **Lossy**, values dequantised to FP32 and quantised by the other
    rule: everything else, such as glm_nsa to dsv3_2, dsv4 FP8 to and from NVFP4, dsv4_1 FP8 to and from FP4, and
    glm_nsa FP8 to and from NVFP4. RoPE lanes keep their bits always.

    Args:
        cache: packed cache in any form that `decode` reads. A CUDA array is converted on its device, with the bytes
            of the CPU. A lossy conversion's kernel is loaded at its first use, not by `warmup`: before a capture,
            convert once.
        from_family, from_format: what it holds; ``"fp8"``, ``"nvfp4"`` or ``"fp4"``.
        to_family, to_format: what is wanted; the same number of quantised and of RoPE dimensions.
        page_block_size: tokens per page of the result; None means that of `cache`.
        page_stride, row_stride: strides of the result, as in `pack_kv_cache`.
        num_slots: only the first so many slots; None means all.
        from_kv_global_scale, to_kv_global_scale: glm_nsa NVFP4 only, as in `pack_kv_cache`.
        return_error: also return the relative L2 error of the quantised values against the dequantised `cache`: 0.0
            where nothing was lost, NaN if there was a NaN. Refused for a lossy conversion on a GPU, which would have
            to wait for it: compare what `unpack_kv_cache` makes of both caches.
        stream: as in `decode`. None on the CPU.

    Returns:
        uint8 [pages, page_block_size, bytes_per_token], new, in the library of `cache` as from
        `pack_kv_cache`; gaps and left-over slots are zero bytes. With `return_error` a tuple ``(cache, error)``.

    Raises:
        UnsupportedError, TypeError, ValueError: as in `pack_kv_cache`, or dimensions that differ.

    Source: `src/convert.rs`.
    """

def repage_kv_cache(
    cache: Any,
    *,
    family: str,
    kv_cache_format: str = "fp8",
    page_block_size: int | None = None,
    page_stride: int | None = None,
    row_stride: int | None = None,
    num_slots: int | None = None,
    stream: Any = None,
) -> Any:
    """Moves a packed cache into pages of another size or other strides, bit for bit, under the same slot ids.

    Page footers move with their rows, which no reshape can do. 528-byte rows become 656-byte ones, and back, by
    `row_stride`.

    Args:
        cache: packed cache in any form that `decode` reads, on the CPU or on a CUDA device.
        family, kv_cache_format: what it holds.
        page_block_size: tokens per page of the result; None means that of `cache`.
        page_stride, row_stride: strides of the result, as in `pack_kv_cache`.
        num_slots: only the first so many slots; None means all.
        stream: as in `decode`. None on the CPU.

    Returns:
        uint8 [pages, page_block_size, bytes_per_token], new, in the library of `cache` as from
        `pack_kv_cache`; gaps and left-over slots are zero bytes.

    Raises:
        UnsupportedError, TypeError, ValueError: as in `pack_kv_cache`.

    Source: `src/convert.rs`.
    """

def warmup(family: str, *, kv_cache_format: str = "fp8", device: int = 0) -> None:
    """Loads the kernels of a family on a CUDA device, so that later calls, captured ones included, load nothing.

    Lossy conversions of caches are left out: their kernels are loaded at the first `convert_kv_cache`.

    Args:
        family, kv_cache_format: as in `decode`.
        device: ordinal of the CUDA device.

    Raises:
        DeviceError: no driver, an old driver, no such device. ValueError: an unknown word, or no GPU kernel.

    Source: `src/cuda/device.rs`.
    """

def families() -> list[dict[str, Any]]:
    """The family table: one dict per (family, kv_cache_format) record, in table order.

    Keys: family, kv_cache_format, d_qk, d_v, quantised_dims, rope_dims, code, scale, group, scales_per_token,
    bytes_per_token, placement, topks, min_topk, window, secondary_formats, in_registry.

    Source: `src/family.rs`.
    """

def show_config() -> dict[str, Any]:
    """Facts about this build and process: version, build id, threads, features, environment variables, CUDA driver.

    Opens the CUDA driver. Source: `src/python/mod.rs`.
    """

def _registry(kv_cache_format: str) -> list[tuple[str, str | None, dict[str, Any]]]:
    """(family, family whose object it shares or None, constructor arguments), in table order."""
