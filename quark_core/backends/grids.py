"""One figure of a run's layers or parameters over its steps, as a grid that a map is drawn of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from quark_core.errors import SchemaValidationError
from quark_core.records.checks import check_choice
from quark_core.records.query import Query, check_index
from quark_core.records.schema import column_types

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.records.columns import Columns

EMPTY, FINITE, NOT_FINITE = 0, 1, 2
"""Marks of a cell: nothing was logged, a finite value, or one that is not finite."""

MOST_ROWS = 2_000
MOST_BINS = 4_000

GRID_KINDS: Mapping[str, str] = {
    "layer": "module_name",
    "parameter": "parameter_name",
    "telemetry": "rank",
}
"""Kind -> the column whose values are the rows of its grid."""

_PLACES = frozenset({"sequence", "time_us", "step", "epoch", "call_index"})
# Which fields count the elements that are not finite of what a field is of.
_COUNTERS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("layer", ""): ("nan_count", "inf_count"),
    ("parameter", "value_"): ("non_finite_value_count",),
    ("parameter", "gradient_"): ("non_finite_gradient_count",),
}
# So many rows are held at once; beyond that those of one cell become one.
_HELD_ROWS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GridQuery:
    """What a grid is of; `build` checks it.

    Attributes:
        kind: `layer`, `parameter` or `telemetry`.
        field: A number of its records, such as `norm`.
        summary_type: Of layers: only activations, or only gradients.
        by: `name` for a row a module or parameter, `rank` for a row a rank; telemetry has
            no names.
        under: Only the modules and parameters that are this module or lie in it.
        low, high: Bounds of the steps, inclusive.
        rank: Only what this rank has logged.
        bins: At most so many columns.
        rows: At most so many rows.
        all_attempts: Also what a later attempt, resumed from an earlier step, has hidden.
    """

    kind: str
    field: str
    summary_type: str | None = None
    by: Literal["name", "rank"] = "name"
    under: str | None = None
    low: int | None = None
    high: int | None = None
    rank: int | None = None
    bins: int = 1_000
    rows: int = 1_000
    all_attempts: bool = False

    @classmethod
    def build(
        cls,
        kind: str,
        field: str,
        *,
        summary_type: str | None = None,
        by: str | None = None,
        under: str | None = None,
        low: int | None = None,
        high: int | None = None,
        rank: int | None = None,
        bins: int = 1_000,
        rows: int = 1_000,
        all_attempts: bool = False,
    ) -> GridQuery:
        """Check what is asked for.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
        """
        check_choice(kind, "kind", GRID_KINDS)
        check_choice(field, f"field of {kind} records", list_grid_fields(kind))
        if summary_type is not None:
            if kind != "layer":
                raise SchemaValidationError("summary_type applies to layers only")
            check_choice(summary_type, "summary_type", ("activation", "gradient"))
        chosen = "rank" if kind == "telemetry" else "name"
        if by is not None:
            check_choice(by, f"by of {kind} records", sorted({"rank", chosen}))
        if under is not None and (not isinstance(under, str) or kind == "telemetry"):
            raise SchemaValidationError("under must name a module of layers or parameters")
        return cls(
            kind=kind,
            field=field,
            summary_type=summary_type,
            by="rank" if "rank" in (by, chosen) else "name",
            under=under or None,
            low=check_index(low, "low"),
            high=check_index(high, "high"),
            rank=check_index(rank, "rank"),
            bins=_check_size(bins, "bins", MOST_BINS),
            rows=_check_size(rows, "rows", MOST_ROWS),
            all_attempts=bool(all_attempts),
        )

    @property
    def row_column(self) -> str:
        """The column whose values are the rows."""
        return "rank" if self.by == "rank" else GRID_KINDS[self.kind]

    @property
    def query(self) -> Query:
        """The records that are needed, those of the other summary type too: they say the order."""
        return Query(
            step_min=self.low or 0,
            step_max=self.high,
            rank=self.rank,
            all_attempts=self.all_attempts,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """A figure over rows and steps: of each cell the largest finite value.

    A column stands for the steps from `starts` to `ends`, which are one step each where
    `exact`, else a power of two of steps; one in which nothing was logged is left out.

    Attributes:
        kind, field, summary_type: What it is of.
        names: The rows, in the model's order: modules and parameters as their records name
            them, or ranks as text.
        starts, ends: First and last step of each column, ascending (int64).
        values: Rows by columns (float64): the maximum of what is finite, NaN where nothing is.
        marks: Rows by columns (uint8): EMPTY where nothing was logged, FINITE, and NOT_FINITE
            where a value is NaN or infinite, or where the records count elements of the tensor
            that are; then `values` has the maximum of what is finite all the same.
        exact: Whether each column is one step.
        depth: Where more rows were there than asked for: how many levels of names are left, and
            a row is all that lies in that module; None where each row is one name.
        left_out: Rows beyond those that were asked for, where even that was too many.
        points: Records that the grid is made of.
    """

    kind: str
    field: str
    summary_type: str | None
    names: tuple[str, ...]
    starts: NDArray[Any]
    ends: NDArray[Any]
    values: NDArray[Any]
    marks: NDArray[Any]
    exact: bool
    depth: int | None = None
    left_out: int = 0
    points: int = 0


class GridBuilder:
    """Makes a grid of records, part by part, in bounded memory; of one thread.

    Args:
        query: What the grid is of.
    """

    def __init__(self, query: GridQuery) -> None:
        self._query = query
        self._codes: dict[str, int] = {}
        # Names that were seen going forward, then those that were only seen going backward.
        self._order: tuple[dict[str, None], dict[str, None]] = ({}, {})
        # Texts that came last, with what is known of them.
        self._ordered: Sequence[str] | None = None
        self._numbered: tuple[Sequence[str], NDArray[Any]] | None = None
        self._parts: list[tuple[Any, Any, Any, Any]] = []
        self._held = 0
        self._limit = _HELD_ROWS
        self._shift = 0
        self._points = 0

    def add_columns(self, columns: Columns) -> None:
        """Add rows that fit `GridQuery.query`."""
        if not columns.count:
            return

        query = self._query
        rows = columns[query.row_column]
        texts, codes = _factorize(rows)
        kinds: Any = None
        if query.kind == "layer":
            types = columns["summary_type"]
            kinds = types == "gradient"
        nulls = columns.is_null(query.field)
        broken = find_broken(columns, query.kind, query.field)
        self.add(texts, codes, columns["step"], columns[query.field], nulls, broken, kinds)

    def add(
        self,
        texts: Sequence[str],
        codes: NDArray[Any],
        steps: NDArray[Any],
        values: NDArray[Any],
        nulls: NDArray[Any] | None,
        broken: NDArray[Any] | None,
        is_gradient: NDArray[Any] | bool | None = None,
    ) -> None:
        """Add rows of which all is an array of one length.

        Args:
            texts: Names of rows.
            codes: Which of them each row is of.
            steps: Their steps; those below 0 are left out.
            values: The figure.
            nulls: Where the figure is not there at all; None where it always is.
            broken: Where the records count elements that are not finite; None for nowhere.
            is_gradient: Of layers: which rows are of gradients.
        """
        import numpy as np

        self._note_order(texts, codes, is_gradient)
        keep = self._choose(texts, codes, steps, is_gradient)
        if keep is not None:
            codes, steps, values = codes[keep], steps[keep], values[keep]
            nulls = None if nulls is None else nulls[keep]
            broken = None if broken is None else broken[keep]
        if not len(steps):
            return
        floats = _to_floats(values)
        finite = np.isfinite(floats)
        bad = np.logical_not(finite)
        if values.dtype != np.float64:
            bad[:] = False
        elif nulls is not None:
            bad &= ~nulls
        if broken is not None:
            bad |= broken
        known = finite | bad
        if not known.all():
            codes, steps, floats, bad = codes[known], steps[known], floats[known], bad[known]
        part = (self._number(texts, codes)[codes], steps, floats, bad)
        self._points += len(part[0])
        self._parts.append(part)
        self._held += len(part[0])
        if self._held > self._limit:
            self._shrink()

    def make_grid(self) -> Grid:
        """The grid of all that was added."""
        import numpy as np

        query = self._query
        names, row_of, depth, left_out = self._choose_rows()
        codes, steps, values, bad = self._join()
        rows = row_of[codes] if len(codes) else codes.astype(np.int64)
        if len(rows) and rows.min() < 0:
            kept = rows >= 0
            rows, steps, values, bad = rows[kept], steps[kept], values[kept], bad[kept]
        shift, keys, columns = _choose_columns(steps, query.bins, self._shift)
        shape = (len(names), len(keys))
        best = np.full(shape[0] * shape[1], -np.inf)
        marks = np.zeros(shape[0] * shape[1], dtype=np.uint8)
        flat = rows * shape[1] + columns
        finite = np.isfinite(values)
        whole = bool(finite.all())
        np.maximum.at(best, flat if whole else flat[finite], values if whole else values[finite])
        marks[flat] = FINITE
        marks[flat[bad]] = NOT_FINITE
        best[np.isneginf(best)] = np.nan
        starts = keys << shift
        ends = starts + (1 << shift) - 1
        if shift:
            starts = np.maximum(starts, query.low or 0)
            ends = ends if query.high is None else np.minimum(ends, query.high)
        return Grid(
            kind=query.kind,
            field=query.field,
            summary_type=query.summary_type,
            names=names,
            starts=starts,
            ends=ends,
            values=best.reshape(shape),
            marks=marks.reshape(shape),
            exact=shift == 0,
            depth=depth,
            left_out=left_out,
            points=self._points,
        )

    def _choose(
        self, texts: Sequence[str], codes: NDArray[Any], steps: NDArray[Any], is_gradient: Any
    ) -> NDArray[Any] | None:
        """Which rows are asked for; None for all."""
        import numpy as np

        query = self._query
        masks = []
        if query.summary_type is not None and is_gradient is not None:
            wanted = query.summary_type == "gradient"
            masks.append(np.broadcast_to(np.asarray(is_gradient) == wanted, steps.shape))
        low, high = query.low or 0, query.high
        if len(steps) and steps.min() < low:
            masks.append(steps >= low)
        if len(steps) and high is not None and steps.max() > high:
            masks.append(steps <= high)
        if query.under is not None:
            inside = np.array([_is_under(text, query.under) for text in texts], dtype=np.bool_)
            masks.append(inside[codes])
        if not masks:
            return None
        found: NDArray[Any] = np.logical_and.reduce(masks)
        return found

    def _number(self, texts: Sequence[str], codes: NDArray[Any]) -> NDArray[Any]:
        """The number of each text; one that no row is of gets none of its own."""
        import numpy as np

        # Chunk for chunk the same texts come, as the same object.
        if self._numbered is not None and self._numbered[0] is texts:
            return self._numbered[1]
        known = self._codes
        if any(text not in known for text in texts):
            present = np.bincount(codes, minlength=len(texts)) > 0
            for text, is_present in zip(texts, present.tolist(), strict=True):
                if is_present:
                    known.setdefault(text, len(known))
        numbers = np.array([known.get(text, 0) for text in texts], dtype=np.int32)
        if all(text in known for text in texts):
            self._numbered = (texts, numbers)
        return numbers

    def _note_order(self, texts: Sequence[str], codes: Any, is_gradient: Any) -> None:
        import numpy as np

        forward, backward = self._order
        if self._ordered is texts:
            return
        if all(text in forward for text in texts):
            self._ordered = texts
            return
        if is_gradient is None or isinstance(is_gradient, bool):
            groups = [(backward if is_gradient else forward, codes)]
        else:
            groups = [(forward, codes[~is_gradient]), (backward, codes[is_gradient])]
        for seen, found in groups:
            present, firsts = np.unique(found, return_index=True)
            for code in present[np.argsort(firsts)].tolist():
                seen.setdefault(texts[code])

    def _list_names(self) -> list[str]:
        """The names that have a value, in the model's order."""
        forward, backward = self._order
        if self._query.by == "rank":
            return sorted(self._codes, key=int)
        # A gradient comes to the last module first.
        behind = [name for name in reversed(backward) if name not in forward]
        return [name for name in [*forward, *behind] if name in self._codes]

    def _choose_rows(self) -> tuple[tuple[str, ...], NDArray[Any], int | None, int]:
        """Names of the rows, the row of each code (-1 for none), depth, and what is left out."""
        import numpy as np

        ordered = self._list_names()
        depth: int | None = None
        row_names = {name: name for name in ordered}
        most = self._query.rows
        if len(ordered) > most and self._query.by == "name":
            deepest = max(name.count(".") for name in ordered)
            for depth in range(deepest, 0, -1):
                row_names = {name: ".".join(name.split(".")[:depth]) for name in ordered}
                if len(set(row_names.values())) <= most:
                    break
        names = list(dict.fromkeys(row_names[name] for name in ordered))
        left_out = max(0, len(names) - most)
        places = {name: place for place, name in enumerate(names[:most])}
        row_of = np.full(max(1, len(self._codes)), -1, dtype=np.int64)
        for name in ordered:
            row_of[self._codes[name]] = places.get(row_names[name], -1)
        return tuple(names[:most]), row_of, depth, left_out

    def _join(self) -> tuple[Any, Any, Any, Any]:
        import numpy as np

        if not self._parts:
            empty = np.empty(0)
            return (
                empty.astype(np.int32),
                empty.astype(np.int64),
                empty,
                empty.astype(np.bool_),
            )
        if len(self._parts) == 1:
            return self._parts[0]
        codes, steps, values, bad = (
            np.concatenate([part[place] for part in self._parts]) for place in range(4)
        )
        return codes, steps, values, bad

    def _shrink(self) -> None:
        """Make one row of all that are of one cell, as fine as the grid will be at most."""
        import numpy as np

        codes, steps, values, bad = self._join()
        self._shift, keys, columns = _choose_columns(steps, self._query.bins, self._shift)
        flat = codes.astype(np.int64) * len(keys) + columns
        order = np.argsort(flat, kind="stable")
        cells, firsts = np.unique(flat[order], return_index=True)
        low = np.where(np.isfinite(values), values, -np.inf)[order]
        best = np.maximum.reduceat(low, firsts)
        best[np.isneginf(best)] = np.nan
        broken = np.logical_or.reduceat(bad[order], firsts)
        rows, places = np.divmod(cells, len(keys))
        part = (rows.astype(np.int32), keys[places] << self._shift, best, broken)
        self._parts = [part]
        self._held = len(cells)
        self._limit = max(_HELD_ROWS, 2 * self._held)


