"""Wall times: two sides in turns in one process, and fresh interpreters."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import timeit
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Between sides: worker threads of the side that ran last wait in loops for a while and would slow the other one.
REST_SECONDS = 0.1
TURN_SECONDS = 0.1


def in_turns(ours: Callable[[], object], theirs: Callable[[], object], turns: int) -> tuple[list[float], list[float]]:
    """Seconds of every timed call of both sides. A turn starts with a call that is not timed; the order alternates."""
    sides = (ours, theirs)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            time.sleep(REST_SECONDS)
            sides[side]()
            seconds[side].extend(one_turn(sides[side]))
    return seconds


def one_turn(work: Callable[[], object]) -> list[float]:
    """Seconds of calls until the turn's time is up; one at least."""
    seconds: list[float] = []
    while sum(seconds) < TURN_SECONDS:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def per_call(work: str, names: dict[str, object], repeats: int) -> list[float]:
    """Seconds per call of a statement that is too short to time alone, loop included."""
    timer = timeit.Timer(work, globals=names)
    number, _ = timer.autorange()
    return [total / number for total in timer.repeat(repeats, number)]


def import_seconds(module: str, *, after: str, runs: int) -> list[float]:
    """Seconds of an import in fresh interpreters that have imported `after`."""
    program = f"import time, {after}; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"

    def once() -> float:
        return float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)

    once()  # compiles bytecode, fills the file cache
    return [once() for _ in range(runs)]


def median(seconds: list[float]) -> float:
    """The median, as every reported time is."""
    return statistics.median(seconds)
