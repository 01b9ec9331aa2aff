"""Results for libraries that cannot be asked for an array: memory of our own, taken over through DLPack."""

import gc

import pytest
import sparse_mla
from test_device import D_V, Problem


class Foreign:
    """An array of a library that nobody knows: the two methods of DLPack over a torch tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.fixture
def problem(torch):
    return Problem(torch)


def decode(p, **kwargs):
    return sparse_mla.decode(Foreign(p.q), Foreign(p.cache), Foreign(p.indices), **p.words, **kwargs)


def test_the_result_is_taken_over_without_a_copy(torch, problem):
    want, want_lse = problem.decode(return_lse=True)
    out, lse = decode(problem, return_lse=True)
    assert isinstance(out, sparse_mla.DeviceArray)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((3, 16, D_V), "bfloat16", (3, 16), "float32")
    assert tuple(map(int, out.__dlpack_device__())) == (2, 0)
    assert repr(out) == "DeviceArray(shape=(3, 16, 512), dtype='bfloat16', device=0)"
    taken = torch.from_dlpack(out)
    assert taken.dtype == torch.bfloat16
    assert taken.data_ptr() == torch.from_dlpack(out).data_ptr()
    assert torch.equal(taken, want)
    assert torch.equal(torch.from_dlpack(lse), want_lse)


def test_cupy_takes_it_over(torch, problem):
    cupy = pytest.importorskip("cupy")
    _, want_lse = problem.decode(return_lse=True)
    _, lse = decode(problem, return_lse=True)
    taken = cupy.from_dlpack(lse)
    cupy.cuda.get_current_stream().synchronize()
    assert (taken == cupy.from_dlpack(want_lse)).all()


def test_the_memory_outlives_the_array(torch, problem):
    want = problem.decode()
    taken = torch.from_dlpack(decode(problem))
    gc.collect()
    others = [decode(problem) for _ in range(20)]
    assert torch.equal(taken, want)
    assert all(torch.equal(torch.from_dlpack(other), want) for other in others)


def test_the_memory_is_freed(torch):
    p = Problem(torch, tokens=256, heads=128, topk=64)  # 32 MiB a result
    decode(p)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(50):
        torch.from_dlpack(decode(p))
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


def test_a_consumer_waits_for_the_result(torch, problem):
    """The result is still being made on a side stream when another stream takes it over."""
    want = problem.decode()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
    out = decode(problem, stream=side)
    assert torch.equal(torch.from_dlpack(out), want)


def test_dropped_before_it_is_done(torch, problem):
    side = torch.cuda.Stream()
    want = problem.decode()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
    decode(problem, stream=side)
    gc.collect()
    assert torch.equal(problem.decode(), want)
    torch.cuda.synchronize()


def test_a_result_is_an_argument_too(torch, problem):
    """Two results of ours are merged, and one is written again."""
    out, lse = decode(problem, return_lse=True)
    merged, _ = sparse_mla.merge_states(out, lse, out, lse)
    assert isinstance(merged, sparse_mla.DeviceArray)
    assert torch.equal(torch.from_dlpack(merged), torch.from_dlpack(out))
    assert decode(problem, out=out) is out
    problem.check(torch.from_dlpack(out))


def test_no_tokens(torch, problem):
    empty = Foreign(problem.q[:0])
    out = sparse_mla.decode(empty, Foreign(problem.cache), Foreign(problem.indices[:0]), **problem.words)
    assert out.shape == (0, 16, D_V)
    assert torch.from_dlpack(out).shape == (0, 16, D_V)


def test_captures_need_given_buffers_and_nothing_sticks(torch, problem):
    sparse_mla.warmup("dsv3_2")
    out = torch.empty(3, 16, D_V, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream()
        with pytest.raises(ValueError, match="`out` must be given while the stream is being captured"):
            decode(problem, stream=stream)
        decode(problem, stream=stream, out=out)
    graph.replay()
    torch.cuda.synchronize()
    problem.check(out)


@pytest.mark.parametrize("words", [{"copy": True}, {"dl_device": (1, 0)}, {"dl_device": (2, 7)}], ids=str)
def test_what_cannot_be_exported(torch, problem, words):
    with pytest.raises(BufferError):
        decode(problem).__dlpack__(**words)
