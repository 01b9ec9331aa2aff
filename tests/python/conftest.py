"""Fixtures shared by the Python tests."""

import os
import zlib

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the oracle's products are small: more threads only spin

import numpy as np
import pytest
import sparse_mla


class CpuBackend:
    """How a test reaches the CPU backend. A further backend offers the same names.

    `array` puts a numpy array on the backend with its strides, `view` takes a basic-index view of such an array,
    `numpy` brings one back. `decode` and `merge_states` take and return the backend's arrays. `f32_tol` is the
    relative L2 asked of a float32 output, beside the contract's 2e-3 for every output.
    """

    name = "cpu"
    f32_tol = 2e-5
    decode = staticmethod(sparse_mla.decode)
    merge_states = staticmethod(sparse_mla.merge_states)

    @staticmethod
    def array(x):
        return x

    @staticmethod
    def view(x, key):
        return x[key]

    @staticmethod
    def numpy(x):
        return np.asarray(x)

    def run(self, problem, **kwargs):
        """Decodes an `oracle.Problem`; numpy out and lse."""
        arrays = {name: self.array(x) for name, x in problem.arrays().items()}
        out, lse = self.decode(**arrays, **{**problem.words(), "return_lse": True, **kwargs})
        return self.numpy(out), self.numpy(lse)


BACKENDS = {"cpu": CpuBackend}


@pytest.fixture(params=["cpu"])
def backend(request):
    """Each backend in turn."""
    return BACKENDS[request.param]()


@pytest.fixture
def rng(request):
    """A generator whose seed is the test's own id, so that tests do not depend on their order."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
