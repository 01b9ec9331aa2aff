"""Situations that users of such kernels ran into, as far as only a GPU shows them; named by the case's id."""

import subprocess
import sys
import threading

import pytest
import sparse_mla
from test_device import D_V, FAMILY, Problem

WATCHDOG_S = 60


def synchronise(torch, what):
    """Fails when the device does not finish in time, where torch would wait for ever."""
    done = threading.Event()
    waiter = threading.Thread(target=lambda: (torch.cuda.synchronize(), done.set()), daemon=True)
    waiter.start()
    assert done.wait(WATCHDOG_S), f"{what} did not finish in {WATCHDOG_S} s"


@pytest.mark.parametrize("heads", [16, 128])
def test_c2_long_rows_launched_20000_times_do_not_hang(torch, heads):
    p = Problem(torch, tokens=1, heads=heads, topk=2048)
    want = p.decode()
    out = torch.empty_like(want)
    for start in range(0, 20_000, 1000):
        for _ in range(1000):
            p.decode(out=out)
        synchronise(torch, f"launches from {start} on")
        assert torch.equal(out, want)


def test_c3_beside_a_bandwidth_hog(torch):
    """H = 128 while another stream copies as fast as it can."""
    p = Problem(torch, tokens=16, heads=128, topk=1024)
    want = p.decode()
    out = torch.empty_like(want)
    source = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    hog = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(hog):
            for _ in range(20):
                target.copy_(source)
        for _ in range(100):
            p.decode(out=out)
        synchronise(torch, "decodes beside copies")
        assert torch.equal(out, want)


def test_c5_a_workspace_made_in_inference_mode_serves_a_capture_outside(torch):
    p = Problem(torch, tokens=1, topk=2048)
    with torch.inference_mode():
        want = p.decode()  # makes the library's own workspace
        workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(want)
    for words in ({}, {"workspace": workspace}):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            p.decode(out=out, **words)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)


def test_c10_warming_up_inside_a_capture_leaves_the_capture_whole(torch):
    """In a process of its own, where no kernel is loaded: done or refused in words; the graph replays what it holds."""
    code = """
import torch, sparse_mla
x = torch.zeros(1000, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x += 1
    try:
        sparse_mla.warmup("dsv3_2")
    except sparse_mla.DeviceError as error:
        print("refused:", error)
    x += 1
graph.replay(); torch.cuda.synchronize()
assert (x == 2).all()
sparse_mla.warmup("dsv3_2")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_c10_with_little_memory_left_the_refusal_is_ours_and_nothing_leaks(torch):
    """The workspace of a fresh stream does not fit: DeviceError; with memory again the decode is right."""
    p = Problem(torch, tokens=64, heads=128, topk=2048)
    want = p.decode(batch_invariant=True)
    out, side = torch.zeros_like(want), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    hogs = []
    for size in (1 << 32, 1 << 28, 1 << 24):
        try:
            while True:
                hogs.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
    try:
        before, _ = torch.cuda.mem_get_info()
        for _ in range(3):
            with pytest.raises(sparse_mla.DeviceError, match=r"(?i)memory"):
                p.decode(out=out, batch_invariant=True, stream=side)
        assert torch.cuda.mem_get_info()[0] == before
    finally:
        hogs.clear()
        torch.cuda.empty_cache()
    assert not out.any()
    p.decode(out=out, batch_invariant=True, stream=side)
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_g4_warm_up_as_a_serving_engine_does(torch):
    """A mixed batch of 16 tokens, then one graph per batch size from one memory pool, replayed in any order."""
    sparse_mla.warmup(FAMILY)
    Problem(torch, tokens=16).decode()
    problems = [Problem(torch, tokens=size, seed=size) for size in (64, 48, 32, 24, 16, 8, 4, 2, 1)]
    outs = [torch.empty(p.q.shape[0], 16, D_V, dtype=torch.bfloat16, device="cuda") for p in problems]
    graphs = [torch.cuda.CUDAGraph() for _ in problems]
    for p, out, graph in zip(problems, outs, graphs, strict=True):
        with torch.cuda.graph(graph, pool=graphs[0].pool() if graph is not graphs[0] else None):
            p.decode(out=out)
    for order in (range(9), range(8, -1, -1), (3, 3, 0, 8, 3)):
        [out.zero_() for out in outs]
        [graphs[index].replay() for index in order]
        torch.cuda.synchronize()
        for index in set(order):
            problems[index].check(outs[index])
