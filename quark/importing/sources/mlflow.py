"""Runs of an MLflow server or store, as `quark_backends.mlflow.reader` describes them.

    experiments, params, tags, notes, parents, times, statuses    as there
    metric histories                                              metrics
    artifacts                                                     artifacts: images, tables
                                                                  (`log_table`), files

A run that Quark mirrored there keeps its own id; where the store has it, it is left alone.
Traces, datasets and registered models are not taken.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import msgspec
import xxhash

from quark.importing.neutral_run import (
    PORTION_POINTS,
    ForeignFile,
    ForeignRun,
    ImportFailure,
    Losses,
    Points,
    Portion,
    RunFacts,
)
from quark_core.errors import BackendUnavailable
from quark_core.records import parse_time
from quark_core.records.names import decode_name

if TYPE_CHECKING:
    from quark_backends.mlflow.client import ArtifactFile, MlflowRun, Server

_IMAGES = frozenset("png jpg jpeg gif bmp webp svg tif tiff".split())
_LOGGED_IMAGE = re.compile(
    r"images/(?P<key>.+)([%+])step\2(?P<step>\d+)\2timestamp\2(?P<time>\d+)\2.+"
)
_LOGGED_TAG = "mlflow.loggedArtifacts"
_OWN_FOLDER = "quark/"
_NAME_MAP = "quark/name_map.json"
_MAX_FILES = 10_000
_PORTION_FILES = 32
_PORTION_BYTES = 64 * 2**20

# Where artifacts are that a store on this machine has elsewhere; and those that a server has.
_CLOUDS = frozenset("s3 gs wasb wasbs abfs abfss dbfs hdfs viewfs".split())
_OF_SERVERS = frozenset("http https mlflow-artifacts".split())

_Row = tuple[int, int, float]
"""Time in ms, step and value."""


def find_runs(
    uri: str, *, experiments: Sequence[str] = (), limit: int | None = None
) -> Iterator[ForeignRun]:
    """The runs of a tracking server or store, the oldest first.

    Args:
        uri: Its URI, or a folder of MLflow's.
        experiments: Names of the experiments; all by default.
        limit: So many of the newest runs at most.

    Raises:
        ImportFailure: It cannot be reached, has no such experiment, or MLflow is not installed.
    """
    link = _Link(uri)
    with link.reaching():
        names = dict(link.server.list_experiments())
        missing = sorted(set(experiments) - set(names.values()))
        if missing:
            raise ImportFailure(
                f"{link.server.uri} has no experiment {missing[0]!r}. Its experiments are "
                f"{', '.join(sorted(names.values()))}"
            )
        wanted = [one for one, name in names.items() if not experiments or name in experiments]
        runs = link.server.list_runs(wanted, limit=limit) if wanted else []
    for run in reversed(runs):
        yield ServerRun(link, run, names.get(run.experiment_id, "mlflow"))


class _Link:
    """The server: one that has not answered once is not waited for by every further run."""

    def __init__(self, uri: str) -> None:
        if "://" not in uri and not uri.startswith(("sqlite:", "file:", "databricks")):
            path = Path(uri).expanduser()
            if not path.exists():
                raise ImportFailure(f"{uri} is neither a URI nor an existing folder")
            database = path if path.is_file() else path / "mlflow.db"
            uri = f"sqlite:///{database.resolve()}" if database.is_file() else str(path.resolve())
        from quark_backends.mlflow.client import open_server

        self._folder = _find_folder(uri)
        self._outage: str | None = None
        with self.reaching(uri):
            self.server: Server = open_server(uri, read_only=True)

    def may_take(self, artifact_uri: str, path: str = "") -> bool:
        """Whether an artifact is one of the store's own, and not any file that it names.

        What somebody else's database says lies anywhere on this machine is nobody's to take: of
        a store on this machine artifacts are taken from below its folder, and from elsewhere
        where a server or a cloud's store has them.

        Args:
            artifact_uri: Where the artifacts of the run are, by the store.
            path: The artifact below it.
        """
        scheme = urlsplit(artifact_uri).scheme.lower()
        if len(scheme) > 1 and scheme != "file":
            return scheme in _CLOUDS or (self._folder is None and scheme in _OF_SERVERS)
        if self._folder is None:
            return False
        place = urlsplit(artifact_uri)
        named = url2pathname(place.path) if scheme == "file" else artifact_uri
        try:
            found = Path(named, path).resolve()
        except (OSError, ValueError, RuntimeError):
            return False
        return found.is_relative_to(self._folder) and place.netloc in ("", "localhost")

    @contextmanager
    def reaching(self, uri: str | None = None) -> Iterator[None]:
        """Calls to the server.

        Raises:
            ImportFailure: It does not answer, or refuses.
        """
        from quark_backends.mlflow.client import Missing, Refused
        from quark_core.config.redaction import redact_text

        if self._outage is not None:
            raise ImportFailure(self._outage)
        try:
            yield
        except BackendUnavailable as error:
            place = self.server.uri if uri is None else redact_text(uri)
            self._outage = (
                f"MLflow at {place} does not answer: {error}. The imported part is kept. Import "
                "again to get the rest"
            )
            raise ImportFailure(self._outage) from error
        except (Missing, Refused) as error:
            raise ImportFailure(f"MLflow refuses: {error}") from error


def _find_folder(uri: str) -> Path | None:
    """The folder of a store on this machine; None of one that a server has."""
    place = urlsplit(uri)
    if place.scheme == "sqlite":
        return Path(url2pathname(place.path[1:])).resolve().parent
    if place.scheme == "file":
        return Path(url2pathname(place.path)).resolve()
    return None if "://" in uri or uri.startswith("databricks") else Path(uri).resolve()


class ServerRun(ForeignRun):
    """One run.

    Its position is how many points of each metric were taken, and a digest of them, so that
    points that come between them later are told; and the size of each file.
    """

    def __init__(self, link: _Link, run: MlflowRun, experiment: str) -> None:
        self.key = run.id
        self._link = link
        self._run = run
        self._experiment = experiment

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        from quark_backends.mlflow.reader import describe_run

        run = self._run
        stored = describe_run(run, self._experiment, self._link.server.uri)
        own_id = run.tags.get("quark.run_id")
        record = stored.run
        return RunFacts(
            identity=run.id,
            run_id=own_id,
            project=record.project_name,
            name=record.name,
            notes=record.notes,
            tags=record.tags,
            config={} if stored.config is None else dict(stored.config.values),
            environment={} if stored.environment is None else dict(stored.environment.values),
            status=record.status,
            started_us=None if run.started_ms is None else parse_time(record.created_at),
            ended_us=None if record.ended_at is None else parse_time(record.ended_at),
            parent=run.tags.get("mlflow.parentRunId"),
            git_commit=record.git_commit,
        )

    def mark(self) -> str | None:
        """See `ForeignRun`."""
        run = self._run
        if run.status == "RUNNING":
            return None
        return f"{run.status}:{run.ended_ms}:{sorted(run.tags.items())}:{run.metric_names}"

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        taken: dict[str, Any] = dict(position.get("metrics", {}))
        sizes: dict[str, int] = dict(position.get("files", {}))
        for portion in self._read_metrics(taken):
            yield Portion(position={"metrics": dict(taken), "files": dict(sizes)}, points=portion)
        yield from self._read_files(taken, sizes, losses)

    def _read_metrics(self, taken: dict[str, Any]) -> Iterator[Points]:
        """The points that were not taken; `taken` says with each portion what was, then."""
        gathered: list[tuple[str, list[_Row]]] = []
        waiting: dict[str, Any] = {}
        count = 0
        for metric, name in self._name_metrics():
            with self._link.reaching():
                rows = self._link.server.load_points(self._run.id, name)
            fresh = self._find_fresh(metric, rows, taken.get(name))
            for begin in range(0, len(fresh), PORTION_POINTS):
                part = fresh[begin : begin + PORTION_POINTS]
                gathered.append((metric, part))
                count += len(part)
                done = len(rows) - (len(fresh) - begin - len(part))
                is_last = done == len(rows)
                waiting[name] = [done, _digest(rows[:done]) if is_last else None]
                if count >= PORTION_POINTS:
                    taken.update(waiting)
                    yield _make_points(gathered)
                    gathered, waiting, count = [], {}, 0
        if gathered:
            taken.update(waiting)
            yield _make_points(gathered)

    def _find_fresh(self, metric: str, rows: list[_Row], taken: Any) -> list[_Row]:
        """Those points of a metric that were not taken."""
        if taken is None:
            return rows
        done, digest = taken
        if digest is not None and len(rows) >= done and _digest(rows[:done]) == digest:
            return rows[done:]
        # The server has put them into another order, or points came late.
        known: Counter[_Row] = Counter()
        for (time_us, step, value), count in self.known(metric).items():
            known[_compare((time_us // 1000, step, value))] += count
        fresh = []
        for row in rows:
            compared = _compare(row)
            if known[compared]:
                known[compared] -= 1
            else:
                fresh.append(row)
        return fresh

    def _name_metrics(self) -> list[tuple[str, str]]:
        """Name with us and in MLflow of each metric."""
        run = self._run
        if "quark.run_id" not in run.tags:
            return [(name, name) for name in run.metric_names]
        from quark_backends.mlflow.reader import name_series

        series = name_series(run.metric_names, self._load_own_names())
        return [(decode_name(key), name) for key, rank, name in series if not rank]

    def _load_own_names(self) -> Mapping[str, str]:
        from quark_backends.mlflow.client import Missing

        with tempfile.TemporaryDirectory(prefix="quark-import-") as folder:
            target = Path(folder) / "names"
            try:
                if not self._link.may_take(self._find_place(), _NAME_MAP):
                    return {}
                self._link.server.download(self._run.id, _NAME_MAP, target)
                loaded: dict[str, Any] = json.loads(target.read_text("utf-8"))
            except (Missing, BackendUnavailable, ValueError, OSError):
                return {}
        names: dict[str, str] = loaded.get("metrics", {})
        return names

    def _find_place(self) -> str:
        with self._link.reaching():
            return self._link.server.find_artifacts(self._run.id)

    def _read_files(
        self, taken: Mapping[str, Any], sizes: dict[str, int], losses: Losses
    ) -> Iterator[Portion]:
        with self._link.reaching():
            found = self._link.server.list_tree(self._run.id, _MAX_FILES + 1)
        if len(found) > _MAX_FILES:
            losses.add("artifact", "(others)", f"only the first {_MAX_FILES} are imported")
        fresh = [
            one
            for one in found[:_MAX_FILES]
            if sizes.get(one.path) != one.size_bytes and not one.path.startswith(_OWN_FOLDER)
        ]
        tables = _list_tables(self._run.tags)
        place = self._find_place() if fresh else ""
        outside = {one.path for one in fresh if not self._link.may_take(place, one.path)}
        for path in sorted(outside):
            losses.add("artifact", path, f"it is outside of the imported store: {place}")
        fresh = [one for one in fresh if one.path not in outside]
        while fresh:
            with tempfile.TemporaryDirectory(prefix="quark-import-") as folder:
                files: list[ForeignFile] = []
                size_bytes = 0
                while fresh and len(files) < _PORTION_FILES and size_bytes < _PORTION_BYTES:
                    one = fresh.pop(0)
                    target = Path(folder) / str(len(files))
                    made = self._fetch(one, target, tables, losses)
                    files += [] if made is None else [made]
                    size_bytes += one.size_bytes
                    sizes[one.path] = one.size_bytes
                yield Portion(position={"metrics": dict(taken), "files": dict(sizes)}, files=files)

    def _fetch(
        self, one: ArtifactFile, target: Path, tables: frozenset[str], losses: Losses
    ) -> ForeignFile | None:
        """One artifact; None for a thumbnail of MLflow's, or one that is gone, which is told."""
        from quark_backends.mlflow.client import Missing

        logged = _LOGGED_IMAGE.fullmatch(one.path)
        suffix = one.path.rpartition(".")[2].lower()
        if logged is not None and one.path.endswith("compressed.webp"):
            return None
        try:
            with self._link.reaching():
                self._link.server.download(self._run.id, one.path, target)
        except ImportFailure as error:
            if not isinstance(error.__cause__, Missing):
                raise
            losses.add("artifact", one.path, "it is listed but does not exist")
            return None
        if logged is not None:
            return ForeignFile(
                artifact_type="image",
                name=logged["key"].replace("#", "/"),
                content=target,
                step=int(logged["step"]),
                time_us=int(logged["time"]) * 1000,
            )
        if one.path in tables and (table := _read_table(target)) is not None:
            return ForeignFile(
                artifact_type="table", name=one.path, content=table, payload_format="json"
            )
        return ForeignFile(
            artifact_type="image" if suffix in _IMAGES else "file",
            name=one.path,
            content=target,
            metadata={"file_name": one.path.rpartition("/")[2]},
        )


