"""Bad input is refused by class and by text, and nothing is written."""

import math
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import sparse_mla
from brute import FAMILIES, RECORDS, aligned_bytes, random_bits, span, strided_cache

T, H, K, E, PAGE, PAGES, DIM = 4, 3, 6, 5, 8, 3, 512
FAR = 10**30


def patterned(shape, dtype):
    """An output buffer of 0xA5 bytes, so that a single written byte shows."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.ndarray(shape, dtype, aligned_bytes(size, fill=0xA5))


def slots(seed, rows, width):
    return np.random.default_rng(seed).integers(0, PAGES * PAGE, (rows, width), np.int32)


def states(seed):
    lse = np.random.default_rng(seed).standard_normal((T, H), np.float32)
    return random_bits(seed, T, H, DIM), lse


def good(name, family="dsv4", kv_cache_format="fp8"):
    """Arguments of a call that works. Every array is its own allocation."""
    record = RECORDS[family, kv_cache_format]
    common = {"family": family, "kv_cache_format": kv_cache_format}
    latent = random_bits(1, PAGES * PAGE, record.d_qk)

    def cache():
        return sparse_mla.pack_kv_cache(latent, page_block_size=PAGE, **common)

    if name == "decode":
        width = max(K, record.min_topk)
        return {
            "q": random_bits(2, T, H, record.d_qk),
            "kv_cache": cache(),
            "indices": slots(3, T, width),
            "topk_length": np.full(T, width, np.int32),
            "attn_sink": np.linspace(-1, 1, H, dtype=np.float32),
            "out": patterned((T, H, record.d_v), np.uint16),
            "lse": patterned((T, H), np.float32),
            "sm_scale": 0.1,
            "return_lse": True,
            **common,
        }
    if name == "dual":
        extra = {
            "extra_kv_cache": cache(),
            "extra_indices": slots(4, T, E),
            "extra_topk_length": np.full(T, E, np.int32),
        }
        return {**good("decode", family, kv_cache_format), **extra}
    if name == "merge_states":
        return dict(zip(("out_a", "lse_a", "out_b", "lse_b"), (*states(5), *states(6)), strict=True))
    if name == "pack_kv_cache":
        return {"latent": latent, "page_block_size": PAGE, **common}
    if name == "append_kv_cache":
        return {
            "latent": random_bits(7, 5, record.d_qk),
            "slot_mapping": np.array([3, 9, 20, 0, 11], np.int64),
            "cache": cache(),
            **common,
        }
    return {"cache": cache(), **common}


def call(name, arguments):
    return getattr(sparse_mla, "decode" if name == "dual" else name)(**arguments)


def memory(arguments):
    """The bytes of every allocation that an argument lies in."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            while isinstance(value.base, np.ndarray):
                value = value.base
            found[name] = value.tobytes()
    return found


def refuse(name, arguments, *words, kinds=(TypeError, ValueError)):
    """The call raises one of `kinds`, its text matches every pattern of `words`, and no byte changes."""
    before = memory(arguments)
    with pytest.raises(kinds) as caught:
        call(name, arguments)
    text = str(caught.value)
    for word in words:
        assert re.search(word, text, re.IGNORECASE), f"nothing like {word!r} in: {text}"
    assert memory(arguments) == before, "something was written"


def change(name, argument, value, **rest):
    return {**good(name, **rest), argument: value}


def word(argument):
    return rf"(?<!\w){argument}(?!\w)"


NAMES = ["decode", "dual", "merge_states", "pack_kv_cache", "append_kv_cache", "unpack_kv_cache"]
ARRAYS = {
    "dual": [
        *("q", "kv_cache", "indices", "topk_length", "attn_sink", "out", "lse"),
        *("extra_kv_cache", "extra_indices", "extra_topk_length"),
    ],
    "merge_states": ["out_a", "lse_a", "out_b", "lse_b"],
    "pack_kv_cache": ["latent"],
    "append_kv_cache": ["latent", "slot_mapping", "cache"],
    "unpack_kv_cache": ["cache"],
}
EACH_ARRAY = [(name, argument) for name, arguments in ARRAYS.items() for argument in arguments]
each_array = pytest.mark.parametrize(("name", "argument"), EACH_ARRAY)
each_name = pytest.mark.parametrize("name", NAMES)
CACHES = [
    *(("dual", "kv_cache"), ("dual", "extra_kv_cache")),
    *(("append_kv_cache", "cache"), ("unpack_kv_cache", "cache")),
]
each_cache = pytest.mark.parametrize(("name", "argument"), CACHES)


def layout_words(argument, field):
    """A stride is blamed either as the array's or as the argument of explain_decode."""
    prefix = "extra_" if argument.startswith("extra") else ""
    return rf"(?<!\w)({argument}|{prefix}{field})(?!\w)"


