"""`quark.trace`: functions whose code, and optionally outputs, a run records."""

from __future__ import annotations

import functools
import hashlib
import inspect as inspection
import itertools
import linecache
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar, overload

from quark.provenance.fingerprint_writer import find_writer
from quark_core.config.arguments import check_label, describe_argument
from quark_core.config.redaction import redact_code
from quark_core.errors import SchemaValidationError
from quark_core.records.kinds.provenance import SOURCES_KEY
from quark_core.runs.open_run import OpenRun, open_runs

# The traced functions of this process: what they are called, and where they stand.
#
# Nothing is parsed here: a text is cut out of its file by the lines that its code object names.

TRACE_MARK = "traced"
"""Place in the metadata of a fingerprint that says that it is of a traced function."""
LEVEL_TEXT = "text"
"""The digest is of the function's text, comments and all."""
LEVEL_BYTECODE = "bytecode"
"""The digest is of what the text was compiled to: there was no text."""
MOST_TEXT_CHARACTERS = 60_000

_MOST_FUNCTIONS = 1_000
_log = logging.getLogger("quark")


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """One function under `@quark.trace`.

    Attributes:
        name: What it is traced as.
        module, qualname: Where it was defined, as Python says.
        code: Its code object, or None of what has none, such as a function of C.
        names: What the module calls Quark and its decorator.
    """

    name: str
    module: str
    qualname: str
    code: CodeType | None
    names: tuple[str, ...] = ()


_lock = threading.Lock()
_traced: dict[tuple[str, str, str], TracedFunction] = {}
_state = {"is_full": False}


def note_traced(traced: TracedFunction) -> None:
    """Remember a function; one that is defined again takes the place of the former.

    Threads: any. Never raises.
    """
    place = (traced.name, traced.module, traced.qualname)
    with _lock:
        if place not in _traced and len(_traced) >= _MOST_FUNCTIONS:
            is_first, _state["is_full"] = not _state["is_full"], True
        else:
            is_first = False
            _traced[place] = traced
    if is_first:
        _log.warning(
            "%d functions are decorated with quark.trace; %r and later ones are not recorded",
            _MOST_FUNCTIONS,
            traced.name[:60],
        )


def list_traced() -> tuple[TracedFunction, ...]:
    """All traced functions that this process has defined so far."""
    with _lock:
        return tuple(_traced.values())


def describe_function(
    traced: TracedFunction, *, with_text: bool = True
) -> tuple[str, str, dict[str, Any]] | None:
    """Digest, level and metadata of a function's fingerprint; None where nothing is known of it.

    Where `with_text` asks for it, the text is in the metadata, with secrets taken out, unless it
    has more than 60,000 characters; the digest is of the text as it was. May read the file.
    """
    code = traced.code
    metadata: dict[str, Any] = {
        TRACE_MARK: True,
        "module": traced.module,
        "qualname": traced.qualname,
        "names": list(traced.names),
    }
    if code is None:
        return None
    first, last = code.co_firstlineno, _find_last_line(code)
    metadata |= {"file": code.co_filename, "first_line": first, "last_line": last}
    lines = _read_lines(code.co_filename, traced.module)[first - 1 : last] if first > 0 else []
    text = "".join(lines)
    if len(lines) < last - first + 1 or not text.strip():
        metadata["python"] = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return _digest_code(code), LEVEL_BYTECODE, metadata
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    if with_text and len(text) <= MOST_TEXT_CHARACTERS:
        shown = redact_code(text)
        metadata["text"] = shown
        metadata["is_redacted"] = shown != text
    return digest, LEVEL_TEXT, metadata


def _read_lines(file: str, module: str) -> list[str]:
    namespace = getattr(sys.modules.get(module), "__dict__", None)
    try:
        return linecache.getlines(file, namespace)
    except (OSError, ValueError, UnicodeError, SyntaxError, MemoryError):
        return []


def _find_last_line(code: CodeType) -> int:
    last = code.co_firstlineno
    pending = [code]
    while pending:
        at = pending.pop()
        last = max([last, *(place[1] for place in at.co_positions() if place[1] is not None)])
        pending += [each for each in at.co_consts if isinstance(each, CodeType)]
    return last


