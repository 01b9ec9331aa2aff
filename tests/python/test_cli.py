"""The command line: both entry forms, exit codes, JSON, and no traceback ever."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest
import sparse_mla
from brute import FAMILIES

SCRIPT = shutil.which("sparse-mla", path=sysconfig.get_path("scripts"))
FORMS = {"script": [SCRIPT], "module": [sys.executable, "-m", "sparse_mla"]}


def run(*arguments, form="module", **options):
    assert all(FORMS[form]), "the command sparse-mla is not installed"
    done = subprocess.run(
        [*FORMS[form], *arguments], capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        **options,
    )  # fmt: skip
    assert "Traceback" not in done.stderr + done.stdout
    assert "panicked" not in done.stderr
    return done


def explain(*arguments, form="module"):
    return run("explain", *arguments, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_families_json_is_families(form):
    done = run("families", "--json", form=form)
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads(json.dumps(sparse_mla.families()))
    assert done.stderr == ""


def test_families_is_a_table_of_every_row():
    done = run("families")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for row in sparse_mla.families():
        words = (row["family"], row["kv_cache_format"], str(row["bytes_per_token"]), str(row["d_qk"]))
        assert any(set(words) <= set(line.replace("|", " ").split()) for line in lines), words


SUPPORTED = [
    "dsv4 --num-heads 8 --topk 128",
    "dsv4 --num-heads=24 --topk=1152 --num-tokens 16 --page-block-size 256 --page-stride 149760",
    "dsv3_2 --num-heads 128 --topk 2048 --num-tokens 300 --row-stride 672",
    "dots3_swa --topk 513 --num-heads 1",
    "dsv4_1 --num-heads 8 --topk 128 --extra-topk 512 --extra-page-block-size 32",
    "dsv4 --num-heads 8 --topk 128 --kv-cache-format nvfp4",
]


def keywords(words):
    """Arguments of explain_decode that a command line stands for."""
    family, *rest = words.replace("=", " ").split()
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return family, {
        name[2:].replace("-", "_"): int(value) if value.lstrip("-").isdigit() else value for name, value in pairs
    }


@pytest.mark.parametrize("words", SUPPORTED)
def test_explain_supported(words):
    family, arguments = keywords(words)
    answer = sparse_mla.explain_decode(family, **arguments)
    assert answer
    done = explain(*words.split())
    assert done.returncode == 0
    assert answer.kernel in done.stdout


REFUSED = [
    "dsv4 --num-heads 200 --topk 0",
    "dots3_swa --num-heads 8 --topk 512",
    "dsv4 --num-heads 8 --topk 128 --page-block-size 1 --page-stride 584",
    "dsv3_2 --num-heads 8 --topk 128 --extra-topk 64",
    "dsv3_2 --num-heads 8 --topk 128 --kv-cache-format nvfp4",
]


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.parametrize("form", FORMS)
def test_explain_refused(words, form):
    family, arguments = keywords(words)
    answer = sparse_mla.explain_decode(family, **arguments)
    assert not answer
    done = explain(*words.split(), form=form)
    assert done.returncode == 1
    for reason in answer.reasons:
        assert reason in done.stdout + done.stderr


def test_explain_a_gpu():
    done = explain(*["dsv4", "--num-heads", "8", "--topk", "128", "--compute-capability", "8.9"])
    assert done.returncode == 1
    (reason,) = sparse_mla.explain_decode("dsv4", num_heads=8, topk=128, compute_capability=(8, 9)).reasons
    assert reason in done.stdout + done.stderr


PLANNED = [
    ("--device h200", (9, 0), 132),
    ("--device gb10 --num-tokens 64 --batch-invariant", (12, 1), 48),
    ("--compute-capability 12.0 --multiprocessors 188 --extra-topk 512 --page-block-size 256", (12, 0), 188),
]


@pytest.mark.parametrize(("words", "capability", "multiprocessors"), PLANNED)
def test_explain_with_a_plan(words, capability, multiprocessors):
    given = words.split()
    shape = {"num_heads": 24, "topk": 1024, "compute_capability": capability, "multiprocessors": multiprocessors}
    if "--num-tokens" in given:
        shape |= {"num_tokens": 64, "batch_invariant": True}
    if "--extra-topk" in given:
        shape["extra_topk"] = 512
    plan = sparse_mla.plan_decode("dsv4", **shape)
    arguments = ["dsv4", "--num-heads", "24", "--topk", "1024", "--plan", *given]
    done = explain(*arguments)
    assert done.returncode == 0, done.stderr
    for name, value in plan.items():
        cell = "-" if value is None else value
        assert re.search(rf"^{name.replace('_', ' ')} +{cell}$", done.stdout, re.M), (name, done.stdout)
    shown = json.loads(explain(*arguments, "--json").stdout)
    assert shown["plan"] == plan
    assert shown["kernel"] == "sm_90/dsv4/fp8" + ("+fp8" if "extra_topk" in shape else "") + "/decode"


def test_a_refused_shape_has_no_plan():
    words = ["dsv4", "--num-heads", "129", "--topk", "128", "--plan", "--device", "h200"]
    done = explain(*words)
    assert done.returncode == 1
    assert "129" in done.stdout
    assert json.loads(explain(*words, "--json").stdout)["plan"] is None


@pytest.mark.parametrize("device", sparse_mla.known_devices())
def test_show_config_with_plans(device):
    facts = sparse_mla.known_devices()[device]
    shown = json.loads(run("show-config", "--plan", "--device", device, "--json").stdout)["plan"]
    assert shown["device"] == {**facts, "compute_capability": list(facts["compute_capability"])}
    for kv_cache_format in ("fp8", "nvfp4"):
        planned = {row["family"] for row in shown["shapes"] if row["kv_cache_format"] == kv_cache_format}
        assert planned == set(sparse_mla.supported_sparse_mla_sm120_configs(kv_cache_format=kv_cache_format))
    table = run("show-config", "--plan", "--device", device).stdout
    assert facts["name"] in table
    for row in shown["shapes"]:
        cells = ("-" if cell is None else str(cell) for cell in row.values())
        assert re.search(r" +".join(map(re.escape, cells)), table)
        shape = {name: row[name] for name in ("num_heads", "topk", "num_tokens", "kv_cache_format")}
        where = {name: facts[name] for name in ("compute_capability", "multiprocessors")}
        assert sparse_mla.plan_decode(row["family"], **shape, **where).items() <= row.items()


USAGE = {
    "explain dsv4 --num-heads 8 --topk 128 --plan --device a100": ("device", *sparse_mla.known_devices()),
    "explain dsv4 --num-heads 8 --topk 128 --plan --multiprocessors 8": ("compute-capability",),
    "explain dsv4 --num-heads 8 --topk 128 --plan --compute-capability 9.0": ("multiprocessors",),
    "explain dsv4 --num-heads 8 --topk 128 --plan --device h200 --multiprocessors 8": ("--device",),
    "explain dsv4 --num-heads 8 --topk 128 --device h200": ("--plan",),
    "explain dsv4 --num-heads 8 --topk 128 --plan --compute-capability 9.0 --multiprocessors 0": ("multiprocessors",),
    "show-config --device h200": ("--plan",),
    "": (),
    "nothing": ("families", "explain", "show-config", "demo"),
    "explain": ("num-heads", "topk"),
    "explain dsv4": ("num-heads", "topk"),
    "explain dsv4 --num-heads 8": ("topk",),
    "explain dsv5 --num-heads 8 --topk 128": FAMILIES,
    "explain dsv4 --num-heads 8 --topk 128 --kv-cache-format int4": ("fp8", "nvfp4"),
    "explain dsv4 --num-heads 8 --topk 128 --compute-precision bf16": ("auto", "f16"),
    "explain dsv4 --num-heads eight --topk 128": ("num-heads", "eight"),
    "explain dsv4 --num-heads 8.5 --topk 128": ("num-heads", "8.5"),
    f"explain dsv4 --num-heads {10**30} --topk 128": ("num-heads",),
    "explain dsv4 --num-heads 8 --topk 128 --head-count 3": ("head-count",),
    "families --yaml": ("yaml",),
    "show-config extra": ("extra",),
}


@pytest.mark.parametrize("words", USAGE, ids=lambda words: words or "no words")
def test_bad_usage(words):
    done = run(*words.split())
    assert done.returncode == 2
    assert done.stdout == ""
    for expected in USAGE[words]:
        assert expected.replace("_", "-") in done.stderr.replace("_", "-")


@pytest.mark.parametrize("form", FORMS)
def test_show_config(form):
    done = run("show-config", "--json", form=form)
    assert done.returncode == 0
    shown = json.loads(done.stdout)
    assert shown["version"] == sparse_mla.__version__
    assert shown.keys() == sparse_mla.show_config().keys()
    plain = run("show-config")
    assert plain.returncode == 0
    assert sparse_mla.__version__ in plain.stdout


def test_show_config_shows_the_environment():
    name = next(iter(sparse_mla.show_config()["environment"]))
    assert name.startswith("SPARSE_MLA_")
    done = run("show-config")
    assert name in done.stdout


@pytest.mark.parametrize("words", ["--help", "explain --help", "families --help", "show-config --help", "demo --help"])
def test_help(words):
    done = run(*words.split())
    assert done.returncode == 0
    assert "usage" in done.stdout.lower()


def test_demo(tmp_path):
    done = run("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    missing = sparse_mla.show_config()["cuda_driver"].get("unavailable")
    if missing:
        assert f"on the CPU; no GPU was used: {missing}" in done.stdout.splitlines()[0]
    report = json.loads((tmp_path / "demo-output" / "errors.json").read_text())
    assert (report["gpu"] is None) == all(row["gpu_us"] is None for row in report["measurements"])
    assert len(report["measurements"]) == len(sparse_mla.families())


@pytest.mark.parametrize("form", FORMS)
def test_reader_that_went_away(form):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*FORMS[form], "families", "--json"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writer)
    assert "Traceback" not in done.stderr


def test_everything_works_without_a_path_or_a_gpu():
    env = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "HOME": "/nonexistent"}
    assert run("explain", "dsv4", "--num-heads", "8", "--topk", "128", env=env).returncode == 0
    assert run("show-config", env=env).returncode == 0
