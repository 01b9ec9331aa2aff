"""What is measured: import and queries, decode, pack and unpack. Both sides are compared before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy_codec
import sparse_mla
from numpy.typing import NDArray
from numpy_decode import NumpyDecode
from timing import import_seconds, in_turns, median, per_call

SEED = 20261129
# A pool larger than the last-level cache, so that gathers miss as they do in a server.
POOL_SLOTS = 65_536
CODEC_ROWS = 16_384
TOPK = 2048
# Float32 on both sides: what is left is the order of summation.
AGREEMENT = 1e-5


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    ours_seconds: float
    numpy_seconds: float | None
    samples: int
    """Timed runs of ours."""
    target: float | None = None
    """Largest `ours_seconds`, or smallest ratio where numpy was measured."""
    disturbed_turns: int | None = None
    """Turns during which other programs ran; None where that was not looked at."""

    @property
    def ratio(self) -> float | None:
        """How many times longer numpy takes."""
        return None if self.numpy_seconds is None else self.numpy_seconds / self.ours_seconds

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.ours_seconds <= self.target if self.ratio is None else self.ratio >= self.target


def queries(runs: int) -> Iterator[Result]:
    """Import time and the queries that an engine asks at start-up or per step."""
    seconds = import_seconds("sparse_mla", after="numpy", runs=4 * runs)
    yield Result("import sparse_mla, numpy imported", median(seconds), None, len(seconds), 15e-3)

    config = sparse_mla.supported_sparse_mla_sm120_configs()["dsv4"]
    names: dict[str, object] = {
        "config": config,
        "explain_decode": sparse_mla.explain_decode,
        "empty": lambda num_heads, topk: True,
    }
    for call, target in (
        ("empty(64, 1152)", None),  # a Python function that does nothing: how fast this machine is right now
        ("config.supports_decode(64, 1152)", 150e-9),
        ("config.supports_decode(64, 1152, num_tokens=16, page_block_size=256)", None),
        ("explain_decode('dsv4', num_heads=64, topk=1152)", None),
        (
            "explain_decode('dsv4', num_heads=64, topk=128, page_block_size=256, page_stride=149760, extra_topk=512)",
            None,
        ),
        ("explain_decode('dsv4', num_heads=256, topk=0)", None),
    ):
        seconds = per_call(call, names, 2 * runs)
        yield Result(f"`{call}`", median(seconds), None, len(seconds), target)


def beside_numpy(
    name: str, sides: tuple[Callable[[], object], Callable[[], object]], runs: int, target: float | None
) -> Result:
    """Times ours and numpy's in turns."""
    turns = in_turns(*sides, turns=runs)
    return Result(name, median(turns.ours), median(turns.theirs), len(turns.ours), target, turns.disturbed)


def decode(family_names: list[str], runs: int) -> Iterator[Result]:
    """CPU decode against numpy over FP8 caches, every candidate present."""
    for row in sparse_mla.families():
        if row["family"] not in family_names or row["kv_cache_format"] != "fp8":
            continue
        rng = np.random.default_rng(SEED)
        cache = sparse_mla.pack_kv_cache(make_latents(rng, POOL_SLOTS, row), family=row["family"])
        theirs = NumpyDecode(cache, row, TOPK)
        for num_heads in (8, 64, 128):
            for num_tokens in (1, 16):
                q = rng.standard_normal((num_tokens, num_heads, row["d_qk"])).astype(ml_dtypes.bfloat16).view(np.uint16)
                indices = rng.integers(0, POOL_SLOTS, (num_tokens, TOPK), np.int32)
                sides = decode_sides(cache, row, q, indices, theirs)
                yield beside_numpy(f"decode {row['family']} H={num_heads} T={num_tokens} K={TOPK}", sides, runs, 1.0)


def decode_sides(
    cache: NDArray[np.uint8], row: dict[str, Any], q: NDArray[np.uint16], indices: NDArray[np.int32], their: NumpyDecode
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Both sides of one shape, writing float32 into buffers of their own; compared."""
    sm_scale = float(np.float32(row["d_qk"] ** -0.5))
    our_out, their_out = (np.empty((*q.shape[:2], row["d_v"]), np.float32) for _ in range(2))
    our_lse = np.empty(q.shape[:2], np.float32)

    def ours() -> object:
        return sparse_mla.decode(
            q, cache, indices, family=row["family"], sm_scale=sm_scale, out=our_out, lse=our_lse, return_lse=True
        )

    def theirs() -> NDArray[np.float32]:
        return their(q, indices, sm_scale, their_out)

    ours()
    their_lse = theirs()
    assert np.linalg.norm(their_out) > 0
    error = np.linalg.norm(our_out - their_out) / np.linalg.norm(their_out)
    lse_error = np.abs(our_lse - their_lse).max()
    assert error < AGREEMENT, f"{row['family']}: the outputs differ by {error:.1e}"
    assert lse_error < 10 * AGREEMENT, f"{row['family']}: the LSEs differ by {lse_error:.1e}"
    return ours, theirs


def codecs(runs: int) -> Iterator[Result]:
    """Pack (from bfloat16) and unpack (to float32) of every format against numpy and ml_dtypes; equal bytes.

    The targets are against the casts of ml_dtypes; a lookup table, which unpacks faster than they do, stands beside.
    """
    for row in sparse_mla.families():
        for work, ours, theirs, target in codec_sides(row):
            name = f"{work} {row['family']} {row['kv_cache_format']}, {CODEC_ROWS} tokens"
            yield beside_numpy(name, (ours, theirs), runs, target)


def codec_sides(
    row: dict[str, Any],
) -> list[tuple[str, Callable[[], NDArray[Any]], Callable[[], NDArray[Any]], float | None]]:
    """What is done, ours, numpy's, and the target of the ratio; compared."""
    latents = make_latents(np.random.default_rng(SEED), CODEC_ROWS, row)
    words: dict[str, Any] = {"family": row["family"], "kv_cache_format": row["kv_cache_format"]}
    cache = sparse_mla.pack_kv_cache(latents, **words)

    def our_pack() -> NDArray[Any]:
        return sparse_mla.pack_kv_cache(latents, **words)

    def our_unpack() -> NDArray[Any]:
        return sparse_mla.unpack_kv_cache(cache, **words)

    sides: list[tuple[str, Callable[[], NDArray[Any]], Callable[[], NDArray[Any]], float | None]] = [
        ("pack", our_pack, lambda: numpy_codec.pack(latents, row), 5.0),
        ("unpack", our_unpack, lambda: numpy_codec.unpack(cache, row, by_table=False), 5.0),
        ("unpack (numpy: table)", our_unpack, lambda: numpy_codec.unpack(cache, row, by_table=True), None),
    ]
    for work, ours, theirs, _ in sides:
        result = ours()
        assert np.array_equal(result, theirs()), f"{work} {words}: the results differ"
        assert np.count_nonzero(result) > result.size // 2
    return sides


def make_latents(rng: np.random.Generator, rows: int, row: dict[str, Any]) -> NDArray[Any]:
    """Gaussian bfloat16 latents whose channels and tokens differ in size."""
    latents = rng.standard_normal((rows, row["d_qk"]), np.float32)
    latents *= rng.lognormal(0.0, 0.5, row["d_qk"]).astype(np.float32)
    latents *= rng.lognormal(0.0, 0.5, (rows, 1)).astype(np.float32)
    return latents.astype(ml_dtypes.bfloat16)
