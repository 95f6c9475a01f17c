"""The frameworks, each of which may be missing, and a request to stop what they train."""

import importlib
import warnings

import pytest

import quark
from quark_core.runs.open_run import StopLookout


def import_or_skip(*names):
    """The modules of a framework, or a skip; what they warn of at import is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            pytest.importorskip(name.split(".")[0], exc_type=ImportError)
        return [importlib.import_module(name) for name in names]


def ask_to_stop(session):
    """What `quark stop` does, and what the session does at its next heartbeat."""
    quark.stop_run(session, reason="enough")
    lookout = StopLookout(session.open_run)
    lookout.look()
    if lookout._thread is not None:  # the session's own has not heard of it before
        lookout._thread.join()
