"""Text samples of a run, searched: by their texts, their columns and their steps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from quark_core.errors import SchemaValidationError
from quark_core.records.kinds.samples import SampleRecord
from quark_core.records.query import Query, ReadBounds, check_index, spell_out

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.records.columns import Columns

_CONDITION = re.compile(
    r"\s*(?P<column>`[^`]+`|[^\s=!<>~`][^=!<>~]*?)\s*(?P<operator>==|!=|<=|>=|=|<|>|~)\s*(?P<value>.*?)\s*",
    re.DOTALL,
)
_MOST_CONDITIONS = 20
_MOST_CHARACTERS = 2_000
_MOST_NAMES = 100
_OWN = ("prompt", "completion", "reward", "step", "epoch", "rank", "set_name")
_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None}


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on one column.

    Attributes:
        column: Its name: `prompt`, `completion`, `reward`, `step`, or one of the row's own.
        operator: One of `==`, `!=`, `<`, `<=`, `>`, `>=`, and `~`: a text that stands in it.
        value: A number, a text, a truth value or None.
    """

    column: str
    operator: str
    value: Any

    def holds(self, value: Any) -> bool:
        """Whether a value of the column fits; one that is missing fits `!=` and `== null` only."""
        if self.operator == "~":
            return isinstance(value, str) and str(self.value).lower() in value.lower()
        if self.operator in ("==", "!="):
            return _is_equal(value, self.value) is (self.operator == "==")
        if isinstance(value, bool) or value is None:
            return False
        if isinstance(value, (int, float)) and isinstance(self.value, (int, float)):
            return _ORDERS[self.operator](value, self.value)
        if isinstance(value, str) and isinstance(self.value, str):
            return _ORDERS[self.operator](value, self.value)
        return False


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """What rows are looked for; all of it must hold.

    Attributes:
        search: A text that stands in one of the row's texts, or "".
        conditions: On columns.
    """

    search: str = ""
    conditions: tuple[Condition, ...] = ()

    @classmethod
    def build(
        cls, search: object = None, where: str | Sequence[str] | Mapping[str, Any] = ()
    ) -> SampleFilter:
        """A filter out of a reader's arguments.

        Raises:
            SchemaValidationError: A condition that is none; the message shows it.
        """
        if search is not None and not isinstance(search, str):
            raise SchemaValidationError(f"search must be a string, not {type(search).__name__}")
        return cls(search or "", read_conditions(where))

    def match(self, columns: Columns) -> NDArray[Any] | None:
        """The places of the rows that fit, ascending; None for all."""
        import numpy as np

        if not self.search and not self.conditions:
            return None
        places = np.arange(columns.count)
        # What is cheap first, so that texts are looked at where all else fits.
        self._check_columns(columns)
        for condition in self.conditions:
            if condition.column in _OWN:
                values = _list_values(columns, condition.column, places)
                places = places[_mask(condition.holds(value) for value in values)]
        others = [one for one in self.conditions if one.column not in _OWN]
        if others and len(places):
            objects = columns["columns"][places]
            places = places[
                _mask(
                    all(one.holds((row or {}).get(one.column)) for one in others) for row in objects
                )
            ]
        if self.search and len(places):
            places = places[self._find_texts(columns, places)]
        return places

    def _check_columns(self, columns: Columns) -> None:
        """Refuse a column that no row has: a name that is mistyped fits nothing for ever."""
        asked = {one.column for one in self.conditions if one.column not in _OWN}
        if not asked or not columns.count:
            return
        known = {name for row in columns["columns"] for name in row or ()}
        for name in sorted(asked - known):
            listed = ", ".join(sorted(known)[:_MOST_NAMES]) or "no custom columns"
            raise SchemaValidationError(
                f"where: no sample has a column {name!r:.60}. The columns are "
                f"{', '.join(_OWN)}, and {listed}"
            )

    def _find_texts(self, columns: Columns, places: NDArray[Any]) -> NDArray[Any]:
        import numpy as np

        needle = self.search.lower()
        found = np.zeros(len(places), np.bool_)
        for name in ("completion", "prompt"):
            texts = columns[name][places]
            found |= _mask(text is not None and needle in text.lower() for text in texts)
        rest = np.flatnonzero(~found)
        if len(rest):
            objects = columns["columns"][places[rest]]
            found[rest] = _mask(bool(row) and _stands_in(needle, row) for row in objects)
        return found


@spell_out(ReadBounds, before="limit")
def find_samples(
    run: Any,
    *,
    search: str | None = None,
    where: str | Sequence[str] | Mapping[str, Any] = (),
    name: str | None = None,
    limit: int | None = None,
    rank: int | None = None,
    **bounds: Unpack[ReadBounds],
) -> Columns:
    """Find text samples of a run by their text, columns and steps.

    Args:
        run: A TrainingSession or a RunContext. An open run is flushed first.
        search: Text to find in any column, ignoring case.
        where: Condition or list of conditions: "reward > 0.5", "task == math", "answer ~ forty"
            (contains). Or a mapping of columns to values. All must hold.
        name: Name of the set. Defaults to all sets.
        limit: Maximum number of rows; the newest are kept. Defaults to all.
        rank: Rank that logged the rows. Defaults to all ranks.
        step, step_min, step_max: Bounds on the step, inclusive.
        epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.

    Returns:
        Columns, in order of logging, with `to_records()`, `to_pandas()`, `to_polars()` and
        `to_arrow()`. `columns` holds a row's other columns as a dict.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
        SessionStoreError: The store cannot be read.
    """
    from quark_core.runs.opening import resolve_target
    from quark_core.runs.run_reader import RunReader

    opened = run if isinstance(run, RunReader) else resolve_target(run)
    wanted = SampleFilter.build(search, where)
    most = check_index(limit, "limit")
    is_plain = not wanted.search and not wanted.conditions
    query = Query.build(
        equals={"set_name": name}, **bounds, rank=rank, limit=most if is_plain else None
    )
    found = opened.read(SampleRecord.KIND, query)
    places = wanted.match(found)
    return found if places is None else found.take(places).keep_newest(most)


