"""The versions of a traced function in the runs of a project, with their results."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from quark.analysis.health import has_result
from quark.analysis.run_search import choose_mode
from quark.provenance.code_changes import CodeChange, compare_sources, count_changed_lines
from quark.provenance.code_fingerprints import CodeReach, FingerprintCache
from quark.provenance.sources import SourceSnapshot, read_sources
from quark.provenance.traces import TraceDigest, read_traces
from quark_core.backends.contract import SupportsRead
from quark_core.backends.run_summary import RunSummary
from quark_core.config.arguments import check_label, resolve_storage_dir
from quark_core.config.objective import ObjectiveMode
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.runs.backend_choice import open_reader
from quark_core.runs.run_ids import name_store
from quark_core.runs.run_search import build_search, find_runs

_MOST_CODES = 50
_PYTHON = ".py"


@dataclass(frozen=True, slots=True)
class TraceVersion:
    """One version of a traced function.

    Attributes:
        trace: Digest of the function in the first run that had this version.
        runs: IDs of the runs that had it, oldest first.
        first_seen, last_seen: Start of the first and the last of these runs.
        lines: Number of lines that differ from the previous version, without comments. None for the
            first version, or if the source was not stored.
        called: Changes in functions that it calls by name, directly or indirectly. None if the
            source was not stored.
        reach_versions: Number of versions of the called code in these runs, or None if unknown.
            More than one means that called code changed.
        count: Number of runs that have the metric.
        mean, best: Mean and best value of the metric, or None.
    """

    trace: TraceDigest
    runs: tuple[str, ...]
    first_seen: str
    last_seen: str
    lines: int | None = None
    called: tuple[CodeChange, ...] | None = None
    reach_versions: int | None = None
    count: int = 0
    mean: float | None = None
    best: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the version as a new dict of JSON values."""
        return {
            "digest": self.trace.digest,
            "level": self.trace.level,
            "module": self.trace.module,
            "qualname": self.trace.qualname,
            "runs": list(self.runs),
            "first_seen": self.first_seen,
            "last_seen": self.last_seen,
            "lines": self.lines,
            "called": None if self.called is None else [each.describe() for each in self.called],
            "reach_versions": self.reach_versions,
            "metric": {"count": self.count, "mean": self.mean, "best": self.best},
        }


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """All versions of one traced function in a project.

    Attributes:
        name: Name of the trace.
        metric: Metric of the statistics, or None.
        versions: Versions, by first run.
    """

    name: str
    metric: str | None
    versions: tuple[TraceVersion, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as a new dict of JSON values."""
        return {
            "name": self.name,
            "metric": self.metric,
            "versions": [version.to_dict() for version in self.versions],
        }


def trace_statistics(
    project: str,
    name: str | None = None,
    *,
    metric: str | None = None,
    mode: ObjectiveMode | None = None,
    storage_dir: str | Path | None = None,
) -> tuple[TraceStatistics, ...]:
    """List the versions of traced functions and the results of their runs.

    Args:
        project: Name of the project.
        name: Name of one traced function. Defaults to all, sorted by name.
        metric: Metric for the results. The last value of each run is used. Non-finite values and
            failed or lost runs are ignored.
        mode: "min" or "max". Defaults to the direction implied by the metric's name.
        storage_dir: Folder of the `.quark` store. Defaults to the working directory, or the nearest
            parent that has a store.

    Raises:
        SchemaValidationError: An argument is invalid, or no run of the project has a function of
            this name.
        SessionStoreError: The store does not exist, or cannot be read.
    """
    reader = open_reader(resolve_storage_dir(storage_dir))
    try:
        return collect_statistics(reader, project, name, metric=metric, mode=mode)
    finally:
        reader.close()


def collect_statistics(
    reader: SupportsRead,
    project: str,
    name: str | None = None,
    *,
    metric: str | None = None,
    mode: ObjectiveMode | None = None,
) -> tuple[TraceStatistics, ...]:
    """As `trace_statistics`, of a reader that is open."""
    check_label(project, "project")
    if name is not None:
        check_label(name, "name")
    wished = None if metric is None else choose_mode(metric, mode)
    runs = find_runs(reader, build_search(project=project, archived=True))
    runs.sort(key=lambda run: (run.stored.run.created_at, run.run_id))
    seen: dict[str, list[_Seen]] = {}
    for run in runs:
        for key, trace in read_traces(reader, run.run_id).items():
            if name in (None, key):
                seen.setdefault(key, []).append(_Seen(run, trace))
    if name is not None and not seen:
        raise SchemaValidationError(
            f"no run of project {project[:60]!r} in {name_store(reader)} has a traced function "
            f"{name[:60]!r}"
        )
    codes = _Codes(reader)
    return tuple(
        TraceStatistics(key, metric, tuple(_list_versions(seen[key], codes, metric, wished)))
        for key in sorted(seen)
    )


@dataclass(slots=True)
class _Seen:
    run: RunSummary
    trace: TraceDigest


def _list_versions(
    seen: Iterable[_Seen], codes: _Codes, metric: str | None, mode: ObjectiveMode | None
) -> Iterator[TraceVersion]:
    versions: dict[str, list[_Seen]] = {}
    for each in seen:
        versions.setdefault(each.trace.version, []).append(each)
    before: list[_Seen] | None = None
    for members in versions.values():
        first = members[0]
        figures = [] if metric is None else list(_list_figures(members, metric))
        reached = [codes.digest_reach(each) for each in members]
        yield TraceVersion(
            trace=first.trace,
            runs=tuple(each.run.run_id for each in members),
            first_seen=first.run.stored.run.created_at,
            last_seen=members[-1].run.stored.run.created_at,
            lines=None if before is None else _count_lines(before[-1].trace, first.trace),
            called=() if before is None else codes.compare_reach(before[-1], first),
            reach_versions=None if None in reached else len(set(reached)),
            count=len(figures),
            mean=math.fsum(figures) / len(figures) if figures else None,
            best=(min(figures) if mode == "min" else max(figures)) if figures else None,
        )
        before = members


def _list_figures(members: Iterable[_Seen], metric: str) -> Iterator[float]:
    for each in members:
        figures = each.run.metrics.get(metric) if has_result(each.run.stored) else None
        if figures is not None and figures.last is not None and math.isfinite(figures.last):
            yield figures.last


def _count_lines(before: TraceDigest, after: TraceDigest) -> int | None:
    if before.text is None or after.text is None:
        return None
    return count_changed_lines(before.text, after.text)


def diff_versions(before: TraceVersion, after: TraceVersion) -> tuple[str, ...]:
    """The lines that two versions differ in, as `diff -u` has them; none without their texts."""
    one, two = before.trace.text, after.trace.text
    if one is None or two is None:
        return ()
    return tuple(difflib.unified_diff(one.splitlines(), two.splitlines(), lineterm="", n=2))


@dataclass(slots=True)
class _Code:
    kept: SourceSnapshot
    reach: CodeReach


@dataclass(slots=True)
class _Codes:
    """The kept sources of runs, each state of the code once."""

    reader: SupportsRead
    cache: FingerprintCache = field(default_factory=FingerprintCache)
    known: dict[str, _Code | None] = field(default_factory=dict)
    changes: dict[tuple[str, str], tuple[CodeChange, ...]] = field(default_factory=dict)

    def find(self, run: RunSummary) -> _Code | None:
        digest = run.stored.digests.code
        if digest is None:
            return None
        if digest not in self.known:
            self.known[digest] = self._read(run) if len(self.known) < _MOST_CODES else None
        return self.known[digest]

    def _read(self, run: RunSummary) -> _Code | None:
        try:
            kept = read_sources(self.reader, run.run_id)
        except QuarkError:
            return None
        texts = {file.path: file.text for file in kept.files if file.path.endswith(_PYTHON)}
        if not texts or None in texts.values():
            return None
        modules = {
            path: self.cache.fingerprint(text) for path, text in texts.items() if text is not None
        }
        return _Code(kept, CodeReach(modules))

    def find_place(self, code: _Code, trace: TraceDigest) -> str | None:
        """The file of a traced function, as its run's sources call it."""
        if trace.file is None:
            return None
        file, root = PurePath(trace.file), PurePath(code.kept.root)
        if file.is_relative_to(root):
            path = file.relative_to(root).as_posix()
            return path if path in code.kept else None
        return None

    def digest_reach(self, seen: _Seen) -> str | None:
        code = self.find(seen.run)
        path = None if code is None else self.find_place(code, seen.trace)
        if code is None or path is None:
            return None
        return code.reach.digest(path, seen.trace.qualname)

    def compare_reach(self, before: _Seen, after: _Seen) -> tuple[CodeChange, ...] | None:
        """What changed in what the function reaches, itself left out."""
        one, two = self.find(before.run), self.find(after.run)
        if one is None or two is None:
            return None
        labels: set[str] = set()
        for code, seen in ((one, before), (two, after)):
            path = self.find_place(code, seen.trace)
            if path is None:
                return None
            reached = code.reach.find(path, seen.trace.qualname)
            labels.update(place.label for place in reached[1:])
        key = (one.kept.digest, two.kept.digest)
        if key not in self.changes:
            self.changes[key] = compare_sources(one.kept.files, two.kept.files, self.cache)
        return tuple(change for change in self.changes[key] if change.place in labels)
