"""What a process and the helper that hosts one of its backends say to each other, and how.

The process sends one message and reads one reply; nothing comes unasked.

A message is a length of four bytes, then msgpack. Of arguments and results
only what Quark, numpy and Python's own types are made of comes back: a class
of the plugin would have to be imported here, which is what the helper is to
keep out.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping
from io import RawIOBase
from typing import Any, TypeVar

import msgspec

from quark_core.backends.contract import Batch
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
            f"{module}.{name} is no type that a backend may be given or give back"
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
