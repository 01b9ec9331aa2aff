"""The config class against a plain frozen dataclass, and the registry against its table."""

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
import unittest.mock

import numpy as np
import pytest
import sparse_mla
from brute import BruteConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_mla import SparseMLASm120DecodeConfig as Config
from sparse_mla import supported_sparse_mla_sm120_configs

NAMES = tuple(field.name for field in dataclasses.fields(BruteConfig))
SETS = ("topks", "head_counts", "extra_page_block_sizes", "page_block_sizes")
FLAGS = ("topk_is_runtime", "page_block_size_is_runtime")
INTS = tuple(name for name in NAMES if name not in (*SETS, *FLAGS, "kv_cache_format"))
REQUIRED = (512, 64, 64, frozenset({128}), 1, 128)
FULL = (576, 32, 8, frozenset({128, 512}), 2, 16, "nvfp4", 416, frozenset({8, 16}), False, frozenset({2}))
EVERY = (*FULL, frozenset({32, 64}), True)
FAR = 10**30


class Plain(Config):
    def supported_topk(self, num_heads=None):
        return (*super().supported_topk(num_heads), -1)


@dataclasses.dataclass(frozen=True)
class Extended(Config):
    note: str = "none"


def config(**changes):
    return Config(**{**dict(zip(NAMES, REQUIRED, strict=False)), **changes})


# Construction


def test_positional_order():
    made = Config(*EVERY)
    assert tuple(getattr(made, name) for name in NAMES) == EVERY


def test_keywords_in_any_order():
    assert Config(**dict(reversed(list(zip(NAMES, EVERY, strict=True))))) == Config(*EVERY)


def test_defaults():
    made = Config(*REQUIRED)
    expected = (*REQUIRED, "fp8", 0, None, True, frozenset(), frozenset(), False)
    assert tuple(getattr(made, name) for name in NAMES) == expected


def test_documented_eleven_positions():
    assert dataclasses.astuple(Config(*FULL)) == (*FULL, frozenset(), False)


@pytest.mark.parametrize("missing", range(6))
def test_missing_argument_is_named(missing):
    arguments = dict(zip(NAMES, REQUIRED, strict=False))
    del arguments[NAMES[missing]]
    with pytest.raises(TypeError, match=rf"\b{NAMES[missing]}\b"):
        Config(**arguments)


def test_unknown_and_surplus_arguments():
    with pytest.raises(TypeError, match="head_topk_pairs"):
        config(head_topk_pairs=frozenset())
    with pytest.raises(TypeError):
        Config(*EVERY, 1)
    with pytest.raises(TypeError, match="d_qk"):
        Config(*REQUIRED, d_qk=512)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    "make",
    [
        *(list, tuple, set, frozenset, iter, dict.fromkeys),
        lambda values: (value for value in values),
        lambda values: range(values[0], values[-1] + 1),
        lambda values: np.array(values, np.int32),
        lambda values: np.array(values, np.uint64),
        lambda values: [np.int64(value) for value in values],
    ],
    ids=lambda make: getattr(make, "__qualname__", None),
)
def test_any_iterable_of_ints(name, make):
    made = config(**{name: make([7, 8, 9])})
    value = getattr(made, name)
    assert type(value) is frozenset
    assert value == {7, 8, 9}
    assert {type(item) for item in value} == {int}
    assert made == config(**{name: frozenset({7, 8, 9})})
    assert hash(made) == hash(config(**{name: frozenset({7, 8, 9})}))


@pytest.mark.parametrize("name", SETS)
def test_empty_iterable(name):
    assert getattr(config(**{name: []}), name) == frozenset()


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize("value", [np.int64(7), np.uint8(7), np.int16(7)], ids=lambda value: type(value).__name__)
def test_numpy_ints_become_ints(name, value):
    made = config(**{name: value})
    assert type(getattr(made, name)) is int
    assert made == config(**{name: 7})
    assert repr(made) == repr(config(**{name: 7}))


@pytest.mark.parametrize("value", [FAR, -FAR, 2**63, 2**64, -(2**63) - 1])
@pytest.mark.parametrize("name", [*INTS, *SETS])
def test_ints_far_beyond_64_bits(name, value):
    given_value = frozenset({value}) if name in SETS else value
    made = config(**{name: given_value})
    assert getattr(made, name) == given_value
    assert pickle.loads(pickle.dumps(made)) == made
    assert str(value) in repr(made)


