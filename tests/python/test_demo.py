"""The demo's GPU part, with host arrays in the place of a GPU's."""

import time

import numpy as np
from sparse_mla import _demo_gpu, demo, families


class HostArrays:
    """The names of the demo's array libraries, on the CPU."""

    def to_device(self, x):
        return x

    def to_host(self, x):
        return x

    def event(self):
        return time.perf_counter()

    def elapsed_us(self, start, stop):
        return 1e6 * (stop - start)


def test_what_is_measured_is_the_same_decode(monkeypatch):
    monkeypatch.setattr(_demo_gpu, "CALLS", 1)
    monkeypatch.setattr(_demo_gpu, "REPEATS", 1)
    for row in families()[::5]:
        measured = demo.measure(row, HostArrays())
        assert measured.gpu_error == measured.decode_error
        assert measured.gpu_lse_error == measured.lse_error
        assert measured.gpu_us > 0
        assert demo.measure(row, None).gpu_us is None


def test_what_no_kernel_serves_is_left_out():
    q, cache = np.zeros((1, 200, 512), np.uint16), np.zeros((1, 64, 584), np.uint8)
    indices = np.zeros((1, 4), np.int32)
    call = {"q": q, "kv_cache": cache, "indices": indices, "family": "dsv4", "sm_scale": 1.0}
    assert _demo_gpu.decode(HostArrays(), 512, **call) is None
    served = _demo_gpu.decode(HostArrays(), 512, **{**call, "q": q[:, :8]})
    assert served.out.shape == (1, 8, 512)
