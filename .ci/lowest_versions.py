"""Print the lowest version of every dependency that the packages' metadata allow, one pin a line.

The metadata is that of packages/*/pyproject.toml, extras included. The output is a requirements file for pip.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,-]+\])?(?:>=|~=)(?P<version>[\d.]+)$")
# Left out, with the reason: these floors cannot be installed beside the others.
LEFT_OUT = {
    "lm-eval": "datasets, which it asks for, asks for pyarrow above the lowest one",
    "py3langid": "its own metadata ask for numpy 2, above the lowest numpy",
    "torch": "the Makefile pins its version: the index has no lower build for CPUs alone",
    "transformers": "its own metadata exclude the lowest tokenizers",
}


def declared() -> list[tuple[str, str]]:
    """Return (package, requirement) for every dependency in the packages' metadata."""
    found = []
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
        found += [(project["name"], requirement) for group in groups for requirement in group]
    return found


def lowest() -> dict[str, str]:
    """Return the lowest version of each dependency that all packages accept.

    Raises:
        SystemExit: a requirement has no lower bound, or more than one bound.
    """
    versions: dict[str, str] = {}
    for package, requirement in declared():
        if re.match(r"mega-\w+", requirement):
            continue
        bound = REQUIREMENT.match(requirement)
        if bound is None:
            sys.exit(f"error: {package}: {requirement}: wanted NAME>=VERSION")
        name, version = bound["name"], bound["version"]
        key = [int(part) for part in version.split(".")]
        if name not in versions or key > [int(part) for part in versions[name].split(".")]:
            versions[name] = version
    return versions


def main() -> None:
    for name, version in sorted(lowest().items()):
        sys.stdout.write(f"# {name}: {LEFT_OUT[name]}\n" if name in LEFT_OUT else f"{name}=={version}\n")


if __name__ == "__main__":
    main()
