"""Compiles the kernels to PTX with the pinned NVRTC, without a GPU, a toolkit or a host compiler.

Used by check.py. The compilers come from requirements-compiler.txt
and requirements-floor.txt, installed under .ptx/.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
ROOT = KERNELS.parent
COMPILER = ROOT / ".ptx" / "compiler" / "nvidia"
# The lowest .version that knows bulk copies to shared::cta; the floor assembler proves that it suffices.
PTX_VERSION = "8.6"
ARCH = "compute_90"


class Nvrtc:
    """libnvrtc of the pinned wheel."""

    def __init__(self) -> None:
        folder = COMPILER / "cuda_nvrtc" / "lib"
        # The builtins lie beside it and are found by name: loaded first, they need no LD_LIBRARY_PATH.
        (builtins,) = folder.glob("libnvrtc-builtins.so.*")
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(folder / "libnvrtc.so.12"))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, source: Path) -> str:
        """PTX of one file; exits with the compiler's log when it does not compile."""
        program = ctypes.c_void_p()
        code = source.read_bytes()
        self._check(self._library.nvrtcCreateProgram(ctypes.byref(program), code, source.name.encode(), 0, None, None))
        options = [
            f"--gpu-architecture={ARCH}",
            "--std=c++17",
            "--device-as-default-execution-space",
            f"-I{KERNELS / 'include'}",
            f"-I{COMPILER / 'cuda_runtime' / 'include'}",
        ]
        array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        result = self._library.nvrtcCompileProgram(program, len(options), array)
        self._check(result, self._text(program, "ProgramLog"))
        return self._text(program, "PTX")

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.value.decode()

    def _check(self, result: int, log: str = "") -> None:
        if result:
            sys.exit(f"nvrtc: {self._library.nvrtcGetErrorString(result).decode()}\n{log}")


def tidy(ptx: str) -> str:
    """Without the compiler's comment block, its only build-dependent text, and at the declared version."""
    ptx = re.sub(r"\A(?://[^\n]*\n)+\n*", "", ptx).rstrip() + "\n"
    return re.sub(r"^\.version \S+", f".version {PTX_VERSION}", ptx, count=1, flags=re.M)


def build() -> dict[Path, str]:
    """Path and text of every PTX file, and of the Rust table of their entry points."""
    nvrtc = Nvrtc()
    modules = {source.stem: tidy(nvrtc.compile(source)) for source in sorted(KERNELS.glob("*.cu"))}
    made = {KERNELS / "ptx" / f"{module}.ptx": ptx for module, ptx in modules.items()}
    made[KERNELS / "ptx" / "kernels.rs"] = kernel_table(modules)
    return made


def kernel_table(modules: dict[str, str]) -> str:
    """The entry points as Rust: shapes stand in the PTX as constants that the kernels' own templates filled."""
    lines = ["// Made by `make ptx` from the constants that stand in the PTX.", "&["]
    shape = re.compile(r"\.b8 (\w+)_shape\[(\d+)\] = \{([\d, ]+)\}")
    for module, ptx in modules.items():
        for entry, size, listed in shape.findall(ptx):
            # Trailing zero bytes are not listed.
            data = bytes(int(byte) for byte in listed.split(",")).ljust(int(size), b"\0")
            heads, chunk, threads, shared_bytes = struct.unpack("<4i", data)
            lines.append(
                f'    Kernel {{ module: "{module}", entry: "{entry}", heads: {heads}, chunk: {chunk}, '
                f"threads: {threads}, shared_bytes: {shared_bytes} }},"
            )
    return "\n".join([*lines, "]", ""])


def differences() -> list[str]:
    """What differs between the committed files and what their sources compile to."""
    made = build()
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text() != text]
    orphans = sorted(set((KERNELS / "ptx").iterdir()) - set(made))
    return [
        f"{path.relative_to(ROOT)} is not what its source compiles to; run `make ptx`" for path in [*stale, *orphans]
    ]


def write() -> list[str]:
    """Writes every file and removes what no source makes; returns no differences."""
    made = build()
    folder = KERNELS / "ptx"
    folder.mkdir(exist_ok=True)
    for path in set(folder.iterdir()) - set(made):
        path.unlink()
    for path, text in made.items():
        path.write_text(text)
    return []


if __name__ == "__main__":
    write()
