"""What only a GPU shows: other libraries, streams, graphs, workspaces, large pools, errors that must not stick."""

import hashlib
import os
import subprocess
import sys
import threading

import numpy as np
import oracle
import pytest
import sparse_mla
from oracle import RECORDS

FAMILY = "dsv3_2"
D_QK, D_V = 576, 512
SM_SCALE = D_QK**-0.5


class Problem:
    """One decode in torch tensors, with its float64 answer."""

    def __init__(self, torch, tokens=3, heads=16, topk=300, slots=4096, seed=0, family=FAMILY):
        self.torch = torch
        generator = torch.Generator(device="cuda").manual_seed(seed)
        latent = torch.randn(slots, D_QK, device="cuda", generator=generator).bfloat16()
        packed = sparse_mla.pack_kv_cache(latent.cpu().view(torch.uint16).numpy(), family=family)
        self.values = torch.from_numpy(sparse_mla.unpack_kv_cache(packed, family=family)).cuda().double()
        self.cache = torch.from_numpy(packed).cuda()
        self.q = torch.randn(tokens, heads, D_QK, device="cuda", generator=generator).bfloat16()
        self.indices = torch.randint(0, slots, (tokens, topk), device="cuda", generator=generator, dtype=torch.int32)
        self.words = {"family": family, "sm_scale": SM_SCALE}

    def decode(self, **kwargs):
        return sparse_mla.decode(self.q, self.cache, self.indices, **{**self.words, **kwargs})

    def reference(self):
        rows = self.values[self.indices.long()]
        scores = self.torch.einsum("thd,tkd->thk", self.q.double(), rows) * SM_SCALE
        return self.torch.einsum("thk,tkd->thd", scores.softmax(-1), rows[..., :D_V])

    def check(self, out):
        want = self.reference()
        assert (out.double() - want).norm() <= 4e-3 * want.norm()


@pytest.fixture
def problem(torch):
    return Problem(torch)


