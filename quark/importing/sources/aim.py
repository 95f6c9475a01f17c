"""Runs in a repository of Aim's, read by Aim's own library.

    experiment, name, description, tags   project, name, notes, tags
    attributes of the run                 configuration; what begins with `__` is environment
    metrics                               metrics; the context's subset stands before the name
                                          (`train/loss`), other contexts as `key=value/`
    distributions                         histograms
    images, audio, texts, figures         artifacts of these types
    creation and end time                 the same; Aim does not say whether a run failed

Aim reads runs through an index that it makes when somebody looks at them in its own page. So
the repository is read through links in a folder of this process's, without the index: nothing of
the repository itself is written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quark.importing.conversion import make_histogram
from quark.importing.neutral_run import (
    PORTION_FILES,
    PORTION_POINTS,
    ForeignFile,
    ForeignRun,
    ImportFailure,
    Losses,
    PointList,
    Portion,
    RunFacts,
)

_INSTALL = "Aim repositories require the package aim: pip install aim (not for every Python)"
_FOLDER = ".aim"
_INDEXED = "meta"
_INDEX = "index"
_FILES = {
    "images": ("get_image_sequence", ("aim.image", "list(aim.image)")),
    "audio": ("get_audio_sequence", ("aim.audio", "list(aim.audio)")),
    "text": ("get_text_sequence", ("aim.text", "list(aim.text)")),
    "figure": ("get_figure_sequence", ("aim.figure",)),
    "distribution": ("get_distribution_sequence", ("aim.distribution",)),
}


def find_runs(place: str | Path, *, project: str | None = None) -> Iterator[ForeignRun]:
    """The runs of a repository.

    Args:
        place: The folder that `.aim` is in, or `.aim` itself.
        project: Their project; by default their experiment.

    Raises:
        ImportFailure: There is no repository, or Aim is not installed.
    """
    root = Path(place).expanduser().resolve()
    folder = root if root.name == _FOLDER else root / _FOLDER
    if not (folder / _INDEXED / "chunks").is_dir():
        raise ImportFailure(f"{root} does not contain an Aim repository ({_FOLDER})")
    try:
        import aim
    except ImportError:
        raise ImportFailure(_INSTALL) from None
    view = _link_without_index(folder)
    try:
        repository = aim.Repo(view.name)
        hashes = sorted(repository.list_all_runs())
    except Exception as error:
        raise ImportFailure(f"Aim cannot read {folder}: {error}") from error
    for run_hash in hashes:
        yield AimRun(aim, repository, run_hash, folder, project)


@cache
def _link_without_index(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder that leads to a repository, and leaves out the index; gone with the process."""
    view = tempfile.TemporaryDirectory(prefix="quark-aim-", ignore_cleanup_errors=True)
    inside = Path(view.name) / _FOLDER
    (inside / _INDEXED).mkdir(parents=True)
    for path in folder.iterdir():
        if path.name != _INDEXED:
            os.symlink(path, inside / path.name)
    for path in (folder / _INDEXED).iterdir():
        if path.name != _INDEX:
            os.symlink(path, inside / _INDEXED / path.name)
    return view


