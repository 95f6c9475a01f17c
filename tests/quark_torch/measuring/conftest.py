"""With the compiled kernel at each of its levels, and without it."""

from pathlib import Path

import pytest

from quark_torch.kernels.building import KernelBuildError, build_kernel
from quark_torch.kernels.loader import load_library
from quark_torch.measuring import tensor_reading

LEVELS = {"base": 0, "AVX2": 1, "AVX-512": 2}


@pytest.fixture(scope="session")
def kernel(tmp_path_factory):
    """A kernel built from the source as it is now, or a skip where there is no compiler."""
    try:
        path: Path = build_kernel(tmp_path_factory.mktemp("kernel"))
    except KernelBuildError as error:
        pytest.skip(f"no compiler: {error}")
    loaded = load_library(path)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module", params=["torch", *LEVELS])
def way(request):
    """Every way of reading; what this processor cannot do is skipped."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(tensor_reading, "find_kernel", lambda: None)
        else:
            kernel = request.getfixturevalue("kernel")
            level = LEVELS[request.param]
            if level > kernel.level:
                pytest.skip(f"this processor has no {request.param}")
            patch.setattr(tensor_reading, "find_kernel", lambda: kernel._replace(level=level))
        yield request.param