def _make_points(gathered: list[tuple[str, list[_Row]]]) -> Points:
    import numpy as np

    names = list(dict.fromkeys(name for name, _ in gathered))
    rows = [row for _, part in gathered for row in part]
    which = np.concatenate(
        [np.full(len(part), names.index(name), np.int64) for name, part in gathered]
    )
    times = np.array([row[0] for row in rows], np.int64) * 1000
    steps = np.array([row[1] for row in rows], np.int64)
    # As they were logged, as far as their times say that.
    order = np.argsort(times, kind="stable")
    values = np.array([row[2] for row in rows], np.float64)
    return Points(names, which[order], steps[order], values[order], times[order])


def _compare(row: _Row) -> _Row:
    """A point that is equal to itself where its value is not a number."""
    time_ms, step, value = row
    return (time_ms, step, value) if value == value else (time_ms, -1 - step, 0.0)


def _digest(rows: Sequence[_Row]) -> str:
    import numpy as np

    data = np.array(rows, dtype=np.float64).tobytes()
    return xxhash.xxh3_64_hexdigest(data)


def _list_tables(tags: Mapping[str, str]) -> frozenset[str]:
    """Paths of what `log_table` has made."""
    try:
        noted = json.loads(tags.get(_LOGGED_TAG, "[]"))
        return frozenset(one["path"] for one in noted if one.get("type") == "table")
    except (ValueError, TypeError, KeyError, AttributeError):
        return frozenset()


def _read_table(path: Path) -> bytes | None:
    try:
        table = json.loads(path.read_bytes())
        return msgspec.json.encode(
            {"columns": [str(name) for name in table["columns"]], "rows": table["data"]}
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
