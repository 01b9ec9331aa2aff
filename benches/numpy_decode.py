"""Sparse-MLA decode as a good engineer writes it with numpy: the other side of the decode benches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from numpy_codec import BLOCK, PAGE, dequantise, rows_of, split


class NumpyDecode:
    """Decode against one dense cache. Made once: views and buffers are kept between calls."""

    def __init__(self, cache: NDArray[np.uint8], row: dict[str, Any], topk: int) -> None:
        self.row = row
        self.rows, self.footers = rows_of(cache, row)
        self.num_slots = len(cache) * PAGE
        self.keys = np.empty((topk, row["d_qk"]), np.float32)
        self.values = np.empty((BLOCK, row["quantised_dims"]), np.float32)

    def __call__(
        self, q: NDArray[np.uint16], indices: NDArray[np.int32], sm_scale: float, out: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Writes float32 `out` [T, H, d_v]; returns the base-2 log-sum-exp [T, H]. `q` holds bfloat16 bits."""
        queries = (q.astype(np.uint32) << 16).view(np.float32)
        queries *= np.float32(sm_scale)  # fewer products than scaling the scores
        lse = np.empty(q.shape[:2], np.float32)
        d_v = self.row["d_v"]
        for token, slots in enumerate(indices[:, : self.row["window"]]):
            keys = self.gather(slots[(slots >= 0) & (slots < self.num_slots)])
            weights = queries[token] @ keys.T
            peak = weights.max(axis=-1, keepdims=True)
            weights -= peak
            np.exp(weights, out=weights)
            total = weights.sum(axis=-1, keepdims=True)
            np.matmul(weights, keys[:, :d_v], out=out[token])
            out[token] /= total
            lse[token] = ((peak + np.log(total)) * np.float32(np.log2(np.e)))[:, 0]
        return lse

    def gather(self, slots: NDArray[np.int32]) -> NDArray[np.float32]:
        """The dequantised rows of slots, in the kept buffer."""
        keys = self.keys[: len(slots)]
        for start in range(0, len(slots), BLOCK):
            block = slots[start : start + BLOCK]
            page, place = block // PAGE, block % PAGE
            footers = None if self.footers is None else self.footers[page, place]
            parts = split(self.rows[page, place], footers, self.row)
            dequantise(parts, self.row, keys[start : start + BLOCK], self.values[: len(block)])
        return keys
