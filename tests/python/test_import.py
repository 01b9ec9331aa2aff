"""Import does nothing, and the process may fork, thread and go on while decode runs."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

BARE = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": ""}
CALL = """
import numpy as np
import numpy.random
def bits(seed, *shape):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
def call(T=4, H=8, K=64, seed=0):
    import sparse_mla
    cache = sparse_mla.pack_kv_cache(bits(1, 256, 512), family="dsv4")
    indices = np.random.default_rng(seed).integers(0, 256, (T, K), np.int32)
    q = bits(seed + 2, T, H, 512)
    def go():
        return sparse_mla.decode(q, cache, indices, family="dsv4", sm_scale=0.1, return_lse=True)
    return go
def same(left, right):
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))
"""


def run(program, *, cwd=None, timeout=60, **env):
    """Standard output, parsed, of a program in a fresh interpreter."""
    home = {} if cwd is None else dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), str(cwd))
    keep = {name: os.environ[name] for name in ("LANG", "PYTHONPATH") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-B", "-W", "ignore", "-c", CALL + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**keep, **home, **env},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


LOOK = """
import json, os, sys
STARTS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "socket.connect")
seen = []
def hook(event, args):
    if event == "open":
        seen.append(str(args[0]))
    elif event in STARTS:
        seen.append(f"{event} {args}")
def nvidia():
    return [line for line in open("/proc/self/maps") if "cuda" in line.lower() or "nvidia" in line.lower()]
tasks, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
sys.addaudithook(hook)
import sparse_mla
imported = list(seen)
"""
QUERIES = """
sparse_mla.supported_sparse_mla_sm120_configs()
sparse_mla.supported_sparse_mla_sm120_configs(kv_cache_format="nvfp4")["dsv4"].supports_decode(8, 128)
sparse_mla.explain_decode("dsv4", num_heads=8, topk=128)
sparse_mla.families()
"""
REPORT = """
later = seen[len(imported):]
print(json.dumps({
    "imported": imported,
    "later": later,
    "maps": nvidia(),
    "allowed": [os.path.dirname(module.__file__) for module in (sparse_mla, os, np)],
    "site": [path for path in sys.path if path.endswith("site-packages")],
    "tasks": len(os.listdir("/proc/self/task")) - tasks,
    "descriptors": len(os.listdir("/proc/self/fd")) - descriptors,
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
}))
"""


def test_import_and_queries_open_nothing_else(tmp_path):
    found = run(LOOK + QUERIES + REPORT, cwd=tmp_path, **BARE)
    package, stdlib, numpy = found["allowed"]

    def is_allowed(path):
        in_site = any(path.startswith(site) for site in found["site"])
        return path.startswith((package, numpy)) or (path.startswith(stdlib) and not in_site)

    assert [path for path in found["imported"] if not is_allowed(path)] == []
    assert any(path.startswith(package) for path in found["imported"]), "the hook saw nothing"
    assert found["later"] == []
    assert found["maps"] == []
    assert found["tasks"] == 0, "threads were started"
    assert found["descriptors"] == 0
    assert not {"torch", "jax", "jaxlib", "tabulate", "matplotlib"} & set(found["modules"])
    assert list(tmp_path.rglob("*")) == [], "files were created"


def test_decode_opens_and_creates_no_file(tmp_path):
    found = run(LOOK + "call()()\n" + REPORT, cwd=tmp_path, **BARE)
    assert found["later"] == []
    assert found["maps"] == []
    assert list(tmp_path.rglob("*")) == []


def test_import_of_every_module_of_the_package():
    names = run("""
    import importlib, json, pkgutil, sparse_mla
    names = [module.name for module in pkgutil.iter_modules(sparse_mla.__path__, "sparse_mla.")]
    for name in names:
        if not name.endswith(("__main__", "torch", "flashinfer")):
            importlib.import_module(name)
    print(json.dumps(names))
    """)
    assert "sparse_mla.cli" in names


FORK = """
import json, os, signal, time
go = call()
before = {before}
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    ours = go()
    os._exit(0 if before is None or same(ours, before) else 3)
deadline = time.monotonic() + 30
while True:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done or time.monotonic() > deadline:
        break
    time.sleep(0.01)
if not done:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
after = go()
print(json.dumps([bool(done), status, before is None or same(after, before)]))
"""


@pytest.mark.parametrize("before", ["go()", "None"], ids=["after a decode", "before any decode"])
def test_decode_in_a_forked_child(before):
    assert run(FORK.format(before=before)) == [True, 0, True]


def test_decode_in_a_pool_of_forked_workers():
    answers = run("""
    import json, multiprocessing
    def work(seed):
        return call(seed=seed)()[0].tobytes().hex()[:4000]
    ours = [work(seed) for seed in range(4)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        theirs = pool.map_async(work, range(4)).get(30)
    print(json.dumps(ours == theirs))
    """)
    assert answers is True


@pytest.mark.parametrize("T", [1, 5, 70])
def test_threads_get_equal_bits(T):
    answers = run(f"""
    import json
    from concurrent.futures import ThreadPoolExecutor
    calls = [call(T={T}, seed=seed) for seed in range(4)]
    alone = [go() for go in calls]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: calls[i % 4](), range(64)))
    print(json.dumps(all(same(got, alone[i % 4]) for i, got in enumerate(together))))
    """)
    assert answers is True


def test_the_gil_is_released_during_decode():
    duration, ticks = run("""
    import json, threading, time
    T, times = 64, []
    while True:
        go = call(T=T, H=64, K=256)
        start = time.perf_counter()
        go()
        if time.perf_counter() - start > 0.3 or T > 4000:
            break
        T *= 2
    def work():
        times.append(time.perf_counter())
        go()
        times.append(time.perf_counter())
    worker, ticks = threading.Thread(target=work), []
    worker.start()
    while worker.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.002)
    print(json.dumps([times[1] - times[0], sum(times[0] < tick < times[1] for tick in ticks)]))
    """)
    assert duration > 0.05
    assert ticks > 10, f"{ticks} steps of another thread in {duration} s"


def test_one_thread_gives_the_bits_of_many():
    program = """
    import json, hashlib
    out, lse = call(T=9, H=5, K=77)()
    print(json.dumps(hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest()))
    """
    pinned = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    assert run(pinned + textwrap.dedent(program)) == run(program)
