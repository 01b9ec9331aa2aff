"""Fixtures of the tests that need a CUDA GPU and torch."""

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import sparse_mla

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))  # the oracle and the backends


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def torch():
    driver = sparse_mla.show_config()["cuda_driver"]
    if "unavailable" in driver:
        pytest.skip(f"no CUDA GPU: {driver['unavailable']}")
    return pytest.importorskip("torch", reason="torch makes the CUDA arrays of these tests")


@pytest.fixture
def rng(request):
    """A generator whose seed is the test's own id."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
