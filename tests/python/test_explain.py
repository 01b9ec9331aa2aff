"""explain_decode: the answer, its reasons, and its agreement with decode."""

import itertools
import pickle
import re

import numpy as np
import pytest
from brute import RECORDS, random_bits, secondary, strided_cache
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sparse_mla import (
    DecodeSupport,
    UnsupportedError,
    decode,
    explain_decode,
    pack_kv_cache,
    supported_sparse_mla_sm120_configs,
)

BASE = {"num_heads": 8, "topk": 576}
PRECISIONS = ("auto", "f16")
EXTRA = ("extra_topk", "extra_page_block_size", "extra_page_stride", "extra_row_stride", "extra_kv_fp4")
# What a reason must say is accepted, by the argument that it blames.
ACCEPTED = {
    "num_heads": r"\b1\b.*\b128\b",
    "topk": r"\b(1|513)\b",
    "num_tokens": r"\b(0|1)\b|negative",
    "page_block_size": r"\b1\b|positive",
    "page_stride": r"\b16\b|\b\d{3,}\b",
    "row_stride": r"\b16\b|\b\d{3,}\b",
    "extra_topk": r"\bdsv4|\b0\b|\b1\b|negative",
    "extra_page_block_size": r"\b1\b|positive",
    "extra_page_stride": r"\b16\b|\b\d{3,}\b",
    "extra_row_stride": r"\b16\b|\b\d{3}\b",
    "extra_kv_fp4": r"\bdsv4_1\b",
    "kv_cache_format": r"\bfp8\b",
    "compute_precision": r"\bauto\b.*\bf16\b|\bf16\b.*\bauto\b",
    "compute_capability": r"\b9\.0\b|GPU|CUDA",
}
INTERNAL = re.compile(
    r"::|\b(Some|Ok|Err)\b|\.rs\b|->|\b[A-Z]\w*(Error|Kind|Layout|View|Request)\b|\b_\w+|[a-z][A-Z]|DSV|panick|unwrap"
)


def blame(request):
    """(arguments at fault, arguments that cannot be judged because another one is at fault)."""
    ask = {**dict.fromkeys(ACCEPTED), **BASE, "num_tokens": 1, "extra_topk": 0, "kv_cache_format": "fp8", **request}
    record = RECORDS.get((ask["family"], ask["kv_cache_format"]))
    if record is None:
        return {"kv_cache_format"}, set(ACCEPTED) - {"kv_cache_format"}
    bad, open_ = set(), set()

    def layout(prefix, rec):
        page, pitch, row = (ask[prefix + name] for name in ("page_block_size", "page_stride", "row_stride"))
        page, row = 64 if page is None else page, rec.size if row is None else row
        if page < 1:
            bad.add(prefix + "page_block_size")
        if row < rec.size or row % 16 if rec.inline else row != rec.size:
            bad.add(prefix + "row_stride")
        if pitch is None:
            return
        if pitch % 16 or pitch < 0:
            bad.add(prefix + "page_stride")
        elif {prefix + "page_block_size", prefix + "row_stride"} & bad:
            open_.add(prefix + "page_stride")
        elif pitch < page * row:
            bad.add(prefix + "page_stride")

    if not 1 <= ask["num_heads"] <= 128:
        bad.add("num_heads")
    if ask["topk"] < record.min_topk:
        bad.add("topk")
    if ask["num_tokens"] < 0:
        bad.add("num_tokens")
    layout("", record)
    if ask["extra_topk"] < 0:
        bad.add("extra_topk")
    given = {name for name in EXTRA if ask[name]} | {name for name in EXTRA if name != "extra_topk" and ask[name] == 0}
    if given:
        fp4 = bool(ask["extra_kv_fp4"])
        extra = secondary(ask["family"], ask["kv_cache_format"], fp4)
        if extra is not None:
            layout("extra_", extra)
        else:
            has_one = secondary(ask["family"], ask["kv_cache_format"], False)
            bad.add("extra_kv_fp4" if has_one else "extra_topk")
            open_ |= set(EXTRA)
    if ask["compute_precision"] not in (None, *PRECISIONS):
        bad.add("compute_precision")
    if ask["compute_capability"] is not None:
        bad.add("compute_capability")
    return bad, open_ - bad


def names(reason):
    return {name for name in ACCEPTED if re.search(rf"(?<!\w){name}(?!\w)", reason)}


