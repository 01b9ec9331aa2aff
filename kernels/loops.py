"""Instruction mix of the two main loops of a decode kernel, counted in its PTX."""

from __future__ import annotations

import re
from collections import Counter

# Kinds by the start of an opcode, first match; everything else is arithmetic, moves and branches.
KINDS = {
    "mma": r"mma\.",
    "shared": r"(ld|st)\.shared|ldmatrix|stmatrix",
    "convert": r"cvt\.rn\.(f16x2|bf16x2)|prmt",
    "global": r"(ld|st)\.global|cp\.async",
    "meet": r"bar|mbarrier|shfl|vote|redux|elect",
}


# Behind a scope's brace, a label and a guard.
OPCODE = re.compile(r"\s*(?:\{\s*)?(?:\w+:\s*)?(?:@!?\S+\s+)?([a-z][\w.:]*)")


def entries(ptx: str) -> dict[str, list[str]]:
    """Lines of every entry point."""
    parts = re.split(r"^\.visible \.entry (\w+)\(", ptx, flags=re.M)
    return {name: body.splitlines() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def kind_of(opcode: str) -> str:
    """The kind an opcode counts for."""
    return next((kind for kind, pattern in KINDS.items() if re.match(pattern, opcode)), "other")


def main_loops(lines: list[str]) -> list[Counter[str]]:
    """Instructions by kind of the innermost loops with tensor products: of the QK warps, then of the PV warps.

    A loop lies between a label and the last branch back to it. What the compiler moved elsewhere is not counted: the
    raising of references; both sides of a branch inside are, though a warp executes one.
    """
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\$L\w+:", line)}
    ends: dict[int, int] = {}
    for at, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)
        if target and labels[target[1]] < at:
            ends[labels[target[1]]] = at
    found = []
    for first, last in sorted(ends.items()):
        inner = any(first < other <= last and has_mma(lines[other:end]) for other, end in ends.items())
        if has_mma(lines[first:last]) and not inner:
            opcodes = (OPCODE.match(line) for line in lines[first : last + 1])
            found.append(Counter(kind_of(match[1]) for match in opcodes if match))
    return found


def has_mma(lines: list[str]) -> bool:
    """Whether tensor products stand in these lines."""
    return any("mma.sync" in line for line in lines)
