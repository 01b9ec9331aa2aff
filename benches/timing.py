"""Wall times: two sides in turns in one process, and fresh interpreters."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

# Between sides: worker threads of the side that ran last wait in loops for a while and would slow the other one.
REST_SECONDS = 0.1
TURN_SECONDS = 0.1
# A turn is repeated when other programs used more than this share of a core meanwhile: threads of both sides then wait
# for each other, which costs a side with busy waiting many times more than one without.
OTHERS_SHARE = 0.1
MOST_REPEATS = 20


class Turns(NamedTuple):
    """Seconds of every timed call of both sides."""

    ours: list[float]
    theirs: list[float]
    disturbed: int
    """Turns that count although other programs ran: no quiet moment was found."""


def in_turns(ours: Callable[[], object], theirs: Callable[[], object], turns: int) -> Turns:
    """Runs both sides in turns; the order alternates."""
    result = Turns([], [], 0)
    for turn in range(turns):
        seconds, disturbed = both_sides(ours, theirs, ours_first=turn % 2 == 0)
        for _ in range(MOST_REPEATS):
            if not disturbed:
                break
            seconds, disturbed = both_sides(ours, theirs, ours_first=turn % 2 == 0)
        result.ours.extend(seconds[0])
        result.theirs.extend(seconds[1])
        result = result._replace(disturbed=result.disturbed + disturbed)
    return result


def both_sides(
    ours: Callable[[], object], theirs: Callable[[], object], *, ours_first: bool
) -> tuple[tuple[list[float], list[float]], bool]:
    """One turn of each side, and whether other programs disturbed them."""
    start, before = time.perf_counter(), others_seconds()
    if ours_first:
        our_seconds, their_seconds = one_turn(ours), one_turn(theirs)
    else:
        their_seconds, our_seconds = one_turn(theirs), one_turn(ours)
    elapsed, others = time.perf_counter() - start, others_seconds() - before
    return (our_seconds, their_seconds), others > OTHERS_SHARE * elapsed


def others_seconds() -> float:
    """CPU seconds that everything but this process has used, a hypervisor's share included; 0 where nothing says so."""
    try:
        line = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = (int(ticks) for ticks in line.split()[1:])
    own = os.times()
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def one_turn(work: Callable[[], object]) -> list[float]:
    """Seconds of calls until the turn's time is up, one at least, after a call that is not timed."""
    time.sleep(REST_SECONDS)
    work()
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
