"""Benches of the CPU: import, queries, decode and caches, beside the obvious numpy way in the same process.

    python benches/bench_cpu.py [--all-families] [--runs N] [--threads N] [--output DIR]

Prints a Markdown table of medians and writes it as JSON, with the machine, into benches/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from suites import Result

HERE = Path(__file__).resolve().parent
THREAD_VARIABLES = ("SPARSE_MLA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
# Left by some environments; they pick other kernels than OpenBLAS would for this CPU, to numpy's disadvantage.
SLOW_BLAS_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
DEFAULT_FAMILIES = ["dsv3_2", "dsv4"]


def main() -> None:
    """Measures everything."""
    parser = argparse.ArgumentParser(description="Benches of the CPU backend against numpy.")
    parser.add_argument("--all-families", action="store_true", help="decode every FP8 family, not dsv3_2 and dsv4 only")
    parser.add_argument("--runs", type=int, default=7, help="turns of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both sides (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of the JSON file")
    arguments = parser.parse_args()
    settle_environment(arguments.threads)

    import sparse_mla  # imports numpy, whose BLAS reads the environment
    import suites

    families = [row["family"] for row in sparse_mla.families()] if arguments.all_families else DEFAULT_FAMILIES
    facts = machine()
    for name, fact in facts.items():
        print(f"{name}: {fact}", file=sys.stderr)
    results: list[Result] = []
    for suite in (
        suites.queries(arguments.runs),
        suites.decode(families, arguments.runs),
        suites.codecs(arguments.runs),
    ):
        for result in suite:
            print(f"{result.name}: {show(result)}", file=sys.stderr)
            results.append(result)
    print_table(results, facts)
    arguments.output.mkdir(parents=True, exist_ok=True)
    report = arguments.output / f"cpu-{datetime.date.today().isoformat()}.json"
    lines = [asdict(result) | {"ratio": result.ratio, "met": result.met} for result in results]
    report.write_text(json.dumps({"machine": facts, "results": lines}, indent=2) + "\n", encoding="utf-8")
    print(f"\nWrote {report}")


def settle_environment(threads: int) -> None:
    """Starts this program anew unless both sides would use `threads` threads and numpy its own choice of kernels."""
    wanted = {name: value for name, value in os.environ.items() if name not in SLOW_BLAS_VARIABLES}
    wanted |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    if wanted != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    import numpy as np
    import sparse_mla

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "load_average_at_start": os.getloadavg()[0],
        "threads": {name: os.environ[name] for name in THREAD_VARIABLES},
        "sparse_mla_num_threads": sparse_mla.show_config()["num_threads"],
        "versions": {name: metadata.version(name) for name in ("sparse-mla", "numpy", "ml_dtypes")}
        | {"python": platform.python_version(), "blas": f"{blas['name']} {blas['version']}"},
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain")),
    }


def cpu_model() -> str:
    """The CPU's name as the kernel knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def git(*arguments: str) -> str | None:
    """Output of git in this checkout; None outside one."""
    try:
        done = subprocess.run(["git", "-C", str(HERE.parent), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def print_table(results: list[Result], facts: dict[str, Any]) -> None:
    """Markdown."""
    threads = facts["sparse_mla_num_threads"]
    print(
        f"{facts['cpu']}, {facts['cores']} cores; sparse-mla {facts['versions']['sparse-mla']} on {threads} threads; "
        f"numpy {facts['versions']['numpy']} with BLAS on {threads} threads (its element-wise loops run on one). "
        f"Medians. Load average at start: {facts['load_average_at_start']:.1f}.\n"
    )
    print("| what | sparse-mla | numpy | ratio | target | met |")
    print("|---|---:|---:|---:|---:|---|")
    for result in results:
        numpy_time = "" if result.numpy_seconds is None else duration(result.numpy_seconds)
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}x"
        target = ""
        if result.target is not None:
            target = f"<= {duration(result.target)}" if result.ratio is None else f">= {result.target:g}x"
        met = {None: "", True: "yes", False: "no"}[result.met]
        print(f"| {result.name} | {duration(result.ours_seconds)} | {numpy_time} | {ratio} | {target} | {met} |")
    if disturbed := [result.name for result in results if result.disturbed_turns]:
        print(f"\nOther programs ran meanwhile, so that these ratios mean little: {'; '.join(disturbed)}.")


def show(result: Result) -> str:
    """One line of progress."""
    ratio = "" if result.ratio is None else f", {result.ratio:.2f}x"
    disturbed = f" ({result.disturbed_turns} turns disturbed)" if result.disturbed_turns else ""
    return f"{duration(result.ours_seconds)}{ratio}{disturbed}"


def duration(seconds: float) -> str:
    """Three significant digits in a unit that fits."""
    for factor, unit in ((1e-6, "ns"), (1e-3, "us"), (1.0, "ms")):
        if seconds < factor:
            return f"{seconds / factor * 1e3:.3g} {unit}"
    return f"{seconds:.3g} s"


if __name__ == "__main__":
    main()
