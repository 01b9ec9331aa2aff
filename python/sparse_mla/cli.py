"""The command `sparse-mla`: what is supported and why not, facts about this build, and a demo.

Exit codes: 0 done (`explain`: supported), 1 refused or failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sparse_mla
from sparse_mla import _plans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main"]

SUPPORTED, REFUSED, USAGE = 0, 1, 2
# What a shell reports for a command that SIGPIPE or SIGINT ended.
BROKEN_PIPE, INTERRUPTED = 128 + 13, 128 + 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (None: that of the process); returns its exit code."""
    try:
        try:
            return run(argv)
        finally:
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()  # here, where a failure can still be reported
    except BrokenPipeError:
        discard_output()
        return BROKEN_PIPE
    except OSError as error:
        discard_output()
        print(f"sparse-mla: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def run(argv: Sequence[str] | None) -> int:
    """Parses and runs; argparse ends the process on wrong usage and after --help."""
    arguments = vars(build_parser().parse_args(argv))
    command: Callable[..., int] = arguments.pop("command")
    return command(**arguments)


def discard_output() -> None:
    """Sends what standard output still holds nowhere, so that the interpreter's last flush cannot fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="sparse-mla",
        description="Sparse-MLA decode: what is supported and why not, facts about this build, and a demo.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sparse-mla {sparse_mla.__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, command: Callable[..., int], summary: str) -> argparse.ArgumentParser:
        description = f"{summary[0].upper()}{summary[1:]}."
        added = verbs.add_parser(name, help=summary, description=description, allow_abbrev=False)
        added.set_defaults(command=command)
        return added

    def json_flag(verb: argparse.ArgumentParser) -> None:
        verb.add_argument("--json", action="store_true", dest="as_json", help="print JSON instead of a table")

    json_flag(verb("families", show_families, "print the family table"))
    explaining = verb("explain", explain, "say whether decode serves a shape, and if not, every reason why")
    add_request(explaining)
    add_device(explaining, "print how the GPU kernels would be launched, too")
    explaining.add_argument("--multiprocessors", type=int, metavar="N", help="of that GPU, for --plan")
    explaining.add_argument("--batch-invariant", action="store_true", help="plan for bits that no other row changes")
    json_flag(explaining)
    showing = verb("show-config", show_config, "print facts about this build, its environment and the CUDA driver")
    add_device(showing, "print how usual shapes of every family are launched, too")
    json_flag(showing)
    demo = verb(
        "demo",
        run_demo,
        "explain deployments, measure the error of every family on the CPU and on a GPU if there is one, plot it",
    )
    demo.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="default: %(default)s")
    return parser


def add_request(parser: argparse.ArgumentParser) -> None:
    """The arguments of `explain_decode`, by its names; what is not given stays at the library's default."""
    parser.add_argument("family", metavar="FAMILY", help="row of `sparse-mla families`, such as dsv4")
    parser.add_argument("--num-heads", type=int, required=True, metavar="H", help="query heads on this rank")
    parser.add_argument("--topk", type=int, required=True, metavar="K", help="width of the indices row")
    for name, summary in {
        "num-tokens": "query tokens of the call",
        "page-block-size": "tokens per page of the primary cache",
        "page-stride": "bytes from page to page",
        "row-stride": "bytes from row to row of an inline family",
        "extra-topk": "width of the secondary cache's indices row",
        "extra-page-block-size": "tokens per page of the secondary cache",
        "extra-page-stride": "bytes from page to page of the secondary cache",
        "extra-row-stride": "bytes from row to row of an inline secondary cache",
    }.items():
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS, metavar="N", help=summary)
    parser.add_argument(
        "--extra-kv-fp4",
        action="store_true",
        default=argparse.SUPPRESS,
        help="the secondary cache holds FP4 records",
    )
    parser.add_argument("--kv-cache-format", default=argparse.SUPPRESS, metavar="WORD", help="fp8 or nvfp4")
    parser.add_argument("--compute-precision", default=argparse.SUPPRESS, metavar="WORD", help="auto, f16 or fp8")
    parser.add_argument(
        "--compute-capability",
        type=parse_capability,
        default=argparse.SUPPRESS,
        metavar="X.Y",
        help="of a GPU, such as 12.0; left out: the CPU backend",
    )


def add_device(parser: argparse.ArgumentParser, summary: str) -> None:
    """`--plan` and the product that it is for."""
    parser.add_argument("--plan", action="store_true", help=summary)
    products = sparse_mla.known_devices()
    parser.add_argument(
        "--device",
        choices=products,
        metavar="WORD",
        help=f"GPU of the plan: {', '.join(products)}; default: the first here",
    )


