"""Packed caches as a good engineer writes them with numpy and ml_dtypes: the other side of the codec benches.

`row` is an entry of `sparse_mla.families()`. Pages are dense; every rule gives the bytes of the library's writers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

PAGE = 64
# Rows that are worked on at a time: of the powers of two, the one with which numpy was fastest (temporaries fit L2).
BLOCK = 4 * PAGE

ALL_BYTES = np.arange(256, dtype=np.uint8)
E4M3 = ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
UE8M0 = (ALL_BYTES.astype(np.uint32) << 23).view(np.float32)  # of the bytes 1 to 254; others do not occur here
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
# Both values of a byte as one 8-byte item, the low nibble first.
E2M1_PAIRS = np.stack([E2M1[ALL_BYTES & 15], E2M1[ALL_BYTES >> 4]], axis=1).view(np.uint64)[:, 0]


class Parts(NamedTuple):
    """The bytes of tokens, [..., bytes]."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    rope: NDArray[np.uint8]


def rows_of(cache: NDArray[np.uint8], row: dict[str, Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Views of a dense cache, [pages, page, bytes]: the data rows, and the scale rows where they stand apart."""
    pages, _, record = cache.shape
    if row["placement"] == "inline":
        return cache, None
    data_bytes = code_bytes(row) + 2 * row["rope_dims"]
    flat = cache.reshape(pages, PAGE * record)
    data, footers = flat[:, : PAGE * data_bytes], flat[:, PAGE * data_bytes :]
    return data.reshape(pages, PAGE, -1), footers.reshape(pages, PAGE, -1)


def split(rows: NDArray[np.uint8], footers: NDArray[np.uint8] | None, row: dict[str, Any]) -> Parts:
    """Views of the parts of rows."""
    codes, rope = code_bytes(row), rows.shape[-1] - 2 * row["rope_dims"]
    scales = rows[..., codes:rope] if footers is None else footers
    return Parts(rows[..., :codes], scales, rows[..., rope:])


def code_bytes(row: dict[str, Any]) -> int:
    """Bytes of a token's codes."""
    dims: int = row["quantised_dims"]
    return dims // 2 if row["code"] == "e2m1" else dims


def pack(latents: NDArray[Any], row: dict[str, Any]) -> NDArray[np.uint8]:
    """Quantises bfloat16 latents [N, d_qk], N a multiple of the page, into a new cache."""
    cache = np.zeros((len(latents) // PAGE, PAGE, row["bytes_per_token"]), np.uint8)
    codes, scales, rope = split(*rows_of(cache, row), row)
    quantised, group = row["quantised_dims"], row["group"]
    for start in range(0, len(latents), BLOCK):
        block = latents[start : start + BLOCK]
        pages = slice(start // PAGE, (start + len(block)) // PAGE)
        values = block[:, :quantised].astype(np.float32).reshape(len(block), -1, group)
        stored, factor = choose_scales(np.abs(values).max(axis=-1), row["scale"])
        if row["scale"] in ("arbitrary_fp32", "e4m3_floored"):
            values /= factor[..., None]
        else:
            values *= factor[..., None]
        if row["code"] == "e2m1":
            nibbles = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(len(block), -1)
            encoded = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        else:
            np.clip(values, -448, 448, out=values)
            encoded = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        codes[pages] = encoded.reshape(codes[pages].shape)
        stored = stored.view(np.uint8).reshape(len(block) // PAGE, PAGE, -1)
        scales[pages][..., : stored.shape[-1]] = stored
        rope[pages] = block[:, quantised:].copy().view(np.uint8).reshape(rope[pages].shape)
    return cache


def choose_scales(amax: NDArray[np.float32], rule: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The stored scales, and what values are divided by (arbitrary_fp32, e4m3_floored) or multiplied by (the rest)."""
    if rule == "arbitrary_fp32":
        scale: NDArray[np.float32] = np.maximum(amax, np.float32(1e-4))
        scale /= 448
        return scale, scale
    if rule in ("ue8m0", "pow2_fp32"):
        ratio = np.maximum(amax / np.float32(448), np.float32(1e-4))
        exponent = (ratio.view(np.uint32) + 0x7F_FFFF) >> 23  # a mantissa that is not zero carries
        stored = exponent.astype(np.uint8) if rule == "ue8m0" else exponent << 23
        return stored, ((254 - exponent) << 23).view(np.float32)
    sixth = amax / np.float32(6)
    if rule == "e4m3_floored":
        stored = np.clip(sixth, np.float32(2**-9), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        return stored, E4M3[stored.view(np.uint8)]
    stored = sixth.astype(ml_dtypes.float8_e4m3fn)
    scale = E4M3[stored.view(np.uint8)]
    return stored, np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def dequantise(
    parts: Parts,
    row: dict[str, Any],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    *,
    by_table: bool = True,
) -> None:
    """Rows of bytes into float32 rows `keys` [n, d_qk]: by tables of 256 entries or casts of ml_dtypes.

    `values` [n, quantised_dims] is scratch: fresh memory for it would cost more than the lookup.
    """
    codes, scales, rope = parts
    quantised = row["quantised_dims"]
    if row["scale"] in ("pow2_fp32", "arbitrary_fp32"):
        factors = np.ascontiguousarray(scales).view(np.float32)
    else:
        factors = (UE8M0 if row["scale"] == "ue8m0" else E4M3).take(scales[:, : row["scales_per_token"]])
    if row["code"] == "e4m3" and by_table:
        np.take(E4M3, codes, out=values, mode="clip")  # a mode that needs no check of the indices
    elif by_table:
        np.take(E2M1_PAIRS, codes, out=values.view(np.uint64), mode="clip")
    elif row["code"] == "e4m3":
        values[...] = codes.view(ml_dtypes.float8_e4m3fn)
    else:
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(values.shape)
        values[...] = nibbles.view(ml_dtypes.float4_e2m1fn)
    groups = values.reshape(len(values), -1, row["group"])
    np.multiply(groups, factors[..., None], out=keys[:, :quantised].reshape(groups.shape, copy=False))
    if row["rope_dims"]:
        wide = np.ascontiguousarray(rope).view(np.uint16).astype(np.uint32)
        wide <<= 16
        keys[:, quantised:] = wide.view(np.float32)


def unpack(cache: NDArray[np.uint8], row: dict[str, Any], *, by_table: bool) -> NDArray[np.float32]:
    """Dequantises every slot."""
    parts = split(*rows_of(cache, row), row)
    keys = np.empty((len(cache) * PAGE, row["d_qk"]), np.float32)
    values = np.empty((BLOCK, row["quantised_dims"]), np.float32)
    for start in range(0, len(keys), BLOCK):
        block = keys[start : start + BLOCK]
        pages = slice(start // PAGE, (start + len(block)) // PAGE)
        flat = Parts(*(part[pages].reshape(len(block), part.shape[-1]) for part in parts))
        dequantise(flat, row, block, values[: len(block)], by_table=by_table)
    return keys
