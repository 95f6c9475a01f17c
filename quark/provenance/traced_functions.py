"""The traced functions of this process: what they are called, and where they stand.

Nothing is parsed here: a text is cut out of its file by the lines that its code object names.
"""

from __future__ import annotations

import hashlib
import linecache
import logging
import sys
import threading
from dataclasses import dataclass
from types import CodeType
from typing import Any

from quark_core.config.redaction import redact_code

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
            "%d functions are under quark.trace; %r and later ones are not noted",
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
