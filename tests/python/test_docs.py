"""The documents say what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
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


def what_caches_can_do():
    """The rows of the table in docs/caches.md, from what the functions accept: words of a line and its conversions."""
    facts = sparse_mla.families()
    rng = np.random.default_rng(0)
    for row in facts:
        line = {"family": row["family"], "kv_cache_format": row["kv_cache_format"]}
        latent = rng.standard_normal((4, row["d_qk"]), np.float32)
        cache = sparse_mla.pack_kv_cache(latent, **line, page_block_size=4)
        rotation = {"rope_cos_sin": np.ones((4, 64), np.float32), "rope_positions": np.arange(4)}
        try:
            sparse_mla.append_kv_cache(latent, np.arange(4), cache, **line, **rotation)
            rotates = "yes"
        except ValueError:
            rotates = "no"
        exact, lossy = [], []
        for other in facts:
            to = {"to_family": other["family"], "to_format": other["kv_cache_format"]}
            if other == row:
                continue
            try:
                _, error = sparse_mla.convert_kv_cache(
                    cache, from_family=row["family"], from_format=row["kv_cache_format"], **to, return_error=True
                )
            except ValueError:
                continue
            (exact if error == 0 else lossy).append(f"{other['family']} {other['kv_cache_format']}")
        role = "primary" if row["in_registry"] else "secondary"
        yield [" ".join(line.values()), role, rotates, ", ".join(exact) or "-", ", ".join(lossy) or "-"]


def test_what_caches_can_do_is_documented():
    text = (ROOT / "docs" / "caches.md").read_text()
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    assert lines[2:] == list(what_caches_can_do())


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
