"""The demo on a GPU: every family and format within the bounds, through each library that makes arrays."""

import json

import pytest
from sparse_mla import _demo_gpu, cli, demo, families


def test_the_demo_measures_the_gpu(torch, tmp_path, capsys):
    assert cli.main(["demo", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"on the CPU, and on {torch.cuda.get_device_name(0)}" in printed.splitlines()[0]
    assert "error on the GPU" in printed
    assert "ABOVE" not in printed
    rows = json.loads((tmp_path / "errors.json").read_text())["measurements"]
    for row in rows:
        assert 0 < row["gpu_error"] <= demo.ERROR_BOUND
        assert 0 < row["gpu_us"] < 1000


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_each_library(torch, library):
    pytest.importorskip(library)
    arrays = {"torch": _demo_gpu.TorchArrays, "cupy": _demo_gpu.CupyArrays}[library]()
    measured = demo.measure(families()[0], arrays)
    assert measured.gpu_error is not None
    assert 0 < measured.gpu_error <= demo.ERROR_BOUND