WRONG = [
    *((name, value) for name in INTS for value in ("64", 64.0, None, [64], np.float64(64))),
    *((name, value) for name in SETS for value in (64, "64", [1.5], ["64"], [None], np.array([1.5]))),
    *((name, value) for name in FLAGS for value in ("yes", None, [])),
    *(("kv_cache_format", value) for value in (8, None, b"fp8")),
    ("topks", None),
    ("extra_page_block_sizes", None),
    ("page_block_sizes", None),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value))
def test_wrong_type_names_the_argument(name, value):
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        config(**{name: value})


def test_wrong_type_in_an_iterable_that_raises():
    def broken():
        yield 1
        raise LookupError("from the caller")

    with pytest.raises(LookupError, match="from the caller"):
        config(topks=broken())


# Behaviour of a frozen dataclass


OTHER = (1, 2, 3, {4}, 5, 6, "fp8", 7, None, True, {8}, {9}, False)


@pytest.mark.parametrize(("name", "other"), list(zip(NAMES, OTHER, strict=True)))
def test_equality_and_hash_by_every_field(name, other):
    first, second = Config(*EVERY), Config(*EVERY)
    changed = dataclasses.replace(first, **{name: other})
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, changed}) == 2
    assert first != changed


def test_unequal_is_the_negation_of_equal():
    first, second, other = Config(*EVERY), Config(*EVERY), Config(*REQUIRED)
    assert [first == second, first != second, first == other, first != other] == [True, False, False, True]


def test_equality_needs_the_same_class():
    made = Config(*EVERY)
    assert made != EVERY
    assert made != BruteConfig(*EVERY)
    assert made != Plain(*EVERY)
    assert Plain(*EVERY) != made
    assert made != Extended(*EVERY)
    assert made.__eq__(EVERY) is NotImplemented
    assert made == unittest.mock.ANY


@pytest.mark.parametrize("method", ["__lt__", "__le__", "__gt__", "__ge__"])
def test_no_ordering(method):
    made = Config(*EVERY)
    assert getattr(made, method)(made) is NotImplemented


def test_sorting_raises():
    with pytest.raises(TypeError, match="not supported"):
        sorted([Config(*EVERY), Config(*EVERY)])


def test_repr():
    one = (512, 64, 64, frozenset({128}), 1, 128, "fp8", 584, None, True, frozenset(), frozenset({32}), True)
    assert repr(Config(*one)) == repr(BruteConfig(*one)).replace("BruteConfig", "SparseMLASm120DecodeConfig")
    assert eval(repr(Config(*EVERY)), {"SparseMLASm120DecodeConfig": Config}) == Config(*EVERY)
    assert repr(Plain(*one)).startswith("Plain(d_qk=512, page_block_size=64, ")


def test_fields():
    ours, plain = dataclasses.fields(Config), dataclasses.fields(BruteConfig)
    assert [field.name for field in ours] == [field.name for field in plain]
    assert [field.default for field in ours] == [field.default for field in plain]
    assert dataclasses.fields(Config(*EVERY)) == ours
    assert dataclasses.is_dataclass(Config)
    assert dataclasses.is_dataclass(Config(*EVERY))


def test_dataclass_parameters():
    parameters = Config.__dataclass_params__
    assert parameters.frozen
    assert parameters.eq
    assert not parameters.order


def test_replace():
    made = Config(*EVERY)
    changed = dataclasses.replace(made, topks=(value for value in (5, 6)), min_topk=FAR)
    assert type(changed) is Config
    assert changed == Config(*EVERY[:3], frozenset({5, 6}), FAR, *EVERY[5:])
    assert made == Config(*EVERY)
    assert dataclasses.replace(made) == made
    with pytest.raises(TypeError, match="min_topk"):
        dataclasses.replace(made, min_topk="1")
    with pytest.raises(TypeError, match="nothing_such"):
        dataclasses.replace(made, nothing_such=1)


def test_asdict_and_astuple():
    made = Config(*EVERY)
    assert list(dataclasses.asdict(made).items()) == list(zip(NAMES, EVERY, strict=True))
    assert type(dataclasses.asdict(made)["topks"]) is frozenset
    assert dataclasses.astuple(made) == EVERY
    assert Config(**dataclasses.asdict(made)) == made
    assert vars(made) == dataclasses.asdict(made)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("cls", [Config, Plain, Extended])
def test_copy(duplicate, cls):
    made = cls(*EVERY)
    twin = duplicate(made)
    assert type(twin) is cls
    assert twin == made
    assert twin.supports_decode(8, 512, num_tokens=8) == made.supports_decode(8, 512, num_tokens=8)


