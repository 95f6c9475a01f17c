"""The helper's end of the pipes: what such a process does first and last."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from io import RawIOBase
from typing import NoReturn

from quark_core.hosting.priority import lower_priority

__all__ = ["extend_import_path", "serve_parent"]

_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")


def serve_parent(serve: Callable[[RawIOBase, RawIOBase], int]) -> NoReturn:
    """Run a helper process, and end it as soon as it has served.

    Signals are left to the process that started it. Standard input and output
    are the pipes to that one, and null devices to everybody else in here.

    Args:
        serve: Reads messages from its first argument and answers on its
            second; returns the exit status.
    """
    for name in _IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    lower_priority()
    source = os.fdopen(os.dup(0), "rb", buffering=0)
    target = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    status = serve(source, target)
    sys.stderr.flush()
    # Handlers of libraries at exit could wait for a server for ever.
    os._exit(status)


def extend_import_path(paths: Iterable[str]) -> None:
    """Let this process import what the one that started it can."""
    known = set(sys.path)
    sys.path += [path for path in paths if path and path not in known]
