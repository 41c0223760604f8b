"""Import a Python function of the user by its name, MODULE:FUNCTION."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from mega_schema.errors import ConfigError


def import_function(where: str, name: str) -> Callable[..., object]:
    """Import MODULE:FUNCTION, from the current folder or from the installed packages.

    Args:
        where: option that names the function, for messages.

    Raises:
        ConfigError: there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    _add_current_folder()
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        what = "the module cannot be imported"
        hint = f"it is looked for in {Path.cwd()} and in the installed packages"
        raise ConfigError(where, what, found=describe_error(error), hint=hint) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(where, f"{module_name} has no such function", found=function_name)
    return function  # type: ignore[no-any-return]


def hash_module(name: str) -> str:
    """Return the hash of the file of MODULE:FUNCTION, "" if there is none. Its imports are not hashed."""
    _add_current_folder()
    try:
        spec = find_spec(name.partition(":")[0])
    except (ImportError, ValueError):
        return ""
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    return blake2b(Path(spec.origin).read_bytes(), digest_size=16).hexdigest()


def describe_error(error: BaseException) -> str:
    """Describe an error of the user's code in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _add_current_folder() -> None:
    """Make modules of the current folder importable, as `python -m` does; a program's own folder is not."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
