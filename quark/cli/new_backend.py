"""`quark backends new`: a distribution of one's own, with a backend that works and its tests."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from quark.cli.backend_skeleton import FILES
from quark_core.errors import SchemaValidationError
from quark_core.registry import BackendRegistry

__all__ = ["check_backend_name", "write_skeleton"]

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*")
_MAX_LENGTH = 50
# Words that `backends=` understands otherwise.
_TAKEN = ("none", "new")


def check_backend_name(name: str, registry: BackendRegistry) -> str:
    """Return the name, or refuse what cannot be a new backend's.

    Raises:
        SchemaValidationError: Not lowercase words of letters and digits with
            `-`, `_` or `.` between them, too long, or the name of an
            installed backend or scheme.
    """
    if not _NAME.fullmatch(name):
        raise SchemaValidationError(
            f"NAME {name!r}: a backend's name begins with a lowercase letter and goes on with "
            "lowercase letters and digits, with single '-', '_' or '.' between, such as my-store"
        )
    if len(name) > _MAX_LENGTH:
        raise SchemaValidationError(f"NAME has {len(name)} characters; {_MAX_LENGTH} are allowed")
    schemes = {scheme for definition in registry.definitions for scheme in definition.schemes}
    left_out = {item.name for item in registry.left_out}
    if name in {*registry.names, *schemes, *left_out, *_TAKEN}:
        raise SchemaValidationError(f"NAME {name!r} is taken; `quark backends` lists what exists")
    return name


def write_skeleton(name: str, into: Path) -> Path:
    """Write the files of a new backend; all of them or none.

    Args:
        name: A name that `check_backend_name` has passed.
        into: Folder in which the backend's own folder is made.

    Returns:
        The backend's folder, `into/quark-NAME`.

    Raises:
        SchemaValidationError: There is something of that name already.
        OSError: It cannot be written.
    """
    words = re.split(r"[-_.]", name)
    named = {
        "@name@": name,
        "@package@": "_".join(["quark", *words]),
        "@class@": "".join(word.capitalize() for word in words) + "Backend",
    }
    target = into / f"quark-{name}"
    if os.path.lexists(target):
        raise SchemaValidationError(f"{target} exists already, and nothing in it was changed")
    into.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".quark-{name}-", dir=into))
    try:
        scratch.chmod(0o777 & ~_read_umask())
        for path, text in FILES.items():
            file = scratch / _fill(path, named)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_fill(text, named), encoding="utf-8", newline="\n")
        # Over an empty folder that came meanwhile this succeeds, over anything else it raises.
        os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _fill(text: str, named: dict[str, str]) -> str:
    for mark, word in named.items():
        text = text.replace(mark, word)
    return text


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
