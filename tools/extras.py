"""Prints the requirements of the package and of the named extras, one argument each, for pip."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
requirements = list(project["dependencies"])
for extra in sys.argv[1:]:
    requirements += project["optional-dependencies"][extra]
# Environment markers and spaces would need quoting in a shell word.
print(" ".join(requirement.split(";")[0].replace(" ", "") for requirement in requirements))
