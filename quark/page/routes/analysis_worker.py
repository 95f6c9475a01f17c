"""The process that analyzes runs for the page: `python -m quark.page.routes.analysis_worker`.

It ends at once, in the middle of whatever it does, when the page's server is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import sys
import threading
from dataclasses import fields
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quark.page.pack import encode_json
from quark.page.routes.run_analysis import AnalyzeRun, analyze, compare
from quark_core.errors import QuarkError, RunNotFoundError
from quark_core.hosting.protocol import (
    Reply,
    dump_value,
    extend_import_path,
    read_frame,
    serve_parent,
    write_frame,
)

if TYPE_CHECKING:
    from quark.page.routes.page_source import PageSource

_log = logging.getLogger("quark")

_LOADED = (
    "quark.analysis.comparison.engine",
    "quark.analysis.engine",
    "quark.analysis.explanation.engine",
    "quark.analysis.outputs",
    "quark.analysis.phases",
)


class _Worker:
    def __init__(self) -> None:
        self._source: PageSource | None = None

    def run(self, source: RawIOBase, target: RawIOBase) -> int:
        """Serve until nobody asks any more."""
        messages: queue.SimpleQueue[AnalyzeRun] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(source, messages), daemon=True).start()
        while True:
            reply = self._serve(messages.get())
            try:
                write_frame(target, reply)
            except OSError:
                return 1

    def _serve(self, message: AnalyzeRun) -> Reply:
        try:
            found = self._analyze(message)
            return Reply(value=dump_value((found, _measure_peak())))
        except MemoryError:
            return Reply("no_memory")
        except RunNotFoundError as error:
            return Reply("no_run", str(error))
        except QuarkError as error:
            return Reply("unreadable", str(error))
        except Exception as error:  # noqa: BLE001 - a plugin's rule may raise anything
            _log.exception("run %s cannot be analyzed", message.run_id)
            return Reply("failed", f"{type(error).__name__}: {error}")

    def _analyze(self, message: AnalyzeRun) -> Any:
        if self._source is None:
            self._source = _open(message)
        if message.pair is not None:
            return encode_json(compare(self._source.open_run, message.pair))
        if not message.run_id:
            return None
        found = analyze(self._source.open_run(message.run_id))
        assert found.coverage is not None
        said = {each.name: getattr(found, each.name) for each in fields(found)}
        return {**said, "coverage": (found.coverage.count, found.coverage.without_data)}


def _listen(source: RawIOBase, messages: queue.SimpleQueue[AnalyzeRun]) -> None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        while (message := read_frame(source, AnalyzeRun)) is not None:
            messages.put(message)
    os._exit(0)


def _open(message: AnalyzeRun) -> PageSource:
    """Load all that an analysis needs, before memory is bounded."""
    from quark.page.routes.page_source import open_source

    extend_import_path(message.import_path)
    for name in _LOADED:
        importlib.import_module(name)
    if message.opener:
        module, _, name = message.opener.partition(":")
        source: PageSource = getattr(importlib.import_module(module), name)(message.argument)
    else:
        source = open_source(Path(message.storage_dir), message.backend)
    _bound_memory(message.memory_bytes)
    return source


def _bound_memory(size_bytes: int) -> None:
    """Let this process have so much more than it has now, where the system can hold it to that."""
    if sys.platform == "win32":
        return
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    except (ImportError, OSError, ValueError):
        return  # no such system: there is a limit of time all the same
    wanted = pages * resource.getpagesize() + size_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _measure_peak() -> int:
    """The most memory that this process has held, in bytes; 0 where the system does not say."""
    # Not of getrusage: there a process begins with what the one had that started it.
    try:
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
    except OSError:
        return 0
    held = (line.split() for line in lines if line.startswith("VmHWM:"))
    return next((int(words[1]) * 1024 for words in held), 0)


if __name__ == "__main__":
    # Somebody waits for what it finds.
    serve_parent(_Worker().run, is_nice=False)