@each_name
def test_the_good_calls_work_and_write(name):
    arguments = good(name)
    before = memory(arguments)
    assert call(name, arguments) is not None or name == "append_kv_cache"
    after = memory(arguments)
    changed = {argument for argument in before if before[argument] != after[argument]}
    expected = {"append_kv_cache": {"cache"}, "decode": {"out", "lse"}, "dual": {"out", "lse"}}
    assert changed == expected.get(name, set())


# Types of arrays

DTYPES = {
    "q": ("float32 float16 float64 int16 uint8 object", r"bfloat16|uint16"),
    "latent": ("float64 int16 int32 uint8", r"bfloat16|uint16|float16|float32"),
    "cache": ("int8 uint16 float32", r"\buint8\b"),
    "indices": ("int64 uint32 int16 float32 bool", r"\bint32\b"),
    "length": ("int64 uint32 float32", r"\bint32\b"),
    "sink": ("float64 float16 int32", r"\bfloat32\b"),
    "out": ("float64 int16 uint8 int32", r"bfloat16|uint16|float16|float32"),
    "lse": ("float64 float16 int32", r"\bfloat32\b"),
    "slot_mapping": ("int16 uint32 uint64 float64 bool", r"\bint32\b|\bint64\b"),
}


def dtype_rule(argument):
    return DTYPES[argument] if argument in DTYPES else next(v for k, v in DTYPES.items() if k in argument)


BAD_DTYPES = [(*pair, dtype) for pair in EACH_ARRAY for dtype in dtype_rule(pair[1])[0].split()]


@pytest.mark.parametrize(("name", "argument", "dtype"), BAD_DTYPES)
def test_wrong_dtype(name, argument, dtype):
    arguments = good(name)
    with np.errstate(all="ignore"):
        arguments[argument] = np.ones(arguments[argument].shape).astype(dtype)
    accepted = dtype_rule(argument)[1]
    refuse(name, arguments, word(argument), rf"\b{dtype}\b", accepted)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.int4], ids=lambda dtype: dtype.__name__)
def test_wrong_extension_dtype(dtype):
    refuse("decode", change("decode", "q", np.zeros((T, H, DIM), dtype)), word("q"), dtype.__name__, "bfloat16|uint16")


def test_states_of_two_dtypes():
    arguments = change("merge_states", "out_b", np.zeros((T, H, DIM), np.float32))
    refuse("merge_states", arguments, "out_a|out_b", "float32", "uint16|bfloat16")


WIDE = [pair for pair in EACH_ARRAY if "cache" not in pair[1]]


@pytest.mark.parametrize(("name", "argument"), WIDE)
def test_big_endian(name, argument):
    arguments = good(name)
    array = arguments[argument]
    arguments[argument] = array.astype(array.dtype.newbyteorder(">"))
    refuse(name, arguments, word(argument), "endian|byte order|[>]")


NOT_ARRAYS = [[[1.0]], "text", 3, {}]


@pytest.mark.parametrize("value", NOT_ARRAYS, ids=lambda value: type(value).__name__)
@each_array
def test_not_an_array(name, argument, value):
    refuse(name, change(name, argument, value), word(argument), rf"\b{type(value).__name__}\b", "array")


@each_array
def test_list_of_the_right_shape(name, argument):
    arguments = good(name)
    refuse(name, {**arguments, argument: arguments[argument].tolist()}, word(argument), "list", "array")


OPTIONAL = {"topk_length", "attn_sink", "out", "lse"} | set(ARRAYS["dual"][-3:])


@pytest.mark.parametrize(("name", "argument"), [pair for pair in EACH_ARRAY if pair[1] not in OPTIONAL])
def test_none_for_a_required_array(name, argument):
    refuse(name, change(name, argument, None), word(argument), "None", "array")


class OnGpu:
    """What a torch tensor on a GPU shows. Reading it here would fault."""

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **_):
        pytest.fail("memory of another device was touched")


@each_array
def test_other_device(name, argument):
    """Before the other library is asked for memory. A first array on a GPU needs a driver first."""
    first = {"dual": "q", "merge_states": "out_a", "pack_kv_cache": "latent", "append_kv_cache": "latent"}
    if argument == first.get(name, "cache"):
        refuse(name, change(name, argument, OnGpu()), "cuda", kinds=(sparse_mla.DeviceError, ValueError))
    else:
        refuse(name, change(name, argument, OnGpu()), word(argument), "cuda|gpu", "cpu|numpy")


# Ranks and shapes

