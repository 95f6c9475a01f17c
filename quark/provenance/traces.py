"""Traced functions of runs, read back: which version of its code each of them had.

Here texts are parsed, and never where they were recorded.
"""

from __future__ import annotations

import ast
import functools
import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quark.provenance.code_fingerprints import fingerprint_tree
from quark.provenance.normal_form import (
    LEVEL_BYTES,
    LEVEL_SYNTAX,
    UnreadableSourceError,
    digest_source,
    parse_source,
)
from quark.provenance.tracing import TRACE_MARK
from quark_core.backends.contract import SupportsRead
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.query import Query

_CODE = "code"
_LOCALS = "<locals>"
_MOST_NAMES = 16
_MOST_PARTS = 32
_MOST_KNOWN = 2_048


@dataclass(frozen=True, slots=True)
class TraceDigest:
    """Which version of a traced function a run had.

    Attributes:
        name: What it is traced as.
        digest: Equal digests of one level say that the function does the same.
        level: syntax: of its normal form; text: of its text, comments and all, since no more
            was kept; bytecode: of what one version of Python made of it.
        module, qualname: Where it was defined.
        file: The file that it was in, or None.
        text: Its text, decorators included, or None where none was kept.
        is_redacted: A secret in the text was replaced: the digest is of that text too.
        attempt: Which attempt of the run had it.
    """

    name: str
    digest: str
    level: str
    module: str
    qualname: str
    file: str | None = None
    text: str | None = None
    is_redacted: bool = False
    attempt: int = 0

    @property
    def version(self) -> str:
        """What tells versions apart: level and digest in one."""
        return f"{self.level}:{self.digest}"


def read_traces(reader: SupportsRead, run_id: str) -> dict[str, TraceDigest]:
    """The traced functions of a run by name, as its newest attempt had them.

    Raises:
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be read.
    """
    columns = reader.read(run_id, FingerprintRecord.KIND, Query())
    found: dict[str, TraceDigest] = {}
    for row in zip(
        *(columns[name] for name in ("subject", "key", "digest", "level", "metadata", "attempt")),
        strict=True,
    ):
        subject, key, digest, level, metadata, attempt = row
        if subject != _CODE or not isinstance(metadata, Mapping) or not metadata.get(TRACE_MARK):
            continue
        known = found.get(key)
        if known is None or attempt >= known.attempt:
            found[key] = _restore(key, digest, level, metadata, attempt)
    return found


def _restore(
    name: str, digest: str, level: str, metadata: Mapping[str, Any], attempt: int
) -> TraceDigest:
    # A run may be somebody else's: its metadata are texts of any kind, or none.
    text = metadata.get("text")
    text = text if isinstance(text, str) else None
    qualname = str(metadata.get("qualname") or "")
    listed = metadata.get("names")
    names = tuple(map(str, listed[:_MOST_NAMES])) if isinstance(listed, list | tuple) else ()
    is_redacted = bool(metadata.get("is_redacted"))
    if text is not None:
        own, own_level = digest_function(text, qualname, names)
        if own_level == LEVEL_SYNTAX:
            # What was taken out of the text is in the digest of what it was.
            digest, level = (f"{own}+{digest[:16]}" if is_redacted else own), LEVEL_SYNTAX
    file = metadata.get("file")
    return TraceDigest(
        name=name,
        digest=digest,
        level=level,
        module=str(metadata.get("module") or ""),
        qualname=qualname,
        file=file if isinstance(file, str) else None,
        text=text,
        is_redacted=is_redacted,
        attempt=attempt,
    )


@functools.lru_cache(maxsize=_MOST_KNOWN)
def digest_function(text: str, qualname: str, names: tuple[str, ...] = ()) -> tuple[str, str]:
    """Digest of one function's normal form, out of its text as it stands in its file.

    It is the digest that the function's unit has in the fingerprint of its module, but for
    functions in functions, which are no units.

    Args:
        text: Its lines, decorators first, indented as they are in the file.
        qualname: Its qualified name, which says which classes it is in.
        names: What its module calls Quark, or the decorator: `@quark.trace` is left out.

    Returns:
        The digest and its level: `syntax`, or `bytes` where the text cannot be read.
    """
    try:
        # Lines keep their indentation: it is part of texts that go over several lines.
        tree = parse_source(f"if 1:\n{text}" if text[:1] in " \t" else text)
    except UnreadableSourceError:
        return digest_source(text)[0], LEVEL_BYTES
    body = tree.body
    if text[:1] in " \t" and len(body) == 1 and isinstance(body[0], ast.If):
        body = body[0].body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        # A lambda: what stands in its lines is all that is known of it.
        return digest_source(ast.Module(body=body, type_ignores=[]))
    wanted = body[0].name
    for owner in reversed(_list_classes(qualname)):
        (around,) = ast.parse(f"class {owner}: pass").body
        assert isinstance(around, ast.ClassDef)
        around.body = body
        body, wanted = [around], f"{around.name}.{wanted}"
    imports: list[ast.stmt] = []
    for name in names:
        if _is_name(name):
            imports += ast.parse(f"import quark as {name}\nfrom quark import trace as {name}").body
    whole = ast.Module(body=[*imports, *body], type_ignores=[])
    unit = fingerprint_tree(whole).find(wanted)
    assert unit is not None
    return unit.digest, LEVEL_SYNTAX


def _list_classes(qualname: str) -> list[str]:
    """The classes that a function is in, the outermost first."""
    parts = qualname.split(".")[-_MOST_PARTS:]
    if _LOCALS in parts:
        parts = parts[len(parts) - parts[::-1].index(_LOCALS) :]
    return [part for part in parts[:-1] if _is_name(part)]


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)
