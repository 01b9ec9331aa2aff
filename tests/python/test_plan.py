"""plan_decode: how a decode would be launched, asked without a GPU."""

import pytest
import sparse_mla

SHAPE = {"num_heads": 64, "topk": 2048}
GPU = {"compute_capability": (12, 0), "multiprocessors": 188}


def test_a_plan_covers_the_request():
    """Tiles of heads and splits of candidates make the grid; partial results of the splits make the workspace."""
    for num_heads in (1, 16, 17, 64, 128):
        for num_tokens in (1, 4, 64, 500):
            plan = sparse_mla.plan_decode("dsv3_2", num_heads=num_heads, topk=2048, num_tokens=num_tokens, **GPU)
            assert (plan["head_tiles"] - 1) * plan["head_tile"] < num_heads <= plan["head_tiles"] * plan["head_tile"]
            assert (plan["chunks"] - 1) * plan["chunk"] < 2048 <= plan["chunks"] * plan["chunk"]
            assert plan["grid"] == plan["head_tiles"] * num_tokens * plan["splits"]
            partial = num_heads * num_tokens * plan["splits"] * (512 * 4 + 8)
            assert plan["workspace_bytes"] == (partial if plan["splits"] > 1 else 0)
            assert plan["shared_bytes"] <= 101_376
            assert plan["kernel"] == f"dsv3_2/decode_{plan['head_tile']}"


def test_a_plan_uses_the_device():
    """One token is spread over the multiprocessors there are."""
    splits = [
        sparse_mla.plan_decode("dsv3_2", **SHAPE, compute_capability=(12, 1), multiprocessors=count)["splits"]
        for count in (1, 16, 48, 188)
    ]
    assert splits == sorted(splits)
    assert splits[0] < splits[-1]


def test_a_batch_invariant_plan_does_not_depend_on_the_batch():
    plans = [
        sparse_mla.plan_decode("dsv4", num_heads=16, topk=1024, num_tokens=tokens, batch_invariant=True, **GPU)
        for tokens in (1, 64, 1000)
    ]
    assert len({(plan["kernel"], plan["splits"]) for plan in plans}) == 1


def test_a_secondary_cache_of_other_records_has_its_own_kernel():
    where = {**SHAPE, **GPU, "num_tokens": 2, "extra_topk": 512}
    plan = sparse_mla.plan_decode("dsv4_1", **where, extra_kv_fp4=True)
    tile = plan["head_tile"]
    assert (plan["kernel"], plan["extra_kernel"]) == (f"dsv4_1/decode_{tile}", f"dsv4_1_fp4/decode_{tile}")
    assert plan["grid"] == plan["head_tiles"] * 2 * (plan["splits"] + plan["extra_splits"])
    same = sparse_mla.plan_decode("dsv4_1", **where)
    assert (same["extra_kernel"], same["extra_splits"]) == (None, None)


def test_known_devices_have_plans():
    devices = sparse_mla.known_devices()
    assert {"h200", "rtx-pro-6000", "rtx-5090", "gb10"} <= set(devices)
    for device in devices.values():
        assert device.keys() == {"name", "compute_capability", "multiprocessors"}
        where = {name: device[name] for name in GPU}
        assert sparse_mla.plan_decode("dsv3_2", **SHAPE, **where)["grid"] > 0


@pytest.mark.parametrize(
    ("family", "shape", "where"),
    [
        ("dsv3_2", {**SHAPE, "num_heads": 129}, {}),
        ("dots3_swa", {**SHAPE, "topk": 512}, {}),
        ("dsv3_2", {**SHAPE, "extra_topk": 1}, {}),
        ("dsv4", {**SHAPE, "kv_cache_format": "nvfp4", "extra_topk": 8, "extra_kv_fp4": True}, {}),
        ("dsv4", SHAPE, {"compute_capability": (8, 9)}),
        ("dsv4", {**SHAPE, "num_tokens": 2**31}, {}),
    ],
)
def test_what_explain_refuses_has_no_plan(family, shape, where):
    where = {**GPU, **where}
    reasons = sparse_mla.explain_decode(family, **shape, compute_capability=where["compute_capability"]).reasons
    with pytest.raises(sparse_mla.UnsupportedError) as caught:
        sparse_mla.plan_decode(family, **shape, **where)
    assert str(caught.value) == "; ".join(reasons)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"multiprocessors": 0}, ValueError),
        ({"multiprocessors": -1}, ValueError),
        ({"multiprocessors": 2**70}, ValueError),
        ({"multiprocessors": 1.5}, TypeError),
        ({"compute_capability": 9}, TypeError),
        ({"compute_capability": (2**40, 0)}, ValueError),
        ({"batch_invariant": 1}, TypeError),
        ({"kv_cache_format": "int4"}, ValueError),
    ],
)
def test_bad_facts_are_named(change, kind):
    with pytest.raises(kind, match=next(iter(change))):
        sparse_mla.plan_decode("dsv3_2", **{**SHAPE, **GPU, **change})
