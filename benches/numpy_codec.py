"""Packed caches as a good engineer writes them with numpy and ml_dtypes: the other side of the codec benches.

`row` is an entry of `sparse_mla.families()`. Pages are dense; every rule gives the bytes of the library's writers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

PAGE = 64
# Rows that are worked on at a time, so that temporaries stay in cache.
BLOCK = 32 * PAGE

ALL_BYTES = np.arange(256, dtype=np.uint8)
E4M3 = ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
UE8M0 = (ALL_BYTES.astype(np.uint32) << 23).view(np.float32)  # of the bytes 1 to 254; others do not occur here
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
# Both values of a byte as one 8-byte item, the low nibble first.
E2M1_PAIRS = np.stack([E2M1[ALL_BYTES & 15], E2M1[ALL_BYTES >> 4]], axis=1).view(np.uint64)[:, 0]


class Parts(NamedTuple):
    """Views of a dense cache, [pages, page, bytes]."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    rope: NDArray[np.uint8]


def parts_of(cache: NDArray[np.uint8], row: dict[str, Any]) -> Parts:
    """Where codes, scales and RoPE lanes stand."""
    record, pages = row["bytes_per_token"], len(cache)
    code_bytes = row["quantised_dims"] // (2 if row["code"] == "e2m1" else 1)
    rope_bytes = 2 * row["rope_dims"]
    scale_bytes = record - code_bytes - rope_bytes
    if row["placement"] == "inline":
        rows = cache.reshape(pages, PAGE, record)
        ends = code_bytes, code_bytes + scale_bytes
        return Parts(rows[..., : ends[0]], rows[..., ends[0] : ends[1]], rows[..., ends[1] :])
    flat = cache.reshape(pages, PAGE * record)
    data = flat[:, : PAGE * (code_bytes + rope_bytes)].reshape(pages, PAGE, -1)
    return Parts(data[..., :code_bytes], flat[:, data[0].size :].reshape(pages, PAGE, -1), data[..., code_bytes:])


def pack(latents: NDArray[Any], row: dict[str, Any]) -> NDArray[np.uint8]:
    """Quantises bfloat16 latents [N, d_qk], N a multiple of the page, into a new cache."""
    cache = np.zeros((len(latents) // PAGE, PAGE, row["bytes_per_token"]), np.uint8)
    codes, scales, rope = parts_of(cache, row)
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
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    rope: NDArray[np.uint8],
    row: dict[str, Any],
    keys: NDArray[np.float32],
    *,
    by_table: bool = True,
) -> None:
    """Rows of bytes into float32 rows `keys` [n, d_qk]: by tables of 256 entries or casts of ml_dtypes."""
    count, quantised = len(codes), row["quantised_dims"]
    if row["scale"] in ("pow2_fp32", "arbitrary_fp32"):
        factors = np.ascontiguousarray(scales).view(np.float32)
    else:
        factors = (UE8M0 if row["scale"] == "ue8m0" else E4M3).take(scales[:, : row["scales_per_token"]])
    values = decode_codes(codes, row["code"], by_table=by_table).reshape(count, -1, row["group"])
    np.multiply(values, factors[..., None], out=keys[:, :quantised].reshape(values.shape, copy=False))
    if row["rope_dims"]:
        wide = np.ascontiguousarray(rope).view(np.uint16).astype(np.uint32)
        wide <<= 16
        keys[:, quantised:] = wide.view(np.float32)


def decode_codes(codes: NDArray[np.uint8], code: str, *, by_table: bool) -> NDArray[np.float32]:
    """The numbers that codes stand for, before scaling."""
    values: NDArray[np.float32]
    if by_table:
        values = (E2M1_PAIRS if code == "e2m1" else E4M3).take(codes).view(np.float32)
    elif code == "e2m1":
        values = np.stack([codes & 15, codes >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


def unpack(cache: NDArray[np.uint8], row: dict[str, Any], *, by_table: bool) -> NDArray[np.float32]:
    """Dequantises every slot."""
    parts = parts_of(cache, row)
    keys = np.empty((len(cache) * PAGE, row["d_qk"]), np.float32)
    for start in range(0, len(keys), BLOCK):
        block = keys[start : start + BLOCK]
        pages = slice(start // PAGE, (start + len(block)) // PAGE)
        codes, scales, rope = (part[pages].reshape(len(block), -1) if part.size else part[0] for part in parts)
        dequantise(codes, scales, rope, row, block, by_table=by_table)
    return keys