def check_refusal(answer, request, bad, open_):
    assert isinstance(answer, DecodeSupport)
    assert answer.supported is False
    assert answer.kernel is None
    assert type(answer.reasons) is tuple
    assert len(set(answer.reasons)) == len(answer.reasons) >= len(bad)
    for argument in bad:
        value = request.get(argument)
        said = [reason for reason in answer.reasons if argument in names(reason)]
        assert said, f"no reason names {argument}: {answer.reasons}"
        if argument != "compute_capability":
            assert any(str(value).lower() in reason.lower() for reason in said), (argument, value, said)
        assert any(re.search(ACCEPTED[argument], reason) for reason in said), (argument, said)
    for reason in answer.reasons:
        assert names(reason) & (bad | open_), f"blames something that is fine: {reason}"
        assert not INTERNAL.search(reason), reason


def check_support(answer, tokens=1):
    assert isinstance(answer, DecodeSupport)
    assert answer.supported is True, answer.reasons
    assert answer.reasons == ()
    assert ("prefill" in answer.kernel) is (tokens > 64)


FAR = st.sampled_from([2**31, 2**40 + 16, 2**62, -(2**40)])
NUMBER = st.one_of(st.integers(-1, 8), st.sampled_from([63, 64, 65, 127, 128, 129, 512, 513, 576]))
STRIDE = st.one_of(
    st.none(),
    st.sampled_from([-16, 0, 8, 16, 520, 528, 584, 592, 656, 672, 1160, 1168, 37376, 37440, 37384, 74240, 10**6]),
)
PAGES = st.none() | st.sampled_from([-1, 0, 1, 2, 3, 16, 63, 64, 256])
REQUESTS = st.fixed_dictionaries(
    {
        "family": st.sampled_from(sorted({family for family, _ in RECORDS})),
        "num_heads": st.one_of(NUMBER, FAR),
        "topk": st.one_of(NUMBER, st.just(2**31), st.just(-(2**40))),
        "num_tokens": st.one_of(NUMBER, FAR),
    },
    optional={
        "page_block_size": PAGES,
        "page_stride": STRIDE,
        "row_stride": STRIDE,
        "extra_topk": st.sampled_from([0, 0, -1, 1, 128, 513]),
        "kv_cache_format": st.sampled_from(["fp8", "nvfp4"]),
        "compute_precision": st.sampled_from(["auto", "f16", "fp8"]),
    },
)
EXTRAS = st.fixed_dictionaries(
    {"extra_topk": st.sampled_from([1, 7, 128, -1, 0])},
    optional={
        "extra_page_block_size": PAGES,
        "extra_page_stride": STRIDE,
        "extra_row_stride": STRIDE,
        "extra_kv_fp4": st.booleans(),
    },
)


def judge(request):
    bad, open_ = blame(request)
    answer = explain_decode(**request)
    if bad:
        check_refusal(answer, request, bad, open_)
    else:
        check_support(answer, request["num_tokens"])
    assert bool(answer) is answer.supported


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(REQUESTS)
def test_answer_and_reasons_agree_with_brute_force(request):
    judge(request)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(sorted(RECORDS)), EXTRAS)
def test_secondary_cache_agrees_with_brute_force(key, extras):
    assume(extras["extra_topk"] or secondary(*key, False))
    judge({"family": key[0], "kv_cache_format": key[1], **BASE, "num_tokens": 2, **extras})