def parse_capability(text: str) -> tuple[int, int]:
    """`"12.0"` as (12, 0)."""
    major, dot, minor = text.partition(".")
    try:
        if dot:
            return int(major), int(minor)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be MAJOR.MINOR such as 12.0, got {text!r}")


def show_families(*, as_json: bool) -> int:
    """The verb `families`."""
    rows = sparse_mla.families()
    if as_json:
        print_json(rows)
        return SUPPORTED
    columns = {
        "family": "family",
        "kv_cache_format": "format",
        "d_qk": "d_qk",
        "d_v": "d_v",
        "bytes_per_token": "bytes/token",
        "placement": "scales in",
        "code": "code",
        "scale": "scale",
        "group": "group",
        "min_topk": "min topk",
        "topks": "calibrated topk",
        "secondary_formats": "secondary",
    }
    print_table([[plain(row[key]) for key in columns] for row in rows], list(columns.values()))
    return SUPPORTED


def explain(
    family: str,
    *,
    as_json: bool,
    plan: bool,
    device: str | None,
    multiprocessors: int | None,
    batch_invariant: bool,
    **request: Any,
) -> int:
    """The verb `explain`."""
    facts: dict[str, Any] = {}
    planned = None
    try:
        if not plan and (device is not None or multiprocessors is not None or batch_invariant):
            raise _plans.DeviceChoiceError("--device, --multiprocessors and --batch-invariant are for --plan")
        if plan:
            facts = _plans.device_facts(device, request.get("compute_capability"), multiprocessors)
            request["compute_capability"] = tuple(facts["compute_capability"])
        answer = sparse_mla.explain_decode(family, **request)
        if plan and answer:
            planned = _plans.plan_of_request(family, request, facts, batch_invariant=batch_invariant)
    except (
        ValueError,
        _plans.DeviceChoiceError,
    ) as error:  # an unknown word, an int beyond 64 bits, no GPU to plan for
        print(f"sparse-mla explain: error: {error}", file=sys.stderr)
        return USAGE
    if as_json:
        shown = {name: getattr(answer, name) for name in answer.__match_args__}
        print_json({**shown, "plan": planned} if plan else shown)
    elif answer:
        print(f"supported: {answer.kernel}")
        if planned:
            print_table([[name.replace("_", " "), plain(value)] for name, value in planned.items()], [])
    else:
        print("refused:")
        for reason in answer.reasons:
            print(f"  {reason}")
    return SUPPORTED if answer else REFUSED


def show_config(*, as_json: bool, plan: bool, device: str | None) -> int:
    """The verb `show-config`."""
    config = sparse_mla.show_config()
    plans: list[dict[str, Any]] = []
    try:
        if device is not None and not plan:
            raise _plans.DeviceChoiceError("--device is for --plan")
        facts = _plans.device_facts(device, None, None) if plan else {}
        if plan:
            plans = _plans.typical_plans(facts)
    except (sparse_mla.UnsupportedError, _plans.DeviceChoiceError) as error:
        print(f"sparse-mla show-config: error: {error}", file=sys.stderr)
        return USAGE
    if as_json:
        print_json({**config, "plan": {"device": facts, "shapes": plans}} if plan else config)
        return SUPPORTED
    rows: list[list[str]] = []
    for name, value in config.items():
        inner = value if isinstance(value, dict) else {"": value}
        rows += [[f"{name} {key}".strip(), plain(fact)] for key, fact in inner.items()]
    print_table(rows, [])
    if plan:
        capability = ".".join(map(str, facts["compute_capability"]))
        size = f"compute capability {capability}, {facts['multiprocessors']} multiprocessors"
        print(f"\nplans for {facts['name']}: {size}\n")
        print_table(
            [[plain(cell) for cell in row.values()] for row in plans], [key.replace("_", " ") for key in plans[0]]
        )
    return SUPPORTED


def run_demo(*, output: Path) -> int:
    """The verb `demo`."""
    from sparse_mla import demo  # numpy work and matplotlib, which no other verb needs

    demo.run(output)
    return SUPPORTED


def plain(value: Any) -> str:
    """A cell of a table."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def print_json(value: Any) -> None:
    """Standard output for programs."""
    print(json.dumps(value, indent=2))


def print_table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> None:
    """Standard output for people."""
    from tabulate import tabulate  # only tables need it

    print(tabulate(rows, headers=headers, tablefmt="simple" if headers else "plain", disable_numparse=True))