def read_conditions(where: str | Sequence[str] | Mapping[str, Any]) -> tuple[Condition, ...]:
    """Conditions as people write them.

    Raises:
        SchemaValidationError: One is none; the message shows it.
    """
    if isinstance(where, Mapping):
        return tuple(Condition(str(column), "==", value) for column, value in where.items())
    texts = [where] if isinstance(where, str) else list(where)
    if len(texts) > _MOST_CONDITIONS:
        raise SchemaValidationError(
            f"where has {len(texts)} conditions; at most {_MOST_CONDITIONS}"
        )
    return tuple(_read_condition(text) for text in texts if text != "")


def _read_condition(text: object) -> Condition:
    found = None
    if isinstance(text, str) and len(text) <= _MOST_CHARACTERS:
        found = _CONDITION.fullmatch(text)
    if found is None or _lacks_value(found["operator"], found["value"]):
        raise SchemaValidationError(
            "where must be conditions such as 'reward > 0.5', 'task == math' or 'answer ~ forty', "
            f"got {text!r:.60}"
        )
    operator = "==" if found["operator"] == "=" else found["operator"]
    value = found["value"] if operator == "~" else _read_value(found["value"])
    if operator == "~" and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return Condition(found["column"].strip("`"), operator, value)


def _lacks_value(operator: str, value: str) -> bool:
    """Whether nothing stands behind an operator, or more of it, as in `reward >> 5`."""
    if operator == "~":
        return not value
    if operator in _ORDERS:
        return not value or value[0] in "<>=~!"
    return not value.strip("<>=~!") or value[0] == "="


def _read_value(text: str) -> Any:
    """A value as people write it: in quotes a text, else a word, a number, or again a text."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text


def _is_equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, float) and isinstance(wanted, float) and math.isnan(wanted):
        return math.isnan(value)
    if isinstance(value, str) and isinstance(wanted, float):
        # A text that is a number was given without quotes; or NaN, as JSON has it.
        try:
            return float(value) == wanted or (math.isnan(wanted) and math.isnan(float(value)))
        except ValueError:
            return False
    return bool(value == wanted)


def _list_values(columns: Columns, name: str, places: NDArray[Any]) -> list[Any]:
    values: list[Any] = columns[name][places].tolist()
    nulls = columns.is_null(name)[places].tolist()
    return [None if is_null else value for value, is_null in zip(values, nulls, strict=True)]


def _mask(flags: Iterator[bool]) -> NDArray[Any]:
    import numpy as np

    return np.fromiter(flags, np.bool_)


def _stands_in(needle: str, value: Any) -> bool:
    if isinstance(value, str):
        return needle in value.lower()
    if isinstance(value, Mapping):
        return any(_stands_in(needle, item) for item in value.values())
    if isinstance(value, list):
        return any(_stands_in(needle, item) for item in value)
    return False


def list_columns(columns: Columns) -> list[str]:
    """Names of the rows' own columns, in the order in which they first appear."""
    names: dict[str, None] = {}
    for row in columns["columns"]:
        if row:
            names.update(dict.fromkeys(row))
            if len(names) > _MOST_NAMES:
                break
    return list(names)[:_MOST_NAMES]


def order_samples(
    columns: Columns, by: str | None, *, descending: bool = False, near: int | None = None
) -> NDArray[Any]:
    """The places of rows in an order.

    Args:
        columns: The rows.
        by: Name of a column; rows that lack it come last. By default the newest come first.
        descending: The largest first.
        near: A step; with it the rows nearest to it come first, and `by` says nothing.
    """
    import numpy as np

    places = np.arange(columns.count)
    if near is not None:
        steps = columns["step"].astype(np.float64)
        distance = np.where(steps < 0, np.inf, np.abs(steps - near))
        return np.lexsort((-places, distance))
    if by is None:
        return places[::-1]
    if by in _OWN:
        values = _list_values(columns, by, places)
    else:
        values = [(row or {}).get(by) for row in columns["columns"]]
    ranked = [_rank_value(value, descending=descending) for value in values]
    return np.array(sorted(range(len(ranked)), key=ranked.__getitem__), dtype=np.int64)


def _rank_value(value: Any, *, descending: bool) -> tuple[int, float, _Backwards | str]:
    """Numbers come before texts, and what is missing or not a number comes last."""
    if isinstance(value, str):
        return 1, 0.0, _Backwards(value) if descending else value
    if isinstance(value, (int, float)) and not math.isnan(value):
        return 0, -float(value) if descending else float(value), ""
    return 2, 0.0, ""


class _Backwards:
    """A text that comes after those which come after it."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __lt__(self, other: _Backwards) -> bool:
        return other.text < self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backwards) and other.text == self.text

    __hash__ = None  # type: ignore[assignment]
