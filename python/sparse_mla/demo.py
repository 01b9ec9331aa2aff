"""The demo: deployments explained, the error of every family measured on the CPU and a GPU if there is one, a plot."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tabulate import tabulate

import sparse_mla
from sparse_mla import _demo_gpu

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Deployment", "Measurement", "run"]

NUM_SLOTS, NUM_TOKENS, NUM_HEADS, TOPK = 4096, 4, 16, 1024
# Candidates that come from the primary cache where the measurement is about a secondary one: the sliding window.
WINDOW_TOPK = 128
# Standard deviation of the logits: peaked as trained attention is, with a tail that counts.
LOGIT_SPREAD = 2.0
# Bounds of `compute_precision="f16"`: relative L2 before the output is rounded, and log-sum-exp in base 2.
ERROR_BOUND, LSE_BOUND = 2e-3, 1e-3
# What kernels with Q and P in FP8 are about off by; the demo also emulates such arithmetic on its own inputs.
FP8_ARITHMETIC_ERROR = 4e-2


@dataclass(frozen=True)
class Deployment:
    """A model on a number of GPUs, as `explain_decode` is asked about it."""

    model: str
    model_heads: int
    tensor_parallel: int
    family: str
    shape: dict[str, Any]

    @property
    def num_heads(self) -> int:
        """Heads per rank; where they do not divide, engines pad the model's heads to the next multiple."""
        return -(-self.model_heads // self.tensor_parallel)

    def explain(self, compute_capability: tuple[int, int] | None) -> sparse_mla.DecodeSupport:
        """What the library says about a GPU of this capability; None = the CPU backend."""
        return sparse_mla.explain_decode(
            self.family, num_heads=self.num_heads, compute_capability=compute_capability, **self.shape
        )


# Of the GPUs that the deployments are asked for; asking needs none.
COMPUTE_CAPABILITY = (12, 0)

# Pages of dsv4 are padded to multiples of 576 bytes by serving engines, rows of glm53_nope to 656.
DEPLOYMENTS = (
    Deployment("DeepSeek-V3.2", 128, 1, "dsv3_2", {"topk": 2048}),
    Deployment("DeepSeek-V3.2", 128, 16, "dsv3_2", {"topk": 2048, "num_tokens": 64}),
    Deployment("DeepSeek-V3.2, prefill", 128, 8, "dsv3_2", {"topk": 2048, "num_tokens": 300}),
    Deployment("GLM-5.2", 64, 8, "glm_nsa", {"topk": 2048}),
    Deployment("GLM-5.2, 4-bit cache", 64, 4, "glm_nsa", {"topk": 2048, "kv_cache_format": "nvfp4"}),
    Deployment("GLM-5.3, padded rows", 64, 2, "glm53_nope", {"topk": 2176, "row_stride": 656}),
    Deployment(
        "DeepSeek-V4, C4 layers",
        64,
        8,
        "dsv4",
        {
            "topk": 128,
            "page_block_size": 256,
            "page_stride": 149_760,
            "extra_topk": 512,
            "extra_page_block_size": 64,
            "extra_page_stride": 37_440,
        },
    ),
    Deployment("DeepSeek-V4, C128 layers", 64, 4, "dsv4", {"topk": 128, "extra_topk": 384, "extra_page_block_size": 2}),
    Deployment("DeepSeek-V4, draft model", 64, 4, "dsv4", {"topk": 192, "num_tokens": 5}),
    Deployment(
        "DeepSeek-V4, layers share pages", 64, 2, "dsv4", {"topk": 128, "page_block_size": 128, "page_stride": 460_224}
    ),
    Deployment("DeepSeek-V4, three GPUs", 64, 3, "dsv4", {"topk": 1152, "num_tokens": 16}),
    Deployment("DeepSeek-V4, six GPUs", 64, 6, "dsv4", {"topk": 640}),
    Deployment("DeepSeek-V4-Pro", 128, 1, "dsv4", {"topk": 1024}),
    Deployment(
        "DeepSeek-V4, 4-bit cache",
        64,
        8,
        "dsv4",
        {"topk": 128, "kv_cache_format": "nvfp4", "extra_topk": 512, "extra_page_block_size": 2},
    ),
    Deployment(
        "DeepSeek-V4.1-Flash",
        64,
        8,
        "dsv4_1",
        {
            "topk": 128,
            "page_block_size": 32,
            "extra_topk": 512,
            "extra_page_block_size": 32,
            "extra_kv_fp4": True,
        },
    ),
    Deployment("DeepSeek-V4.1-Flash", 64, 1, "dsv4_1", {"topk": 1152, "num_tokens": 16}),
    Deployment("dots3", 64, 8, "dots3_swa", {"topk": 576}),
    Deployment("dots3, buffer too narrow", 64, 8, "dots3_swa", {"topk": 512}),
    Deployment("DeepSeek-V3.2, second cache", 128, 8, "dsv3_2", {"topk": 2048, "extra_topk": 512}),
    Deployment("DeepSeek-V3.2, two tokens as heads", 256, 1, "dsv3_2", {"topk": 2048}),
    Deployment(
        "DeepSeek-V4, odd page, no padding",
        64,
        8,
        "dsv4",
        {"topk": 128, "page_block_size": 33, "page_stride": 33 * 584},
    ),
    Deployment("DeepSeek-V4.1-Flash, NVFP4", 64, 8, "dsv4_1", {"topk": 512, "kv_cache_format": "nvfp4"}),
    Deployment("DeepSeek-V4, FP8 arithmetic", 64, 8, "dsv4", {"topk": 512, "compute_precision": "fp8"}),
)


@dataclass(frozen=True)
class Measurement:
    """Errors and times of one family and cache format. Errors of outputs are relative L2."""

    family: str
    format: str
    bytes_per_token: int
    """Of the cache whose format is measured."""
    decode_error: float
    """`decode` against float64 attention over the same dequantised cache."""
    lse_error: float
    """Largest absolute error of the log-sum-exp (base 2) in the same comparison."""
    fp8_arithmetic_error: float
    """Float64 attention with Q and P rounded to E4M3, in the same comparison."""
    exact_error: float
    """`decode` against float64 attention over the latents before quantisation."""
    pack_ms: float
    decode_ms: float
    gpu_error: float | None
    """As `decode_error`, on the GPU; None where nothing ran on one."""
    gpu_lse_error: float | None
    gpu_us: float | None


def run(output: Path) -> None:
    """Prints the tables; writes `errors.json` and, where matplotlib is installed, `errors.png` into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    arrays, gpu = _demo_gpu.find()
    where = f"on the CPU, and on {gpu}" if arrays else f"on the CPU; no GPU was used: {gpu}"
    print(f"sparse-mla {sparse_mla.__version__}. What is measured below ran {where}.\n")
    print_deployments()
    measurements = [measure(row, arrays) for row in sparse_mla.families()]
    print_measurements(measurements)

    facts = {
        "gpu": gpu if arrays else None,
        "version": sparse_mla.__version__,
        "num_threads": sparse_mla.show_config()["num_threads"],
        "num_tokens": NUM_TOKENS,
        "num_heads": NUM_HEADS,
        "topk": TOPK,
        "num_slots": NUM_SLOTS,
        "measurements": [asdict(measurement) for measurement in measurements],
    }
    report = output / "errors.json"
    report.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(f"\nWrote {report}")
    try:
        import matplotlib.figure  # noqa: F401 - optional
    except ImportError:
        print("No plot: matplotlib is not installed (pip install 'sparse-mla[demo]').")
        return
    picture = output / "errors.png"
    plot(measurements, picture)
    print(f"Wrote {picture}")


def print_deployments() -> None:
    """Every deployment with the library's answers; refusals with their reasons below the table."""
    rows: list[list[Any]] = []
    refusals: list[str] = []
    for number, deployment in enumerate(DEPLOYMENTS, start=1):
        on_cpu, on_gpu = deployment.explain(None), deployment.explain(COMPUTE_CAPABILITY)
        shape = deployment.shape
        primary = f"{shape['topk']} x {shape.get('page_block_size', '-')}"
        secondary = (
            f"{shape['extra_topk']} x {shape.get('extra_page_block_size', '-')}" if "extra_topk" in shape else ""
        )
        rows.append(
            [
                number,
                deployment.model,
                deployment.tensor_parallel,
                deployment.num_heads,
                shape.get("num_tokens", 1),
                primary,
                secondary,
                "yes" if on_cpu else "refused",
                on_gpu.kernel or "refused",
            ]
        )
        where = " on the GPU" if on_cpu else ""
        refusals += [f"{number:3}. {deployment.model}{where}: {reason}" for reason in on_gpu.reasons]
    gpu = ".".join(map(str, COMPUTE_CAPABILITY))
    headers = [
        "",
        "deployment",
        "TP",
        "heads/rank",
        "tokens",
        "topk x page",
        "secondary",
        "CPU",
        f"kernel on GPU {gpu}",
    ]
    print("Which deployments are served? (asked, not run; page: tokens per page, - = the default)\n")
    print(tabulate(rows, headers, tablefmt="simple"))
    print("\nRefused, and why:\n" + "\n".join(refusals) + "\n")


def print_measurements(measurements: list[Measurement]) -> None:
    """The errors and times as a table, and whether the bounds hold."""
    headers = [
        "family",
        "format",
        "bytes/\ntoken",
        "decode vs\nfloat64",
        "LSE\nerror",
        "same with Q, P\nin FP8 (emulated)",
        "decode vs exact\n(no quantisation)",
        "pack\nms",
        "decode\nms",
        "GPU vs\nfloat64",
        "GPU LSE\nerror",
        "GPU\nus",
    ]
    errors = [("decode error", [m.decode_error for m in measurements], ERROR_BOUND)]
    errors += [("LSE error", [m.lse_error for m in measurements], LSE_BOUND)]
    on_gpu = [m for m in measurements if m.gpu_us is not None]
    if on_gpu:
        errors += [("decode error on the GPU", [m.gpu_error or 0.0 for m in on_gpu], ERROR_BOUND)]
        errors += [("LSE error on the GPU", [m.gpu_lse_error or 0.0 for m in on_gpu], LSE_BOUND)]
    else:
        headers = headers[:-3]
    print(
        f"Error of decode: {NUM_TOKENS} tokens, {NUM_HEADS} heads, topk {TOPK}, a cache of {NUM_SLOTS} tokens.\n"
        "Relative L2 of a float32 output against numpy in float64, over the dequantised cache, then over the latents.\n"
    )
    formats = ("", "", "d", ".1e", ".1e", ".1e", ".1e", ".1f", ".2f", ".1e", ".1e", ".1f")
    rows = [list(asdict(m).values())[: len(headers)] for m in measurements]
    print(tabulate(rows, headers, tablefmt="simple", floatfmt=formats, missingval="-"))
    print()
    for name, values, bound in errors:
        largest = max(values)
        print(f"Largest {name}: {largest:.1e}, {'within' if largest <= bound else 'ABOVE'} the bound of {bound:.0e}.")


def measure(row: dict[str, Any], arrays: _demo_gpu.TorchArrays | _demo_gpu.CupyArrays | None) -> Measurement:
    """Packs, decodes and compares one row of the family table; on a GPU, too, where `arrays` are made there."""
    rng = np.random.default_rng(2026)
    family: str = row["family"]
    latents = make_latents(rng, row)
    indices = rng.permuted(np.tile(np.arange(NUM_SLOTS, dtype=np.int32), (NUM_TOKENS, 1)), axis=1)[:, :TOPK].copy()
    sm_scale = float(np.float32(row["d_qk"] ** -0.5))
    used = indices[:, : row["window"]]
    q = make_queries(rng, latents, used, sm_scale)

    def pack() -> NDArray[np.uint8]:
        packed = sparse_mla.pack_kv_cache(latents, family=family, kv_cache_format=row["kv_cache_format"])
        return cast("NDArray[np.uint8]", packed)

    cache = pack()
    seen = sparse_mla.unpack_kv_cache(cache, family=family, kv_cache_format=row["kv_cache_format"])[used]
    call: dict[str, Any] = {"kv_cache": cache, "indices": indices, "kv_cache_format": row["kv_cache_format"]}
    if not row["in_registry"]:  # the format of a secondary cache: beside a window in the family's primary format
        primary = sparse_mla.pack_kv_cache(latents, family=family)
        seen[:, :WINDOW_TOPK] = sparse_mla.unpack_kv_cache(primary, family=family)[used[:, :WINDOW_TOPK]]
        call = {
            "kv_cache": primary,
            "indices": indices[:, :WINDOW_TOPK],
            "extra_kv_cache": cache,
            "extra_indices": indices[:, WINDOW_TOPK:],
            "extra_kv_fp4": True,
        }
    out = np.empty((NUM_TOKENS, NUM_HEADS, row["d_v"]), np.float32)  # without the rounding of a bfloat16 output

    def decode() -> NDArray[np.float32]:
        _, lse = sparse_mla.decode(q, family=family, sm_scale=sm_scale, out=out, return_lse=True, **call)
        return cast("NDArray[np.float32]", lse)

    lse = decode()
    expected, expected_lse = attention(q, seen, row["d_v"], sm_scale)
    rounded, _ = attention(q, seen, row["d_v"], sm_scale, in_fp8=True)
    exact, _ = attention(q, latents[used], row["d_v"], sm_scale)
    gpu = _demo_gpu.decode(arrays, row["d_v"], q=q, family=family, sm_scale=sm_scale, **call) if arrays else None
    return Measurement(
        family=family,
        format=row["kv_cache_format"] if row["in_registry"] else f"{row['kv_cache_format']} extra",
        bytes_per_token=row["bytes_per_token"],
        decode_error=relative_l2(out, expected),
        lse_error=float(np.abs(lse - expected_lse).max()),
        fp8_arithmetic_error=relative_l2(rounded, expected),
        exact_error=relative_l2(out, exact),
        pack_ms=median_ms(pack, 3),
        decode_ms=median_ms(decode, 5),
        gpu_error=relative_l2(gpu.out, expected) if gpu else None,
        gpu_lse_error=float(np.abs(gpu.lse - expected_lse).max()) if gpu else None,
        gpu_us=gpu.us if gpu else None,
    )


def make_latents(rng: np.random.Generator, row: dict[str, Any]) -> NDArray[np.float32]:
    """Latents as trained models have them, [NUM_SLOTS, d_qk].

    Channels differ in size, a few are outliers, tokens differ in size, and the RoPE part is a common key rotated by
    the token's position.
    """
    d_qk, rope_dims = row["d_qk"], row["rope_dims"]
    channels = rng.lognormal(0.0, 0.5, d_qk)
    channels[rng.choice(row["quantised_dims"], 8, replace=False)] *= 20
    latents = rng.standard_normal((NUM_SLOTS, d_qk)) * channels * rng.lognormal(0.0, 0.3, (NUM_SLOTS, 1))
    if rope_dims:
        pairs = rope_dims // 2
        angles = np.arange(NUM_SLOTS)[:, None] * 10_000.0 ** (-np.arange(pairs) / pairs)
        keys = (latents[:, -rope_dims:] + rng.normal(0.0, 2.0, rope_dims)).reshape(NUM_SLOTS, pairs, 2)
        rotated = (keys[..., 0] + 1j * keys[..., 1]) * np.exp(1j * angles)
        latents[:, -rope_dims:] = np.stack([rotated.real, rotated.imag], axis=-1).reshape(NUM_SLOTS, rope_dims)
    return cast("NDArray[np.float32]", latents.astype(np.float32))


def make_queries(
    rng: np.random.Generator, latents: NDArray[np.float32], indices: NDArray[np.int32], sm_scale: float
) -> NDArray[np.uint16]:
    """Queries as bfloat16 bits, [T, H, d_qk], whose logits spread by LOGIT_SPREAD over each token's candidates."""
    q = rng.standard_normal((NUM_TOKENS, NUM_HEADS, latents.shape[1])) / np.sqrt(latents.std(axis=0))
    logits = sm_scale * np.einsum("thd,tkd->thk", q, latents[indices])
    q *= LOGIT_SPREAD / logits.std(axis=-1, keepdims=True)
    bits: NDArray[np.uint32] = q.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16)  # cut off: the reference reads the same bits