SINGLE = [
    ("dsv4", {"num_heads": 0}),
    ("dsv4", {"num_heads": 129}),
    ("dsv4", {"num_heads": -(2**63)}),
    ("dsv4", {"topk": 0}),
    ("dsv4", {"topk": -1}),
    ("dots3_swa", {"topk": 512}),
    ("dsv4", {"num_tokens": -1}),
    ("dsv4", {"page_block_size": 0}),
    ("dsv3_2", {"page_block_size": -64}),
    ("dsv4", {"page_stride": 37376 - 16}),
    ("dsv4", {"page_stride": 37376 + 8}),
    ("dsv4", {"page_block_size": 1, "page_stride": 584}),
    ("dsv4", {"page_block_size": 3, "page_stride": 1752}),
    ("dots3_swa", {"page_block_size": 1, "page_stride": 1160}),
    ("dsv3_2", {"page_stride": 64 * 656 - 16}),
    ("dsv3_2", {"page_stride": -64 * 656}),
    ("dsv3_2", {"row_stride": 640}),
    ("dsv3_2", {"row_stride": 664}),
    ("glm53_nope", {"row_stride": 656, "page_stride": 64 * 528}),
    ("dsv4", {"row_stride": 592}),
    ("dsv4_1", {"row_stride": 512}),
    ("dsv3_2", {"extra_topk": 128}),
    ("glm_nsa", {"extra_topk": 1}),
    ("glm53_nope", {"extra_topk": 128}),
    ("dots3_swa", {"extra_topk": 128}),
    ("dsv4", {"extra_topk": -1}),
    ("dsv4", {"extra_topk": 128, "extra_page_block_size": 0}),
    ("dsv4", {"extra_topk": 128, "extra_page_stride": 37384}),
    ("dsv4", {"extra_topk": 128, "extra_page_block_size": 3, "extra_page_stride": 1744}),
    ("dsv4", {"extra_topk": 128, "extra_kv_fp4": True}),
    ("dsv4_1_inline", {"extra_topk": 128, "extra_row_stride": 520}),
    ("dsv4_1_inline", {"extra_topk": 128, "extra_kv_fp4": True, "extra_row_stride": 280}),
    ("dsv3_2", {"kv_cache_format": "nvfp4"}),
    ("glm53_nope", {"kv_cache_format": "nvfp4"}),
    ("dots3_swa", {"kv_cache_format": "nvfp4"}),
    ("dsv4_1", {"kv_cache_format": "nvfp4"}),
    ("dsv4", {"compute_precision": "fp8"}),
]


@pytest.mark.parametrize(("family", "change"), SINGLE, ids=lambda value: str(value))
def test_one_fault_gives_one_reason(family, change):
    request = {"family": family, **BASE, **change}
    bad, open_ = blame(request)
    assert len(bad) == 1
    answer = explain_decode(**request)
    check_refusal(answer, request, bad, open_)
    assert len(answer.reasons) == 1