@pytest.mark.skipif(sys.version_info < (3, 13), reason="copy.replace came with Python 3.13")
def test_copy_replace():
    assert copy.replace(Config(*EVERY), min_topk=9) == dataclasses.replace(Config(*EVERY), min_topk=9)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("cls", [Config, Plain, Extended])
def test_pickle(cls, protocol):
    made = cls(*EVERY)
    twin = pickle.loads(pickle.dumps(made, protocol))
    assert type(twin) is cls
    assert twin == made
    assert hash(twin) == hash(made)
    assert twin.supported_topk() == made.supported_topk()


def test_pickle_names_the_public_package():
    assert Config.__module__ == "sparse_mla"
    assert Config.__qualname__ == "SparseMLASm120DecodeConfig"
    assert b"_core" not in pickle.dumps(Config(*EVERY))


def test_pickle_crosses_processes():
    data = pickle.dumps(Config(*EVERY))
    program = f"import pickle; c = pickle.loads({data!r}); print(hash(c) == hash(type(c)(*{EVERY!r})), c.min_topk)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "2"]


def test_match_statement():
    assert Config.__match_args__ == NAMES
    match Config(*EVERY):
        case Config(576, page, tokens, kv_cache_format="nvfp4", head_counts=heads):
            assert (page, tokens, heads) == (32, 8, {8, 16})
        case _:
            pytest.fail("no match")
    match Config(*EVERY):
        case Config(512):
            pytest.fail("matched the wrong d_qk")


FROZEN = [(cls, name) for cls in (Config, Plain, Extended) for name in NAMES]


@pytest.mark.parametrize(("cls", "name"), [*FROZEN, (Config, "supports_decode"), (Config, "new"), (Extended, "new")])
def test_frozen(cls, name):
    made = cls(*EVERY)
    with pytest.raises(dataclasses.FrozenInstanceError, match=name):
        setattr(made, name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError, match=name):
        delattr(made, name)
    assert made == cls(*EVERY)


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = Config(*EVERY).nothing_such


def test_plain_subclass():
    made = Plain(*EVERY)
    assert isinstance(made, Config)
    assert made == Plain(*EVERY)
    assert made.supported_topk() == (128, 512, -1)
    assert made.supports_decode(8, 512, num_tokens=8)
    assert dataclasses.replace(made, min_topk=3) == Plain(*EVERY[:4], 3, *EVERY[5:])


def test_plain_subclass_may_keep_attributes_of_its_own():
    made = Plain(*EVERY)
    made.cached = 1
    assert made.cached == 1
    assert made == Plain(*EVERY)


def test_dataclass_subclass_with_a_field():
    made = Extended(*EVERY, note="mine")
    assert [field.name for field in dataclasses.fields(made)] == [*NAMES, "note"]
    assert Extended.__match_args__ == (*NAMES, "note")
    assert made == Extended(*EVERY, "mine")
    assert made != Extended(*EVERY)
    assert hash(made) == hash(Extended(*EVERY, "mine"))
    assert repr(made).endswith("page_block_size_is_runtime=True, note='mine')")
    assert dataclasses.replace(made, note="yours", d_qk=1) == Extended(1, *EVERY[1:], "yours")
    assert dataclasses.astuple(made) == (*EVERY, "mine")
    assert made.supported_num_heads() == (8, 16)
    assert made.supports_decode(8, 512, num_tokens=8)
    assert not made.supports_decode(9, 512)


def test_dataclass_subclass_checks_and_normalises_too():
    assert Extended(*REQUIRED[:3], [1, 2], *REQUIRED[4:]).topks == frozenset({1, 2})
    with pytest.raises(TypeError, match="min_topk"):
        Extended(*REQUIRED[:4], "1", 128)


def test_subclass_must_stay_frozen():
    with pytest.raises(TypeError, match="frozen"):
        dataclasses.dataclass(type("Thawed", (Config,), {"__annotations__": {"note": str}, "note": ""}))


# Queries


def test_supported_num_heads():
    assert config(max_num_heads=5).supported_num_heads() == (1, 2, 3, 4, 5)
    assert config(head_counts={64, 8, 16}).supported_num_heads() == (8, 16, 64)
    assert config(head_counts=()).supported_num_heads() == ()
    assert config(max_num_heads=0).supported_num_heads() == ()
    assert config(head_counts={FAR, 3}, max_num_heads=1).supported_num_heads() == (3, FAR)
    with pytest.raises(OverflowError):
        config(max_num_heads=FAR).supported_num_heads()


