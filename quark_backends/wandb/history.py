"""Records and media as rows of the W&B history. For the process of the mirror only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from quark_backends.mirror_records import Curves, Place, find_place, rank_prefix, tabulate_samples
from quark_backends.wandb.local_files import HISTORY_KEY, WandbState
from quark_core.api import (
    AlertRecord,
    ArtifactRecord,
    Batch,
    EventRecord,
    LayerSummaryRecord,
    MetricRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    PayloadFolder,
    PhaseRecord,
    SampleRecord,
    StreamRecord,
    SystemTelemetryRecord,
    decode_name,
)

_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp"})
_SUFFIXES: Mapping[str, frozenset[str]] = {
    "image": _IMAGES,
    "figure": frozenset({".png"}),
    "table": frozenset({".json"}),
    "audio": frozenset({".wav", ".mp3", ".flac", ".ogg", ".m4a"}),
    "video": frozenset({".mp4", ".gif", ".webm", ".ogg"}),
    "html": frozenset({".html", ".htm", ".txt"}),
    "point_cloud": frozenset({".ply"}),
    "histogram": frozenset({".json"}),
    "confusion_matrix": frozenset({".json"}),
    "pr_curve": frozenset({".json"}),
    "roc_curve": frozenset({".json"}),
}
# W&B takes no more of one table among its rows; the artifact has it whole.
_MAX_TABLE_ROWS = 10_000
_MAX_BYTES = 25_000_000
_MAX_RECORDING_BYTES = 250_000_000
_MAX_POINTS = 300_000
_CATEGORIES = range(1, 15)
_SAID = ("caption", "boxes", "masks", "class_labels")


class Media(msgspec.Struct, frozen=True, tag="media"):
    """An artifact on its way to W&B's own kind of it.

    Attributes:
        kind: Type of the artifact.
        sha256: Its payload.
        suffix: Of the payload's file.
        said: What its metadata say that W&B shows too.
    """

    kind: str
    sha256: str
    suffix: str
    said: dict[str, Any] = {}


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Rows on their way to a table of W&B's."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def describe_media(record: ArtifactRecord) -> Media | None:
    """What W&B can show of an artifact among its charts; None where it is a file and no more."""
    path = record.payload_relative_path
    kind = record.artifact_type
    if path is None or kind not in _SUFFIXES:
        return None
    limit = _MAX_RECORDING_BYTES if kind in ("audio", "video") else _MAX_BYTES
    suffix = PurePosixPath(path).suffix.lower()
    if record.size_bytes > limit or suffix not in _SUFFIXES[kind]:
        return None
    metadata: Mapping[str, Any] = record.metadata or {}
    said = {name: metadata[name] for name in _SAID if metadata.get(name) is not None}
    plain: dict[str, Any] = json.loads(json.dumps(said, default=dict))
    return Media(kind, record.sha256, suffix, plain)


@contextmanager
def showing(
    wandb: Any, payloads: PayloadFolder, values: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """A row's values with W&B's own objects for media, until the row is logged.

    What W&B does not take is left out: the artifact beside the row has it.

    Args:
        wandb: The imported library.
        payloads: Where the payloads lie.
        values: Key -> value, `Media` or `Rows`.
    """
    if not any(isinstance(value, (Media, Rows)) for value in values.values()):
        yield dict(values)
        return
    shown: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="media-", dir=payloads.root) as folder:
        files = _Files(payloads, Path(folder))
        for key, value in values.items():
            # W&B may raise anything over a broken image, and needs Pillow for a good one.
            with contextlib.suppress(Exception):
                if isinstance(value, Rows):
                    shown[key] = _make_table(wandb, value.columns, value.rows)
                elif isinstance(value, Media):
                    shown[key] = _MAKERS[value.kind](wandb, value, files, key)
                else:
                    shown[key] = value
        yield shown


class _Files:
    """Payloads under names that tell their kind: they are named by their content."""

    def __init__(self, payloads: PayloadFolder, folder: Path) -> None:
        self._payloads = payloads
        self._folder = folder

    def name(self, sha256: str, suffix: str) -> str:
        path = self._payloads.find(sha256)
        if path is None:
            raise FileNotFoundError(sha256)
        named = self._folder / f"{sha256}{suffix}"
        if not named.exists():
            try:
                os.link(path, named)
            except OSError:
                shutil.copyfile(path, named)
        return str(named)

    def read(self, media: Media) -> Any:
        return json.loads(Path(self.name(media.sha256, media.suffix)).read_bytes())


def _make_image(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    said = media.said
    labels = {int(number): str(name) for number, name in said.get("class_labels", {}).items()}
    boxes = {name: _describe_boxes(found, labels) for name, found in said.get("boxes", {}).items()}
    masks = {}
    for item in said.get("masks", ()):
        # Of more than 256 classes W&B knows no mask; the artifact has it.
        if item.get("encoding", "L") == "L":
            mask = {"path": files.name(item["sha256"], ".png")}
            masks[item["mask"]] = {**mask, **({"class_labels": labels} if labels else {})}
    path = files.name(media.sha256, media.suffix)
    caption = said.get("caption")
    caption = None if caption is None else str(caption)
    try:
        return wandb.Image(path, caption=caption, boxes=boxes or None, masks=masks or None)
    except Exception:
        if not boxes and not masks:
            raise
        return wandb.Image(path, caption=caption)


def _describe_boxes(found: list[dict[str, Any]], labels: Mapping[int, str]) -> dict[str, Any]:
    """Boxes as W&B has them: of a class by its number."""
    names = dict(labels)
    numbers = {name: number for number, name in names.items()}
    data = []
    for item in found:
        left, top, right, bottom = item["box"]
        label = item.get("label", 0)
        if isinstance(label, str):
            number = numbers.setdefault(label, max(names, default=-1) + 1)
        else:
            number = int(label)
        names.setdefault(number, str(label))
        box = {
            "position": {"minX": left, "minY": top, "maxX": right, "maxY": bottom},
            "domain": "pixel",
            "class_id": number,
            "box_caption": names[number],
        }
        if item.get("score") is not None:
            box["scores"] = {"score": float(item["score"])}
        data.append(box)
    return {"box_data": data, "class_labels": names}


def _make_audio(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    return wandb.Audio(files.name(media.sha256, media.suffix), caption=media.said.get("caption"))


def _make_video(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    path = files.name(media.sha256, media.suffix)
    return wandb.Video(path, caption=media.said.get("caption"), format=media.suffix[1:])


def _make_html(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    # As a file: wandb takes a short text for a path.
    return wandb.Html(files.name(media.sha256, ".html"), inject=False)


def _make_points(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    import numpy as np

    data = Path(files.name(media.sha256, media.suffix)).read_bytes()
    head, _, body = data.partition(b"end_header\n")
    found = re.findall(rb"property (float|uchar) (\w+)", head)
    types = [(name.decode(), "<f4" if kind == b"float" else "u1") for kind, name in found]
    table = np.frombuffer(body, dtype=types)[:_MAX_POINTS]
    names = ["x", "y", "z"]
    known = {name.decode() for _, name in found}
    if "red" in known:
        names += ["red", "green", "blue"]
    elif "value" in known and np.isin(table["value"], list(_CATEGORIES)).all():
        names.append("value")
    return wandb.Object3D(np.stack([table[name].astype(float) for name in names], axis=1))


def _make_stored_table(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    table = files.read(media)
    if len(table["rows"]) > _MAX_TABLE_ROWS:
        raise ValueError(f"{len(table['rows'])} rows are too many for W&B")
    rows = [
        [
            wandb.Image(files.name(cell["image"], ".png"))
            if isinstance(cell, dict) and isinstance(cell.get("image"), str)
            else cell
            for cell in row
        ]
        for row in table["rows"]
    ]
    return _make_table(wandb, table["columns"], rows)


def _make_table(wandb: Any, columns: Any, rows: Any) -> Any:
    return wandb.Table(columns=list(columns), data=[list(r) for r in rows], allow_mixed_types=True)


def _make_histogram(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key

    found = files.read(media)
    fitting = shrink(Histogram(tuple(found["counts"]), tuple(found["bins"])))
    return wandb.Histogram(np_histogram=(list(fitting.counts), list(fitting.edges)))


def _make_matrix(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    found = files.read(media)
    labels = found["labels"]
    columns = ["Actual", "Predicted", "nPredictions"]
    rows = [
        [str(labels[i]), str(labels[j]), count]
        for i, row in enumerate(found["matrix"])
        for j, count in enumerate(row)
    ]
    # As `wandb.plot.confusion_matrix` draws it, which wants the predictions themselves.
    return wandb.plot_table(
        data_table=wandb.Table(columns=columns, data=rows),
        vega_spec_name="wandb/confusion_matrix/v1",
        fields={column: column for column in columns},
        string_fields={"title": key},
    )


def _make_curve(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    found = files.read(media)
    x, y = str(found["x"]), str(found["y"])
    rows = [
        [str(curve.get("label", "")), at, value]
        for curve in found["curves"]
        for at, value in zip(curve["x"], curve["y"], strict=True)
    ]
    # As `wandb.plot.pr_curve` and `roc_curve` draw them.
    return wandb.plot_table(
        data_table=wandb.Table(columns=["class", x, y], data=rows[:_MAX_TABLE_ROWS]),
        vega_spec_name="wandb/area-under-curve/v0",
        fields={"x": x, "y": y, "class": "class"},
        string_fields={"title": key, "x-axis-title": x, "y-axis-title": y},
    )


_MAKERS: Mapping[str, Callable[[Any, Media, _Files, str], Any]] = {
    "image": _make_image,
    "figure": _make_image,
    "table": _make_stored_table,
    "audio": _make_audio,
    "video": _make_video,
    "html": _make_html,
    "point_cloud": _make_points,
    "histogram": _make_histogram,
    "confusion_matrix": _make_matrix,
    "pr_curve": _make_curve,
    "roc_curve": _make_curve,
}


# Rows whose `_step`, W&B's own, is the step that the user logged, as long as steps ascend.
#
# W&B takes a row for a step only while no row of that step or a later one was sent. So
# what belongs to one step is joined before it goes out: rows of the newest two batches
# of metrics are held, and lie in the mirror's state until they are seen in W&B's file.
#
# What is no metric of rank 0 with a step rides in a row that has room for it, and has an
# axis of its own there: epochs, other ranks, layers, findings about earlier steps.

_MAX_RIDERS = 2000
# What finds no room near by is tried again among later rows.
_MAX_TRIES = 64
_LATER = ("quark/time", "quark/attempt")


class Histogram(msgspec.Struct, frozen=True, tag="histogram"):
    """A histogram on its way to W&B, which takes 512 bins at most."""

    counts: tuple[float, ...]
    edges: tuple[float, ...]


class Part(msgspec.Struct):
    """What one batch has for one row.

    Attributes:
        mark: `<writer>.<batch>.<part>`, by which it is found in W&B's file.
        values: Key -> value, axes included.
        axis: The key that is the x-axis of the part's keys; "" is W&B's own.
        step: The step whose row it asks for, or None.
        is_metric: Whether it is of metrics.
        replaces: Whether its values may take the place of those that a row has: counters,
            and the machine's values.
        epoch: The epoch, which is a step as long as a run has none.
        beside: The step that it was logged at or after, beside whose row it is best kept.
    """

    mark: str
    values: dict[str, int | float | str | Histogram | Media | Rows]
    axis: str
    step: int | None = None
    is_metric: bool = False
    replaces: bool = False
    epoch: int | None = None
    beside: int | None = None

    @property
    def attempt(self) -> Any:
        """The attempt that it is of."""
        return self.values.get("quark/attempt")


class StepRow(msgspec.Struct):
    """The parts that one row of W&B's is joined from, and its `_step`."""

    step: int
    parts: list[Part]


