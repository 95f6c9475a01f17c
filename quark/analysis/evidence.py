"""The records and curves that show a piece of evidence.

A rule says in words what it saw; which records these words rest on is known of the figures
that its texts show. So one place finds it out for every rule, also for those that others
write: of the figures the one of the same name, and of these the one whose value was observed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from quark.analysis.curves import strip_prefixes, take_lowest_rank
from quark.analysis.observations import (
    BATCH_LOSS,
    Figure,
    FigureKind,
    Source,
    Text,
    name_source,
    read_field,
    read_source,
)
from quark_core.backends.grids import find_broken
from quark_core.records import AlertRecord, EvidenceRecord, HealthScoreRecord, PhaseRecord
from quark_core.records.query import Query
from quark_core.records.schema import column_types
from quark_core.runs.reading import read_rows

if TYPE_CHECKING:
    from quark.analysis.curves import LayerHistory
    from quark.analysis.run_data import RunData
    from quark_core.backends.contract import SupportsRead
    from quark_core.records.columns import Columns

Finding = TypeVar("Finding", AlertRecord, HealthScoreRecord, PhaseRecord)

# What a figure is called that is worked out of a field, and what stands only in the metadata.
_FIELDS = {
    "rms": "norm",
    "gradient_rms": "gradient_norm",
    "calls": "norm",
    "carried_over": "gradient_norm",
    "accumulated": "gradient_norm",
    "skipped": "update_norm",
    "no_optimizer_step": "update_norm",
    "evaluation_mode": "value_norm",
    "sharded": "value_norm",
}
_SUMMARIES = ("activation", "gradient")
# Words of a summary -> what shows it, of a parameter; where several are in it the first counts.
_WORDS = (
    ("gradient is not finite", "non_finite_gradient_count"),
    ("not finite", "non_finite_value_count"),
    ("gradient", "gradient_norm"),
    ("learning rate", "learning_rate"),
    ("hardly moves", "update_to_parameter_ratio"),
    ("update", "update_to_parameter_ratio"),
    ("change", "update_norm"),
    ("without any step", "update_norm"),
    ("in no optimizer", "in_optimizer"),
    ("frozen", "requires_grad"),
    ("norm", "value_norm"),
)
_SUFFIXES = (".weight", ".bias")
_NEAR = 1e-6


class _Place(NamedTuple):
    kind: str
    name: str | None
    field: str
    summary_type: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EvidenceCurve:
    """The records that show a piece of evidence, as a curve.

    Attributes:
        unit: What the points are at: steps, or epochs where the records have no steps.
        step: Steps or epochs, ascending (int64).
        value: The values (float64), NaN where one is not finite.
    """

    unit: Literal["step", "epoch"]
    step: NDArray[np.int64]
    value: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.step)


def place_findings(records: Iterable[Finding], run: RunData) -> tuple[Finding, ...]:
    """Records of an analysis, of which each piece of evidence says where it is seen."""
    return tuple(
        msgspec.structs.replace(
            record, evidence=tuple(place_evidence(piece, run) for piece in record.evidence)
        )
        for record in records
    )


def place_evidence(
    piece: EvidenceRecord, run: RunData, texts: Sequence[str] = ()
) -> EvidenceRecord:
    """The piece with the records that show it, where there are any; its text keeps no figures.

    Args:
        piece: What a rule has observed.
        run: The run that it was observed in.
        texts: Those of the finding that it belongs to, the most telling first.
    """
    plain = msgspec.structs.replace(piece, summary=str(piece.summary))
    if piece.record_kind is not None:
        return plain
    place = _find_place(piece, run, texts)
    if place is None:
        return plain
    return msgspec.structs.replace(
        plain,
        record_kind=place.kind,
        record_name=place.name,
        field=place.field,
        summary_type=place.summary_type,
    )


def read_evidence(
    reader: SupportsRead,
    run_id: str,
    piece: EvidenceRecord,
    *,
    low: int | None = None,
    high: int | None = None,
) -> EvidenceCurve | None:
    """The records that a piece of evidence was seen in, as a curve; None where it names none.

    Of several ranks the lowest counts, unless the evidence is of one. Where it is of all
    parameters together, norms are those of all of them, and other figures their mean.

    Args:
        reader: An opened backend that reads.
        run_id: The run.
        piece: The evidence.
        low, high: Only these steps, both included.

    Raises:
        RunNotFoundError: The store has no such run.
        SessionStoreError: The store cannot be read.
    """
    kind, name = piece.record_kind, piece.record_name
    if kind is None or piece.field is None:
        return None
    column = {"metric": "metric_key", "layer": "module_name", "parameter": "parameter_name"}
    equals: dict[str, str | None] = {"summary_type": piece.summary_type}
    rank = None
    if kind in column:
        equals[column[kind]] = name
    elif kind == "telemetry" and name is not None:
        rank = int(name)
    query = Query.build(equals=equals, step_min=low, step_max=high, rank=rank)
    rows = read_rows(reader, run_id, kind, query)
    if not rows.count and name is not None and kind in ("layer", "parameter"):
        # Findings name them without what wrappers put before them.
        every = Query.build(
            equals={"summary_type": piece.summary_type}, step_min=low, step_max=high
        )
        rows = read_rows(reader, run_id, kind, every)
        named = [strip_prefixes(text) == name for text in rows[column[kind]].tolist()]
        rows = rows.take(np.array(named, dtype=np.bool_))
    return _make_curve(rows, piece)


def _make_curve(rows: Columns, piece: EvidenceRecord) -> EvidenceCurve:
    assert piece.field is not None
    rows = take_lowest_rank(rows)
    values = read_field(rows, piece.field, piece.record_name)
    # A norm of what is left of a tensor is none of the tensor's.
    broken = find_broken(rows, str(piece.record_kind), piece.field)
    known = ~np.isnan(values) | broken
    values = np.where(broken, np.nan, values)
    unit: Literal["step", "epoch"] = "step"
    at = rows["step"]
    if "epoch" in rows and rows.count and at.max() < 0:
        unit, at = "epoch", rows["epoch"]
    kept = at >= 0
    at, values, known = at[kept], values[kept], known[kept]
    if piece.record_name is None and piece.record_kind == "parameter":
        is_norm = piece.field.endswith("_norm")
        at, values = _join_all(at[known], values[known], is_norm=is_norm)
    order = np.argsort(at, kind="stable")
    return EvidenceCurve(unit, at[order], values[order])


def _join_all(
    at: NDArray[np.int64], values: NDArray[np.float64], *, is_norm: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """One value a step of what all parameters have there."""
    steps, places = np.unique(at, return_inverse=True)
    with np.errstate(over="ignore", invalid="ignore"):
        weights = values**2 if is_norm else values
        total = np.bincount(places, weights=weights, minlength=len(steps))
        return steps, np.sqrt(total) if is_norm else total / np.bincount(places)


def _find_place(piece: EvidenceRecord, run: RunData, texts: Sequence[str]) -> _Place | None:
    if piece.kind in ("score", "alert", "rules"):
        return None
    own = list(_list_figures(piece.summary))
    told = [figure for text in texts for figure in _list_figures(text)]
    named = _find_by_name(piece, run)
    if named is not None:
        return named
    ranked = sorted(
        enumerate([*own, *told]),
        key=lambda item: (-_rate(item[1], piece, is_own=item[0] < len(own)), item[0]),
    )
    for place, figure in ranked:
        if place >= len(own) and not _is_told_of(figure, piece):
            continue
        found = _to_place(figure.source, run)
        if found is not None:
            return found
    by_words = _guess(piece, run)
    if by_words is not None:
        return by_words
    places = (_to_place(figure.source, run) for _, figure in ranked)
    return next((found for found in places if found is not None), None)


def _is_told_of(figure: Figure, piece: EvidenceRecord) -> bool:
    """Whether a figure of the finding is of the same name, and of what the evidence speaks of."""
    source = figure.source
    if source is None or not _is_named(source, piece.source):
        return False
    spoken = _find_word(piece.summary)
    if source.kind in _SUMMARIES or spoken is None:
        return spoken is None or spoken[0] in ("norm", source.kind)
    return source.kind != "parameter" or source.field.startswith(spoken[1].partition("_")[0])


def _find_word(summary: str) -> tuple[str, str] | None:
    lower = summary.lower()
    return next((pair for pair in _WORDS if pair[0] in lower), None)


def _find_by_name(piece: EvidenceRecord, run: RunData) -> _Place | None:
    """Where the source says it all: a metric, or a field of telemetry, batches or parameters."""
    source = piece.source
    if source in run.metrics and piece.kind not in ("layer", "parameter"):
        return _Place("metric", source, "value")
    if source == BATCH_LOSS:
        return _Place("batch", None, "loss")
    kind: FigureKind = "telemetry"
    if piece.kind in ("batch", "parameter", "parameters"):
        kind = "batch" if piece.kind == "batch" else "parameter"
    if piece.kind == "parameter" or source not in column_types(kind):
        return None
    return _check(Source(kind, "", source), run, _Place(kind, None, source))


def _check(source: Source, run: RunData, place: _Place) -> _Place | None:
    """The place, where the run has such records."""
    if source.kind == "parameter":
        return place if run.parameters else None
    return place if len(read_source(run, source)[0]) else None


def _list_figures(text: str) -> Iterator[Figure]:
    """The figures of a text that were measured, those that others are made of too."""
    waiting = list(text.figures) if isinstance(text, Text) else []
    while waiting:
        figure = waiting.pop(0)
        if figure.source is not None:
            yield figure
        waiting = [*figure.operands, *waiting]


def _rate(figure: Figure, piece: EvidenceRecord, *, is_own: bool) -> float:
    """How well a figure fits a piece of evidence."""
    source = figure.source
    assert source is not None
    fit = 4.0 * is_own
    if source.name == piece.source:
        fit += 3.0
    elif _is_named(source, piece.source):
        fit += 2.5
    if piece.observed_value is not None and np.isclose(
        figure.value, piece.observed_value, rtol=_NEAR, atol=0.0
    ):
        fit += 1.0
    return fit + 0.5 * (source.kind in piece.summary.lower())


def _is_named(source: Source | None, name: str) -> bool:
    """Whether a figure is of what evidence calls by a name: a module, or a parameter of it."""
    if source is None or not name:
        return False
    if source.rank is not None and str(source.rank) == name:
        return True
    return source.name == name or any(source.name == name + suffix for suffix in _SUFFIXES)


def _to_place(source: Source | None, run: RunData) -> _Place | None:
    """Where the records of a figure are; None where the run has none."""
    if source is None:
        return None
    if source.kind == "metric" and source.name not in run.metrics:
        source = Source(*name_source(run, source.name))
    if not len(read_source(run, source)[0]):
        return None
    field = _FIELDS.get(source.field, source.field)
    match source.kind:
        case "metric":
            return _Place("metric", source.name, "value")
        case "activation" | "gradient":
            return _Place("layer", source.name, field, source.kind)
        case "parameter":
            return _Place("parameter", source.name, field)
        case "telemetry":
            return _Place("telemetry", None if source.rank is None else str(source.rank), field)
        case _:
            return _Place("batch", source.name or None, field)


def _guess(piece: EvidenceRecord, run: RunData) -> _Place | None:
    """Of a module or parameter that evidence names, what its words are about."""
    if piece.kind == "class":
        return _Place("batch", piece.source, "class_counts")
    if piece.kind == "sample":
        return _check(Source("batch", "", "loss"), run, _Place("batch", None, "loss"))
    if piece.kind == "parameters":
        return _choose_field(None, list(run.parameters), ("update_norm", "value_norm"), run)
    words = f"{piece.kind} {piece.summary}".lower()
    spoken = _find_word(piece.summary)
    layers = [kind for kind in _SUMMARIES if kind in words] or list(_SUMMARIES)
    is_of_layer = any(piece.source in _find_layers(run, kind) for kind in layers)
    is_broken = "not finite" in words
    if not is_of_layer or not (is_broken or spoken is None or spoken[0] in ("gradient", "norm")):
        fields = ("value_norm",) if spoken is None else (spoken[1], "update_norm", "value_norm")
        names = _list_parameters(piece.source, run)
        found = _choose_field(names[0], names[:1], fields, run) if names else None
        if found is not None:
            return found
    for kind in (*layers, *_SUMMARIES):
        history = _find_layers(run, kind).get(piece.source)
        if history is not None:
            counted = (name for name in ("nan_count", "inf_count") if is_broken)
            field = next((name for name in counted if np.nan_to_num(history[name]).any()), "norm")
            return _Place("layer", piece.source, field, kind)
    return None


def _find_layers(run: RunData, summary_type: str) -> Mapping[str, LayerHistory]:
    return run.gradients if summary_type == "gradient" else run.activations


def _list_parameters(name: str, run: RunData) -> list[str]:
    """Parameters that are this, or of the module of this name, its weight first."""
    exact = [name, *(name + suffix for suffix in _SUFFIXES)]
    inside = [other for other in run.parameters if other.startswith(f"{name}.")]
    return [other for other in dict.fromkeys([*exact, *inside]) if other in run.parameters]


def _choose_field(
    name: str | None, names: Sequence[str], fields: Sequence[str], run: RunData
) -> _Place | None:
    """The first of some fields that was recorded of these parameters; that they train always is."""
    for field in fields:
        if any(np.isfinite(run.parameters[one][field]).any() for one in names):
            return _Place("parameter", name, field)
    return _Place("parameter", name, "requires_grad") if names else None