def list_grid_fields(kind: str) -> tuple[str, ...]:
    """The fields of a kind that a grid can be of."""
    return tuple(
        name
        for name, encoding in column_types(kind).items()
        if encoding in ("i", "f") and name not in _PLACES
    )


def find_counters(kind: str, field: str) -> tuple[str, ...]:
    """The fields that count what is not finite of the tensor that a figure is of."""
    if column_types(kind)[field] != "f":
        return ()
    for (counted, prefix), names in _COUNTERS.items():
        if counted == kind and field.startswith(prefix):
            return names
    return ()


def find_broken(columns: Columns, kind: str, field: str) -> NDArray[Any]:
    """Which rows have a figure of the finite elements only of a tensor that has others too."""
    import numpy as np

    broken = np.zeros(columns.count, dtype=np.bool_)
    for counter in find_counters(kind, field):
        broken |= _to_floats(columns[counter]) > 0
    return broken


def _choose_columns(
    steps: NDArray[Any], bins: int, shift: int
) -> tuple[int, NDArray[Any], NDArray[Any]]:
    """By how many bits steps are shifted, the columns' keys, and the column of each step."""
    import numpy as np

    if not len(steps):
        return shift, steps.astype(np.int64), steps.astype(np.int64)
    # Rows of one step stand beside each other: what is said of the first is said of them all.
    firsts = np.concatenate(([0], np.flatnonzero(steps[1:] != steps[:-1]) + 1))
    heads = steps[firsts]
    distinct = np.unique(heads)
    keys = np.unique(distinct >> shift)
    while len(keys) > bins:
        shift += 1
        keys = np.unique(distinct >> shift)
    columns = np.searchsorted(keys, heads >> shift)
    return shift, keys, np.repeat(columns, np.diff(firsts, append=len(steps)))


def _factorize(values: NDArray[Any]) -> tuple[list[str], NDArray[Any]]:
    """The different values as texts, and which of them each one is."""
    import numpy as np

    plain = values.tolist()
    lookup = {value: place for place, value in enumerate(dict.fromkeys(plain))}
    codes = np.fromiter(map(lookup.__getitem__, plain), np.int64, len(plain))
    return [str(value) for value in lookup], codes


def _to_floats(values: NDArray[Any]) -> NDArray[Any]:
    """Numbers with NaN where there is none: of whole numbers -1 stands for None."""
    import numpy as np

    if values.dtype == np.float64:
        return values
    if values.dtype == object:
        return np.array([np.nan if value is None else float(value) for value in values])
    out = values.astype(np.float64)
    out[values < 0] = np.nan
    return out


def _is_under(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _check_size(value: object, argument: str, most: int) -> int:
    number = check_index(value, argument)
    if number is None or not 1 <= number <= most:
        raise SchemaValidationError(f"{argument} must be from 1 to {most}, got {value!r:.40}")
    return number