@pytest.mark.parametrize("family", ["dsv3_2", "dots3_swa"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [("extra_page_block_size", 32), ("extra_page_stride", 99984), ("extra_row_stride", 99984), ("extra_kv_fp4", True)],
)
def test_secondary_cache_without_width_where_the_family_has_none(family, argument, value):
    answer = explain_decode(family, **BASE, **{argument: value})
    assert not answer
    (reason,) = answer.reasons
    assert argument in names(reason)
    assert str(value) in reason
    assert family in reason


FAULTS = {
    "num_heads": 129,
    "topk": 0,
    "num_tokens": -2,
    "page_block_size": 0,
    "extra_topk": -3,
    "compute_precision": "fp8",
}


@pytest.mark.parametrize("several", list(itertools.combinations(FAULTS, 3)), ids="+".join)
def test_every_reason_is_listed(several):
    request = {"family": "dsv4", **BASE, **{name: FAULTS[name] for name in several}}
    answer = explain_decode(**request)
    check_refusal(answer, request, set(several), set())
    assert len(answer.reasons) == 3


ACCEPTS = [
    ("dsv4", {"page_stride": 37440}),
    ("dsv4", {"page_stride": 37376}),
    ("dsv4", {"page_block_size": 256, "page_stride": 149760}),
    ("dsv4", {"page_block_size": 128, "page_stride": 460224}),
    ("dsv4", {"page_block_size": 1, "page_stride": 592}),
    ("dsv4", {"page_block_size": 1}),
    ("dsv4", {"row_stride": 584}),
    ("dsv4", {"num_tokens": 0}),
    ("dsv3_2", {"row_stride": 672}),
    ("dsv3_2", {"row_stride": 1088, "page_stride": 64 * 1088 + 16}),
    ("glm53_nope", {"row_stride": 656}),
    ("glm53_nope", {"row_stride": 656, "page_stride": 64 * 656}),
    ("dots3_swa", {"topk": 513}),
    ("dsv4", {"extra_topk": 77}),
    ("dsv4", {"extra_topk": 128, "extra_page_block_size": 2}),
    ("dsv4", {"extra_topk": 128, "extra_page_block_size": 2, "extra_page_stride": 1168}),
    ("dsv4", {"extra_topk": 128, "kv_cache_format": "nvfp4", "extra_page_block_size": 32}),
    ("dsv4_1", {"extra_topk": 640}),
    ("dsv4_1", {"extra_topk": 640, "extra_kv_fp4": True, "extra_page_stride": 18432}),
    ("dsv4_1_inline", {"extra_topk": 5, "extra_kv_fp4": True, "extra_row_stride": 304}),
    ("dsv4_1_inline", {"extra_topk": 5, "extra_row_stride": 544}),
    ("glm_nsa", {"kv_cache_format": "nvfp4", "topk": 1, "num_heads": 1}),
    ("dsv4", {"compute_precision": "f16"}),
]


@pytest.mark.parametrize(("family", "change"), ACCEPTS, ids=lambda value: str(value))
def test_accepted(family, change):
    check_support(explain_decode(family, **{**BASE, **change}))


@pytest.mark.parametrize("key", RECORDS, ids="-".join)
def test_tokens_above_64_are_served_by_the_prefill_form(key):
    family, fmt = key
    answers = {t: explain_decode(family, **BASE, num_tokens=t, kv_cache_format=fmt) for t in (1, 64, 65, 10**6)}
    for tokens, answer in answers.items():
        check_support(answer, tokens)
    assert answers[1].kernel == answers[64].kernel
    assert answers[65].kernel == answers[10**6].kernel
    assert not supported_sparse_mla_sm120_configs(kv_cache_format=fmt)[family].supports_decode(8, 576, num_tokens=65)


def test_kernel_tells_family_and_format_apart():
    kernels = {explain_decode(family, **BASE, kv_cache_format=fmt).kernel for family, fmt in RECORDS}
    assert len(kernels) == len(RECORDS)


@pytest.mark.parametrize("capability", [(8, 9), (8, 0), (7, 5), (0, 0)])
def test_capability_below_9_is_refused_by_name(capability):
    answer = explain_decode("dsv4", **BASE, compute_capability=capability)
    check_refusal(answer, {"compute_capability": capability}, {"compute_capability"}, set())
    assert re.search(r"\b{}(\.|, ){}\b".format(*capability), answer.reasons[0])
    assert re.search(r"\b9\.0\b|\(9, 0\)", answer.reasons[0])


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (12, 3), (99, 9)])
def test_capability_of_the_portable_kernels(capability):
    answer = explain_decode("dsv4", **BASE, compute_capability=capability)
    assert answer
    assert answer.kernel.startswith("sm_90/")


@pytest.mark.parametrize(
    ("family", "request_", "kernel"),
    [
        ("dsv4", {"kv_cache_format": "nvfp4"}, "dsv4/nvfp4"),
        ("dsv4", {"kv_cache_format": "nvfp4", "extra_topk": 8}, "dsv4/nvfp4+nvfp4"),
        ("glm_nsa", {"kv_cache_format": "nvfp4"}, "glm_nsa/nvfp4"),
        ("dsv4_1", {"extra_topk": 8, "extra_kv_fp4": True}, "dsv4_1/fp8+fp4"),
        ("dsv4_1_inline", {"extra_kv_fp4": True}, "dsv4_1_inline/fp8+fp4"),
    ],
)
def test_both_backends_serve_four_bit_caches(family, request_, kernel):
    assert explain_decode(family, **BASE, **request_).kernel == f"cpu/{kernel}/decode"
    assert explain_decode(family, **BASE, **request_, compute_capability=(12, 0)).kernel == f"sm_90/{kernel}/decode"


