"""Times the first use of a family on a CUDA GPU: compiling its PTX without the driver's cache, loading it with.

Needs nothing but the driver; prints one line per entry of the registry. Each number is of a process of its own and
includes opening the device.
"""

from __future__ import annotations

import os
import subprocess
import sys

import sparse_mla

ONCE = """
import sys, time, sparse_mla
start = time.perf_counter()
sparse_mla.warmup(sys.argv[1], kv_cache_format=sys.argv[2])
print(time.perf_counter() - start)
"""


def seconds(family: str, kv_cache_format: str, *, cached: bool) -> float:
    """Seconds of `warmup` in a new process."""
    environment = {**os.environ, "CUDA_CACHE_DISABLE": "0" if cached else "1"}
    command = [sys.executable, "-c", ONCE, family, kv_cache_format]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    print("\n| family | format | compiled, s | from the cache, s |\n|---|---|---|---|")
    for row in sparse_mla.families():
        if row["in_registry"]:
            names = row["family"], row["kv_cache_format"]
            compiled = seconds(*names, cached=False)
            seconds(*names, cached=True)  # fills the cache
            print(f"| {' | '.join(names)} | {compiled:.2f} | {seconds(*names, cached=True):.3f} |", flush=True)


if __name__ == "__main__":
    main()
