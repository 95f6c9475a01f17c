"""`python -m quark_torch.kernels` compiles the kernel and the hooks for this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quark_torch.kernels.building import (
    SOURCE,
    KernelBuildError,
    build_kernel,
    build_probing,
    cache_folder,
)
from quark_torch.kernels.loader import load_library, load_probing


def main() -> int:
    """Build into the package, or into the user's cache where that is read-only."""
    done = [
        _build("kernel", build_kernel, load_library),
        _build("hooks", build_probing, load_probing),
    ]
    return 0 if all(done) else 1


def _build(what: str, build: Callable[[Path], Path], load: Callable[[Path], Any]) -> bool:
    reasons: list[str] = []
    for folder in (SOURCE.parent, cache_folder()):
        try:
            path = build(folder)
        except KernelBuildError as error:
            reasons.append(str(error))
            continue
        if load(path) is None:
            reasons.append(f"{path} was built but cannot be loaded")
            continue
        sys.stdout.write(f"Built {path}\n")
        return True
    sys.stderr.write(
        f"The {what} could not be built: {reasons[0]}. Quark works without it, but more slowly.\n"
    )
    return False


if __name__ == "__main__":
    sys.exit(main())
