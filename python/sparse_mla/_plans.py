"""Plans as the command line asks for them: for a product, for given facts, or for the GPU at hand."""

from __future__ import annotations

from typing import Any

import sparse_mla

__all__ = ["DeviceChoiceError", "device_facts", "plan_of_request", "typical_plans"]

# What of a request a plan depends on; layouts only decide whether there is one.
PLANNED = ("num_heads", "topk", "num_tokens", "extra_topk", "extra_kv_fp4", "kv_cache_format")
HEADS, TOKENS = (16, 64, 128), (1, 64)


class DeviceChoiceError(Exception):
    """No device, or two, to plan for: what to say instead."""


def device_facts(
    device: str | None, compute_capability: tuple[int, int] | None, multiprocessors: int | None
) -> dict[str, Any]:
    """Name, compute_capability and multiprocessors: of a product, as given, or of the first GPU at hand."""
    if device is not None:
        if compute_capability is not None or multiprocessors is not None:
            raise DeviceChoiceError("--device comes without --compute-capability and --multiprocessors")
        return sparse_mla.known_devices()[device]
    if compute_capability is not None and multiprocessors is not None:
        return {"name": "as given", "compute_capability": compute_capability, "multiprocessors": multiprocessors}
    if compute_capability is not None or multiprocessors is not None:
        raise DeviceChoiceError("--compute-capability and --multiprocessors must come together for a plan")
    driver = sparse_mla.show_config()["cuda_driver"]
    for name, capability, count in driver.get("devices", []):
        return {"name": name, "compute_capability": capability, "multiprocessors": count}
    missing = driver.get("unavailable", "the driver has no device")
    words = ", ".join(sparse_mla.known_devices())
    raise DeviceChoiceError(
        f"a plan needs --device ({words}), or --compute-capability and --multiprocessors: {missing}"
    )


def plan_of_request(
    family: str, request: dict[str, Any], facts: dict[str, Any], *, batch_invariant: bool
) -> dict[str, Any]:
    """The plan of a request that `explain_decode` supports on the device."""
    return sparse_mla.plan_decode(
        family,
        compute_capability=facts["compute_capability"],
        multiprocessors=facts["multiprocessors"],
        batch_invariant=batch_invariant,
        **{name: request[name] for name in PLANNED if name in request},
    )


def typical_plans(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Shapes that models use with their plans, for every entry of the registry."""
    rows = []
    for line in sparse_mla.families():
        if not line["in_registry"]:
            continue
        for num_heads in HEADS:
            for num_tokens in TOKENS:
                shape = {"num_heads": num_heads, "topk": line["topks"][-1], "num_tokens": num_tokens}
                shape["kv_cache_format"] = line["kv_cache_format"]
                plan = plan_of_request(line["family"], shape, facts, batch_invariant=False)
                rows.append({"family": line["family"], **shape, **plan})
    return rows
