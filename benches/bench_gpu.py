"""Times decode and the cache kernels on a CUDA GPU: graph replay, cold in L2, medians, beside a copy of the same bytes.

Needs torch. Run by tests/gpu/run.sh; writes gpu-<device>-<date>.json and prints Markdown. `--families` without names
leaves decode out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import sparse_mla
import torch
from gpu_caches import time_caches, time_conversions

# Family, cache format, widths.
GRID: list[tuple[str, str, tuple[int, ...]]] = [
    ("dsv3_2", "fp8", (2048, 512)),
    ("glm_nsa", "nvfp4", (2048, 512)),
    ("glm53_nope", "fp8", (2176,)),
    ("dsv4", "fp8", (512, 128)),
    ("dsv4", "nvfp4", (512, 128)),
    ("dots3_swa", "fp8", (576,)),
    ("dsv4_1", "fp8", (512,)),
    ("dsv4_1_inline", "fp8", (512,)),
]
HEADS = (16, 64, 128)
TOKENS = (1, 4, 16, 64)
POOL_BYTES = 3 << 30  # many times the L2 cache
COLD_BYTES = 200 << 20  # rows read before any is read again
MAX_INDEX_SETS = 1000


def make_pool(facts: dict[str, Any], generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """A packed cache of random valid records, uint8 [pages, 64, bytes_per_token], and its slots. Never zeros."""
    record = facts["bytes_per_token"]
    quantised, rope, scales = facts["quantised_dims"], 2 * facts["rope_dims"], facts["scales_per_token"]
    fp4 = facts["code"] == "e2m1"
    pages = POOL_BYTES // (64 * record)
    pool = torch.empty(pages, 64 * record, dtype=torch.uint8, device="cuda")
    for start in range(0, pages, 4096):
        count = min(4096, pages - start)

        def random(width: int, low: int, high: int, count: int = count) -> torch.Tensor:
            shape = (count, 64, width)
            return torch.randint(low, high, shape, device="cuda", generator=generator, dtype=torch.uint8)

        signed = random(quantised, 0, 0x70) | (random(quantised, 0, 2) << 7)
        codes = random(quantised // 2, 0, 256) if fp4 else signed
        lanes = torch.randn(count, 64, rope // 2, device="cuda", generator=generator).bfloat16().view(torch.uint8)
        if facts["scale"] == "ue8m0":
            scale = random(scales, 116, 120)
        elif fp4:
            scale = random(scales, 0x20, 0x30)
        else:
            values = torch.rand(count, 64, scales, device="cuda", generator=generator) * 0.01 + 0.001
            scale = values.view(torch.uint8)
        pad = record - codes.shape[2] - rope - scale.shape[2]
        scale = torch.cat([scale, torch.zeros_like(random(pad, 0, 2))], 2)
        if facts["placement"] == "inline":
            page = torch.cat([codes, scale, lanes], 2).flatten(1)
        else:
            page = torch.cat([torch.cat([codes, lanes], 2).flatten(1), scale.flatten(1)], 1)
        pool[start : start + count] = page
    return pool.view(pages, 64, record), pages * 64


def replay_us(calls: list[Callable[[], Any]], minimum_ms: float = 4.0, repeats: int = 9) -> float:
    """Median microseconds of one call, over replays of a graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once(rounds: int) -> float:
        start.record()
        for _ in range(rounds):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / rounds

    once(1)
    rounds = max(1, min(50, int(minimum_ms / max(once(1), 1e-3))))
    return statistics.median(once(rounds) for _ in range(repeats)) * 1e3 / len(calls)