class AimRun(ForeignRun):
    """One run; its position is, of each sequence, how many entries were taken and the last step."""

    def __init__(
        self, aim: Any, repository: Any, run_hash: str, folder: Path, project: str | None
    ) -> None:
        self.key = run_hash
        self._aim = aim
        self._repository = repository
        self._folder = folder
        self._project = project
        self._opened: Any = None

    def _open(self) -> Any:
        if self._opened is None:
            try:
                self._opened = self._aim.Run(self.key, repo=self._repository, read_only=True)
            except Exception as error:
                raise ImportFailure(f"Aim cannot read run {self.key}: {error}") from error
        return self._opened

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        run = self._open()
        try:
            attributes = dict(run.meta_run_attrs_tree.collect())
        except KeyError:
            attributes = {}
        aside = {name: value for name, value in attributes.items() if name.startswith("__")}
        ended_s = run.end_time
        return RunFacts(
            identity=self.key,
            project=self._project or run.experiment or "default",
            name=run.name,
            notes=run.description or None,
            tags=list(run.tags),
            config={name: value for name, value in attributes.items() if name not in aside},
            environment={"aim": {"run": self.key, "repository": str(self._folder), **aside}},
            status="completed" if ended_s else "running",
            started_us=round(run.creation_time * 1e6),
            ended_us=round(ended_s * 1e6) if ended_s else None,
        )

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        taken: dict[str, Any] = dict(position.get("sequences", {}))
        yield from self._read_metrics(taken)
        yield from self._read_files(taken, losses)

    def _read_metrics(self, taken: dict[str, Any]) -> Iterator[Portion]:
        points, waiting = PointList(), dict(taken)
        for metric in self._open().metrics():
            name = _join(metric.name, metric.context.to_dict())
            rows = [
                (int(step), float(value), float(time_s))
                for step, (value, _, time_s) in sorted(metric.data.items())
            ]
            for step, value, time_s in self._find_fresh(name, rows, taken.get(name)):
                points.add(name, step, value, time_s)
            waiting[name] = [len(rows), rows[-1][0] if rows else -1]
            if len(points) >= PORTION_POINTS:
                taken.update(waiting)
                yield Portion(position={"sequences": dict(taken)}, points=points.take())
        if waiting != taken:
            taken.update(waiting)
            yield Portion(
                position={"sequences": dict(taken)}, points=points.take() if len(points) else None
            )

    def _find_fresh(
        self, name: str, rows: list[tuple[int, float, float]], taken: Any
    ) -> list[tuple[int, float, float]]:
        if taken is None:
            return rows
        count, last = taken
        fresh = [row for row in rows if row[0] > last]
        if len(fresh) == len(rows) - count:
            return fresh
        # Steps came between those that were taken.
        steps = {step for _, step, _ in self.known(name)}
        return [row for row in rows if row[0] not in steps]

    def _read_files(self, taken: dict[str, Any], losses: Losses) -> Iterator[Portion]:
        run = self._open()
        files: list[ForeignFile] = []
        for kind, (method, types) in _FILES.items():
            for plain, context, _ in run.iter_sequence_info_by_type(types):
                name = _join(plain, context.to_dict())
                key = f"{kind}:{name}"
                last = taken.get(key, -1)
                for step, (value, _, time_s) in sorted(
                    getattr(run, method)(plain, context).data.items()
                ):
                    if int(step) <= last:
                        continue
                    items = value if isinstance(value, (list, tuple)) else [value]
                    for place, item in enumerate(items):
                        shown = name if len(items) == 1 else f"{name}/{place}"
                        try:
                            files += _make_file(kind, shown, item, int(step), round(time_s * 1e6))
                        except Exception as error:  # noqa: BLE001 - Aim decodes what it finds
                            losses.add(kind, shown, f"it cannot be read: {error}")
                    taken[key] = int(step)
                    if len(files) >= PORTION_FILES:
                        yield Portion(position={"sequences": dict(taken)}, files=files)
                        files = []
        if files:
            yield Portion(position={"sequences": dict(taken)}, files=files)


def _make_file(kind: str, name: str, item: Any, step: int, time_us: int) -> list[ForeignFile]:
    if kind == "distribution":
        counts, edges = item.to_np_histogram()
        made = make_histogram(name, edges.tolist(), counts.tolist(), step=step, time_us=time_us)
        return [] if made is None else [made]
    if kind == "text":
        data, form, shown = str(item.data).encode(), "text", "markdown"
    elif kind == "figure":
        data, form, shown = bytes(item.storage["data"].load(), "utf-8"), "json", "figure"
    elif kind == "audio":
        data, form, shown = bytes(item.get().read()), "bytes", "audio"
    else:
        data, form, shown = bytes(item.storage["data"]), "bytes", "image"
    caption = getattr(item, "caption", "")
    facts = {"caption": caption} if caption else {}
    if shown == "figure":
        facts["library"] = "plotly"
    return [
        ForeignFile(
            artifact_type=shown,
            name=name,
            content=data,
            payload_format=form,
            step=step if step >= 0 else None,
            time_us=time_us,
            metadata=facts,
        )
    ]


def _join(name: str, context: Mapping[str, Any]) -> str:
    """The name of a sequence, with what tells it from others of that name before it."""
    parts = [
        str(value) if key == "subset" else f"{key}={value}"
        for key, value in sorted(context.items())
    ]
    return "/".join([*parts, name])
