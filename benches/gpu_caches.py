"""Times cache kernels on a CUDA GPU, beside a copy of as many bytes and beside an empty launch."""

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


MOVED = 65536  # slots of a cache that is moved or converted


def time_conversions(replay_us: Replay, generator: torch.Generator) -> list[dict[str, Any]]:
    """Microseconds of repage (pages of 64 to pages of 256) and of every conversion, 65,536 slots; prints Markdown."""
    print(f"\n{MOVED} slots, pages of 64. In brackets: copy time of the same bytes over the time.\n")
    print("| from | to | kind | us |\n|---|---|---|---|")
    rows = []
    for old in sparse_mla.families():
        for new in sparse_mla.families():
            row = time_conversion(old, new, replay_us, generator)
            if row is not None:
                rows.append(row)
                print(f"| {row['from']} | {row['to']} | {row['kind']} | {cell(row, 'convert')} |", flush=True)
    return rows


def time_conversion(
    old: dict[str, Any], new: dict[str, Any], replay_us: Replay, generator: torch.Generator
) -> dict[str, Any] | None:
    """The time of one pair of lines of the family table; None if there is no conversion."""
    if (old["quantised_dims"], old["rope_dims"]) != (new["quantised_dims"], new["rope_dims"]):
        return None
    moved = MOVED * (old["bytes_per_token"] + new["bytes_per_token"])
    names = {"from_family": old["family"], "from_format": old["kv_cache_format"]}
    names |= {"to_family": new["family"], "to_format": new["kv_cache_format"]}
    words = {"family": old["family"], "kv_cache_format": old["kv_cache_format"]}
    caches = [
        sparse_mla.pack_kv_cache(
            torch.randn(MOVED, old["d_qk"], device="cuda", generator=generator, dtype=torch.bfloat16), **words
        )
        for _ in range(max(4, COLD_BYTES // moved))
    ]
    kept: list[Any] = []  # or every output would lie in the same, warm memory
    if old == new:
        kind, call = "repage", partial(sparse_mla.repage_kv_cache, **words, page_block_size=256)
    else:
        call = partial(sparse_mla.convert_kv_cache, **names)
        kind = "exact" if is_exact(caches[0][:1], names) else "lossy"
    us = replay_us([lambda cache=cache: kept.append(call(cache)) for cache in caches])
    times = {"convert_us": round(us, 3), "convert_copy_us": round(copy_us(moved, replay_us), 3)}
    name = "{family} {kv_cache_format}".format
    return {"from": name(**old), "to": name(**new), "kind": kind, **times}


def is_exact(cache: torch.Tensor, names: dict[str, Any]) -> bool:
    """Whether codes are kept: a GPU gives the error of no other conversion."""
    try:
        sparse_mla.convert_kv_cache(cache, **names, return_error=True)
    except ValueError:
        return False
    return True