def _digest_code(code: CodeType) -> str:
    """Of what is run, wherever it stands: equal for one text on one version of Python."""
    whole = hashlib.sha256()
    pending = [code]
    while pending:
        at = pending.pop()
        constants = [
            sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each)
            for each in at.co_consts
            if not isinstance(each, CodeType)
        ]
        names = (at.co_names, at.co_varnames, at.co_freevars, at.co_cellvars, constants)
        whole.update(at.co_code + repr((names, at.co_flags, at.co_argcount)).encode())
        pending += [each for each in at.co_consts if isinstance(each, CodeType)]
    return whole.hexdigest()


_Function = TypeVar("_Function", bound=Callable[..., Any])

_FIRST_CALLS = 4


@overload
def trace(name: _Function, /) -> _Function: ...


@overload
def trace(
    name: str | None = None,
    *,
    output: bool = False,
    init: Callable[[], object] | None = None,
    inspect: Callable[[Any], object] | None = None,
) -> Callable[[_Function], _Function]: ...


def trace(
    name: Any = None,
    *,
    output: bool = False,
    init: Callable[[], object] | None = None,
    inspect: Callable[[Any], object] | None = None,
) -> Any:
    """Record in each run which version of a function's code it used.

    `quark traces` lists the versions. Without `output` and `init`, the function is returned
    unchanged and calls have no overhead. Comments, layout and local variable names do not change
    the version. Each run of this process records the function, even if it does not call it.

    Args:
        name: Name of the trace. Defaults to the qualified name of the function.
        output: Whether to fingerprint the return value, as `session.fingerprint` does, in the run
            opened last. Calls 0 to 3 of a run and calls at powers of two are included. For a
            generator, the yielded values are used. For a coroutine, the awaited result is used.
        init: Function called before each call, for example to set a seed. Its exceptions propagate.
        inspect: Function that selects the part of the result to fingerprint. Needs `output`.

    Raises:
        SchemaValidationError: An argument is invalid, or the object is not a function.

    Example:
        @quark.trace("train_step")
        def train_step(model, batch): ...
    """
    if callable(name) or isinstance(name, staticmethod | classmethod):
        return _Decorator(None, False, None, None)(name)
    if not isinstance(output, bool):
        raise SchemaValidationError(
            f"output must be True or False, got {describe_argument(output)}"
        )
    for argument, given in (("init", init), ("inspect", inspect)):
        if given is not None and not callable(given):
            raise SchemaValidationError(
                f"{argument} must be a function, got {describe_argument(given)}"
            )
    if inspect is not None and not output:
        raise SchemaValidationError(
            "inspect selects the parts of the output to record: add output=True"
        )
    return _Decorator(None if name is None else _check_name(name), output, init, inspect)


def _check_name(name: object) -> str:
    checked = check_label(name, "name")
    if checked == SOURCES_KEY:
        raise SchemaValidationError(f"name must not be {SOURCES_KEY!r}, a reserved name")
    return checked


class _Decorator:
    def __init__(
        self,
        name: str | None,
        output: bool,
        init: Callable[[], object] | None,
        inspect: Callable[[Any], object] | None,
    ) -> None:
        self._name, self._output, self._init, self._inspect = name, output, init, inspect

    def __call__(self, target: Any) -> Any:
        if isinstance(target, staticmethod | classmethod):
            return type(target)(self(target.__func__))
        if isinstance(target, type) or not callable(target):
            raise SchemaValidationError(
                f"quark.trace decorates functions and methods, not {describe_argument(target)}"
            )
        qualname = _find_name(target)
        name = self._name or _check_name(qualname.replace("<locals>.", ""))
        _note(name, qualname, target)
        if not self._output and self._init is None:
            return target
        watch = _OutputWatch(name, self._inspect) if self._output else None
        return _wrap(target, watch, self._init)


def _find_name(target: Any) -> str:
    try:
        return str(target.__qualname__)
    except Exception:  # noqa: BLE001 - an object may answer with anything
        return type(target).__qualname__