def copy_rate() -> float:
    """Bytes per microsecond of a large device copy, read and written."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / replay_us([lambda: target.copy_(source)])


def time_family(
    facts: dict[str, Any],
    topk: int,
    pool: torch.Tensor,
    slots: int,
    generator: torch.Generator,
    rate: float,
    rows: list[dict[str, Any]],
) -> None:
    """Times every head and token count of one family and width; prints a table and appends to `rows`."""
    title = f"{facts['family']} {facts['kv_cache_format']} K {topk}"
    print(f"\n| {title} | " + " | ".join(f"T {tokens}" for tokens in TOKENS) + " |")
    print("|---" * (len(TOKENS) + 1) + "|")
    for heads in HEADS:
        cells = []
        for tokens in TOKENS:
            read = tokens * topk * (facts["bytes_per_token"] + 4)
            sets = max(8, min(MAX_INDEX_SETS, COLD_BYTES // read))
            call = Call(facts, tokens, heads, slots, pool, generator)
            us = replay_us([partial(call, call.indices(topk)) for _ in range(sets)])
            copy_us = (read + 2 * (call.q.numel() + call.out.numel())) / rate
            rows.append(
                {
                    "family": facts["family"],
                    "kv_cache_format": facts["kv_cache_format"],
                    "topk": topk,
                    "heads": heads,
                    "tokens": tokens,
                    "us": round(us, 3),
                    "copy_us": round(copy_us, 3),
                }
            )
            cells.append(f"{us:.2f} ({us / copy_us:.1f})")
        print(f"| H {heads} | " + " | ".join(cells) + " |", flush=True)


class Call:
    """decode with given buffers, but for the indices."""

    def __init__(
        self,
        facts: dict[str, Any],
        tokens: int,
        heads: int,
        slots: int,
        pool: torch.Tensor,
        generator: torch.Generator,
    ) -> None:
        self.q = torch.randn(tokens, heads, facts["d_qk"], device="cuda", generator=generator).bfloat16()
        self.out = torch.empty(tokens, heads, facts["d_v"], dtype=torch.bfloat16, device="cuda")
        self.lse = torch.empty(tokens, heads, device="cuda")
        self.pool, self.slots, self.generator = pool, slots, generator
        self.words = {
            "family": facts["family"],
            "kv_cache_format": facts["kv_cache_format"],
            "sm_scale": facts["d_qk"] ** -0.5,
        }

    def indices(self, topk: int) -> torch.Tensor:
        """Random slots, int32 [T, topk]."""
        shape = (len(self.q), topk)
        return torch.randint(0, self.slots, shape, device="cuda", generator=self.generator, dtype=torch.int32)

    def __call__(self, indices: torch.Tensor) -> None:
        sparse_mla.decode(self.q, self.pool, indices, out=self.out, lse=self.lse, **self.words)


def host_us(
    facts: dict[str, Any], pool: torch.Tensor, slots: int, generator: torch.Generator, tokens: int = 1
) -> float:
    """Median microseconds from the Python call to its return with given buffers; without tokens nothing is launched."""
    call = Call(facts, tokens, 16, slots, pool, generator)
    indices = call.indices(512)
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(50):
            call(indices)
        times.append((time.perf_counter() - begin) / 50)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benches/results"))
    parser.add_argument("--families", nargs="*", default=[family for family, *_ in GRID])
    arguments = parser.parse_args()
    generator = torch.Generator(device="cuda").manual_seed(0)
    caches = time_caches(replay_us, generator)
    conversions = time_conversions(replay_us, generator)
    rate = copy_rate()
    table = {(row["family"], row["kv_cache_format"]): row for row in sparse_mla.families()}
    rows: list[dict[str, Any]] = []
    host: dict[str, float] = {}
    for family, kv_cache_format, widths in GRID:
        if family in arguments.families:
            facts = table[family, kv_cache_format]
            pool, slots = make_pool(facts, generator)
            for topk in widths:
                time_family(facts, topk, pool, slots, generator, rate, rows)
            if family == "dsv3_2":
                host = {f"T {tokens}": host_us(facts, pool, slots, generator, tokens) for tokens in (0, 1)}
            del pool
    print(f"\nmicroseconds (in brackets: over the bytes at copy speed, {rate / 1e6:.2f} TB/s)")
    for tokens, us in host.items():
        print(f"Python call, given buffers, {tokens}: {us:.2f} us")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    config = sparse_mla.show_config()
    result = {
        "device": torch.cuda.get_device_name(),
        "driver": config["cuda_driver"],
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "build_id": config["build_id"],
        "copy_bytes_per_us": rate,
        "host_us": host,
        "rows": rows,
        "caches": caches,
        "conversions": conversions,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name().replace(" ", "-").lower()
    path = arguments.output / f"gpu-{name}-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print("written to", path)


if __name__ == "__main__":
    main()