class _Held(msgspec.Struct):
    rows: list[StepRow] = []
    riders: list[Part] = []


def join_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """The values of a row; the newest part has the last word."""
    values: dict[str, Any] = {}
    for part in parts:
        values.update(part.values)
    values[HISTORY_KEY] = " ".join(part.mark for part in parts)
    return values


class StepRows:
    """Joins parts to rows of ascending steps.

    Args:
        state: Says what was sent, and keeps what is held from process to process.
    """

    def __init__(self, state: WandbState) -> None:
        self._state = state
        held = msgspec.msgpack.decode(state.held, type=_Held) if state.held else _Held()
        self._rows = {row.step: row for row in sorted(held.rows, key=lambda row: row.step)}
        self._riders = held.riders
        self._keys = {row.step: _find_keys(row.parts) for row in held.rows}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not self._rows and not self._riders

    def save(self) -> None:
        """Put what is held into the state."""
        held = _Held(list(self._rows.values()), self._riders)
        self._state.held = b"" if self.is_empty else msgspec.msgpack.encode(held)

    def drop_found(self, marks: set[str]) -> None:
        """Forget parts that are in W&B's file already."""
        for step, row in list(self._rows.items()):
            left = [part for part in row.parts if part.mark not in marks]
            if len(left) < len(row.parts):
                self._note_sent(step)
                del self._rows[step], self._keys[step]
                # Its row is there, without them: see `add`.
                self._riders = [*left, *self._riders]
        self._riders = [part for part in self._riders if part.mark not in marks]

    def note_found(self, part: Part) -> None:
        """A part that comes again is in W&B's file already, and so is the row of its step."""
        if part.is_metric and part.step is not None:
            self._state.has_steps = True
            self._note_sent(part.step)

    def add(self, parts: Sequence[Part]) -> str | None:
        """Take a batch's parts; returns why W&B's own steps cannot go on, None where they can.

        In either case nothing is lost: what is held has all of them.
        """
        newest: int | None = None
        for part in parts:
            newest = part.step if part.is_metric and part.step is not None else newest
            part.beside = part.step if part.step is not None else newest
            self._add(part)
        metric_steps = [part.step for part in parts if part.is_metric and part.step is not None]
        if metric_steps:
            self._state.newest_steps = [*self._state.newest_steps[-1:], min(metric_steps)]
        self._seat_riders()
        for part in self._riders:
            if part.is_metric and part.step is not None:
                sent = self._state.sent_step
                late = f"step {part.step} arrived after step {sent}"
                return late if part.step < sent else f"step {part.step} arrived twice"
        if len(self._riders) > _MAX_RIDERS:
            return "more values arrived for its steps than their rows can contain"
        return None

    def release(self) -> Iterator[StepRow]:
        """The rows that nothing is expected for any more, in order."""
        newest = self._state.newest_steps
        if len(newest) < 2:
            return
        for step in list(self._rows):
            if step < newest[0] and len(self._rows) > 1:
                yield self._take(step)

    def flush(self) -> Iterator[StepRow]:
        """Everything, in order."""
        for step in list(self._rows):
            yield self._take(step)
        while self._riders:
            row = StepRow(self._state.sent_step + 1, [])
            keys: set[str] = set()
            left: list[Part] = []
            for part in self._riders:
                if _fits(part, row.parts, keys):
                    row.parts.append(part)
                    keys |= part.values.keys()
                else:
                    left.append(part)
            self._riders = left
            self._note_sent(row.step)
            yield row

    def give_up(self) -> list[Part]:
        """Everything that is held, part by part, for rows that have no step."""
        parts = [part for row in self._rows.values() for part in row.parts] + self._riders
        self._rows, self._riders, self._keys = {}, [], {}
        return parts

    def _add(self, part: Part) -> None:
        step = part.step
        if part.is_metric and step is not None:
            self._state.has_steps = True
        elif part.is_metric and part.epoch is not None and not self._state.has_steps:
            step = part.epoch
        elif step not in self._rows:
            step = None
        if step is None or step <= self._state.sent_step:
            self._riders.append(part)
            return
        if step not in self._rows:
            is_last = not self._rows or step > next(reversed(self._rows))
            self._rows[step], self._keys[step] = StepRow(step, []), set()
            if not is_last:
                self._rows = dict(sorted(self._rows.items()))
        if _fits(part, self._rows[step].parts, self._keys[step]):
            self._seat(part, self._rows[step])
        else:
            self._riders.append(part)

    def _seat(self, part: Part, row: StepRow) -> None:
        row.parts.append(part)
        self._keys[row.step] |= part.values.keys()

    def _seat_riders(self) -> None:
        """Give riders the nearest row that has room for them."""
        left = []
        steps = list(self._rows)
        for part in self._riders:
            if part.is_metric and part.step is not None:
                left.append(part)  # it asked for a row that it cannot have
                continue
            for step in islice(_order(steps, part.beside), _MAX_TRIES):
                if _fits(part, self._rows[step].parts, self._keys[step]):
                    self._seat(part, self._rows[step])
                    break
            else:
                left.append(part)
        self._riders = left

    def _take(self, step: int) -> StepRow:
        row = self._rows.pop(step)
        del self._keys[step]
        self._note_sent(step)
        return row

    def _note_sent(self, step: int) -> None:
        self._state.sent_step = max(self._state.sent_step, step)


