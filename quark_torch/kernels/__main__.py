"""`python -m quark_torch.kernels` compiles the kernel for this machine."""

from __future__ import annotations

import sys

from quark_torch.kernels.building import (
    SOURCE,
    KernelBuildError,
    build_kernel,
    cache_folder,
)
from quark_torch.kernels.loader import load_library


def main() -> int:
    """Build into the package, or into the user's cache where that is read-only."""
    reasons: list[str] = []
    for folder in (SOURCE.parent, cache_folder()):
        try:
            path = build_kernel(folder)
        except KernelBuildError as error:
            reasons.append(str(error))
            continue
        if load_library(path) is None:
            reasons.append(f"{path} was built but cannot be loaded")
            continue
        sys.stdout.write(f"Built {path}\n")
        return 0
    sys.stderr.write(
        f"The kernel was not built: {reasons[0]}. Quark works without it, more slowly.\n"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