RANKS = [
    *(("decode", "q", shape) for shape in [(), (DIM,), (H, DIM), (1, 1, T, H, DIM)]),
    *(("decode", "indices", shape) for shape in [(), (K,), (T, 1, 1, K)]),
    *(("decode", "topk_length", shape) for shape in [(), (T, 1, 1)]),
    *(("decode", "attn_sink", shape) for shape in [(), (1, H)]),
    *(("decode", "out", shape) for shape in [(T * H * DIM,), (T, H * DIM), (1, T, 1, H, DIM)]),
    *(("decode", "lse", shape) for shape in [(), (T * H,), (T, H, 1)]),
    *(("decode", "kv_cache", shape) for shape in [(), (584 * PAGE,), (1, 1, PAGE, 1, 584)]),
    *(("dual", "extra_kv_cache", shape) for shape in [(), (584 * PAGE,), (1, 1, PAGE, 1, 584)]),
    *(("dual", "extra_indices", shape) for shape in [(E,), (T, 1, 1, E)]),
    *(("dual", "extra_topk_length", shape) for shape in [(), (T, 1, 1)]),
    *(("merge_states", "out_a", shape) for shape in [(), (DIM,), (H, DIM)]),
    *(("merge_states", "lse_b", shape) for shape in [(), (H,), (T, H, 1)]),
    *(("pack_kv_cache", "latent", shape) for shape in [(), (DIM,), (1, 1, 8, DIM)]),
    *(("append_kv_cache", "latent", shape) for shape in [(), (DIM,), (1, 1, 5, DIM)]),
    *(("append_kv_cache", "slot_mapping", shape) for shape in [(), (5, 1)]),
    *(("append_kv_cache", "cache", shape) for shape in [(), (584,), (1, 1, PAGE, 1, 584)]),
    *(("unpack_kv_cache", "cache", shape) for shape in [(), (584,), (1, 1, PAGE, 1, 584)]),
]


def reshaped(name, argument, shape):
    arguments = good(name)
    arguments[argument] = np.zeros(shape, arguments[argument].dtype)
    return arguments


@pytest.mark.parametrize(("name", "argument", "shape"), RANKS, ids=lambda value: str(value))
def test_wrong_rank(name, argument, shape):
    came = rf"\b{len(shape)}\b|{', '.join(map(str, shape))}" if shape else r"\b0\b|\(\)|\[\]|scalar"
    # States of two ranks are two shapes that do not match: either one may be blamed.
    who = "(out|lse)_[ab]" if name == "merge_states" else word(argument)
    refuse(name, reshaped(name, argument, shape), who, came)


SHAPES = [
    ("decode", "q", (T, H, DIM - 1), DIM),
    ("decode", "q", (T, H, 576), DIM),
    ("decode", "q", (T, H, 0), DIM),
    ("decode", "indices", (T + 1, K), T),
    ("decode", "indices", (1, K), T),
    ("decode", "indices", (T, 2, K), 1),
    ("decode", "indices", (1, T, K), T),
    ("decode", "topk_length", (T + 1,), T),
    ("decode", "topk_length", (1,), T),
    ("decode", "topk_length", (T, 2), T),
    ("decode", "attn_sink", (H + 1,), H),
    ("decode", "attn_sink", (1,), H),
    ("decode", "attn_sink", (0,), H),
    ("decode", "out", (T, H, DIM - 1), DIM),
    ("decode", "out", (T, H, 1024), DIM),
    ("decode", "out", (T + 1, H, DIM), T),
    ("decode", "out", (T, H + 1, DIM), H),
    ("decode", "out", (H, T, DIM), T),
    ("decode", "lse", (T, H + 1), H),
    ("decode", "lse", (T - 1, H), T),
    ("decode", "lse", (H, T), T),
    ("decode", "kv_cache", (PAGES, PAGE, 583), 584),
    ("decode", "kv_cache", (PAGES, PAGE, 592), 584),
    ("decode", "kv_cache", (PAGES, PAGE, 656), 584),
    ("decode", "kv_cache", (PAGES, 2, PAGE, 584), 1),
    ("decode", "kv_cache", (PAGES, 584 * PAGE + 16), 584),
    ("dual", "extra_kv_cache", (PAGES, PAGE, 288), 584),
    ("dual", "extra_indices", (T - 1, E), T),
    ("dual", "extra_indices", (T, 2, E), 1),
    ("dual", "extra_topk_length", (T + 1,), T),
    ("merge_states", "lse_a", (T, H + 1), H),
    ("merge_states", "lse_b", (T + 1, H), T),
    ("merge_states", "out_b", (T, H, DIM - 1), DIM),
    ("merge_states", "out_b", (T, H + 1, DIM), H),
    ("pack_kv_cache", "latent", (8, DIM - 1), DIM),
    ("pack_kv_cache", "latent", (8, 576), DIM),
    ("pack_kv_cache", "latent", (2, PAGE - 1, DIM), PAGE),
    ("append_kv_cache", "latent", (5, DIM - 1), DIM),
    ("append_kv_cache", "slot_mapping", (6,), 5),
    ("append_kv_cache", "slot_mapping", (4,), 5),
    ("append_kv_cache", "cache", (PAGES, PAGE, 583), 584),
    ("append_kv_cache", "cache", (PAGES, PAGE, 592), 584),
    ("append_kv_cache", "cache", (PAGES, 2, PAGE, 584), 1),
    ("append_kv_cache", "cache", (PAGES, 584 * PAGE - 16), 584),
    ("unpack_kv_cache", "cache", (PAGES, PAGE, 576), 584),
    ("unpack_kv_cache", "cache", (PAGES, 2, PAGE, 584), 1),
]