def _order(steps: list[int], beside: int | None) -> Iterator[int]:
    """Steps, which ascend, in the order in which they are tried for a rider."""
    start = len(steps) if beside is None else bisect_left(steps, beside)
    yield from steps[start:]
    yield from reversed(steps[:start])


def _find_keys(parts: Sequence[Part]) -> set[str]:
    return {key for part in parts for key in part.values}


def _fits(part: Part, parts: Sequence[Part], keys: set[str]) -> bool:
    """Whether a row takes a part: no other value, and no other place on an axis, is lost."""
    if parts and parts[0].attempt != part.attempt:
        return False
    for key in part.values.keys() & keys:
        if key in _LATER or part.replaces:
            continue
        if key not in ("quark/step", "quark/epoch", part.axis):
            return False
        if any(other.values.get(key, part.values[key]) != part.values[key] for other in parts):
            return False
    return True


AXES = ("quark/step", "quark/epoch", "quark/time", "quark/attempt", HISTORY_KEY)
"""What each row carries beside its values."""

_PLAIN_KEY = re.compile(r"[_a-zA-Z][_a-zA-Z0-9]*")
_MAX_BINS = 512
_RUNTIME = "system/runtime/"


class KeyTable:
    """Finds the key of a name; the same name always has the same key, and no two share one.

    Keys that begin with `_` are W&B's own (`_step`), and those in `AXES` the
    mirror's: such names get `key` before them.

    Args:
        known: Name -> key where they differ; added to.
        strict: Whether keys consist of letters, digits and `_` only.
    """

    def __init__(self, known: dict[str, str], *, strict: bool) -> None:
        self._known = known
        self._strict = strict
        self._owners = {key: name for name, key in known.items()}

    def find(self, name: str) -> str:
        """The key of a name."""
        key = self._known.get(name)
        if key is not None:
            return key
        key = self._encode(name)
        if self._owners.setdefault(key, name) != name:
            key = f"{key}_{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:8]}"
            self._owners[key] = name
        if key != name or self._strict:
            self._known[name] = key
        return key

    def _encode(self, name: str) -> str:
        key = f"key{name}" if name.startswith("_") or name in AXES else name
        if self._strict and not _PLAIN_KEY.fullmatch(key):
            key = re.sub(r"[^_a-zA-Z0-9]", "_", key)
            key = key if _PLAIN_KEY.fullmatch(key) else f"key_{key}"
        return key


