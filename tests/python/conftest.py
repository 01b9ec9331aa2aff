"""Fixtures shared by the Python tests."""

import os
import zlib

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the oracle's products are small: more threads only spin

import numpy as np
import pytest
from backends import BACKENDS


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Each backend in turn."""
    return BACKENDS[request.param]()


@pytest.fixture
def rng(request):
    """A generator whose seed is the test's own id, so that tests do not depend on their order."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
