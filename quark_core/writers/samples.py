"""SampleLogger: text samples and rollouts as rows that are searched and shown at their step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Unpack

from quark_core.config.redaction import cut_text
from quark_core.errors import SchemaValidationError
from quark_core.records.base import check_timestamp, now_us
from quark_core.records.json_object import JsonObject, encode_json, normalize_json
from quark_core.records.kinds.samples import SampleRecord
from quark_core.records.names import check_name
from quark_core.records.query import ReadBounds, check_index, check_step, spell_out
from quark_core.runs.sample_search import find_samples
from quark_core.runs.step_counters import read_step
from quark_core.writers.buffered_writer import BufferedWriter
from quark_core.writers.scalars import to_float

_TEXT_CHARACTERS = 16_384
_MOST_TEXT_CHARACTERS = 65_536
_MOST_COLUMNS = 100
# The texts of a row together, so that a row of many long columns is bounded too.
_ROW_CHARACTERS = 262_144
_PLACES = ("step", "epoch", "timestamp")


class SampleLogger(BufferedWriter[SampleRecord]):
    """Writer and reader of text samples: prompt, completion, reward and other columns.

    Calls return at once and do not wait for a store. Secrets are removed from each text, at some
    hundred microseconds per 10,000 characters. Long texts are truncated; `cut` of the row holds
    their original lengths. Thread-safe.

    Args:
        session: A TrainingSession, or its RunContext.
        name: Name of the set, such as "eval/generations". Defaults to "samples".
        batch_size: Number of records that `flush()` returns and that are written together. Defaults
            to 100.
        text_characters: Maximum number of characters of a text to store, up to 65,536.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
    """

    KIND: ClassVar[str] = SampleRecord.KIND

    def __init__(
        self,
        session: object,
        name: str = "samples",
        *,
        batch_size: int = 100,
        text_characters: int = _TEXT_CHARACTERS,
    ) -> None:
        self._name = check_name(name, "name")
        bound = check_index(text_characters, "text_characters")
        if not bound or bound > _MOST_TEXT_CHARACTERS:
            raise SchemaValidationError(
                f"text_characters must be from 1 to {_MOST_TEXT_CHARACTERS}, got {bound}"
            )
        self._text_characters = bound
        self._has_told = False
        super().__init__(session, batch_size=batch_size)

    def log(
        self,
        row: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        epoch: int | None = None,
        timestamp: str | None = None,
        **columns: Any,
    ) -> SampleRecord:
        """Log one row, and return its record at once.

        Args:
            row: Columns as a mapping. It may hold `step` and `epoch`.
            step, epoch: Counters, both optional.
            timestamp: Time as ISO 8601 text. Defaults to now.
            **columns: Columns, which override those of `row`. `prompt` and `completion` are strings
                or lists of chat messages. `reward` is a number (NaN is allowed) or None. Others are
                strings, numbers, booleans or small JSON values.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            InvalidRunStateError: The writer is closed or the run has ended.
        """
        self._check_open("log")
        if row is not None and not isinstance(row, Mapping):
            raise SchemaValidationError(f"row must be a mapping, not {type(row).__name__}")
        fields = self._read_row({**(row or {}), **columns}, step, epoch, timestamp, "row")
        return self._put(fields)

    def log_many(
        self,
        rows: Any,
        *,
        step: int | None = None,
        epoch: int | None = None,
        timestamp: str | None = None,
    ) -> int:
        """Log many rows; if one is invalid, none is logged.

        Args:
            rows: Mappings as in `log`, a mapping of columns to lists of one length, or a DataFrame.
            step, epoch, timestamp: Values for all rows. If None, those of each row are used.

        Returns:
            The number of logged rows.

        Raises:
            SchemaValidationError: An argument is invalid. The message names row and column.
            InvalidRunStateError: The writer is closed or the run has ended.
        """
        self._check_open("log_many")
        read = [
            self._read_row(row, step, epoch, timestamp, f"rows[{index}]")
            for index, row in enumerate(_list_rows(rows))
        ]
        for fields in read:
            self._put(fields)
        return len(read)

    @spell_out(ReadBounds, before="limit")
    def read(
        self,
        *,
        search: str | None = None,
        where: str | Sequence[str] | Mapping[str, Any] = (),
        name: str | None = None,
        limit: int | None = None,
        **bounds: Unpack[ReadBounds],
    ) -> tuple[SampleRecord, ...]:
        """Flush, then read the run's rows in order of logging.

        Args:
            search: Text to find in any column, ignoring case.
            where: Condition or list of conditions, such as "reward > 0.5" or ["task == math"]. Or a
                mapping of columns to values. All must hold.
            name: Name of the set. Defaults to all sets of the run.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            limit: Maximum number of rows; the newest are kept. Defaults to all.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        found = find_samples(self, search=search, where=where, name=name, limit=limit, **bounds)
        return found.to_records()  # type: ignore[return-value]

    def _put(self, fields: tuple[Any, ...]) -> SampleRecord:
        time_us, *others = fields
        record = SampleRecord(*self._origin, self._take_sequence(), time_us, self._name, *others)
        record = self._put_record(record)
        self._remember(record, 1)
        return record

    def _read_row(
        self,
        row: Any,
        step: int | None,
        epoch: int | None,
        timestamp: str | None,
        argument: str,
    ) -> tuple[Any, ...]:
        """Time, prompt, completion, reward, step, epoch, columns and cut of a row."""
        if not isinstance(row, Mapping):
            raise SchemaValidationError(
                f"{argument} must be a mapping of columns, not {type(row).__name__}"
            )
        if len(row) > _MOST_COLUMNS:
            raise SchemaValidationError(
                f"{argument} has {len(row)} columns; at most {_MOST_COLUMNS} are allowed"
            )
        place: dict[str, Any] = {"step": step, "epoch": epoch, "timestamp": timestamp}
        texts: dict[str, str | None] = {"prompt": None, "completion": None}
        reward: float | None = None
        columns: dict[str, Any] = {}
        cut = _Cut(self._text_characters)
        for key, value in row.items():
            if key in _PLACES:
                place[key] = value if place[key] is None else place[key]
            elif key in texts:
                texts[key] = None if value is None else cut.shorten(key, _to_text(value, key))
            elif key == "reward":
                reward = None if value is None else to_float(value, "reward", argument)
            else:
                column = check_name(key, f"a column of {argument}")
                columns[column] = cut.take(column, value, argument)
        if cut.lengths and not self._has_told:
            self._tell_of_cut(cut.lengths)
        return (
            now_us() if place["timestamp"] is None else check_timestamp(place["timestamp"]),
            texts["prompt"],
            texts["completion"],
            reward,
            read_step(self._run, place["step"]),
            check_step(place["epoch"], "epoch"),
            JsonObject(columns) if columns else None,
            JsonObject(cut.lengths) if cut.lengths else None,
        )

    def _tell_of_cut(self, lengths: Mapping[str, int]) -> None:
        self._has_told = True
        self._run.emit_event(
            "samples_cut",
            "warning",
            payload=JsonObject(
                {
                    "message": f"samples {self._name!r}: only the first {self._text_characters} "
                    "characters of long texts are stored. The field `cut` of a row names the "
                    "shortened texts. text_characters sets the limit",
                    "columns": sorted(lengths),
                }
            ),
        )


