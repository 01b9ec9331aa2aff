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


def test_appends_launch_once_and_beyond_1024_rows_find_winners_first(play):
    notes = play("""
cache = Foreign(np.zeros((200, 64, 656), np.uint8))
note = open(os.environ["PLAYED_LOG"], "a")
for rows, dtype in ((20, np.int32), (1024, np.int64), (1025, np.int64)):
    latent, slots = Foreign(np.zeros((rows, 576), np.uint16)), Foreign(np.zeros(rows, dtype))
    for warm in range(2):
        print("call", 0, 0, file=note, flush=True)
        sparse_mla.append_kv_cache(latent, slots, cache, family="glm_nsa", stream=0x7000)
    assert {stream for array in (latent, slots, cache) for stream in array.streams} == {0x7000}
table, positions = Foreign(np.zeros((9, 64), np.float32)), Foreign(np.zeros(1025, np.int32))
rope = {"rope_cos_sin": table, "rope_positions": positions, "rope_interleaved": False}
sparse_mla.append_kv_cache(latent, slots, cache, family="dsv3_2", **rope)
""")
    calls = " ".join(note[0] for note in notes).split("call")
    assert [call.split() for call in calls[2:6]] == [
        ["launch"],
        ["launch"],
        ["launch"],
        ["alloc", "load", "launch", "launch"],
    ]
    assert calls[6].split()[:2] == ["launch", "launch"]
    assert [int(grid, 16) for grid, _ in of(notes, "launch")[:6]] == [20, 20, 128, 128, 17, 65]


def test_pack_unpack_and_moves_make_their_results(play):
    notes = play("""
latent = Foreign(np.zeros((100, 512), np.float16))
cache = sparse_mla.pack_kv_cache(latent, family="dsv4", page_block_size=6)
assert (cache.shape, cache.dtype) == ((17, 6, 584), "uint8")
values = sparse_mla.unpack_kv_cache(cache, family="dsv4")
assert (values.shape, values.dtype) == ((102, 512), "float32")
moved = sparse_mla.repage_kv_cache(cache, family="dsv4", page_block_size=64, num_slots=100)
assert moved.shape == (2, 64, 584)
footers, words = sparse_mla.pack_kv_cache(latent, family="dsv4_1"), {"to_family": "dsv4_1_inline"}
inline, error = sparse_mla.convert_kv_cache(footers, from_family="dsv4_1", **words, return_error=True)
assert (inline.shape, error) == ((2, 64, 528), 0.0)
lossy = {"from_family": "dsv4", "to_family": "dsv4", "to_format": "nvfp4"}
nvfp4 = sparse_mla.convert_kv_cache(cache, **lossy, page_block_size=10, num_slots=95)
assert (nvfp4.shape, nvfp4.dtype) == ((10, 10, 384), "uint8")
for refused, call in {
    "`page_block_size` must be dense": lambda: sparse_mla.pack_kv_cache(latent, family="dsv4", page_block_size=3),
    "`return_error` must be False for a lossy": lambda: sparse_mla.convert_kv_cache(
        cache, **lossy, return_error=True
    ),
    "`to_kv_global_scale` must be 1.0": lambda: sparse_mla.convert_kv_cache(cache, **lossy, to_kv_global_scale=2.0),
    "`from_kv_global_scale` must be 1.0": lambda: sparse_mla.convert_kv_cache(
        cache, **lossy, from_kv_global_scale=2.0
    ),
    "`to_family` must be a family with 448": lambda: sparse_mla.convert_kv_cache(
        cache, from_family="dsv4", to_family="dsv4_1"
    ),
    "`num_slots` must be at most 102": lambda: sparse_mla.repage_kv_cache(cache, family="dsv4", num_slots=103),
}.items():
    try:
        call()
    except ValueError as error:
        assert refused in str(error), error
    else:
        raise AssertionError(refused)
""")
    assert [int(grid, 16) for grid, _ in of(notes, "launch")] == [102, 13, 16, 128, 16, 13]


def test_wrong_writes_launch_nothing(play):
    notes = play("""
open(os.environ["PLAYED_LOG"], "a")
latent, slots = Foreign(np.zeros((8, 576), np.uint16)), Foreign(np.zeros(8, np.int64))
cache = Foreign(np.zeros((1, 8, 656), np.uint8))
shifted = Foreign(np.zeros(8 * 576 + 1, np.uint16)[1:].reshape(8, 576))
table = Foreign(np.zeros((4, 64), np.float32))
for name, arrays, words in (
    ("latent", (shifted, slots, cache), {}),
    ("cache", (latent, slots, cache.array), {}),
    ("slot_mapping", (latent, Foreign(np.zeros(7, np.int64)), cache), {}),
    ("rope_positions", (latent, slots, cache), {"rope_cos_sin": table}),
    ("kv_global_scale", (latent, slots, cache), {"kv_global_scale": 2.0}),
):
    try:
        sparse_mla.append_kv_cache(*arrays, family="dsv3_2", **words)
    except ValueError as error:
        assert f"`{name}` must be" in str(error), error
    else:
        raise AssertionError(name)
""")
    assert not of(notes, "launch")