def attention(
    q: NDArray[np.uint16], keys: NDArray[Any], d_v: int, sm_scale: float, *, in_fp8: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Plain attention in float64 over `keys` [T, K, d_qk]: the output, and the log-sum-exp in base 2.

    `in_fp8` rounds Q and P to E4M3 as FP8 kernels do: Q per head and 64 dimensions by a power of two, P per head and
    64 candidates by its largest value.
    """
    queries = (q.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    keys = keys.astype(np.float64)
    # einsum without BLAS, whose threads would wait in loops beside a busy machine's other work.
    scores = sm_scale * np.einsum("thd,tkd->thk", round_groups(queries, power_of_two=True) if in_fp8 else queries, keys)
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    values = np.einsum("thk,tkv->thv", round_groups(weights) if in_fp8 else weights, keys[..., :d_v])
    return values / total, (peak + np.log(total))[..., 0] / np.log(2)


def round_groups(x: NDArray[np.float64], *, power_of_two: bool = False) -> NDArray[np.float64]:
    """`x` [..., n] rounded to E4M3 with one scale per 64 values."""
    rounded = np.empty_like(x)
    for start in range(0, x.shape[-1], 64):
        group = x[..., start : start + 64]
        scale = np.maximum(np.abs(group).max(axis=-1, keepdims=True), 1e-30) / 448
        if power_of_two:
            scale = 2.0 ** np.ceil(np.log2(scale))
        _, exponent = np.frexp(group / scale)
        step = np.ldexp(1.0, np.maximum(exponent, -5) - 4)  # 3 mantissa bits; subnormal below 2^-6
        rounded[..., start : start + 64] = np.rint(group / scale / step) * step * scale
    return rounded


def relative_l2(x: NDArray[Any], expected: NDArray[Any]) -> float:
    """|x - expected| / |expected| over everything."""
    return float(np.linalg.norm(x - expected) / np.linalg.norm(expected))


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Median wall time in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def plot(measurements: list[Measurement], picture: Path) -> None:
    """The errors on a log scale, one column per family and format."""
    from matplotlib.figure import Figure  # not pyplot, which opens a display backend

    figure = Figure(figsize=(12, 6.4), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    columns = range(len(measurements))
    blue, red, green = "#4c78a8", "#d1495b", "#2a9d8f"
    axes.bar(
        columns,
        [m.exact_error for m in measurements],
        width=0.6,
        color=blue,
        alpha=0.45,
        label="decode against exact attention on unquantised latents: what the cache format costs",
    )
    for m, column in zip(measurements, columns, strict=True):
        place = (column, max(m.exact_error, m.fp8_arithmetic_error))  # above the bar and the marker on it
        axes.annotate(
            f"{m.exact_error:.1e}", place, (0, 7), textcoords="offset points", ha="center", color=blue, size=9
        )
    for errors, marker, color, text in (
        ([m.fp8_arithmetic_error for m in measurements], "D", red, "Q and P rounded to FP8 (emulated)"),
        ([m.decode_error for m in measurements], "s", green, "decode"),
    ):
        label = f"{text} against float64 on the same dequantised cache: what the arithmetic costs"
        axes.plot(columns, errors, marker, color=color, markeredgecolor="white", markersize=7, label=label)
    for level, color, text in (
        (FP8_ARITHMETIC_ERROR, red, "error of FP8 arithmetic\n(Q and P in FP8)"),
        (ERROR_BOUND, green, "bound on the error\nof decode's arithmetic"),
    ):
        axes.axhline(level, color=color, linestyle="--", linewidth=1.2)
        text = f"{level:.0e}: {text}"
        axes.text(1.01, level, text, color=color, va="center", size=9, transform=axes.get_yaxis_transform())
    axes.set_yscale("log")
    axes.set_ylim(1e-8, 1)
    axes.set_yticks([10.0**power for power in range(-8, 1)])
    axes.set_xlim(-0.6, len(measurements) - 0.4)
    axes.set_xticks(columns, [f"{m.family}\n{m.format}\n{m.bytes_per_token} B/token" for m in measurements], size=8.5)
    axes.set_ylabel("relative L2 error of the output")
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    axes.set_title(
        "Error of sparse-MLA decode by family and cache format\n"
        f"CPU backend, {NUM_TOKENS} tokens x {NUM_HEADS} heads x topk {TOPK}, synthetic latents with outlier channels",
        size=11,
    )
    figure.savefig(picture)