@pytest.mark.parametrize(("name", "argument", "shape", "needed"), SHAPES, ids=lambda value: str(value))
def test_wrong_shape(name, argument, shape, needed):
    arguments = reshaped(name, argument, shape)
    wrong = next((size for size in shape if size not in arguments_sizes(name, argument)), shape[0])
    refuse(name, arguments, word(argument), rf"\b{wrong}\b", rf"\b{needed}\b")


def arguments_sizes(name, argument):
    return good(name)[argument].shape


# Inline rows may be wider than the record.
WIDTHS = [(key, delta) for key in RECORDS for delta in (-16, -1, 16) if delta < 0 or not RECORDS[key].inline]


@pytest.mark.parametrize(("key", "delta"), WIDTHS, ids=lambda value: str(value))
def test_record_width_of_every_family(key, delta):
    record = RECORDS[key]
    cache = aligned_bytes(2 * 16 * (record.size + delta)).reshape(2, 16, -1)
    arguments = {"cache": cache, "family": key[0], "kv_cache_format": key[1]}
    refuse("unpack_kv_cache", arguments, word("cache"), rf"\b{record.size + delta}\b", rf"\b{record.size}\b")


def test_batched_q_against_transposed_indices():
    arguments = good("decode")
    arguments |= {"q": random_bits(1, 2, 3, H, DIM), "indices": slots(1, 6, K).reshape(3, 2, K)}
    for argument in ("out", "lse", "topk_length"):
        del arguments[argument]
    refuse("decode", arguments, word("indices"), "3, 2", "2, 3")


# Strides, alignment


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        pair
        for pair in EACH_ARRAY
        if pair[1] in ("q", "indices", "out", "lse", "latent", "extra_indices") or pair in CACHES
    ],
)
def test_last_dimension_must_be_dense(name, argument):
    arguments = good(name)
    array = arguments[argument]
    arguments[argument] = np.repeat(array, 2, axis=-1)[..., ::2]
    refuse(name, arguments, word(argument), "dense|contiguous|stride", r"\b[24]\b|stride|contiguous")


@pytest.mark.parametrize("argument", ["indices", "extra_indices", "q", "out", "lse"])
def test_reversed_last_dimension(argument):
    arguments = good("dual")
    arguments[argument] = arguments[argument].copy()[..., ::-1]
    refuse("dual", arguments, word(argument), "dense|contiguous|stride")


@pytest.mark.parametrize("name", ["pack_kv_cache", "append_kv_cache"])
def test_latent_must_be_contiguous(name):
    arguments = good(name)
    arguments["latent"] = np.repeat(arguments["latent"], 2, axis=0)[::2]
    refuse(name, arguments, word("latent"), "contiguous|dense|stride")


@pytest.mark.parametrize("key", [slice(None), (slice(None), slice(None, None, -1))], ids=["tokens", "heads"])
def test_q_must_be_contiguous(key):
    arguments = good("decode")
    wide = np.repeat(arguments["q"], 2, axis=0)[::2] if key == slice(None) else arguments["q"][key]
    refuse("decode", {**arguments, "q": wide}, word("q"), "contiguous")


@each_cache
def test_cache_pointer_must_be_16_byte_aligned(name, argument):
    cache = strided_cache(RECORDS["dsv4", "fp8"], PAGES, PAGE, offset=8)
    refuse(name, change(name, argument, cache), word(argument), r"\b16\b", "align|multiple")


BAD_STRIDES = {
    "page stride off 16": ("dsv4", "page_stride", {"page_stride": 584 * PAGE + 8}, r"\b16\b"),
    "page stride too small": ("dsv4", "page_stride", {"page_stride": 584 * PAGE - 16}, rf"\b{584 * PAGE}\b"),
    "pages on top of each other": ("dsv4", "page_stride", {"page_stride": 0}, rf"\b{584 * PAGE}\b"),
    "footer rows not tight": ("dsv4", "row_stride", {"row_stride": 592}, r"\b584\b"),
    "inline row stride off 16": ("dsv4_1_inline", "row_stride", {"row_stride": 536}, r"\b16\b"),
    "inline row stride too small": ("dsv4_1_inline", "row_stride", {"row_stride": 512}, r"\b528\b"),
    "inline page stride off 16": ("dsv4_1_inline", "page_stride", {"page_stride": 528 * PAGE + 8}, r"\b16\b"),
    "inline page stride too small": ("dsv4_1_inline", "page_stride", {"page_stride": 528 * PAGE - 528}, r"\b4224\b"),
    "inline rows on top of each other": ("dsv4_1_inline", "row_stride", {"row_stride": 0}, r"\b528\b"),
    "inline page stride below padded rows": (
        *("dsv4_1_inline", "page_stride"),
        *({"row_stride": 656, "page_stride": 528 * PAGE}, rf"\b{656 * PAGE}\b"),
    ),
}


