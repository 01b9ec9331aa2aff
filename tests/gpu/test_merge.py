"""merge_states on a GPU: the CPU's answers, float64's, streams, graphs, strides, errors that must not stick."""

import itertools
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import sparse_mla
from backends import CudaBackend

BF16 = np.dtype(ml_dtypes.bfloat16)
# Log-sum-exps that decide by themselves, with each other and with usual ones.
SPECIAL = np.array([-np.inf, np.inf, np.nan, 0.0, 3.0, -1e30, 1e30, 600.0, -600.0, 200.0], np.float32)


@pytest.fixture
def backend():
    return CudaBackend()


def sides(rng, shape, dtype):
    """Two results whose log-sum-exps meet in every special pair, then at random."""
    rows = int(np.prod(shape[:-1]))
    pairs = np.array(list(itertools.product(SPECIAL, SPECIAL)), np.float32)
    lse = rng.normal(0, 3, (2, rows)).astype(np.float32)
    count = min(rows, len(pairs))
    lse[:, :count] = pairs[:count].T
    values = rng.standard_normal((2, *shape)).astype(dtype)
    return [(values[side], lse[side].reshape(shape[:-1])) for side in range(2)]


def compare(got, want, dtype):
    """NaN where the CPU has NaN, infinities alike, else within float32 or one step of the output."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    step = {BF16: 2**-7, np.dtype(np.float16): 2**-10, np.dtype(np.float32): 4e-6}[np.dtype(dtype)]
    np.testing.assert_allclose(got, want, rtol=step, atol=step * 1e-1, equal_nan=True)


@pytest.mark.parametrize("base", ["2", "e"])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", [(5, 20, 512), (2, 3, 17, 1024), (101, 1), (100, 3), (120, 66), (100, 0), (0, 4, 8)])
def test_as_on_the_cpu(torch, backend, rng, shape, dtype, base):
    (out_a, lse_a), (out_b, lse_b) = sides(rng, shape, dtype)
    with np.errstate(invalid="ignore"):
        want, want_lse = sparse_mla.merge_states(out_a, lse_a, out_b, lse_b, lse_base=base)
    arrays = (
        map(backend.array, (out_a, lse_a, out_b, lse_b))
        if out_a.size
        else as_tensors(torch, out_a, lse_a, out_b, lse_b)
    )
    got, got_lse = sparse_mla.merge_states(*arrays, lse_base=base)
    assert (tuple(got.shape), tuple(got_lse.shape)) == (shape, shape[:-1])
    compare(backend.numpy(got), want, dtype)
    np.testing.assert_allclose(backend.numpy(got_lse), want_lse, rtol=1e-6, atol=1e-6, equal_nan=True)


def as_tensors(torch, *arrays):
    """Copies of arrays that may be empty."""
    tensors = [torch.from_numpy(x.view(np.int16) if x.dtype == BF16 else x).cuda() for x in arrays]
    return [t.view(torch.bfloat16) if x.dtype == BF16 else t for t, x in zip(tensors, arrays, strict=True)]


@pytest.mark.parametrize("junk", [np.nan, np.inf])
@pytest.mark.parametrize("lse_b", [-np.inf, -3000.0, -300.0])
def test_what_weighs_nothing_is_ignored_and_what_weighs_little_is_not(torch, backend, rng, lse_b, junk):
    """What float64 cannot weigh is ignored; what only float32 cannot weigh still brings its NaN and its infinity."""
    a = rng.standard_normal((4, 512)).astype(np.float32)
    states = a, np.zeros(4, np.float32), np.full_like(a, junk), np.full(4, lse_b, np.float32)
    want, want_lse = sparse_mla.merge_states(*states)
    got, lse = map(backend.numpy, sparse_mla.merge_states(*map(backend.array, states)))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(lse, want_lse)


@pytest.mark.parametrize("base", ["2", "e"])
def test_against_float64(torch, backend, rng, base):
    a, b = rng.standard_normal((2, 64, 16, 512)).astype(np.float32)
    lse_a, lse_b = rng.normal(0, 4, (2, 64, 16)).astype(np.float32)
    got, lse = map(backend.numpy, sparse_mla.merge_states(*map(backend.array, (a, lse_a, b, lse_b)), lse_base=base))
    log = np.log(2.0) if base == "2" else 1.0
    weight = 1 / (1 + np.exp((lse_b.astype(np.float64) - lse_a) * log))[..., None]
    want = weight * a + (1 - weight) * b
    assert np.linalg.norm(got - want) <= 1e-6 * np.linalg.norm(want)
    np.testing.assert_allclose(lse, np.logaddexp(lse_a * log, lse_b * log) / log, rtol=1e-6, atol=1e-6)


STRIDED = {
    "rows of wider ones": lambda x: x[:, :, :100],
    "an odd start": lambda x: x[:, :, 1:101],
    "every other value": lambda x: x[:, :, :200:2],
    "every other token": lambda x: x[::2, :, :100],
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_strided_views(torch, name, dtype):
    generator = torch.Generator(device="cuda").manual_seed(1)
    wide = torch.randn(2, 6, 1, 256, device="cuda", generator=generator).to(getattr(torch, dtype))
    lse = torch.randn(2, 6, 4, device="cuda", generator=generator)
    a, b = STRIDED[name](wide[0]), STRIDED[name](wide[1])
    lse_a, lse_b = (x[: len(a) * (6 // len(a)) : 6 // len(a), 2:3] for x in lse)
    got, got_lse = sparse_mla.merge_states(a, lse_a, b, lse_b)
    want, want_lse = sparse_mla.merge_states(*(x.contiguous() for x in (a, lse_a, b, lse_b)))
    assert torch.equal(got, want)
    assert torch.equal(got_lse, want_lse)
    weight = torch.sigmoid((lse_a.double() - lse_b) * np.log(2))[..., None]
    exact = weight * a.double() + (1 - weight) * b.double()
    assert (got.double() - exact).norm() <= 4e-3 * exact.norm()


def make(torch, rows=48, d_v=512):
    """Two sides in torch."""
    return [
        x
        for _ in range(2)
        for x in (torch.randn(rows, 8, d_v, device="cuda").bfloat16(), torch.randn(rows, 8, device="cuda"))
    ]


def test_torch_in_torch_out(torch):
    states = make(torch)
    before = [x.clone() for x in states]
    out, lse = sparse_mla.merge_states(*states)
    assert (out.dtype, lse.dtype, out.device) == (torch.bfloat16, torch.float32, states[0].device)
    assert out.is_contiguous()
    assert all(map(torch.equal, states, before))


def test_cupy_arrays(torch):
    cupy = pytest.importorskip("cupy")
    states = [x.half() if x.dtype == torch.bfloat16 else x for x in make(torch)]
    want, want_lse = sparse_mla.merge_states(*states)
    out, lse = sparse_mla.merge_states(*map(cupy.from_dlpack, states))
    assert isinstance(out, cupy.ndarray)
    assert out.dtype == cupy.float16
    cupy.cuda.get_current_stream().synchronize()
    assert torch.equal(torch.from_dlpack(out), want)
    assert torch.equal(torch.from_dlpack(lse), want_lse)


def test_on_the_producers_stream(torch):
    """One side is still being made on a side stream when the merge is called there."""
    states = make(torch)
    want, _ = sparse_mla.merge_states(*states)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late = torch.zeros_like(states[2])
        torch.cuda._sleep(50_000_000)
        late.copy_(states[2])
        got, _ = sparse_mla.merge_states(states[0], states[1], late, states[3])
    side.synchronize()
    assert torch.equal(got, want)


def test_in_a_graph_with_a_decode_of_each_rank(torch):
    """Captured after two decodes; the replay follows edits of the indices."""
    from test_device import Problem

    p = Problem(torch, topk=256)
    sparse_mla.warmup("dsv3_2")
    ranks = [p.indices[:, :100].contiguous(), p.indices[:, 100:].contiguous()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states = [x for r in ranks for x in sparse_mla.decode(p.q, p.cache, r, **p.words, return_lse=True)]
        out, _ = sparse_mla.merge_states(*states)
    for _ in range(3):
        p.indices.copy_(torch.randint(0, 4096, p.indices.shape, device="cuda", dtype=torch.int32))
        ranks[0].copy_(p.indices[:, :100]), ranks[1].copy_(p.indices[:, 100:])
        graph.replay()
        torch.cuda.synchronize()
        want = p.reference()
        assert (out.double() - want).norm() <= 6e-3 * want.norm()


def test_a_cold_module_in_a_capture_is_refused_and_nothing_sticks(torch):
    """In a process of its own, where no module is loaded yet."""
    code = """
