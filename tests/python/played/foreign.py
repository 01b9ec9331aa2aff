"""Arrays of a CUDA library that nobody knows, over host memory, and what a DLPack capsule holds."""

import ctypes

import numpy as np

CUDA = (2, 0)
CODES = {"i": 0, "u": 1, "f": 2}


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("tensor", DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ]


python = ctypes.pythonapi
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)


class Foreign:
    """The two methods of DLPack; uint16 stands for bfloat16. Notes the streams it was asked for."""

    def __init__(self, array):
        self.array, self.streams, self.kept = array, [], []

    def __dlpack_device__(self):
        return CUDA

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.streams.append(stream)
        array, rank = self.array, self.array.ndim
        shape = (ctypes.c_int64 * rank)(*array.shape)
        strides = (ctypes.c_int64 * rank)(*(stride // array.itemsize for stride in array.strides))
        tensor = DLTensor(
            array.ctypes.data, *CUDA, rank, CODES[array.dtype.kind], 8 * array.itemsize, 1, shape, strides, 0
        )
        managed = DLManagedTensor(tensor, None, nothing)
        self.kept.append((managed, shape, strides))
        return python.PyCapsule_New(ctypes.addressof(managed), b"dltensor", None)


def tensor_of(capsule):
    """The DLTensor of an unused legacy capsule."""
    return ctypes.cast(python.PyCapsule_GetPointer(capsule, b"dltensor"), ctypes.POINTER(DLManagedTensor))[0].tensor


def problem(tokens=3, heads=16, topk=300):
    """q, cache and indices of a dsv3_2 decode, and its keywords."""
    q = Foreign(np.zeros((tokens, heads, 576), np.uint16))
    cache = Foreign(np.zeros((8, 64, 656), np.uint8))
    indices = Foreign(np.zeros((tokens, topk), np.int32))
    return (q, cache, indices), {"family": "dsv3_2", "sm_scale": 0.04}
