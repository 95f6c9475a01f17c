"""The code that runs were made of: what is kept, the text of a file, what two runs differ in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.page.routes.comparisons import read_sides
from quark.page.routes.parameters import MAX_ROWS, Parameters
from quark.provenance.sources import (
    REDACTED,
    count_equal,
    diff_sources,
    list_attempts,
    read_git_changes,
    read_source,
    read_sources,
)
from quark_core.errors import ArtifactNotFoundError, SchemaValidationError
from quark_core.system.terminal_text import clean_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quark.page.routes.page_source import PageSource
    from quark.provenance.sources import SourceDiff, SourceFile, SourceSnapshot

_ROWS = 100
_MOST_CHARACTERS = 200_000
_MOST_TOLD = 50
_MOST_DIFFS = 500
_MOST_LINES = 5_000
_LINE_CHARACTERS = 2_000
_GIT_DIFF_NAME = "git.diff"


def list_sources(source: PageSource, run_id: str, parameters: Parameters) -> dict[str, Any]:
    """A page of the files of a run, and what is known of them all.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    attempt = parameters.get_integer("attempt")
    text = (parameters.get_text("text") or "").lower()
    after = parameters.get_text("after")
    limit = parameters.get_bounded("limit", _ROWS, MAX_ROWS)
    source.load_run(run_id)
    try:
        kept = read_sources(source.reader, run_id, attempt=attempt, texts=False)
    except ArtifactNotFoundError as error:
        return {"note": str(error), "files": [], "count": 0, "next": None, "attempts": []}
    found = sorted((f for f in kept.files if text in f.path.lower()), key=lambda file: file.path)
    rest = [file for file in found if after is None or file.path > after]
    shown = rest[:limit]
    return {
        "note": None,
        "attempt": kept.attempt,
        "attempts": list(list_attempts(source.reader, run_id)),
        "digest": kept.digest,
        "root": kept.root,
        "main": kept.main,
        "entry": kept.entry,
        "files": [_describe_kept(file, kept) for file in shown],
        "next": shown[-1].path if len(rest) > len(shown) else None,
        "count": len(found),
        "total": len(kept.files),
        "size_bytes": sum(file.size_bytes for file in kept.files),
        "left_out": _list_left_out(kept.left_out),
        "outside": list(kept.outside)[:_MOST_TOLD],
        "has_git_diff": read_git_changes(source.reader, run_id, attempt=kept.attempt) is not None,
    }


def _list_left_out(left_out: Mapping[str, str]) -> list[dict[str, str]]:
    told = sorted(left_out.items())[:_MOST_TOLD]
    return [{"name": name, "reason": reason} for name, reason in told]


def _describe_kept(file: SourceFile, kept: SourceSnapshot) -> dict[str, Any]:
    return {
        "id": file.path,
        **_describe(file),
        "is_kept": file.reason in (None, REDACTED),
        "is_main": file.path == kept.main,
        "is_changed": file.path in kept.changed,
    }


def _describe(file: SourceFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "size_bytes": file.size_bytes,
        "sha256": file.sha256,
        "reason": file.reason,
    }


def tell_source(source: PageSource, run_id: str, parameters: Parameters) -> dict[str, Any]:
    """The text of one file, as far as a page shows it.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
        ArtifactNotFoundError: The run has no such file.
    """
    attempt = parameters.get_integer("attempt")
    source.load_run(run_id)
    if parameters.get_flag("git_diff"):
        text = read_git_changes(source.reader, run_id, attempt=attempt)
        if text is None:
            raise ArtifactNotFoundError(f"run {run_id} has no diff of a git tree")
        said = {"path": _GIT_DIFF_NAME, "size_bytes": len(text), "sha256": None, "reason": None}
        return {**said, **_cut(text)}
    path = parameters.get_text("path")
    if path is None:
        raise SchemaValidationError("path must name a file of the run's sources")
    file = read_source(source.reader, run_id, path, attempt=attempt)
    if file is None:
        raise ArtifactNotFoundError(f"run {run_id} has no source file with this path")
    return {**_describe(file), **_cut(file.text)}


def _cut(text: str | None) -> dict[str, Any]:
    if text is None:
        return {"text": None, "is_cut": False}
    shown = clean_text(text[:_MOST_CHARACTERS].replace("\r\n", "\n"))
    return {"text": shown, "is_cut": len(text) > _MOST_CHARACTERS}


def describe_source_diffs(source: PageSource, parameters: Parameters) -> dict[str, Any]:
    """Which files of the code the first runs of two sides differ in.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    judged, baseline = _read_pair(source, parameters)
    said = {"judged": judged, "baseline": baseline}
    try:
        before, after = (
            read_sources(source.reader, run_id, texts=False) for run_id in (baseline, judged)
        )
    except ArtifactNotFoundError as error:
        return {**said, "state": "failed", "note": str(error), "files": [], "count": 0}
    found = diff_sources(before, after)
    return {
        **said,
        "state": "computed",
        "note": None,
        "is_equal": before.digest == after.digest,
        "same_count": count_equal(before, after),
        "count": len(found),
        "files": [_describe_diff(diff) for diff in found[:_MOST_DIFFS]],
    }


def _describe_diff(diff: SourceDiff) -> dict[str, Any]:
    return {
        "path": diff.path,
        "kind": diff.kind,
        "old_path": None if diff.before is None else diff.before.path,
        "before": None if diff.before is None else _describe(diff.before),
        "after": None if diff.after is None else _describe(diff.after),
    }


def tell_source_diff(source: PageSource, parameters: Parameters) -> dict[str, Any]:
    """What one file of the code of two sides' first runs differs in, line by line.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
        ArtifactNotFoundError: It is no file in which they differ.
    """
    judged, baseline = _read_pair(source, parameters)
    path = parameters.get_text("path")
    if path is None:
        raise SchemaValidationError("path must name a file of the runs' sources")
    sides = [read_sources(source.reader, each, texts=False) for each in (baseline, judged)]
    found = next((diff for diff in diff_sources(*sides) if diff.path == path), None)
    if found is None:
        raise ArtifactNotFoundError("these runs have no different source file with this path")
    texts = [
        None if file is None else read_source(source.reader, run_id, file.path)
        for run_id, file in ((baseline, found.before), (judged, found.after))
    ]
    old, new = ({} if file is None else {path: file} for file in texts)
    lines = next((diff.lines for diff in diff_sources(old, new)), ())
    reasons = {file.reason for file in texts if file is not None and file.reason}
    note = None
    if not lines:
        note = "; ".join(sorted(reasons)) or "it has a different path and the same content"
    return {
        "path": path,
        "kind": found.kind,
        "lines": [clean_text(line[:_LINE_CHARACTERS]) for line in lines[:_MOST_LINES]],
        "is_cut": len(lines) > _MOST_LINES or any(len(each) > _LINE_CHARACTERS for each in lines),
        "note": note,
    }


def _read_pair(source: PageSource, parameters: Parameters) -> tuple[str, str]:
    sides = read_sides(source, parameters, may_be_known=True)
    if len(sides) != 2:
        raise SchemaValidationError(f"side must name two sides, got {len(sides)}")
    return sides[0].ids[0], sides[1].ids[0]
