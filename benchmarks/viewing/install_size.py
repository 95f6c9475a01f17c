"""By how much the page makes an installation larger."""

from __future__ import annotations

import io
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from figures import Figure

import quark.page

# What the page's server needs and nothing else in Quark does.
_NEEDS = ("starlette", "uvicorn", "anyio", "idna")


def measure_install_size() -> list[Figure]:
    """Sizes as in a wheel (deflated) and unpacked, in MB."""
    root = Path(quark.page.__file__).parent
    own = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    vendored = [path for path in own if "vendor" in path.parts]
    needed = [
        Path(str(path.locate()))
        for name in _NEEDS
        for path in distribution(name).files or ()
        if "__pycache__" not in path.parts and path.suffix != ".pyc"
    ]
    needed = [path for path in needed if path.is_file()]
    page_mb, needed_mb = _compress(own), _compress(needed)
    return [
        Figure("the page's files, as in a wheel, MB", page_mb, at_most=3),
        Figure("of these vendored, MB", _compress(vendored)),
        Figure(f"with {', '.join(_NEEDS)}, as in wheels, MB", page_mb + needed_mb, at_most=3),
        Figure("all of it unpacked, MB", sum(path.stat().st_size for path in own + needed) / 1e6),
    ]


def _compress(paths: list[Path]) -> float:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, path in enumerate(paths):
            archive.write(path, f"{place}/{path.name}")
    return len(packed.getvalue()) / 1e6
