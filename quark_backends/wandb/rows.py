"""Records as rows of W&B's history, one per step and epoch of a batch, and the keys in them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from quark_backends.mirroring.curves import Curves, Place, find_place, rank_prefix
from quark_backends.mirroring.sample_rows import tabulate_samples
from quark_backends.wandb.log_file import HISTORY_KEY
from quark_backends.wandb.media import Rows, describe_media
from quark_backends.wandb.state import WandbState
from quark_backends.wandb.step_rows import Histogram, Part
from quark_core.api import (
    AlertRecord,
    ArtifactRecord,
    Batch,
    EventRecord,
    LayerSummaryRecord,
    MetricRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    PhaseRecord,
    SampleRecord,
    StreamRecord,
    SystemTelemetryRecord,
    decode_name,
)

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
                    part = _begin_part(record, place, mark, native=self._state.steps != "counted")
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
            part = _begin_part(rows[0], place, mark, native=self._state.steps != "counted")
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
        if (
            state.steps != "counted"
            and isinstance(record, SystemTelemetryRecord)
            and (record.step is not None or record.epoch is not None)
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


def _begin_part(record: StreamRecord, place: Place, mark: str, *, native: bool) -> Part:
    values: dict[str, Any] = {"quark/time": record.time_us / 1e6, "quark/attempt": record.attempt}
    is_metric = isinstance(record, MetricRecord)
    is_main = is_metric and not record.rank
    if is_main or not native:
        if place.step is not None:
            values["quark/step"] = place.step
        if place.epoch is not None:
            values["quark/epoch"] = place.epoch
        axis = next((key for key in ("quark/step", "quark/epoch") if key in values), "quark/time")
        if native and axis == "quark/step":
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