def test_supported_topk():
    exact = config(topks=[512, 128, FAR], topk_is_runtime=False)
    assert exact.supported_topk() == (128, 512, FAR)
    assert exact.supported_topk(None) == exact.supported_topk(num_heads=128) == exact.supported_topk(1)
    assert exact.supported_topk(0) == exact.supported_topk(129) == exact.supported_topk(-FAR) == ()
    assert config(head_counts={8}).supported_topk(16) == ()
    assert dataclasses.replace(exact, topk_is_runtime=True).supported_topk(8) == (128, 512, FAR)


@pytest.mark.parametrize(
    ("changes", "page", "expected"),
    [
        ({}, None, True),
        ({}, 64, True),
        ({}, 32, False),
        ({"page_block_size": 0}, None, True),
        ({"page_block_sizes": {2, 32}}, None, False),
        ({"page_block_sizes": {2, 32}}, 64, False),
        ({"page_block_sizes": {2, 32}}, 32, True),
        ({"page_block_sizes": {2, 32}, "page_block_size_is_runtime": True}, 7, True),
        ({"page_block_size_is_runtime": True}, FAR, True),
        ({"page_block_size_is_runtime": True}, 0, False),
        ({"page_block_size_is_runtime": True}, -FAR, False),
        ({"page_block_size_is_runtime": True, "page_block_size": 0}, None, False),
    ],
)
def test_page_rule(changes, page, expected):
    assert config(**changes).supports_decode(8, 128, page_block_size=page) is expected


@pytest.mark.parametrize(
    ("heads", "topk", "tokens", "expected"),
    [
        (1, 1, 1, True),
        (128, 1, 64, True),
        (129, 1, 1, False),
        (0, 1, 1, False),
        (-1, 1, 1, False),
        (8, 0, 1, False),
        (8, -1, 1, False),
        (8, FAR, 1, True),
        (FAR, 8, 1, False),
        (8, 8, 65, False),
        (8, 8, 0, True),
        (8, 8, -FAR, True),
        (8, 8, FAR, False),
        (2**64 + 8, 8, 1, False),
        (8, 2**64, 1, True),
        (8, -(2**64) + 8, 1, False),
    ],
)
def test_supports_decode_bounds(heads, topk, tokens, expected):
    assert config().supports_decode(heads, topk, num_tokens=tokens) is expected


def test_queries_take_numpy_ints():
    made = config(topks=np.array([128]), topk_is_runtime=False)
    assert made.supports_decode(np.int32(8), np.uint64(128), num_tokens=np.int8(1), page_block_size=np.int64(64))
    assert not made.supports_decode(np.int32(8), np.uint64(2**64 - 1))
    assert made.supported_topk(np.uint8(8)) == (128,)


@pytest.mark.parametrize("value", ["8", 8.0, [8], np.float32(8)], ids=repr)
@pytest.mark.parametrize("name", ["num_heads", "topk", "num_tokens", "page_block_size"])
def test_queries_name_a_wrong_type(name, value):
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        config().supports_decode(**{"num_heads": 8, "topk": 128, name: value})
    if name == "num_heads":
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            config().supported_topk(value)


@pytest.mark.parametrize("name", ["num_heads", "topk", "num_tokens"])
def test_queries_refuse_none(name):
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        config().supports_decode(**{"num_heads": 8, "topk": 128, name: None})