@pytest.mark.parametrize(
    ("family", "request_", "argument", "most"),
    [
        ("glm_nsa", {}, "num_tokens", 2**31 - 1),
        ("glm_nsa", {}, "topk", 2**31 - 1),
        ("glm_nsa", {"page_block_size": 1}, "row_stride", 2**32 - 16),
        ("dsv4", {}, "page_block_size", (2**32 - 1) // 584),
        ("dsv4", {}, "extra_topk", 2**31 - 1),
        ("dsv4", {"extra_topk": 8}, "extra_page_block_size", (2**32 - 1) // 584),
        ("dsv4_1_inline", {"extra_topk": 8, "extra_page_block_size": 1}, "extra_row_stride", 2**32 - 16),
    ],
)
def test_a_gpu_refuses_what_its_kernels_cannot_count(family, request_, argument, most):
    step = 16 if argument.endswith("row_stride") else 1
    served = {**BASE, **request_, argument: most}
    assert explain_decode(family, **served, compute_capability=(12, 0))
    above = {**served, argument: most + step}
    assert explain_decode(family, **above)
    answer = explain_decode(family, **above, compute_capability=(12, 0))
    assert len(answer.reasons) == 1
    assert answer.reasons[0].startswith(f"`{argument}` must be at most")
    assert answer.reasons[0].endswith(f"got {most + step}")


def test_capability_joins_the_other_reasons():
    answer = explain_decode("dsv4", num_heads=200, topk=0, compute_capability=(8, 9))
    check_refusal(answer, {"num_heads": 200, "topk": 0}, {"num_heads", "topk", "compute_capability"}, set())


@pytest.mark.parametrize("capability", [12, "12.0", (12,), (12, 0, 0), (12.0, 0), ("12", "0")], ids=repr)
def test_capability_of_the_wrong_form(capability):
    with pytest.raises((TypeError, ValueError), match="compute_capability"):
        explain_decode("dsv4", **BASE, compute_capability=capability)


# Words and types

WORDS = {
    "family": ("dsv4", "dsv3_2", "glm_nsa", "glm53_nope", "dots3_swa", "dsv4_1", "dsv4_1_inline"),
    "kv_cache_format": ("fp8", "nvfp4"),
    "compute_precision": ("auto", "f16"),
}


@pytest.mark.parametrize("word", ["", "DSV4", "fp16", "dsv5", "auto ", "glm"])
@pytest.mark.parametrize("argument", WORDS)
def test_unknown_word_lists_the_accepted_ones(argument, word):
    with pytest.raises(ValueError, match=argument) as caught:
        explain_decode(**{"family": "dsv4", **BASE, argument: word})
    text = str(caught.value)
    assert word in text
    assert all(re.search(rf"\b{accepted}\b", text) for accepted in WORDS[argument])
    assert not re.search(r"\bfp4\b", text), "a word that is never accepted here"


INT_ARGUMENTS = tuple(
    name
    for name in ACCEPTED
    if name not in ("kv_cache_format", "compute_precision", "compute_capability", "extra_kv_fp4")
)


@pytest.mark.parametrize("value", ["8", 8.0, [8]], ids=repr)
@pytest.mark.parametrize("argument", INT_ARGUMENTS)
def test_wrong_type_is_named(argument, value):
    with pytest.raises(TypeError, match=rf"\b{argument}\b"):
        explain_decode(**{"family": "dsv4", **BASE, argument: value})


@pytest.mark.parametrize(("argument", "value"), [("family", 3), ("kv_cache_format", None), ("extra_kv_fp4", "no")])
def test_wrong_type_of_the_rest_is_named(argument, value):
    with pytest.raises(TypeError, match=rf"\b{argument}\b"):
        explain_decode(**{"family": "dsv4", **BASE, argument: value})


@pytest.mark.parametrize("value", [10**30, -(10**30), 2**63, 2**64], ids=["1e30", "-1e30", "2^63", "2^64"])
@pytest.mark.parametrize("argument", INT_ARGUMENTS)
def test_ints_beyond_64_bits_are_a_value_error(argument, value):
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        explain_decode(**{"family": "dsv4", **BASE, "extra_topk": 1, argument: value})


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 2**62, 2**32])
@pytest.mark.parametrize("argument", INT_ARGUMENTS)
@pytest.mark.parametrize("family", ["dsv4", "dsv4_1_inline"])
def test_the_largest_ints_never_overflow(family, argument, value):
    answer = explain_decode(**{"family": family, **BASE, "extra_topk": 1, argument: value})
    assert answer.supported is not bool(answer.reasons)
    if value < 0:
        assert any(argument in names(reason) for reason in answer.reasons)


def test_numpy_ints_are_ints():
    answer = explain_decode("dsv4", num_heads=np.int32(8), topk=np.uint64(576), page_stride=np.int64(37440))
    assert answer == explain_decode("dsv4", num_heads=8, topk=576, page_stride=37440)
    assert answer


