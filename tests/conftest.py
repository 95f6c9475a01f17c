"""What all tests share."""

import functools
import os
import signal
import sys
import tempfile

import pytest
from pgbouncer import pgbouncer  # noqa: F401 - a fixture for all tests
from postgres_server import (  # noqa: F401 - fixtures for all tests
    make_postgres_database,
    postgres_database,
    postgres_server,
    postgres_service_url,
    postgres_url,
)

from quark.provenance import tracing
from quark_core.runs.open_run import open_runs

pytest_plugins = ["tiers"]

# The kit asserts in modules that pytest would not rewrite by itself.
pytest.register_assert_rewrite(
    "quark_core.testing.conformance", "quark_core.testing.store_conformance"
)

# Hundreds of tests start an interpreter, and each would compile Quark anew where nothing is kept.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What tests choose is no choice of the user's who runs them.
_config_home = tempfile.TemporaryDirectory(prefix="quark-test-config-")
os.environ["XDG_CONFIG_HOME"] = _config_home.name
_cache_home = tempfile.TemporaryDirectory(prefix="quark-test-cache-")
os.environ["XDG_CACHE_HOME"] = _cache_home.name

# Many tests look at what is on standard error; what runs say there has tests of its own.
os.environ["QUARK_QUIET"] = "1"
# Counts of records and threads are exact in many tests. What is on by default has tests of its own,
# and all others run with it where these variables say so: QUARK_CAPTURE=sys QUARK_SYSTEM_METRICS=1.
os.environ.setdefault("QUARK_CAPTURE", "none")
os.environ.setdefault("QUARK_SOURCES", "off")
os.environ.setdefault("QUARK_SYSTEM_METRICS", "0")

# A job in the background of a shell ignores Ctrl-C, and so would the scripts that are tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def why_no_cuda_device():
    """Why tests marked `gpu` cannot run here, or None where they can."""
    try:
        import torch
    except ImportError:
        return "needs a CUDA device, and PyTorch, which is not installed here"
    if torch.cuda.is_available():
        return None
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"needs a CUDA device: PyTorch {torch.__version__} (built for {built}) finds none here"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and (reason := why_no_cuda_device()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where tensors lie: here always, and on a CUDA device where there is one."""
    import torch

    return torch.device(request.param)


@pytest.fixture(autouse=True)
def only_own_functions_are_traced(request):
    """Each run notes all functions that its process traces, those of other tests too."""
    known = dict(tracing._traced)
    module = getattr(request.node.module, "__name__", "")
    for place in known:
        if place[1] != module:
            tracing._traced.pop(place, None)
    yield
    tracing._traced.clear()
    tracing._traced.update(known)


@pytest.fixture(autouse=True)
def no_session_is_left_open():
    """A run that a test forgets would be the "latest" one of the next test."""
    yield
    left = open_runs.sessions
    for session in left:
        session.end_run("interrupted")
    assert left == ()