import torch, sparse_mla
states = [x for _ in range(2) for x in (torch.randn(4, 8, 512, device="cuda"), torch.randn(4, 8, device="cuda"))]
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        sparse_mla.merge_states(*states)
    raise SystemExit("not refused")
except sparse_mla.DeviceError as error:
    assert "warmup()" in str(error), error
sparse_mla.warmup("dsv4")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out, lse = sparse_mla.merge_states(*states)
graph.replay(); torch.cuda.synchronize()
want, want_lse = sparse_mla.merge_states(*states)
assert torch.equal(out, want) and torch.equal(lse, want_lse)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_mistake_sticks(torch):
    """Each is refused before any launch, in one process; the next merge is right."""
    out_a, lse_a, out_b, lse_b = states = make(torch)
    want, _ = sparse_mla.merge_states(*states)
    mistakes = {
        "host side": (out_a, lse_a, out_b.cpu(), lse_b),
        "host lse": (out_a, lse_a, out_b, lse_b.cpu()),
        "first on the host": (out_a.cpu(), lse_a, out_b, lse_b),
        "numpy": (out_a, lse_a.cpu().numpy(), out_b, lse_b),
        "two types": (out_a, lse_a, out_b.float(), lse_b),
        "double": (out_a.double(), lse_a, out_b.double(), lse_b),
        "bf16 lse": (out_a, lse_a.bfloat16(), out_b, lse_b),
        "fewer values": (out_a, lse_a, out_b[..., :511], lse_b),
        "fewer heads": (out_a, lse_a[:, :7], out_b, lse_b),
        "no heads": (out_a, lse_a, out_b, lse_b[:, 0]),
        "uneven rows": (out_a[:, :7], lse_a[:, :7], out_b[:, :7], lse_b[:, :7]),
        "a scalar": (lse_a[0, 0], lse_a[0, 0], lse_b[0, 0], lse_b[0, 0]),
    }
    for name, arguments in mistakes.items():
        with pytest.raises((TypeError, ValueError)):
            sparse_mla.merge_states(*arguments)
        assert torch.equal(sparse_mla.merge_states(*states)[0], want), name
    torch.cuda.synchronize()
