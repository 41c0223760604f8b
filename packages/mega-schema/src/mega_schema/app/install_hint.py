"""Name the command that installs an optional dependency of one of our packages."""

from __future__ import annotations

from typing import Final

# No package index has these packages yet, so the command is for the root of a checkout. A release changes
# this line to 'pip install "{package}{extras}"'; tests/repo_rules then lists the documents to change.
_COMMAND: Final = 'pip install -e "packages/{package}{extras}"'


def install_hint(package: str, *extras: str) -> str:
    """Return a command to paste that installs `package` with `extras`, such as "mega-train" with "plot"."""
    return _COMMAND.format(package=package, extras=f"[{','.join(extras)}]" if extras else "")
