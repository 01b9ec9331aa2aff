"""Times the cache writers and readers on a CUDA GPU, beside a copy of as many bytes and beside an empty launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import sparse_mla
import torch

MANY = 8192  # rows of a prefill chunk
COLD_BYTES = 200 << 20  # written and read before anything is touched again
Replay = Callable[[list[Callable[[], Any]]], float]


def time_caches(replay_us: Replay, generator: torch.Generator) -> list[dict[str, Any]]:
    """Microseconds of append (8,192 rows, 1 row, with RoPE), pack and unpack, for every record; prints Markdown."""
    empty_us = replay_us([partial(torch.cuda._sleep, 0)] * 100)
    print(f"\nEmpty launch: {empty_us:.2f} us. In brackets: copy time of the same bytes over the time.\n")
    print(f"| record | append {MANY} | with RoPE | pack {MANY} | append 1 | over an empty launch | unpack {MANY} |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for facts in sparse_mla.families():
        row = time_record(facts, replay_us, generator)
        rows.append({"empty_us": round(empty_us, 3), **row})
        cells = " | ".join(cell(row, name) for name in ("append", "rope", "pack", "append_1"))
        over_empty, unpack = row["append_1_us"] / empty_us, cell(row, "unpack")
        title = f"{facts['family']} {facts['kv_cache_format']}"
        print(f"| {title} | {cells} | {over_empty:.2f} | {unpack} |", flush=True)
    return rows


def cell(row: dict[str, Any], name: str) -> str:
    """Microseconds and the share of the copy rate."""
    us, copy_us = row.get(f"{name}_us"), row.get(f"{name}_copy_us")
    return "-" if us is None or copy_us is None else f"{us:.2f} ({copy_us / us:.0%})"


def time_record(facts: dict[str, Any], replay_us: Replay, generator: torch.Generator) -> dict[str, Any]:
    """The times of one line of the family table."""
    words = {"family": facts["family"], "kv_cache_format": facts["kv_cache_format"]}
    record, d_qk, rope_dims = facts["bytes_per_token"], facts["d_qk"], facts["rope_dims"]
    append_bytes, unpack_bytes = MANY * (2 * d_qk + record), MANY * (record + 4 * d_qk)
    sets = max(4, COLD_BYTES // append_bytes)
    shape = sets, MANY, d_qk
    latents = torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)
    pool = torch.zeros(sets * MANY // 64, 64, record, dtype=torch.uint8, device="cuda")
    slots = torch.randperm(sets * MANY, device="cuda", generator=generator).view(sets, MANY)
    appends = [partial(sparse_mla.append_kv_cache, latents[i], slots[i], pool, **words) for i in range(sets)]
    ones = [
        partial(sparse_mla.append_kv_cache, latents[i % sets, i : i + 1], slots[i % sets, i : i + 1], pool, **words)
        for i in range(100)
    ]
    half = append_bytes // MANY // 2
    # By a kernel: `copy_` of so little is a node of another kind in a graph.
    row_copies = [
        partial(torch.bitwise_not, source, out=torch.empty_like(source))
        for source in (latents[i % sets, i].view(torch.uint8)[:half] for i in range(100))
    ]
    kept: list[Any] = []  # or every output would lie in the same, warm memory
    times = {
        "append_us": replay_us(appends),
        "append_copy_us": copy_us(append_bytes, replay_us),
        "append_1_us": replay_us(ones),
        "append_1_copy_us": replay_us(row_copies),
        # Without slots, and so without a search for duplicates.
        "pack_us": replay_us(
            [lambda latent=latent: kept.append(sparse_mla.pack_kv_cache(latent, **words)) for latent in latents]
        ),
    }
    times["pack_copy_us"] = times["append_copy_us"]
    if rope_dims:
        table = torch.randn(4096, rope_dims, device="cuda", generator=generator)
        positions = torch.randint(0, 4096, (MANY,), device="cuda", generator=generator)
        rope = {"rope_cos_sin": table, "rope_positions": positions}
        times["rope_us"] = replay_us([partial(call, **rope) for call in appends])
        times["rope_copy_us"] = times["append_copy_us"]
    pages = MANY // 64
    parts = [pool[i * pages : (i + 1) * pages] for i in range(sets)]
    times["unpack_us"] = replay_us(
        [lambda part=part: kept.append(sparse_mla.unpack_kv_cache(part, **words)) for part in parts]
    )
    times["unpack_copy_us"] = copy_us(unpack_bytes, replay_us)
    return {**words, **{name: round(us, 3) for name, us in times.items()}}


def copy_us(moved: int, replay_us: Replay) -> float:
    """Microseconds of a device copy that reads and writes `moved` bytes in all, cold."""
    count = max(4, COLD_BYTES // moved)
    source = torch.ones(count, moved // 2 // 16 * 16, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return replay_us([partial(target[i].copy_, source[i]) for i in range(count)])
