"""The demo's decodes on a CUDA GPU, through torch or cupy, whichever is installed."""

from __future__ import annotations

import importlib
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import sparse_mla

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["CupyArrays", "GpuResult", "TorchArrays", "decode", "find"]

# Calls of a timing, and timings of which the median counts.
CALLS, REPEATS = 20, 9


class TorchArrays:
    """CUDA arrays and timers of torch."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        if not self.torch.cuda.is_available():
            raise ImportError("torch sees no CUDA device")

    def to_device(self, x: NDArray[Any]) -> Any:
        """A copy; uint16 is taken for the bits of bfloat16."""
        if x.dtype == np.uint16:
            return self.torch.from_numpy(x.view(np.int16)).cuda().view(self.torch.bfloat16)
        return self.torch.from_numpy(np.ascontiguousarray(x)).cuda()

    def to_host(self, x: Any) -> NDArray[np.float32]:
        """A float32 copy."""
        copy: NDArray[np.float32] = x.cpu().numpy()
        return copy

    def event(self) -> Any:
        """A recorded event of the current stream."""
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: Any, stop: Any) -> float:
        """Microseconds between two events."""
        stop.synchronize()
        return 1e3 * float(start.elapsed_time(stop))


class CupyArrays:
    """CUDA arrays and timers of cupy."""

    def __init__(self) -> None:
        self.cupy: Any = importlib.import_module("cupy")

    def to_device(self, x: NDArray[Any]) -> Any:
        """A copy; bfloat16 stays uint16 bits."""
        return self.cupy.asarray(x)

    def to_host(self, x: Any) -> NDArray[np.float32]:
        """A float32 copy."""
        copy: NDArray[np.float32] = self.cupy.asnumpy(x)
        return copy

    def event(self) -> Any:
        """A recorded event of the current stream."""
        event = self.cupy.cuda.Event()
        event.record()
        return event

    def elapsed_us(self, start: Any, stop: Any) -> float:
        """Microseconds between two events."""
        stop.synchronize()
        return 1e3 * float(self.cupy.cuda.get_elapsed_time(start, stop))


def find() -> tuple[TorchArrays | CupyArrays | None, str]:
    """What makes CUDA arrays here, and the GPU's name; or None, and why there is none."""
    driver = sparse_mla.show_config()["cuda_driver"]
    if "unavailable" in driver:
        return None, driver["unavailable"]
    refusals = []
    libraries: tuple[type[TorchArrays | CupyArrays], ...] = (TorchArrays, CupyArrays)
    for library in libraries:
        try:
            return library(), driver["devices"][0][0]
        except ImportError as error:
            refusals.append(str(error))
    return None, f"CUDA arrays need torch or cupy: {'; '.join(refusals)}"


@dataclass(frozen=True)
class GpuResult:
    """Output and log-sum-exp of one decode in float32, and its time."""

    out: NDArray[np.float32]
    lse: NDArray[np.float32]
    us: float


def decode(arrays: TorchArrays | CupyArrays, d_v: int, **call: Any) -> GpuResult | None:
    """`sparse_mla.decode` of numpy arguments on the GPU, timed; None if no GPU kernel serves them."""
    given = {name: arrays.to_device(x) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    leading = call["q"].shape[:2]
    given["out"] = arrays.to_device(np.empty((*leading, d_v), np.float32))
    given["lse"] = arrays.to_device(np.empty(leading, np.float32))

    def once() -> Any:
        return sparse_mla.decode(**given, return_lse=True)

    try:
        out, lse = once()
    except sparse_mla.UnsupportedError:
        return None
    return GpuResult(arrays.to_host(out), arrays.to_host(lse), median_us(arrays, once))


def median_us(arrays: TorchArrays | CupyArrays, once: Callable[[], object]) -> float:
    """Median microseconds of a call, among calls that follow one another."""
    times = []
    for _ in range(REPEATS):
        start = arrays.event()
        for _ in range(CALLS):
            once()
        times.append(arrays.elapsed_us(start, arrays.event()) / CALLS)
    return statistics.median(times)