NEAR = st.integers(-2, 12)
WIDE = st.one_of(NEAR, st.sampled_from([64, 128, 513, 2**31, 2**32 + 1, 2**63, 2**64 + 3, FAR, -FAR]))
SOME = st.frozensets(WIDE, max_size=4)
CONFIGS = st.tuples(
    WIDE, WIDE, WIDE, SOME, WIDE, NEAR, st.sampled_from(["fp8", "nvfp4"]), WIDE,
    st.none() | SOME, st.booleans(), SOME, SOME, st.booleans(),
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(CONFIGS, WIDE, WIDE, WIDE, st.none() | WIDE)
def test_queries_agree_with_the_brute_force_class(values, heads, topk, tokens, page):
    ours, plain = Config(*values), BruteConfig(*values)
    assert dataclasses.astuple(ours) == dataclasses.astuple(plain)
    assert ours.supported_num_heads() == plain.supported_num_heads()
    assert ours.supported_topk() == plain.supported_topk()
    assert ours.supported_topk(heads) == plain.supported_topk(heads)
    answer = ours.supports_decode(heads, topk, num_tokens=tokens, page_block_size=page)
    assert answer is plain.supports_decode(heads, topk, num_tokens=tokens, page_block_size=page)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(CONFIGS, CONFIGS)
def test_equality_agrees_with_the_brute_force_class(left, right):
    assert (Config(*left) == Config(*right)) is (BruteConfig(*left) == BruteConfig(*right))
    assert Config(*left) == Config(*left)
    assert hash(Config(*left)) == hash(Config(*left))


# Signatures


def parameters(function):
    return [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]


@pytest.mark.parametrize("name", ["__init__", "supported_num_heads", "supported_topk", "supports_decode"])
def test_signatures_are_those_of_the_dataclass(name):
    assert parameters(getattr(Config, name)) == parameters(getattr(BruteConfig, name))


def test_class_signature():
    assert parameters(Config) == parameters(BruteConfig)


@pytest.mark.parametrize("name", ["supported_num_heads", "supported_topk", "supports_decode"])
def test_bound_methods_are_introspectable_and_documented(name):
    method = getattr(Config(*EVERY), name)
    assert parameters(method) == parameters(getattr(BruteConfig(*EVERY), name))
    assert method.__doc__


# Registry

COMMON = (True, frozenset(), frozenset(), True)
TABLE = {
    "fp8": {
        "dsv4": (512, {128, 192, 256, 512, 1024}, 1, 584),
        "dsv3_2": (576, {128, 512, 1024, 2048}, 1, 656),
        "glm_nsa": (576, {128, 512, 1024, 2048}, 1, 656),
        "glm53_nope": (512, {2176}, 1, 528),
        "dots3_swa": (1088, {576}, 513, 1160),
        "dsv4_1": (512, {512}, 1, 528),
        "dsv4_1_inline": (512, {512}, 1, 528),
    },
    "nvfp4": {
        "dsv4": (512, {128, 512}, 1, 384),
        "glm_nsa": (576, {128, 512, 1024, 2048}, 1, 416),
    },
}


@pytest.mark.parametrize("kv_cache_format", TABLE)
def test_registry_is_the_table(kv_cache_format):
    configs = supported_sparse_mla_sm120_configs(kv_cache_format=kv_cache_format)
    assert type(configs) is dict
    assert list(configs) == list(TABLE[kv_cache_format])
    for name, (d_qk, topks, min_topk, size) in TABLE[kv_cache_format].items():
        expected = (d_qk, 64, 64, topks, min_topk, 128, kv_cache_format, size, None, *COMMON)
        assert type(configs[name]) is Config
        assert dataclasses.astuple(configs[name]) == expected, name


def test_registry_defaults_to_fp8():
    assert supported_sparse_mla_sm120_configs() == supported_sparse_mla_sm120_configs(kv_cache_format="fp8")


def test_glm_nsa_is_the_object_of_dsv3_2():
    configs = supported_sparse_mla_sm120_configs()
    assert configs["glm_nsa"] is configs["dsv3_2"]
    assert len({id(entry) for entry in configs.values()}) == len(configs) - 1


def test_registry_is_fresh_on_each_call():
    first = supported_sparse_mla_sm120_configs()
    first.clear()
    assert list(supported_sparse_mla_sm120_configs()) == list(TABLE["fp8"])


@pytest.mark.parametrize("word", ["int4", "FP8", "", " fp8", "fp4", "nvfp4\0", "bf16"])
def test_registry_lists_the_accepted_words(word):
    with pytest.raises(ValueError, match="kv_cache_format") as caught:
        supported_sparse_mla_sm120_configs(kv_cache_format=word)
    assert "fp8" in str(caught.value)
    assert "nvfp4" in str(caught.value)


@pytest.mark.parametrize("word", [None, 8, b"fp8"], ids=repr)
def test_registry_refuses_other_types(word):
    with pytest.raises((TypeError, ValueError), match="kv_cache_format"):
        supported_sparse_mla_sm120_configs(kv_cache_format=word)


def test_registry_argument_is_keyword_only():
    with pytest.raises(TypeError):
        supported_sparse_mla_sm120_configs("fp8")
    (only,) = parameters(supported_sparse_mla_sm120_configs)
    assert only == ("kv_cache_format", inspect.Parameter.KEYWORD_ONLY, "fp8")


def test_registry_agrees_with_the_family_table():
    rows = {(row["kv_cache_format"], row["family"]): row for row in sparse_mla.families() if row["in_registry"]}
    assert set(rows) == {(fmt, name) for fmt, table in TABLE.items() for name in table}
    for (fmt, name), row in rows.items():
        entry = supported_sparse_mla_sm120_configs(kv_cache_format=fmt)[name]
        assert (row["d_qk"], row["bytes_per_token"], row["min_topk"]) == (
            entry.d_qk, entry.bytes_per_token, entry.min_topk,
        )  # fmt: skip
        assert set(row["topks"]) == entry.topks
        assert row["d_v"] == (1024 if name == "dots3_swa" else 512)