def test_calling_convention():
    with pytest.raises(TypeError):
        explain_decode("dsv4", 8, 576)
    with pytest.raises(TypeError, match="num_heads"):
        explain_decode("dsv4", topk=576)
    with pytest.raises(TypeError, match="topk"):
        explain_decode("dsv4", num_heads=8)
    with pytest.raises(TypeError, match="d_qk"):
        explain_decode("dsv4", **BASE, d_qk=512)
    assert explain_decode(family="dsv4", **BASE)


# The answer object


def test_answer_is_immutable():
    for answer in (explain_decode("dsv4", **BASE), explain_decode("dsv4", num_heads=8, topk=0)):
        before = (answer.supported, answer.reasons, answer.kernel)
        for name in ("supported", "reasons", "kernel", "note"):
            with pytest.raises(AttributeError):
                setattr(answer, name, None)
            with pytest.raises(AttributeError):
                delattr(answer, name)
        assert (answer.supported, answer.reasons, answer.kernel) == before


def test_answer_is_hashable_and_comparable():
    yes, no = explain_decode("dsv4", **BASE), explain_decode("dsv4", num_heads=8, topk=0)
    assert yes == explain_decode("dsv4", num_heads=9, topk=577)
    assert hash(yes) == hash(explain_decode("dsv4", num_heads=9, topk=577))
    assert len({yes, no, explain_decode("dsv4", **BASE), explain_decode("dsv4", num_heads=8, topk=-1)}) == 3
    assert yes != no
    assert no != explain_decode("dsv4", num_heads=8, topk=-1)
    assert yes != explain_decode("dsv3_2", **BASE)
    assert yes != True  # noqa: E712
    assert yes != (True, (), yes.kernel)


def test_answer_shows_itself():
    no = explain_decode("dsv4", num_heads=8, topk=0)
    assert repr(no).startswith("DecodeSupport(supported=False, ")
    assert no.reasons[0] in repr(no)
    assert explain_decode("dsv4", **BASE).kernel in repr(explain_decode("dsv4", **BASE))
    match no:
        case DecodeSupport(False, (reason,), None):
            assert reason == no.reasons[0]
        case _:
            pytest.fail("no match")


# explain against decode