@pytest.mark.parametrize("kind", BAD_STRIDES)
@each_cache
def test_cache_strides(name, argument, kind):
    family, field, strides, accepted = BAD_STRIDES[kind]
    cache = strided_cache(RECORDS[family, "fp8"], PAGES, PAGE, **strides)
    arguments = change(name, argument, cache, family=family)
    if name == "append_kv_cache":
        accepted += "|overlap"
    refuse(name, arguments, layout_words(argument, field), rf"\b{strides[field]}\b", accepted)


@each_cache
def test_negative_page_stride(name, argument):
    arguments = good(name)
    arguments[argument] = arguments[argument][::-1]
    refuse(name, arguments, layout_words(argument, "page_stride"), r"-\d+")


@each_cache
def test_page_stride_of_a_flat_cache(name, argument):
    size = 584 * PAGE
    cache = np.ndarray((PAGES, size), np.uint8, aligned_bytes(PAGES * (size + 8)), strides=(size + 8, 1))
    words = (layout_words(argument, "page_stride"), rf"\b{size + 8}\b", r"\b16\b")
    refuse(name, change(name, argument, cache), *words)


@each_cache
def test_odd_page_of_dsv4_needs_a_padded_pitch(name, argument):
    cache = aligned_bytes(PAGES * 3 * 584).reshape(PAGES, 3, 584)
    refuse(name, change(name, argument, cache), layout_words(argument, "page_stride"), r"\b1752\b", r"\b16\b")


def flat(result):
    return result if isinstance(result, tuple) else () if result is None else (result,)


ELEMENTS = [pair for pair in WIDE if pair[1] not in ("out_b", "lse_b")]


@pytest.mark.parametrize(("name", "argument"), ELEMENTS)
def test_unaligned_elements_are_handled_right_or_refused(name, argument):
    plain, moved = good(name), good(name)
    array = plain[argument]
    odd = np.ndarray(array.shape, array.dtype, aligned_bytes(array.nbytes + 1), offset=1)
    odd[...] = array
    moved[argument] = odd
    before = memory(moved)
    try:
        result = call(name, moved)
    except (TypeError, ValueError) as error:
        assert re.search(word(argument), str(error))  # noqa: PT017
        assert "align" in str(error)  # noqa: PT017
        assert memory(moved) == before
    else:
        expected = call(name, plain)
        assert [array.tobytes() for array in flat(result)] == [array.tobytes() for array in flat(expected)]
        if name == "append_kv_cache":
            np.testing.assert_array_equal(moved["cache"], plain["cache"])


