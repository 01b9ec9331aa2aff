"""The documents say what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import sparse_mla

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_readme_lists_the_family_table():
    block = README.split("<!-- families:")[1].split("<!-- end of families -->")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line.startswith("|")
    ]
    facts = [
        [
            row["family"],
            row["kv_cache_format"],
            str(row["d_qk"]),
            str(row["d_v"]),
            str(row["bytes_per_token"]),
            row["placement"],
            f"{row['code']}, {row['scale']} over {row['group']}",
            str(row["rope_dims"]),
            str(row["min_topk"]),
            " ".join(map(str, row["topks"])),
            " ".join(row["secondary_formats"]) or "-",
        ]
        for row in sparse_mla.families()
    ]
    assert lines[2:] == facts  # after the header and its rule


def test_readme_lists_every_environment_variable():
    assert set(re.findall(r"SPARSE_MLA_\w+", README)) == set(sparse_mla.show_config()["environment"])


def test_every_verb_of_the_readme_exists():
    verbs = set(re.findall(r"^make ([a-z-]+)", README, re.M))
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    assert verbs
    assert verbs <= targets


@pytest.mark.parametrize("line", re.findall(r"^(sparse-mla (?:families|explain|show-config).*)$", README, re.M))
def test_commands_of_the_readme_run(line):
    done = subprocess.run([sys.executable, "-m", "sparse_mla", *line.split()[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_run(example):
    done = subprocess.run([sys.executable, ROOT / "examples" / example], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