class RowMaker:
    """Makes rows; the same ones again from the same state and batch.

    Args:
        state: Counts and choices that go on from batch to batch; changed.
        strict_names: See `KeyTable`.
        layers: How many layers, and how many parameters, get rows; None is all.
    """

    def __init__(self, state: WandbState, *, strict_names: bool, layers: int | None) -> None:
        self._state = state
        self._curves = Curves(machine="system_quark")
        self._keys = KeyTable(state.names, strict=strict_names)
        self._limit = layers

    def make(self, batch: Batch, records: Sequence[StreamRecord]) -> list[Part]:
        """The parts that rows are made of, in the order of their first records."""
        if records and isinstance(records[0], SampleRecord):
            return self._make_samples(batch, records)
        self._choose(records)
        parts: list[Part] = []
        newest: dict[tuple[Place, int], Part] = {}
        phases = 0
        for record in records:
            place = find_place(record)
            values: Sequence[tuple[str, Any]]
            if isinstance(record, (EventRecord, PhaseRecord)):
                values = [self._curves.count(record, self._state.counts, phases)]
                phases += 1
            else:
                values = self._list(record)
            for name, value in values:
                key = self._keys.find(name)
                part = newest.get((place, record.rank))
                if part is None or key in part.values:
                    mark = f"{batch.writer_id}.{batch.number}.{len(parts)}"
                    part = _begin_part(record, place, mark)
                    newest[place, record.rank] = part
                    parts.append(part)
                part.values[key] = value
        return parts

    def _make_samples(self, batch: Batch, records: Sequence[StreamRecord]) -> list[Part]:
        """A table for each set, step and rank of a batch."""
        found: dict[tuple[str, Place, int], list[SampleRecord]] = {}
        for record in records:
            assert isinstance(record, SampleRecord)
            place = find_place(record)
            found.setdefault((record.set_name, place, record.rank), []).append(record)
        parts: list[Part] = []
        for (name, place, _), rows in found.items():
            mark = f"{batch.writer_id}.{batch.number}.{len(parts)}"
            part = _begin_part(rows[0], place, mark)
            key = self._keys.find(rank_prefix(rows[0]) + decode_name(name))
            part.values[key] = Rows(*tabulate_samples(rows))
            parts.append(part)
        return parts

    def _list(self, record: StreamRecord) -> list[tuple[str, Any]]:
        state = self._state
        if isinstance(record, ArtifactRecord):
            media = describe_media(record)
            return (
                []
                if media is None
                else [(rank_prefix(record) + decode_name(record.artifact_key), media)]
            )
        chosen = self._chosen(record)
        if chosen is not None and chosen[1] not in chosen[0]:
            state.left_out[record.KIND] = state.left_out.get(record.KIND, 0) + 1
            return []
        if isinstance(record, ParameterDistributionRecord):
            if not record.counts:
                return []
            name = self._curves.distribution(record)
            return [(name, shrink(Histogram(record.counts, record.bin_edges)))]
        values = self._curves.list_values(record)
        if isinstance(record, SystemTelemetryRecord) and (
            record.step is not None or record.epoch is not None
        ):
            # The writer mirrors these into metrics, whose rows have them.
            return [pair for pair in values if _RUNTIME not in pair[0]]
        return values

    def _choose(self, records: Sequence[StreamRecord]) -> None:
        """Choose which layers and parameters have curves: evenly spaced, once and for all."""
        if self._limit is None:
            return
        for record in records:
            if isinstance(record, AlertRecord) and record.culprit is not None:
                # Beyond the limit: it is what people will look for.
                for each in (self._state.layers, self._state.parameters):
                    if record.culprit not in each and len(each) < 2 * self._limit:
                        each.append(record.culprit)
        for kind in ("layers", "parameters"):
            chosen: list[str] = getattr(self._state, kind)
            room = self._limit - len(chosen)
            if room <= 0:
                continue
            seen: dict[str, None] = {}
            for record in records:
                found = self._chosen(record)
                if found is not None and found[0] is chosen and found[1] not in chosen:
                    seen[found[1]] = None
            names = list(seen)
            count = min(room, len(names))
            chosen += [names[index * len(names) // count] for index in range(count)]

    def _chosen(self, record: StreamRecord) -> tuple[list[str], str] | None:
        """The choice that a record depends on, and its name there; None where there is none."""
        if self._limit is None:
            return None
        if isinstance(record, LayerSummaryRecord):
            return self._state.layers, record.module_name
        if isinstance(record, (ParameterSummaryRecord, ParameterDistributionRecord)):
            return self._state.parameters, record.parameter_name
        return None


def shrink(histogram: Histogram) -> Histogram:
    """A histogram of as many bins as W&B takes, neighbours put together."""
    size = -(-len(histogram.counts) // _MAX_BINS)
    if size <= 1:
        return histogram
    counts = [
        sum(histogram.counts[start : start + size])
        for start in range(0, len(histogram.counts), size)
    ]
    edges = [*histogram.edges[:-1:size], histogram.edges[-1]]
    return Histogram(tuple(counts), tuple(edges))


def _begin_part(record: StreamRecord, place: Place, mark: str) -> Part:
    values: dict[str, Any] = {"quark/time": record.time_us / 1e6, "quark/attempt": record.attempt}
    is_metric = isinstance(record, MetricRecord)
    is_main = is_metric and not record.rank
    if is_main:
        if place.step is not None:
            values["quark/step"] = place.step
        if place.epoch is not None:
            values["quark/epoch"] = place.epoch
        # Of a step it is W&B's own.
        axis = "quark/epoch" if place.epoch is not None else "quark/time"
        if place.step is not None:
            axis = ""
    else:
        # Of its own: what rides in a step's row stands at another place than that.
        names = [f"rank{record.rank}"] * bool(record.rank) + [record.KIND] * (not is_metric)
        stem = f"quark/{'_'.join(names)}"
        axis, at = next(
            (
                pair
                for pair in ((f"{stem}_step", place.step), (f"{stem}_epoch", place.epoch))
                if pair[1] is not None
            ),
            (f"{stem}_time", record.time_us / 1e6),
        )
        values[axis] = at
    return Part(
        mark,
        values,
        axis,
        step=None if is_metric and not is_main else place.step,
        is_metric=is_metric,
        replaces=isinstance(record, (EventRecord, SystemTelemetryRecord)),
        epoch=place.epoch if is_main else None,
    )