def test_strides_of_axes_of_one_element_do_not_matter():
    record = RECORDS["dsv4", "fp8"]
    arguments = good("decode")
    dense = arguments["kv_cache"][:1].copy()
    odd = np.ndarray(dense.shape, np.uint8, aligned_bytes(dense.size), strides=(7, record.size, 1))
    odd[...] = dense
    expected = call("decode", {**arguments, "kv_cache": dense, "out": None, "lse": None})
    for ours, theirs in zip(call("decode", {**arguments, "kv_cache": odd}), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("argument", ["indices", "extra_indices"])
def test_row_stride_of_indices_is_free(argument):
    one = good("dual")[argument][:1]
    expected = call("dual", change("dual", argument, np.repeat(one, T, axis=0)))
    for free in (np.broadcast_to(one, (T, one.size)), np.repeat(one, 2 * T, axis=0)[::2]):
        ours = call("dual", change("dual", argument, free))
        assert [array.tobytes() for array in ours] == [array.tobytes() for array in expected]


# Outputs


@pytest.mark.parametrize(("name", "argument"), [("decode", "out"), ("decode", "lse"), ("append_kv_cache", "cache")])
def test_read_only_output(name, argument):
    arguments = good(name)
    arguments[argument] = arguments[argument].copy() if argument != "cache" else arguments[argument]
    arguments[argument].flags.writeable = False
    refuse(name, arguments, word(argument), "read-?only|writ")


@each_name
def test_read_only_inputs_are_welcome(name):
    arguments = good(name)
    for argument, value in arguments.items():
        if isinstance(value, np.ndarray) and argument not in ("out", "lse", "cache"):
            value.flags.writeable = False
    call(name, arguments)


def view(buffer, shape, dtype, offset=0):
    return np.ndarray(shape, dtype, buffer, offset=offset)


def out_is_q(a):
    a["out"] = a["q"]
    return "out", "q"


def out_touches_the_end_of_q(a):
    size = T * H * DIM * 2
    both = aligned_bytes(2 * size - 2)
    a["q"], a["out"] = view(both, (T, H, DIM), np.uint16), view(both, (T, H, DIM), np.uint16, size - 2)
    return "out", "q"


def out_in_cache(argument):
    def overlap(a):
        a[argument] = strided_cache(RECORDS["dsv4", "fp8"], PAGES, PAGE)
        a["out"] = view(span(a[argument]), (T, H, DIM), np.uint16)
        return "out", argument

    overlap.__name__ = f"out_in_{argument}"
    return overlap


def lse_on(argument):
    def overlap(a):
        big = aligned_bytes(4096)
        old = a[argument]
        a[argument] = view(big, old.shape, old.dtype)
        a[argument][...] = old
        a["lse"] = view(big, (T, H), np.float32)
        return "lse", argument

    overlap.__name__ = f"lse_on_{argument}"
    return overlap


def lse_in_out(a):
    memory = aligned_bytes(T * H * DIM * 2, fill=0xA5)
    a["out"], a["lse"] = view(memory, (T, H, DIM), np.uint16), view(memory, (T, H), np.float32, 64)
    return "lse", "out"


def tokens_of_out_coincide(a):
    a["out"] = np.ndarray((T, H, DIM), np.uint16, aligned_bytes(H * DIM * 2), strides=(0, DIM * 2, 2))
    return "out", "out|itself"


def heads_of_out_overlap(a):
    a["out"] = np.ndarray((T, H, DIM), np.uint16, aligned_bytes(T * H * DIM * 2), strides=(H * DIM * 2, DIM, 2))
    return "out", "out|itself"


def tokens_of_lse_coincide(a):
    a["lse"] = np.ndarray((T, H), np.float32, aligned_bytes(64), strides=(0, 4))
    return "lse", "lse|itself"


def tokens_of_lse_overlap(a):
    a["lse"] = np.ndarray((T, H), np.float32, aligned_bytes(64), strides=(4, 4))
    return "lse", "lse|itself"


ALIASES = [
    *(out_is_q, out_touches_the_end_of_q, out_in_cache("kv_cache"), out_in_cache("extra_kv_cache"), lse_in_out),
    *(tokens_of_out_coincide, heads_of_out_overlap, tokens_of_lse_coincide, tokens_of_lse_overlap),
    *(lse_on(name) for name in ("indices", "topk_length", "attn_sink", "extra_indices", "extra_topk_length")),
]


@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: alias.__name__)
def test_overlapping_outputs(alias):
    arguments = good("dual")
    refuse("dual", arguments, *map(word, alias(arguments)), "overlap|alias|share")


@pytest.mark.parametrize("argument", ["latent", "slot_mapping"])
def test_append_into_its_own_input(argument):
    arguments = good("append_kv_cache")
    old = arguments[argument]
    arguments["cache"] = strided_cache(RECORDS["dsv4", "fp8"], PAGES, PAGE)
    arguments[argument] = view(span(arguments["cache"]), old.shape, old.dtype, 64)
    arguments[argument][...] = old
    refuse("append_kv_cache", arguments, word("cache"), word(argument), "overlap|alias|share")


def test_neighbours_in_one_allocation_do_not_overlap():
    arguments = good("decode")
    size = T * H * DIM * 2
    both = aligned_bytes(2 * size + 2 * T * H * 4)
    q, out = view(both, (T, H, DIM), np.uint16), view(both, (T, H, DIM), np.uint16, size)
    lse = np.ndarray((T, H), np.float32, both, offset=2 * size, strides=(2 * H * 4, 4))
    q[...] = arguments["q"]
    expected = call("decode", arguments)
    call("decode", {**arguments, "q": q, "out": out, "lse": lse})
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])


# Partners


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["extra_kv_cache"], "extra_indices"),
        (["extra_indices"], "extra_kv_cache"),
        (["extra_topk_length"], "extra_kv_cache|extra_indices"),
        (["extra_kv_cache", "extra_topk_length"], "extra_indices"),
        (["extra_indices", "extra_topk_length"], "extra_kv_cache"),
    ],
)
def test_missing_partner(given, named):
    dual = good("dual")
    arguments = {**good("decode"), **{argument: dual[argument] for argument in given}}
    refuse("decode", arguments, word(f"({named})"), "|".join(map(word, given)))