def calls(draw):
    """A request, and the arguments of the decode call that it describes."""
    key = draw(st.sampled_from(sorted(RECORDS)))
    record = RECORDS[key]
    heads = draw(st.sampled_from([1, 1, 2, 7, 16, 0, 80, 128, 129]))
    topk = draw(st.sampled_from([1, 2, 5, 64, 0, 512, 513, 520]))
    tokens = draw(st.sampled_from([1, 2, 3, 0, 65] if heads * topk < 200 else [1, 2, 0]))
    request = {"family": key[0], "kv_cache_format": key[1], "num_heads": heads, "topk": topk, "num_tokens": tokens}
    if draw(st.integers(0, 9)) == 0:
        request["compute_precision"] = "fp8"

    def cache(prefix, rec, fmt):
        page = request[prefix + "page_block_size"] = draw(st.sampled_from([1, 2, 3, 5, 16, 64]))
        if draw(st.booleans()):
            latent = random_bits(page, 3 * page, rec.d_qk)
            return pack_kv_cache(latent, family=key[0], kv_cache_format=fmt, page_block_size=page)
        grow = draw(st.sampled_from([0, 0, 16, 128, 8])) if page > 1 else 0
        row = request[prefix + "row_stride"] = rec.size + grow
        padded = -(-page * row // 16) * 16 + draw(st.sampled_from([0, 0, 16, 64, 8, -16]))
        request[prefix + "page_stride"] = padded
        return strided_cache(rec, 3, page, page_stride=padded, row_stride=row)

    arguments = {
        "q": random_bits(tokens, tokens, heads, record.d_qk),
        "kv_cache": cache("", record, key[1]),
        "indices": draw_indices(draw, tokens, topk, 3 * request["page_block_size"]),
        "family": key[0],
        "kv_cache_format": key[1],
        "compute_precision": request.get("compute_precision", "auto"),
        "sm_scale": 0.05,
    }
    if draw(st.integers(0, 2)) == 0:
        fp4 = draw(st.booleans())
        extra = secondary(*key, fp4) or record
        width = request["extra_topk"] = draw(st.sampled_from([1, 3, 70, 0] if secondary(*key, fp4) else [2]))
        if fp4:
            request["extra_kv_fp4"] = arguments["extra_kv_fp4"] = True
        fmt = "fp4" if fp4 and secondary(*key, True) else key[1]
        arguments["extra_kv_cache"] = cache("extra_", extra, fmt)
        arguments["extra_indices"] = draw_indices(draw, tokens, width, 3 * request["extra_page_block_size"])
    return request, arguments


def draw_indices(draw, tokens, topk, slots):
    seed = draw(st.integers(0, 99))
    return np.random.default_rng(seed).integers(-2, slots, (tokens, topk), np.int32)


@settings(
    max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.composite(calls)())
def test_explain_against_decode(call):
    request, arguments = call
    answer = explain_decode(**request)
    bad, open_ = blame(request)
    assert answer.supported is not bool(bad), (request, answer)
    if answer:
        out = decode(**arguments)
        assert out.shape == (*arguments["q"].shape[:2], RECORDS[request["family"], request["kv_cache_format"]].d_v)
        assert np.all((out & 0x7F80) != 0x7F80), "an infinity or a NaN"
    else:
        check_refusal(answer, request, bad, open_)
        with pytest.raises(UnsupportedError) as caught:
            decode(**arguments)
        assert str(caught.value) == "; ".join(answer.reasons)


def test_error_class():
    assert issubclass(UnsupportedError, ValueError)
    assert UnsupportedError.__name__ == "UnsupportedError"
    assert str(pickle.loads(pickle.dumps(UnsupportedError("no")))) == "no"


@pytest.mark.parametrize(("family", "fmt"), [("dsv3_2", "nvfp4"), ("dots3_swa", "nvfp4"), ("dsv4_1", "nvfp4")])
def test_missing_format_is_refused_with_the_same_text_everywhere(family, fmt):
    record = RECORDS[family, "fp8"]
    reasons = explain_decode(family, num_heads=2, topk=600, page_block_size=2, kv_cache_format=fmt).reasons
    with pytest.raises(UnsupportedError) as caught:
        decode(
            random_bits(1, 1, 2, record.d_qk),
            strided_cache(record, 2, 2),
            np.zeros((1, 600), np.int32),
            family=family,
            sm_scale=1.0,
            kv_cache_format=fmt,
        )
    assert str(caught.value) == "; ".join(reasons)
    with pytest.raises(UnsupportedError, match="kv_cache_format"):
        pack_kv_cache(random_bits(1, 2, record.d_qk), family=family, kv_cache_format=fmt)


@pytest.mark.parametrize("key", RECORDS, ids="-".join)
def test_no_tokens_return_at_once(key):
    family, fmt = key
    record = RECORDS[key]
    q, none = random_bits(1, 0, 3, record.d_qk), np.zeros((0, 600), np.int32)
    arguments = {"family": family, "sm_scale": 1.0, "kv_cache_format": fmt, "return_lse": True}
    assert explain_decode(family, num_heads=3, topk=600, num_tokens=0, kv_cache_format=fmt)
    out, lse = decode(q, strided_cache(record, 2, 4), none, **arguments)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((0, 3, record.d_v), np.uint16, (0, 3), np.float32)
    out, lse = np.zeros((0, 3, record.d_v), np.uint16), np.zeros((0, 3), np.float32)
    returned = decode(q, strided_cache(record, 2, 4), none, **arguments, out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse


@pytest.mark.parametrize(("heads", "topk", "named"), [(0, 8, "num_heads"), (2, 0, "topk"), (0, 0, "num_heads")])
def test_no_heads_and_no_width(heads, topk, named):
    arguments = {"family": "dsv4", "sm_scale": 1.0}
    reasons = explain_decode("dsv4", num_heads=heads, topk=topk, page_block_size=4).reasons
    assert named in reasons[0]
    for tokens in (0, 2):
        q, indices = np.zeros((tokens, heads, 512), np.uint16), np.zeros((tokens, topk), np.int32)
        with pytest.raises(UnsupportedError) as caught:
            decode(q, strided_cache(RECORDS["dsv4", "fp8"], 2, 4), indices, **arguments)
        assert str(caught.value) == "; ".join(reasons)


def test_empty_pages_cannot_be_read():
    with pytest.raises(ValueError, match=r"page_block_size|kv_cache"):
        decode(
            random_bits(1, 1, 2, 512),
            np.zeros((2, 0, 584), np.uint8),
            np.zeros((1, 4), np.int32),
            family="dsv4",
            sm_scale=1.0,
        )
