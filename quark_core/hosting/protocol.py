"""The protocol between a process and the helper that hosts one of its backends.

The process sends one message and reads one reply; nothing comes unasked.

A message is a length of four bytes, then msgpack. Of arguments and results
only what Quark, numpy and Python's own types are made of comes back: a class
of the plugin would have to be imported here, which is what the helper is to
keep out.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import os
import pickle
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from io import RawIOBase
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from quark_core.backends.contract import BackendDefinition, Batch
from quark_core.errors import BackendContractError
from quark_core.system.process import ProcessIdentity

AS_EQUAL = "as-equal"
"""Argument of a helper process that is to have the priority of the one that starts it."""


class OpenBackend(msgspec.Struct, frozen=True, tag=True):
    """Open the backend.

    Attributes:
        name: Name of the backend.
        opener: What opens it, as `module:function`, or "".
        plugin: What declares it, as `module:object`, or "".
        capabilities: What its definition declares.
        config: The fields of its `BackendConfig`, paths as texts.
        parent: The process that asks.
        folder: Where helpers of this backend note that they live; "" for one that only reads.
        import_path: `sys.path` of that process.
        log_level: Messages of lower levels are not passed on.
    """

    name: str
    opener: str
    plugin: str
    capabilities: tuple[str, ...]
    config: Mapping[str, Any]
    parent: ProcessIdentity
    folder: str
    import_path: tuple[str, ...]
    log_level: int


class WriteBatches(msgspec.Struct, frozen=True, tag=True):
    """Store batches, as one."""

    batches: tuple[Batch, ...]


class PutPayload(msgspec.Struct, frozen=True, tag=True):
    """Keep a payload, which lies in a file."""

    run_id: str
    sha256: str
    size_bytes: int
    path: str


class ReadPayload(msgspec.Struct, frozen=True, tag=True):
    """Copy a payload that the backend has into a new file."""

    run_id: str
    sha256: str
    into: str


class CallMethod(msgspec.Struct, frozen=True, tag=True):
    """Call any other method of the backend.

    Attributes:
        name: The method.
        arguments: What `values.dump` made of its arguments, positional and named.
    """

    name: str
    arguments: bytes


class CloseBackend(msgspec.Struct, frozen=True, tag=True):
    """Close the backend, and end the process."""


class Reply(msgspec.Struct, frozen=True):
    """What became of a message.

    Attributes:
        outcome: ok, or the name of the error that was raised: the nearest that Quark has.
        text: What the error says.
        retry_after_s: When to come again, where the error says so.
        said: Level and text of what was logged meanwhile.
        value: What `values.dump` made of the method's result, or "".
    """

    outcome: str = "ok"
    text: str = ""
    retry_after_s: float | None = None
    said: tuple[tuple[int, str], ...] = ()
    value: bytes = b""


Message = OpenBackend | WriteBatches | PutPayload | ReadPayload | CallMethod | CloseBackend


_LENGTH = struct.Struct("<I")
_Frame = TypeVar("_Frame")


def write_frame(stream: RawIOBase, message: Any) -> None:
    """Send a message.

    Args:
        stream: Unbuffered: a forked child must not inherit half of a message.
        message: A msgspec struct that the other side knows.

    Raises:
        OSError: The other side is gone.
    """
    data = msgspec.msgpack.encode(message)
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        view = view[stream.write(view) or 0 :]


def read_frame(stream: RawIOBase, kind: type[_Frame]) -> _Frame | None:
    """The next message, or None where the other side is gone.

    Args:
        stream: Unbuffered.
        kind: What is expected: a type, or a union of types.
    """
    head = _read(stream, _LENGTH.size)
    if head is None:
        return None
    data = _read(stream, _LENGTH.unpack(head)[0])
    return None if data is None else msgspec.msgpack.decode(data, type=kind)


def _read(stream: RawIOBase, size_bytes: int) -> bytes | None:
    parts = []
    while size_bytes:
        part = stream.read(size_bytes)
        if not part:
            return None
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


_MODULES = frozenset(
    {"quark_core", "numpy", "collections", "datetime", "pathlib", "copyreg", "msgspec", "_codecs"}
)


# What makes values again out of their parts; all else that is named is a type.
_MAKERS = frozenset(
    {"__newobj__", "_frombuffer", "_reconstruct", "_reconstructor", "encode", "rebuild", "scalar"}
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`; of a module only what it has itself.

        A name with dots would lead through what the module has imported, to any function there is.
        """
        package = module.partition(".")[0]
        if (package in _MODULES or module == "builtins") and name.isidentifier():
            found = super().find_class(module, name)
            home = str(getattr(found, "__module__", None) or module).partition(".")[0]
            is_maker = name in _MAKERS and package != "builtins"
            if (isinstance(found, type) or is_maker) and home in {*_MODULES, "builtins"}:
                return found
        raise pickle.UnpicklingError(
            f"{module}.{name} is not a type that a backend can receive or return"
        )


def dump_value(value: Any) -> bytes:
    """Make bytes of a value.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: It has a part that no other process can
            have, such as a function.
    """
    return pickle.dumps(value, protocol=5)


def load_value(data: bytes) -> Any:
    """The value that bytes were made of.

    Raises:
        pickle.UnpicklingError: It has a part that is neither Quark's, numpy's nor Python's.
    """
    return _Unpickler(io.BytesIO(data)).load()


_MAIN = "__main__"
_HELP = (
    "its `open` is not a function that another process can import, so it cannot have its own "
    "process. Define it as a module-level function, or declare the backend with "
    "own_process=False. It then runs in the training process and can end it"
)