def test_torch_in_torch_out(torch, problem):
    out, lse = problem.decode(return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert out.device == problem.q.device
    problem.check(out)


def test_given_buffers_come_back(torch, problem):
    out = torch.empty(3, 16, D_V, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(3, 16, device="cuda")
    got, got_lse = problem.decode(out=out, lse=lse, return_lse=True)
    assert got is out
    assert got_lse is lse
    problem.check(out)


def test_cupy_arrays(torch, problem):
    cupy = pytest.importorskip("cupy")
    q = cupy.from_dlpack(problem.q.view(torch.uint16))
    cache, indices = cupy.from_dlpack(problem.cache), cupy.from_dlpack(problem.indices)
    out = sparse_mla.decode(q, cache, indices, **problem.words)
    assert isinstance(out, cupy.ndarray)
    cupy.cuda.get_current_stream().synchronize()
    problem.check(torch.from_dlpack(out).view(torch.bfloat16))


def test_jax_arrays(torch, problem):
    jax = pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("jax sees no GPU here")
    q, cache, indices = (jax.dlpack.from_dlpack(x) for x in (problem.q, problem.cache, problem.indices))
    out = torch.empty(3, 16, D_V, dtype=torch.bfloat16, device="cuda")
    sparse_mla.decode(q, cache, indices, **problem.words, out=out)
    problem.check(out)
    own, lse = sparse_mla.decode(q, cache, indices, **problem.words, return_lse=True)
    array = jax.numpy.from_dlpack(own)
    assert (array.shape, array.dtype.name, jax.numpy.from_dlpack(lse).dtype.name) == (
        (3, 16, D_V),
        "bfloat16",
        "float32",
    )
    del own, lse
    assert torch.equal(torch.from_dlpack(array), out)


def test_on_the_callers_stream(torch, problem):
    """q is still being made on a side stream when decode is called there."""
    want = problem.reference()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.zeros_like(problem.q)
        torch.cuda._sleep(50_000_000)
        late.copy_(problem.q)
        out = sparse_mla.decode(late, problem.cache, problem.indices, **problem.words)
    side.synchronize()
    assert (out.double() - want).norm() <= 4e-3 * want.norm()


def test_a_named_stream_waits_for_the_producer(torch, problem):
    want = problem.reference()
    out = torch.empty(3, 16, D_V, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    late = torch.zeros_like(problem.q)
    torch.cuda._sleep(50_000_000)
    late.copy_(problem.q)
    sparse_mla.decode(late, problem.cache, problem.indices, **problem.words, out=out, stream=side)
    side.synchronize()
    assert (out.double() - want).norm() <= 4e-3 * want.norm()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("splits_expected", [True, False], ids=["split", "unsplit"])
def test_graph_replay_follows_in_place_edits(torch, mode, splits_expected):
    """C4, C19: captured once, then indices, lengths, q and cache change under it; padded rows hold junk."""
    p = Problem(torch, tokens=2 if splits_expected else 200, topk=600)
    lengths = torch.full((p.q.shape[0],), 600, dtype=torch.int32, device="cuda")
    sparse_mla.warmup(FAMILY)
    out = torch.empty(p.q.shape[0], 16, D_V, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        p.decode(out=out, topk_length=lengths)
    for seed in range(3):
        other = Problem(torch, tokens=p.q.shape[0], topk=600, seed=seed + 5)
        p.q.copy_(other.q), p.indices.copy_(other.indices), p.cache.copy_(other.cache)
        p.values = other.values
        p.indices[-1] = 2**30 - seed  # a padded row: stale indices, length 0
        lengths[-1] = 0
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        want = p.decode(topk_length=lengths)
        assert torch.equal(out, want)
        assert not out[-1].any()
        want = other.reference()[:-1]
        assert (out[:-1].double() - want).norm() <= 4e-3 * want.norm()


def test_graphs_of_different_shapes_interleave(torch):
    """C11: replaying A, B, A with allocations between leaves both right."""
    sparse_mla.warmup(FAMILY)
    problems = [Problem(torch, tokens=tokens, topk=700, seed=tokens) for tokens in (4, 16)]
    outs, graphs = [], []
    for p in problems:
        outs.append(torch.empty(p.q.shape[0], 16, D_V, dtype=torch.bfloat16, device="cuda"))
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            p.decode(out=outs[-1])
    for _ in range(20):
        for graph in (*graphs, graphs[0]):
            graph.replay()
            torch.empty(1 << 20, device="cuda").fill_(float("nan"))
    torch.cuda.synchronize()
    for p, out in zip(problems, outs, strict=True):
        p.check(out)


def test_a_cold_module_in_a_capture_is_refused_and_nothing_sticks(torch):
    """C16, in a process of its own, where no module is loaded yet."""
    code = """
import sys; sys.path.insert(0, "tests/gpu"); sys.path.insert(0, "tests/python")
import torch, sparse_mla
from test_device import Problem, FAMILY
p = Problem(torch)
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        p.decode()
    raise SystemExit("not refused")
except sparse_mla.DeviceError as error:
    assert "warmup()" in str(error), error
sparse_mla.warmup(FAMILY)
out = torch.empty(3, 16, 512, dtype=torch.bfloat16, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    p.decode(out=out)
graph.replay(); torch.cuda.synchronize(); p.check(out)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_threads_on_two_streams(torch):
    problems = [Problem(torch, seed=seed, topk=1000, slots=2048) for seed in range(2)]
    wants = [p.decode() for p in problems]
    torch.cuda.synchronize()
    wrong = []

    def work(p, want):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                if not torch.equal(p.decode(), want):
                    wrong.append(p)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(problems, wants, strict=True)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_a_callers_workspace(torch):
    p = Problem(torch, tokens=1, topk=2048)
    want = p.decode()
    with pytest.raises(ValueError, match=r"`workspace` must be at least (\d+) bytes") as caught:
        p.decode(workspace=torch.empty(16, dtype=torch.uint8, device="cuda"))
    needed = int(str(caught.value).split("at least ")[1].split()[0])
    memory = torch.full((needed + 256,), 0xAB, dtype=torch.uint8, device="cuda")
    assert torch.equal(p.decode(workspace=memory[:needed]), want)
    torch.cuda.synchronize()
    assert (memory[needed:] == 0xAB).all()


def test_inputs_stay_as_they_are(torch, problem):
    arrays = [problem.q, problem.cache, problem.indices]

    def digest():
        return [hashlib.sha256(x.view(torch.uint8).cpu().numpy().tobytes()).hexdigest() for x in arrays]

    before = digest()
    problem.decode()
    torch.cuda.synchronize()
    assert digest() == before


@pytest.mark.parametrize("gap", [0, 1 << 20], ids=["dense", "strided"])
def test_offsets_beyond_4_gib(torch, gap):
    """B15: the rows that are read lie past 2^31 and 2^32 bytes."""
    p = Problem(torch, slots=256, topk=200)
    page_bytes = 64 * 656
    pages = (5 << 30) // (page_bytes + gap)
    pool = torch.zeros(pages, page_bytes + gap, dtype=torch.uint8, device="cuda")
    pool[-4:, :page_bytes] = p.cache.view(4, page_bytes)
    far = (
        pool[:, :page_bytes].view(pages, 64, 656)
        if not gap
        else pool.as_strided((pages, 64, 656), (page_bytes + gap, 656, 1))
    )
    out = sparse_mla.decode(p.q, far, p.indices + (pages - 4) * 64, **p.words)
    p.check(out)


def test_many_tokens_and_no_cliff_at_64(torch):
    p = Problem(torch, tokens=300, heads=11, topk=130, slots=512)
    out = p.decode(batch_invariant=True)
    p.check(out)
    for tokens in (1, 63, 64, 65):
        part = sparse_mla.decode(p.q[:tokens], p.cache, p.indices[:tokens], **p.words, batch_invariant=True)
        assert torch.equal(part, out[:tokens])


def mistakes(torch, p):
    """Every kind of wrong call, by name."""
    other = p.q.cpu()
    return {
        "host q": lambda: sparse_mla.decode(other, p.cache, p.indices, **p.words),
        "host cache": lambda: sparse_mla.decode(p.q, p.cache.cpu(), p.indices, **p.words),
        "host numpy cache": lambda: sparse_mla.decode(p.q, p.cache.cpu().numpy(), p.indices, **p.words),
        "float q": lambda: sparse_mla.decode(p.q.float(), p.cache, p.indices, **p.words),
        "int64 indices": lambda: sparse_mla.decode(p.q, p.cache, p.indices.long(), **p.words),
        "strided q": lambda: sparse_mla.decode(p.q[:, ::2], p.cache, p.indices, **p.words),
        "misaligned q": lambda: sparse_mla.decode(
            torch.zeros(p.q.numel() + 1, dtype=p.q.dtype, device="cuda")[1:].view(p.q.shape),
            p.cache,
            p.indices,
            **p.words,
        ),
        "strided indices": lambda: sparse_mla.decode(p.q, p.cache, p.indices[:, ::2], **p.words),
        "misaligned cache": lambda: sparse_mla.decode(
            p.q, p.cache.view(-1)[8 : 8 + 64 * 656].view(1, 64, 656), p.indices, **p.words
        ),
        "misaligned pitch": lambda: sparse_mla.decode(
            p.q, p.cache.view(-1).as_strided((8, 64, 656), (64 * 656 + 8, 656, 1)), p.indices, **p.words
        ),
        "out is q": lambda: p.decode(out=p.q[..., :D_V]),
        "out of another shape": lambda: p.decode(out=torch.empty(3, 16, 500, device="cuda")),
        "nvfp4": lambda: p.decode(kv_cache_format="nvfp4"),
        "129 heads": lambda: sparse_mla.decode(p.q[:1].repeat(1, 9, 1), p.cache, p.indices[:1], **p.words),
        "host lengths": lambda: p.decode(topk_length=torch.ones(3, dtype=torch.int32)),
        "no extra cache": lambda: p.decode(extra_indices=p.indices),
        "host workspace": lambda: p.decode(workspace=torch.empty(1 << 20, dtype=torch.uint8)),
    }


def test_no_mistake_sticks(torch, problem):
    """Each is refused before any launch, in one process; the next decode is right."""
    want = problem.decode()
    for name, call in mistakes(torch, problem).items():
        with pytest.raises((TypeError, ValueError)):
            call()
        assert torch.equal(problem.decode(), want), name
    torch.cuda.synchronize()


def test_gpu_and_cpu_agree(torch):
    rng = np.random.default_rng(3)
    for record in RECORDS.values():
        if record.fmt == "fp4":  # only a secondary cache
            p = oracle.problem(rng, RECORDS[record.family, "fp8"], 2, 24, 640, extra="fp4", extra_k=100)
        else:
            p = oracle.problem(rng, record, 2, 24, 640)
        arrays = p.arrays()
        want = sparse_mla.decode(**arrays, **p.words(), out=np.empty((2, 24, p.cache.rec.d_v), np.float32))
        device = {
            name: torch.from_numpy(np.ascontiguousarray(x).view(np.int16) if x.dtype.itemsize == 2 else x).cuda()
            for name, x in arrays.items()
        }
        device["q"] = device["q"].view(torch.bfloat16)
        out = torch.empty(2, 24, p.cache.rec.d_v, device="cuda")
        got = sparse_mla.decode(**device, **p.words(), out=out).cpu().numpy()
        assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want), record


def test_soak(torch):
    """C8: random shapes in one process, every so often checked. SPARSE_MLA_SOAK sets how many launches."""
    launches = int(os.environ.get("SPARSE_MLA_SOAK", "2000"))
    rng = np.random.default_rng(0)
    base = Problem(torch, tokens=64, heads=128, topk=1024, slots=8192)
    for launch in range(launches):
        tokens, heads, topk = int(rng.integers(1, 65)), int(rng.integers(1, 129)), int(rng.integers(1, 1025))
        q = base.q[:tokens, :heads].contiguous()
        out = sparse_mla.decode(q, base.cache, base.indices[:tokens, :topk], **base.words)
        if launch % max(launches // 50, 1) == 0:
            rows = base.values[base.indices[:tokens, :topk].long()]
            scores = torch.einsum("thd,tkd->thk", q.double(), rows) * SM_SCALE
            want = torch.einsum("thk,tkd->thd", scores.softmax(-1), rows[..., :D_V])
            assert (out.double() - want).norm() <= 4e-3 * want.norm(), (tokens, heads, topk)
    torch.cuda.synchronize()
