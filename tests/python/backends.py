"""The backends that tests run on."""

import ml_dtypes
import numpy as np
import pytest
import sparse_mla

BF16 = np.dtype(ml_dtypes.bfloat16)


class CpuBackend:
    """How a test reaches the CPU backend. A further backend offers the same names.

    `array` puts a numpy array on the backend with its strides, `view` takes a basic-index view of such an array,
    `numpy` brings one back. `decode` and `merge_states` take and return the backend's arrays. `f32_tol` is the
    relative L2 asked of a float32 output, beside the contract's 2e-3 for every output. `compacts` says that holes leave
    no trace in the rounding either: the candidates are listed before they are summed.
    """

    name = "cpu"
    f32_tol = 2e-5
    compacts = True
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


class CudaBackend(CpuBackend):
    """Through torch, on the current CUDA device."""

    name = "cuda"
    f32_tol = 2e-3
    compacts = False

    def __init__(self):
        driver = sparse_mla.show_config()["cuda_driver"]
        if "unavailable" in driver:
            pytest.skip(f"no CUDA GPU: {driver['unavailable']}")
        self.torch = pytest.importorskip("torch", reason="torch makes the CUDA arrays of these tests")

    def array(self, x):
        """A copy with the strides, and with the bytes between the elements."""
        torch = self.torch
        start, stop = np.lib.array_utils.byte_bounds(x)
        interface = {"version": 3, "shape": (stop - start,), "typestr": "|u1", "data": (start, True)}
        memory = np.asarray(type("Bytes", (), {"__array_interface__": interface})())
        lead = start % 16  # as aligned as it was
        buffer = torch.zeros(lead + len(memory) + 16, dtype=torch.uint8, device="cuda")
        buffer[lead : lead + len(memory)] = torch.from_numpy(memory.copy())
        dtype = torch.bfloat16 if x.dtype.name in ("uint16", "bfloat16") else getattr(torch, x.dtype.name)
        offset = lead + x.__array_interface__["data"][0] - start
        size = x.dtype.itemsize
        used = buffer[offset % size :][: (len(buffer) - offset % size) // size * size].view(dtype)
        return used.as_strided(x.shape, [stride // size for stride in x.strides], offset // size)

    def numpy(self, x):
        x = x.detach().cpu()
        return x.view(self.torch.uint16).numpy().view(BF16) if x.dtype == self.torch.bfloat16 else x.numpy()


BACKENDS = {"cpu": CpuBackend, "cuda": CudaBackend}
