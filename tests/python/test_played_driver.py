"""The way from Python to a launch and back, against a driver that only takes notes: order of calls, memory, streams."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLAYED = Path(__file__).parent / "played"


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """The folder of the played libcuda."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler makes the driver of these tests")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run([compiler, "-shared", "-fPIC", PLAYED / "libcuda.c", "-o", folder / "libcuda.so"], check=True)
    (folder / "libcuda.so.1").symlink_to("libcuda.so")
    return folder


@pytest.fixture
def play(driver, tmp_path):
    """Runs a program beside the played driver; returns the driver's notes as lists of words."""

    def run(program):
        log = tmp_path / "log"
        start = (
            "import gc, os\nimport numpy as np\nimport sparse_mla\nfrom foreign import Foreign, problem, tensor_of\n"
        )
        env = {**os.environ, "LD_LIBRARY_PATH": str(driver), "PYTHONPATH": str(PLAYED), "PLAYED_LOG": str(log)}
        done = subprocess.run(
            [sys.executable, "-c", start + program], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return [line.split() for line in log.read_text().splitlines()]

    return run


def of(notes, call):
    return [note[1:] for note in notes if note[0] == call]


def test_a_decode_loads_launches_and_makes_its_results(play):
    notes = play("""
arrays, words = problem()
out, lse = sparse_mla.decode(*arrays, **words, return_lse=True)
assert isinstance(out, sparse_mla.DeviceArray) and isinstance(lse, sparse_mla.DeviceArray)
assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((3, 16, 512), "bfloat16", (3, 16), "float32")
assert repr(lse) == "DeviceArray(shape=(3, 16), dtype='float32', device=0)"
assert out.__dlpack_device__() == (2, 0)
assert [array.streams for array in arrays] == [[1], [1], [1]]
capsule = out.__dlpack__()
tensor = tensor_of(capsule)
assert (tensor.device_type, tensor.device_id, tensor.ndim, tensor.byte_offset) == (2, 0, 3, 0)
assert (tensor.code, tensor.bits, tensor.lanes) == (4, 16, 1)
assert [tensor.shape[axis] for axis in range(3)] == [3, 16, 512]
assert [tensor.strides[axis] for axis in range(3)] == [8192, 512, 1]
open(os.environ["PLAYED_LOG"], "a").write(f"address {tensor.data:#x} 0\\n")
""")
    plan_has_splits = len(of(notes, "load")) == 2
    assert len(of(notes, "launch")) == 1 + plan_has_splits
    sizes = [int(size, 16) for _, size in of(notes, "alloc")]
    assert sizes[:2] == [3 * 16 * 512 * 2, 3 * 16 * 4]
    assert of(notes, "address")[0][0] == of(notes, "alloc")[0][0]
    order = [note[0] for note in notes]
    assert order.index("record") > max(index for index, call in enumerate(order) if call == "launch")
    assert len(of(notes, "record")) == 2


def test_memory_is_freed_with_its_last_owner(play):
    notes = play("""
arrays, words = problem()
out = sparse_mla.decode(*arrays, **words)
capsules = [out.__dlpack__(), out.__dlpack__(max_version=(1, 0))]
assert [str(capsule).split('"')[1] for capsule in capsules] == ["dltensor", "dltensor_versioned"]
note = open(os.environ["PLAYED_LOG"], "a")
for owner in ("out", "capsules[0]", "capsules[0]"):
    print("before", 0, 0, file=note, flush=True)
    exec(f"del {owner}")
    gc.collect()
print("end", 0, 0, file=note, flush=True)
""")
    order = [note[0] for note in notes if note[0] in ("before", "free", "destroy", "end")]
    assert order == ["before", "before", "before", "free", "destroy", "end"]
    assert of(notes, "free")[0][0] == of(notes, "alloc")[0][0]


STREAMS = {"None": "0x1", "1": "0x1", "2": "0x2", "0x5000": "0x5000", "-1": None}


@pytest.mark.parametrize("stream", STREAMS)
def test_a_consumers_stream_waits_for_the_last_write(play, stream):
    notes = play(f"""
arrays, words = problem()
out = sparse_mla.decode(*arrays, **words, stream=0x7000)
assert [array.streams for array in arrays] == [[0x7000]] * 3
out.__dlpack__(stream={stream})
""")
    assert {note[1] for note in of(notes, "launch")} == {"0x7000"}
    (event, written_on) = of(notes, "record")[-1]
    assert written_on == "0x7000"
    after = [note for note in notes[notes.index(["record", event, written_on]) + 1 :] if note[0] == "wait"]
    assert after == ([["wait", event, STREAMS[stream]]] if STREAMS[stream] else [])


def test_what_a_capsule_cannot_be(play):
    play("""
arrays, words = problem()
out = sparse_mla.decode(*arrays, **words)
for wrong, kind in [({"copy": True}, BufferError), ({"dl_device": (1, 0)}, BufferError),
                    ({"dl_device": (2, 1)}, BufferError), ({"stream": 0}, ValueError), ({"stream": -2}, ValueError)]:
    try:
        out.__dlpack__(**wrong)
        raise SystemExit(f"{wrong} was taken")
    except kind:
        pass
out.__dlpack__(copy=False, dl_device=(2, 0))
""")


def test_a_capture_needs_given_buffers_and_warm_kernels(play):
    notes = play("""
arrays, words = problem(tokens=200)
given = Foreign(np.zeros((200, 16, 512), np.uint16))
os.environ["CAPTURING"] = "1"
for keywords, kind, text in [({}, ValueError, "`out` must be given while the stream is being captured"),
                             ({"out": given}, sparse_mla.DeviceError, "call warmup()")]:
    try:
        sparse_mla.decode(*arrays, **words, **keywords)
        raise SystemExit("not refused")
    except kind as error:
        assert text in str(error), error
os.environ["CAPTURING"] = "0"
sparse_mla.warmup("dsv3_2")
os.environ["CAPTURING"] = "1"
assert sparse_mla.decode(*arrays, **words, out=given) is given
""")
    assert len(of(notes, "launch")) == 1
    assert not of(notes, "record")


def test_merges_run_on_the_device_and_take_our_own_results(play):
    notes = play("""
arrays, words = problem()
sparse_mla.warmup("dsv3_2")
out, lse = sparse_mla.decode(*arrays, **words, return_lse=True)
merged, merged_lse = sparse_mla.merge_states(out, lse, out, lse)
assert (merged.shape, merged.dtype, merged_lse.shape) == ((3, 16, 512), "bfloat16", (3, 16))
half = Foreign(np.zeros((5, 66), np.float16)), Foreign(np.zeros(5, np.float32))
merged, _ = sparse_mla.merge_states(*half, *half, lse_base="e")
assert merged.dtype == "float16"
""")
    rows, fours = 3 * 16, 512 // 4
    assert [int(note[0], 16) for note in of(notes, "launch")[-2:]] == [rows * fours // 256, 1]
    decoded = {event for event, _ in of(notes, "record")[:2]}
    done = max(index for index, note in enumerate(notes) if note[0] == "record" and note[1] in decoded)
    assert sorted(note[1] for note in notes[done:] if note[0] == "wait" and note[1] in decoded) == sorted(
        [*decoded] * 2
    )


def test_a_merge_of_nothing_launches_nothing(play):
    notes = play("""
none = Foreign(np.zeros((0, 4, 512), np.float32)), Foreign(np.zeros((0, 4), np.float32))
out, lse = sparse_mla.merge_states(*none, *none)
assert (out.shape, lse.shape) == ((0, 4, 512), (0, 4))
""")
    assert not of(notes, "launch")


def test_a_warm_call_with_given_buffers_only_launches(play):
    notes = play("""
arrays, words = problem(tokens=1, topk=2048)
out, lse = Foreign(np.zeros((1, 16, 512), np.uint16)), Foreign(np.zeros((1, 16), np.float32))
note = open(os.environ["PLAYED_LOG"], "a")
for _ in range(2):
    print("call", 0, 0, file=note, flush=True)
    sparse_mla.decode(*arrays, **words, out=out, lse=lse)
""")
    last = notes[len(notes) - notes[::-1].index(["call", "0", "0"]) :]
    assert [note[0] for note in last] == ["launch", "launch"]
