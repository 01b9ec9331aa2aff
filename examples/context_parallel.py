"""Decode context parallelism: every rank holds a part of the KV cache, `merge_states` joins what they found.

    python examples/context_parallel.py

The ranks are a loop here; in a cluster, out and lse travel through an all-gather.
"""

from functools import reduce

import numpy as np
import sparse_mla
from numpy.typing import NDArray

FAMILY, D_V = "dsv3_2", 512  # V is the latent part of K
NUM_RANKS, SLOTS_PER_RANK = 4, 512
NUM_TOKENS, NUM_HEADS, TOPK = 2, 16, 256


def local_indices(indices: NDArray[np.int32], rank: int) -> NDArray[np.int32]:
    """Slot ids into the rank's own cache; candidates of other ranks become absent, wherever they stand in the row."""
    local: NDArray[np.int32] = indices - np.int32(rank * SLOTS_PER_RANK)
    return np.where((local >= 0) & (local < SLOTS_PER_RANK), local, np.int32(-1))


def main() -> None:
    """Compares the joined answer with that of one cache that holds everything."""
    rng = np.random.default_rng(0)
    config = sparse_mla.supported_sparse_mla_sm120_configs()[FAMILY]
    latents = rng.standard_normal((NUM_RANKS * SLOTS_PER_RANK, config.d_qk), np.float32)
    q = (rng.standard_normal((NUM_TOKENS, NUM_HEADS, config.d_qk), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    indices = rng.integers(0, len(latents), (NUM_TOKENS, TOPK), np.int32)
    indices[1] %= SLOTS_PER_RANK  # the second token's candidates all live on rank 0: the others find nothing

    def decode(part: NDArray[np.float32], slots: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        # Float32 partial results: rounding to bfloat16 belongs after the join, once.
        out = np.empty((NUM_TOKENS, NUM_HEADS, D_V), np.float32)
        lse = np.empty((NUM_TOKENS, NUM_HEADS), np.float32)
        cache = sparse_mla.pack_kv_cache(part, family=FAMILY)
        sparse_mla.decode(q, cache, slots, family=FAMILY, sm_scale=config.d_qk**-0.5, out=out, lse=lse)
        return out, lse

    parts = np.split(latents, NUM_RANKS)
    partial = [decode(part, local_indices(indices, rank)) for rank, part in enumerate(parts)]
    for rank, (_, lse) in enumerate(partial):
        found = np.isfinite(lse).all(axis=-1)
        print(f"rank {rank}: tokens with candidates here: {np.flatnonzero(found).tolist()}")

    # A rank without candidates has an LSE of -inf, the neutral element of the join: no special case is needed.
    out, lse = reduce(lambda left, right: sparse_mla.merge_states(*left, *right), partial)
    expected, expected_lse = decode(latents, indices)
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    print(f"joined against one cache: relative L2 {error:.1e}, LSE error {np.abs(lse - expected_lse).max():.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    main()