def describe_opener(definition: BackendDefinition) -> tuple[str, str] | None:
    """Where another process finds a backend; None where it cannot.

    Returns:
        Its function as `module:name` and "", or "" and the plugin that
        declares it as `module:object`.
    """
    opener = definition.open
    module = str(getattr(opener, "__module__", ""))
    name = str(getattr(opener, "__qualname__", ""))
    if module != _MAIN and getattr(sys.modules.get(module), name, None) is opener:
        return f"{module}:{name}", ""
    if definition.plugin is not None and definition.plugin.partition(":")[0] != _MAIN:
        return "", definition.plugin
    return None


def refuse_hidden(definition: BackendDefinition) -> None:
    """Refuse a backend that is to have a process of its own, and that no other process finds.

    Raises:
        BackendContractError: It is such a one.
    """
    if definition.own_process and describe_opener(definition) is None:
        raise BackendContractError(f"backend {definition.name!r}: {_HELP}", backend=definition.name)


def load_definition(definition: BackendDefinition, opener: str, plugin: str) -> BackendDefinition:
    """In the other process: the definition with the function that opens it.

    Args:
        definition: It, with any function.
        opener: What `describe_opener` returned.
        plugin: Likewise.

    Raises:
        BackendContractError: The plugin does not declare it here.
    """
    if opener:
        module, _, name = opener.partition(":")
        return replace(definition, open=getattr(importlib.import_module(module), name))
    from importlib.metadata import EntryPoint

    from quark_core.backends.registry import BackendRegistry
    from quark_core.hookspecs import ENTRY_POINT_GROUP

    point = EntryPoint(definition.name, plugin, ENTRY_POINT_GROUP)
    registry = BackendRegistry.discover([point])
    return replace(definition, open=registry.find(definition.name).open)


# The helper's end: what such a process does first and last.
#
# It lets training go first where cores are scarce, as long as there is training.

_NICENESS = 10
_OUT_OF_MEMORY_SCORE = 500
# Linux lets a user ask once in 0.1 s, whichever process asks.
_TRIES = 8
_TRY_EVERY_S = 0.11


def lower_priority(*, is_nice: bool = True) -> None:
    """Make this process nicer than the one that started it, and the first to go for its memory.

    Args:
        is_nice: False for the latter alone.
    """
    if is_nice and hasattr(os, "nice"):  # Windows has none
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)
        _set_session(os.getpid(), _NICENESS)
    with contextlib.suppress(OSError):  # only Linux has it
        # Where memory runs out, training is not what the system ends.
        Path("/proc/self/oom_score_adj").write_text(str(_OUT_OF_MEMORY_SCORE))


def lower_started() -> None:
    """Lower the priority of the child processes that started sessions of their own.

    They inherit the niceness of their parent, but not that of its session.
    """
    import psutil

    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            _set_session(process.pid, _NICENESS)


def restore_priority(pid: int) -> None:
    """Let a helper, and what it has started, have its share again: it is waited for.

    Where this user may not make processes less nice, their sessions are, as far as
    the system has such.
    """
    if sys.platform == "win32" or not hasattr(os, "nice"):  # Windows has none
        return
    import psutil

    own, own_session = os.nice(0), _find_session_niceness()
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            _set_session(process.pid, own_session)
            with contextlib.suppress(psutil.Error, OSError):
                # On Linux each thread has its own.
                for thread in process.threads():
                    os.setpriority(os.PRIO_PROCESS, thread.id, own)


def _find_session_niceness() -> int:
    """That of this process's own session; 0 where the system has none."""
    try:
        return int(Path("/proc/self/autogroup").read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


def _set_session(pid: int, niceness: int) -> None:
    """Set that of the session that a process leads.

    Linux shares cores among sessions first (`sched_autogroup_enabled`), and the
    niceness of a process counts among those of its session only.
    """
    if not hasattr(os, "getsid"):  # Windows has none
        return
    path = Path(f"/proc/{pid}/autogroup")
    with contextlib.suppress(OSError):
        if not path.exists() or os.getsid(pid) != pid:
            return
        for _ in range(_TRIES):
            try:
                path.write_text(str(niceness))
            except BlockingIOError:
                time.sleep(_TRY_EVERY_S)
            else:
                return


_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")


def serve_parent(serve: Callable[[RawIOBase, RawIOBase], int], *, is_nice: bool = True) -> NoReturn:
    """Run a helper process, and end it as soon as it has served.

    Signals are left to the process that started it. Standard input and output
    are the pipes to that one, and null devices to everybody else in here.

    Args:
        serve: Reads messages from its first argument and answers on its
            second; returns the exit status.
        is_nice: Whether the process that started it goes first where cores are scarce.
    """
    for name in _IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    lower_priority(is_nice=is_nice and AS_EQUAL not in sys.argv)
    faulthandler.enable()
    source = os.fdopen(os.dup(0), "rb", buffering=0)
    target = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        # The end of this process is the end of the pipes, whatever a library has forked.
        os.register_at_fork(after_in_child=lambda: _forget(source, target))
    status = serve(source, target)
    sys.stderr.flush()
    # Handlers of libraries at exit could wait for a server for ever.
    os._exit(status)


def _forget(*streams: RawIOBase) -> None:
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()


def extend_import_path(paths: Iterable[str]) -> None:
    """Let this process import what the one that started it can."""
    known = set(sys.path)
    sys.path += [path for path in paths if path and path not in known]