class _Cut:
    """Keeps the texts of one row within their bounds, and notes those that were longer."""

    def __init__(self, characters: int) -> None:
        self._characters = characters
        self._left = _ROW_CHARACTERS
        self.lengths: dict[str, int] = {}

    def shorten(self, column: str, text: str) -> str:
        bound = max(0, min(self._characters, self._left))
        if len(text) > bound:
            self.lengths[column] = len(text)
            text = cut_text(text, bound)
        self._left -= len(text)
        return text

    def take(self, column: str, value: Any, argument: str) -> Any:
        if isinstance(value, str):
            return self.shorten(column, normalize_json(value, column))
        if value is None or isinstance(value, (bool, int, float)):
            return normalize_json(value, column)
        taken = normalize_json(value, f"{argument}[{column!r}]")
        if isinstance(taken, (list, dict)):
            encoded = encode_json(taken).decode()
            if len(encoded) > min(self._characters, self._left):
                return self.shorten(column, encoded)
            self._left -= len(encoded)
        return taken


def _to_text(value: Any, column: str) -> str:
    """A text, or a chat of messages as one: a line with the role before each message."""
    if isinstance(value, str):
        text: str = normalize_json(value, column)
        return text
    if isinstance(value, (list, tuple)) and value and all(_is_message(one) for one in value):
        return "\n".join(
            f"{one['role']}: {one['content']}" for one in normalize_json(value, column)
        )
    return encode_json(normalize_json(value, column)).decode()


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str) and "role" in value


def _list_rows(rows: Any) -> Iterator[Any]:
    """The rows of whatever holds them."""
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        to_dicts = getattr(rows, "to_dicts", None)
        rows = rows.to_dict(orient="records") if to_dicts is None else to_dicts()
    if isinstance(rows, Mapping):
        lengths = {
            name: len(values)
            if isinstance(values, Sequence) and not isinstance(values, str)
            else -1
            for name, values in rows.items()
        }
        if len(set(lengths.values())) > 1 or -1 in lengths.values():
            raise SchemaValidationError(
                "rows as a mapping must contain lists of one length. Otherwise, pass a list of "
                f"mappings. The lengths are {str(lengths)[:200]}"
            )
        names = list(rows)
        yield from (dict(zip(names, one, strict=True)) for one in zip(*rows.values(), strict=True))
        return
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Iterable):
        raise SchemaValidationError(
            f"rows must be an iterable of mappings, not {type(rows).__name__}"
        )
    yield from rows
