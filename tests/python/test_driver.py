"""Drivers that are missing, old, broken or without a device, played by small libraries in the place of libcuda."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRIVER = (ROOT / "src" / "cuda" / "driver.rs").read_text()
FIRST, REST = (
    re.findall(r'"(cu\w+)"', re.search(rf"const {name}: &\[&str\] = &\[(.*?)\];", DRIVER, re.S)[1])
    for name in ("FIRST_SYMBOLS", "SYMBOLS")
)
BODIES = {
    "cuInit": "(unsigned flags) { return INIT; }",
    "cuDriverGetVersion": "(int *version) { *version = VERSION; return 0; }",
    "cuDeviceGetCount": "(int *count) { *count = 0; return 0; }",
    "cuGetErrorName": '(int error, const char **text) { *text = "CUDA_ERROR_PLAYED"; return 0; }',
    "cuGetErrorString": '(int error, const char **text) { *text = "a played error"; return 0; }',
}
PROGRAM = """
import sparse_mla
print(sparse_mla.show_config()["cuda_driver"])
try:
    sparse_mla.warmup("dsv4")
except sparse_mla.DeviceError as error:
    print("DeviceError:", error)
assert sparse_mla.explain_decode("dsv4", num_heads=8, topk=128, compute_capability=(9, 0))
"""


def with_driver(folder, symbols, *, version=13000, init=0, **environment):
    """What PROGRAM prints beside a libcuda of these symbols."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler makes the libraries of these tests")
    source = folder / "libcuda.c"
    lines = [f"int {symbol}{BODIES.get(symbol, '(void) { return 999; }')}" for symbol in symbols]
    source.write_text("\n".join(lines) or "int nothing;")
    definitions = [f"-DVERSION={version}", f"-DINIT={init}"]
    subprocess.run([compiler, "-shared", "-fPIC", *definitions, source, "-o", folder / "libcuda.so"], check=True)
    (folder / "libcuda.so.1").symlink_to("libcuda.so")
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), **environment}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_e3_an_old_driver_is_named_with_what_is_needed(tmp_path):
    """It lacks later entry points as well; the version is what its owner can act on."""
    shown = with_driver(tmp_path, FIRST, version=12040)
    assert shown.count("the CUDA driver must support CUDA 12.7 or newer, found one for CUDA 12.4") == 2


@pytest.mark.parametrize("version", [12070, 12080, 13000, 14010])
def test_e3_newer_drivers_are_taken(tmp_path, version):
    shown = with_driver(tmp_path, FIRST + REST, version=version)
    assert f"'version': '{version // 1000}.{version % 1000 // 10}', 'devices': []" in shown
    assert "DeviceError: `device` must be one of the driver's 0 devices, got 0" in shown


@pytest.mark.parametrize("symbol", FIRST + REST)
def test_h3_a_library_without_a_symbol_is_an_error_and_no_panic(tmp_path, symbol):
    shown = with_driver(tmp_path, [other for other in FIRST + REST if other != symbol])
    assert shown.count(f"not NVIDIA's driver, or a damaged one: it has no {symbol}") == 2


def test_h3_an_empty_library_is_an_error_and_no_panic(tmp_path):
    assert "it has no cuInit" in with_driver(tmp_path, [])


def test_h3_every_symbol_that_is_called_is_looked_for():
    called = set()
    for path in (ROOT / "src" / "cuda").glob("*.rs"):
        called |= set(re.findall(r"sys::(cu[A-Z]\w*)\(", path.read_text()))
    assert called
    assert called <= set(FIRST + REST)


@pytest.mark.parametrize("init", [34, 100, 999])
def test_h4_a_driver_that_does_not_start_is_quoted(tmp_path, init):
    """A toolkit's stub (34), no device (100), a broken installation (999)."""
    shown = with_driver(tmp_path, FIRST + REST, init=init)
    assert shown.count("the CUDA driver refused cuInit") == 2
    assert "a played error" in shown


@pytest.mark.parametrize("path", ["/nowhere", "/a:b", ""])
def test_e4_no_toolkit_is_looked_for(tmp_path, path):
    """CUDA_HOME and CUDA_PATH change nothing."""
    assert "'devices': []" in with_driver(tmp_path, FIRST + REST, CUDA_HOME=path, CUDA_PATH=path)


@pytest.mark.parametrize("module", sorted((ROOT / "kernels" / "ptx").glob("*.ptx")), ids=lambda path: path.stem)
def test_e2_ptx_is_portable(module):
    """No architecture-specific target, and the oldest ISA that the code takes: CUDA 12.7 is the first that has 8.6."""
    text = module.read_text()
    assert re.findall(r"^\.(version|target|address_size) (.*)$", text, re.M) == [
        ("version", "8.6"),
        ("target", "sm_90"),
        ("address_size", "64"),
    ]
    assert "DriverVersion(12_070)" in DRIVER