def _note(name: str, qualname: str, target: Any) -> None:
    try:
        inner = inspection.unwrap(target)
        code = getattr(getattr(inner, "__func__", inner), "__code__", None)
        namespace = getattr(inner, "__globals__", {})
        quark = sys.modules.get("quark")
        names = [
            each
            for each, value in list(namespace.items())
            if value is trace or (quark is not None and value is quark)
        ]
        module = str(getattr(inner, "__module__", "") or "")
        own = str(getattr(inner, "__qualname__", qualname))
        note_traced(TracedFunction(name, module, own, code, tuple(names)))
    except Exception as error:  # noqa: BLE001 - the module must be imported all the same
        _log.warning("the function %r is not traced: %s", name, error)


def _wrap(
    target: Any, watch: _OutputWatch | None, init: Callable[[], object] | None
) -> Callable[..., Any]:
    take = _take_nothing if watch is None else watch.take
    if inspection.isasyncgenfunction(target):
        if init is None:
            # What it yields is not looked at: it would have to be awaited in its place.
            return target  # type: ignore[no-any-return]
        watch, take = None, _take_nothing
    if inspection.iscoroutinefunction(target):

        @functools.wraps(target)
        async def traced(*args: Any, **arguments: Any) -> Any:
            if init is not None:
                init()
            result = await target(*args, **arguments)
            take(result)
            return result

    elif inspection.isgeneratorfunction(target):

        @functools.wraps(target)
        def traced(*args: Any, **arguments: Any) -> Any:
            if init is not None:
                init()
            if watch is None:
                return target(*args, **arguments)
            return _relay(target(*args, **arguments), take)

    else:

        @functools.wraps(target)
        def traced(*args: Any, **arguments: Any) -> Any:
            if init is not None:
                init()
            result = target(*args, **arguments)
            take(result)
            return result

    # A compiler of functions that cannot take the wrapper takes what is in it.
    traced.__script_if_tracing_wrapper = True  # type: ignore[attr-defined]
    traced.__original_fn = target  # type: ignore[attr-defined]
    return traced


def _take_nothing(_result: object) -> None:
    pass


def _relay(inner: Generator[Any, Any, Any], take: Callable[[Any], None]) -> Any:
    """A generator that yields, takes and returns what the inner one does."""
    step: Callable[[], Any] = functools.partial(next, inner)
    while True:
        try:
            item = step()
        except StopIteration as end:
            return end.value
        take(item)
        try:
            sent = yield item
        except GeneratorExit:
            inner.close()
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to the inner one
            step = functools.partial(inner.throw, error)
        else:
            step = functools.partial(inner.send, sent)


class _OutputWatch:
    """Which calls of one function are looked at, in the run opened last."""

    def __init__(self, name: str, inspect: Callable[[Any], object] | None) -> None:
        self._name, self._inspect = name, inspect
        # Counters that one call advances: a lock would be held by nobody in a forked child, and
        # by the very thread that a signal handler has stopped.
        self._calls: weakref.WeakKeyDictionary[OpenRun, itertools.count[int]]
        self._calls = weakref.WeakKeyDictionary()
        self._has_warned = False

    def take(self, result: Any) -> None:
        """Look at a result, if it is the turn; never raises."""
        try:
            if _is_compiling():
                # What is written down here would become a part of what is compiled.
                return
            sessions = open_runs.peek_sessions()
            if not sessions:
                return
            run = sessions[-1].open_run
            calls = self._calls.get(run)
            if calls is None:
                calls = self._calls.setdefault(run, itertools.count())
            call = next(calls)
            if call >= _FIRST_CALLS and call & (call - 1):
                return
            if run.is_over or run.refusal is not None or not run.stream.active:
                return
            shown = result if self._inspect is None else self._inspect(result)
            find_writer(run).fingerprint(self._name, shown, None, "sample")
        except Exception as error:  # noqa: BLE001 - a step must not fail for this
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "outputs of %r are skipped: %s: %s", self._name, type(error).__name__, error
                )

    def __getstate__(self) -> tuple[str, Callable[[Any], object] | None]:
        return self._name, self._inspect

    def __setstate__(self, state: tuple[str, Callable[[Any], object] | None]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def _is_compiling() -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing())
