"""What can be shown of the PTX without a GPU; run by `make test`, and with --write by `make ptx`.

Regenerated PTX equals the committed files; the oldest assembler that knows a target takes it without spills and within
the registers and the shared memory of a block; no hidden driver call is in it. The tables are in README.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import build
import loops

FLOOR_PTXAS = build.ROOT / ".ptx" / "floor" / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
# The floor, CUDA 12.8, does not know sm_121 yet.
PTXAS = build.COMPILER / "cuda_nvcc" / "bin" / "ptxas"
# SM120 has the least shared memory of the targets; every kernel keeps to it.
BLOCK_SHARED_BYTES = 101_376
REGISTERS_PER_SM = 65_536
TARGETS = {"sm_90": FLOOR_PTXAS, "sm_120": FLOOR_PTXAS, "sm_121": PTXAS}
README = build.KERNELS / "README.md"
END = "<!-- end of table -->"


@dataclass
class Assembled:
    """What ptxas says of an entry point."""

    entry: str
    threads: int
    registers: int
    spilled_bytes: int
    static_shared_bytes: int


def assemble(path: Path, target: str) -> list[Assembled]:
    """Assembles one module for one target; exits with the assembler's words when it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "x.cubin"
        command = [str(TARGETS[target]), "-v", f"-arch={target}", "-o", str(cubin), str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{path.name} for {target}: {done.stderr}")
        if calls := re.findall(rb"__cuda_syscall_\w+", cubin.read_bytes()):
            sys.exit(f"{path.name} for {target}: hidden driver call {calls[0].decode()}")
    threads = dict(re.findall(r"\.entry (\w+)\([^)]*\)\s*\.maxntid (\d+)", path.read_text()))
    found: list[Assembled] = []
    for line in done.stderr.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            found.append(Assembled(entry[1], int(threads[entry[1]]), 0, 0, 0))
        elif spills := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            found[-1].spilled_bytes = sum(map(int, spills.groups()))
        elif used := re.search(r"Used (\d+) registers", line):
            found[-1].registers = int(used[1])
            shared = re.search(r"(\d+) bytes smem", line)
            found[-1].static_shared_bytes = int(shared[1]) if shared else 0
    return found


def kernel_facts() -> dict[tuple[str, str], dict[str, int]]:
    """Heads, candidates of a chunk, threads and dynamic shared memory of the decode kernels, by module and entry."""
    facts = {}
    pattern = r'module: "(\w+)", entry: "(\w+)", heads: (\d+), chunk: (\d+), threads: (\d+), shared_bytes: (\d+)'
    for module, entry, heads, chunk, threads, shared in re.findall(
        pattern, (build.KERNELS / "ptx" / "kernels.rs").read_text()
    ):
        facts[module, entry] = {
            "heads": int(heads),
            "chunk": int(chunk),
            "threads": int(threads),
            "shared": int(shared),
        }
    return facts


def table() -> tuple[str, list[str]]:
    """A Markdown table of every entry point and target, and what is wrong."""
    wrong = []
    registers = " | ".join(f"registers {target}" for target in TARGETS)
    lines = [
        f"| module | PTX bytes | entry | heads | threads | shared bytes | {registers} |",
        "|---|---|---|---|---|---|" + "---|" * len(TARGETS),
    ]
    facts = kernel_facts()
    for path in sorted((build.KERNELS / "ptx").glob("*.ptx")):
        by_target = {target: {one.entry: one for one in assemble(path, target)} for target in TARGETS}
        for entry in sorted(by_target["sm_90"]):
            fact = facts.get((path.stem, entry), {"heads": 0, "shared": 0})
            for target in TARGETS:
                one = by_target[target][entry]
                shared = one.static_shared_bytes + fact["shared"]
                if one.spilled_bytes:
                    wrong.append(f"{path.stem} {entry} for {target} spills {one.spilled_bytes} bytes")
                if shared > BLOCK_SHARED_BYTES:
                    wrong.append(
                        f"{path.stem} {entry} needs {shared} bytes of shared memory, {BLOCK_SHARED_BYTES} exist"
                    )
                if one.registers * one.threads > REGISTERS_PER_SM:
                    wrong.append(f"{path.stem} {entry} for {target} needs {one.registers * one.threads} registers")
            used = " | ".join(str(by_target[target][entry].registers) for target in TARGETS)
            shared = by_target["sm_90"][entry].static_shared_bytes + fact["shared"]
            heads = fact["heads"] or "-"
            size = path.stat().st_size
            threads = by_target["sm_90"][entry].threads
            lines.append(f"| {path.stem} | {size} | {entry} | {heads} | {threads} | {shared} | {used} |")
    return "\n".join(lines) + "\n", wrong


def loop_table() -> tuple[str, list[str]]:
    """A Markdown table of the main loops' instructions for 64 candidates and 16 heads, and what is wrong."""
    kinds = [*loops.KINDS, "other"]
    lines = [f"| module | entry | loop | {' | '.join(kinds)} | all |", "|---|---|---|" + "---|" * (len(kinds) + 1)]
    wrong = []
    facts = kernel_facts()
    for path in sorted((build.KERNELS / "ptx").glob("*.ptx")):
        for entry, body in loops.entries(path.read_text()).items():
            if (fact := facts.get((path.stem, entry))) is None:
                continue
            found = loops.main_loops(body)
            if len(found) != 2:
                wrong.append(f"{path.stem} {entry} has {len(found)} loops with tensor products, not QK and PV")
                continue
            tiles = fact["heads"] // 16
            warps = (4 * tiles, fact["threads"] // 32 - 4 * tiles)
            for name, count, counts in zip(("QK", "PV"), warps, found, strict=True):
                scaled = [counts[kind] * count * 64 // fact["chunk"] // tiles for kind in kinds]
                row = " | ".join(map(str, [*scaled, sum(scaled)]))
                lines.append(f"| {path.stem} | {entry} | {name} | {row} |")
    return "\n".join(lines) + "\n", wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write PTX and tables instead of comparing them")
    write = parser.parse_args().write
    wrong = build.write() if write else build.differences()
    text = expected = README.read_text()
    entries, faults = table()
    mix, loop_faults = loop_table()
    wrong += faults + loop_faults
    for begin, made in (("<!-- table: `make ptx` -->\n", entries), ("<!-- loops: `make ptx` -->\n", mix)):
        head, _, rest = expected.partition(begin)
        _, _, tail = rest.partition(END)
        expected = head + begin + made + END + tail
    if write:
        README.write_text(expected)
    elif text != expected:
        wrong.append("the tables of kernels/README.md are not what assembler and PTX say; run `make ptx`")
    for fault in wrong:
        print(fault)
    if not wrong:
        print(f"PTX: {entries.count(chr(10)) - 2} entry points assemble for {', '.join(TARGETS)}, none spills")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