@pytest.mark.parametrize("family", ["dsv3_2", "glm_nsa", "glm53_nope", "dots3_swa"])
def test_secondary_cache_where_the_family_has_none(family):
    arguments = good("dual", family=family)
    refuse("dual", arguments, r"\bextra_\w+", rf"\b{family}\b", kinds=sparse_mla.UnsupportedError)


@pytest.mark.parametrize("family", ["dsv4", "dsv3_2", "dots3_swa"])
def test_fp4_secondary_cache_is_of_dsv4_1(family):
    arguments = {**good("dual", family=family), "extra_kv_fp4": True}
    refuse("dual", arguments, r"\bextra_\w+", family, kinds=sparse_mla.UnsupportedError)


# Words and scalars

FAMILY_CALLS = [name for name in NAMES if name != "merge_states"]
FORMAT_WORDS = {
    name: ("fp8", "nvfp4") if name in ("decode", "dual") else ("fp8", "nvfp4", "fp4") for name in FAMILY_CALLS
}


@pytest.mark.parametrize("family", ["dsv5", "", "DSV4", "dsv4 ", "glm", "dsv4\0"])
@pytest.mark.parametrize("name", FAMILY_CALLS)
def test_unknown_family(name, family):
    words = [rf"\b{accepted}\b" for accepted in FAMILIES]
    refuse(name, change(name, "family", "dsv4") | {"family": family}, "family", *words, kinds=ValueError)


@pytest.mark.parametrize("word_given", ["int4", "", "FP8", "bf16"])
@pytest.mark.parametrize("name", FAMILY_CALLS)
def test_unknown_format(name, word_given):
    words = [rf"\b{accepted}\b" for accepted in FORMAT_WORDS[name]]
    refuse(name, change(name, "kv_cache_format", word_given), "kv_cache_format", word_given, *words, kinds=ValueError)


@pytest.mark.parametrize("name", [name for name in FAMILY_CALLS if name != "dual"])
@pytest.mark.parametrize("family", ["dsv3_2", "glm53_nope", "dots3_swa", "dsv4_1", "dsv4_1_inline"])
def test_format_that_the_family_lacks(name, family):
    arguments = {**good(name, family=family), "kv_cache_format": "nvfp4"}
    words = ["kv_cache_format", r"\bnvfp4\b", r"\bfp8\b", rf"\b{family}\b"]
    refuse(name, arguments, *words, kinds=sparse_mla.UnsupportedError)


@pytest.mark.parametrize("name", ["pack_kv_cache", "append_kv_cache", "unpack_kv_cache"])
@pytest.mark.parametrize("family", ["dsv4", "glm_nsa", "dots3_swa"])
def test_fp4_records_are_of_dsv4_1(name, family):
    arguments = {**good(name, family=family), "kv_cache_format": "fp4"}
    refuse(name, arguments, "kv_cache_format", r"\bfp4\b", family, kinds=sparse_mla.UnsupportedError)


@pytest.mark.parametrize("argument", ["family", "kv_cache_format"])
@pytest.mark.parametrize("value", [3, None, b"fp8", ["dsv4"]], ids=repr)
@pytest.mark.parametrize("name", FAMILY_CALLS)
def test_words_must_be_str(name, argument, value):
    refuse(
        name, change(name, argument, value) if argument != "family" else good(name) | {argument: value}, word(argument)
    )


@pytest.mark.parametrize("value", ["10", "", "E", "base2"])
@pytest.mark.parametrize("name", ["decode", "merge_states"])
def test_unknown_lse_base(name, value):
    refuse(name, change(name, "lse_base", value), "lse_base", value, r"\b2\b", r"\be\b", kinds=ValueError)


@pytest.mark.parametrize("value", [2, None, 2.718], ids=repr)
@pytest.mark.parametrize("name", ["decode", "merge_states"])
def test_lse_base_must_be_str(name, value):
    refuse(name, change(name, "lse_base", value), "lse_base")


@pytest.mark.parametrize("value", ["bf16", "", "AUTO"])
def test_unknown_compute_precision(value):
    arguments = change("decode", "compute_precision", value)
    refuse("decode", arguments, "compute_precision", value, r"\bauto\b", r"\bf16\b", kinds=ValueError)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")], ids=repr)
def test_sm_scale_must_be_finite(value):
    refuse("decode", change("decode", "sm_scale", value), word("sm_scale"), "nan|inf", "finite", kinds=ValueError)


def test_sm_scale_must_be_finite_in_float32():
    refuse(
        "decode", change("decode", "sm_scale", 1e300), word("sm_scale"), "finite", r"1e\+?300|10{300}", kinds=ValueError
    )


@pytest.mark.parametrize("value", ["0.1", None, [0.1], 1j], ids=repr)
@pytest.mark.parametrize("argument", ["sm_scale", "kv_global_scale"])
def test_scales_must_be_numbers(argument, value):
    refuse("decode", change("decode", argument, value), word(argument), kinds=TypeError)


