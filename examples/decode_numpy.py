"""Pack a KV cache, decode against it, and check the answer in plain numpy.

python examples/decode_numpy.py
"""

import numpy as np
import sparse_mla
from numpy.typing import NDArray

FAMILY = "dsv4"
NUM_TOKENS, NUM_HEADS, TOPK, NUM_SLOTS = 3, 8, 128, 1024


def to_bf16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """numpy has no bfloat16, so the library takes its bits (or ml_dtypes.bfloat16). Cut off: enough here."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def from_bf16_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The same bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def main() -> None:
    """One decode step of three sequences."""
    rng = np.random.default_rng(0)
    config = sparse_mla.supported_sparse_mla_sm120_configs()[FAMILY]
    latents = rng.standard_normal((NUM_SLOTS, config.d_qk), np.float32)
    cache = sparse_mla.pack_kv_cache(latents, family=FAMILY)
    print(f"cache: {cache.shape} {cache.dtype}, {config.bytes_per_token} bytes per token")

    q = to_bf16_bits(rng.standard_normal((NUM_TOKENS, NUM_HEADS, config.d_qk), np.float32))
    # Slot ids, page * page_block_size + row. A width needs no padding to some multiple; what a row lacks is -1.
    indices = rng.integers(0, NUM_SLOTS, (NUM_TOKENS, TOPK), np.int32)
    indices[1, 100:] = -1
    sm_scale = config.d_qk**-0.5

    out, lse = sparse_mla.decode(q, cache, indices, family=FAMILY, sm_scale=sm_scale, return_lse=True)
    print(f"out: {out.shape} bfloat16 bits, lse: {lse.shape} base 2")

    keys = sparse_mla.unpack_kv_cache(cache, family=FAMILY)
    for token, row in enumerate(indices):
        k = keys[row[row >= 0]]
        scores = sm_scale * from_bf16_bits(q[token]) @ k.T
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        expected = weights @ k / weights.sum(axis=-1, keepdims=True)  # in dsv4, V is all of K
        error = np.linalg.norm(from_bf16_bits(out[token]) - expected) / np.linalg.norm(expected)
        print(f"token {token}: {len(k)} candidates, relative L2 against numpy {error:.1e}")
        assert error < 4e-3, "more than the rounding of a bfloat16 output"


if __name__ == "__main__":
    main()
