"""What all tests share."""

import signal

import pytest
from postgres_server import (  # noqa: F401 - fixtures for all tests
    make_postgres_database,
    postgres_database,
    postgres_server,
    postgres_url,
)

from quark_core.open_run import open_runs

# The kit asserts in modules that pytest would not rewrite by itself.
pytest.register_assert_rewrite(
    "quark_core.testing.conformance", "quark_core.testing.store_conformance"
)


# A job in the background of a shell ignores Ctrl-C, and so would the scripts that are tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_session_is_left_open():
    """A run that a test forgets would be the "latest" one of the next test."""
    yield
    left = open_runs.sessions
    for session in left:
        session.end_run("interrupted")
    assert left == ()