def test_sm_scale_is_required():
    arguments = good("decode")
    del arguments["sm_scale"]
    refuse("decode", arguments, word("sm_scale"), kinds=TypeError)


@pytest.mark.parametrize(
    "key", [("dsv4", "fp8"), ("dsv3_2", "fp8"), ("glm_nsa", "fp8"), ("dsv4", "nvfp4")], ids="-".join
)
@pytest.mark.parametrize("name", ["decode", "pack_kv_cache", "append_kv_cache", "unpack_kv_cache"])
def test_global_scale_where_the_family_has_none(name, key):
    arguments = change(name, "kv_global_scale", 2.5, family=key[0], kv_cache_format=key[1])
    refuse(name, arguments, word("kv_global_scale"), r"\b2\.5\b", r"\b1(\.0)?\b", kinds=ValueError)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0], ids=repr)
@pytest.mark.parametrize("name", ["decode", "pack_kv_cache", "append_kv_cache", "unpack_kv_cache"])
def test_global_scale_must_be_usable(name, value):
    arguments = change(name, "kv_global_scale", value, family="glm_nsa", kv_cache_format="nvfp4")
    refuse(name, arguments, word("kv_global_scale"), "nan|inf|0", kinds=ValueError)


@pytest.mark.parametrize("argument", ["return_lse", "batch_invariant", "extra_kv_fp4"])
@pytest.mark.parametrize("value", ["yes", 1.5, None], ids=repr)
def test_flags_must_be_bool(argument, value):
    refuse("dual", change("dual", argument, value), word(argument), kinds=TypeError)


@pytest.mark.parametrize("argument", ["workspace", "stream"])
@pytest.mark.parametrize("value", [7, np.zeros(8, np.uint8)], ids=["int", "array"])
def test_gpu_arguments_beside_numpy_arrays(argument, value):
    refuse("decode", change("decode", argument, value), word(argument))


def test_unknown_and_positional_arguments():
    refuse("decode", change("decode", "scale", 1.0), "scale", kinds=TypeError)
    arguments = good("unpack_kv_cache")
    with pytest.raises(TypeError):
        sparse_mla.unpack_kv_cache(arguments["cache"], "dsv4")


# Sizes given to pack_kv_cache


@pytest.mark.parametrize("value", [0, -1, -(2**63), 2**63, FAR, -FAR])
def test_page_block_size_must_be_positive(value):
    arguments = change("pack_kv_cache", "page_block_size", value)
    refuse(
        "pack_kv_cache", arguments, word("page_block_size"), "" if abs(value) >= 2**63 else str(value), kinds=ValueError
    )


@pytest.mark.parametrize("argument", ["page_block_size", "page_stride", "row_stride"])
@pytest.mark.parametrize("value", ["64", 64.0, [64]], ids=repr)
def test_sizes_must_be_ints(argument, value):
    refuse("pack_kv_cache", change("pack_kv_cache", argument, value), word(argument), kinds=TypeError)


PITCHES = [
    *(("dsv4", "page_stride", value, r"\b(16|4672)\b") for value in (-16, 0, 16, 584 * PAGE - 16, 584 * PAGE + 8)),
    *(("dsv4", "page_stride", value, "") for value in (2**63, FAR, -FAR)),
    *(("dsv3_2", "page_stride", value, r"\b(16|5248)\b") for value in (656 * PAGE - 16, 656 * PAGE + 8, -5248)),
    *(("dsv3_2", "row_stride", value, r"\b(16|656)\b") for value in (-656, 0, 640, 664)),
    *(("dsv3_2", "row_stride", value, "") for value in (2**63, FAR)),
    *(("dsv4", "row_stride", value, r"\b584\b") for value in (0, 576, 592)),
]


@pytest.mark.parametrize(("family", "argument", "value", "accepted"), PITCHES)
def test_strides_given_to_pack(family, argument, value, accepted):
    arguments = change("pack_kv_cache", argument, value, family=family)
    said = str(value) if accepted else ""
    refuse("pack_kv_cache", arguments, word(argument), said, accepted, kinds=ValueError)


@pytest.mark.parametrize(
    "size",
    ["page_block_size=2**40", "page_block_size=2**62", "page_stride=2**48", "page_stride=2**62", "row_stride=2**45"],
)
def test_caches_beyond_any_memory_are_an_exception(size):
    """In a process of its own: a failed allocation must raise, not abort."""
    program = (
        "import numpy as np, sparse_mla\n"
        "try:\n"
        f"    sparse_mla.pack_kv_cache(np.zeros((999, 576), np.uint16), family='dsv3_2', {size})\n"
        "except (ValueError, MemoryError) as error:\n"
        "    print('raised', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout[:6]) == (0, "raised"), done.stderr
    assert "panicked" not in done.stderr
