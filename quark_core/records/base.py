"""The base of all records: immutable, fast to create, and usable as a dataclass."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import PurePath
from time import time_ns
from typing import Any, ClassVar, get_type_hints

import msgspec

from quark_core.errors import SchemaValidationError, UnknownKindError

# Where a record belongs; the rest of its numbers are figures.
_PLACES = frozenset({"attempt", "rank", "sequence", "time_us", "step", "epoch"})
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_START = _EPOCH.replace(tzinfo=None)
_MICROSECOND = timedelta(microseconds=1)


def format_time(time_us: int) -> str:
    """ISO 8601 in UTC with microseconds, such as `2026-05-07T09:30:00.000000Z`."""
    # A moment without a zone is sooner told, and is UTC as well.
    return f"{(_START + timedelta(microseconds=time_us)).isoformat(timespec='microseconds')}Z"


def parse_time(text: str) -> int:
    """Microseconds since the epoch of an ISO 8601 text; without an offset it is UTC.

    Raises:
        ValueError: Not an ISO 8601 date and time.
        OverflowError: Before the year 1 or after 9999 in UTC.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    # Through UTC, so that a moment that UTC cannot show is refused here.
    return (moment.astimezone(UTC) - _EPOCH) // _MICROSECOND


class _DataclassFields:
    """Computes `__dataclass_fields__` at first sight, through the public dataclasses API."""

    def __init__(self) -> None:
        self._made: dict[type, dict[str, dataclasses.Field[Any]]] = {}

    def __get__(self, instance: object, owner: type) -> dict[str, dataclasses.Field[Any]]:
        found = self._made.get(owner)
        if found is None:
            hints = get_type_hints(owner)
            specs: list[tuple[str, Any, dataclasses.Field[Any]]] = []
            for field in msgspec.structs.fields(owner):
                default: Any = dataclasses.MISSING
                factory: Callable[[], Any] | Any = dataclasses.MISSING
                if field.default is not msgspec.NODEFAULT:
                    default = field.default
                if field.default_factory is not msgspec.NODEFAULT:
                    factory = field.default_factory
                made = (
                    dataclasses.field(default_factory=factory)
                    if factory is not dataclasses.MISSING
                    else dataclasses.field(default=default)
                )
                specs.append((field.name, hints[field.name], made))
            twin: Any = dataclasses.make_dataclass(owner.__name__, specs)
            found = self._made[owner] = twin.__dataclass_fields__
        return found


class FieldRules(msgspec.Struct, frozen=True):
    """What the fields of a record keep to beside their types.

    Attributes:
        names: Fields that name something, and so are neither empty nor too long.
        words: Field -> the few words of which it holds one.
        finite: Numbers that are finite. Statistics of a network need not be.
        plain: Texts that nobody writes freely, such as ids and names of a layer's type. All
            other texts and JSON values of a record are redacted on their way into a run.
        labelled: JSON values whose keys are labels that people choose, and whose values count.
    """

    names: tuple[str, ...] = ()
    words: Mapping[str, tuple[str, ...]] = {}
    finite: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    labelled: tuple[str, ...] = ()


class Record(msgspec.Struct, frozen=True, gc=False):
    """Base of every record: immutable, comparable, picklable, `to_dict()`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]] = _DataclassFields()  # type: ignore[assignment]

    RULES: ClassVar[FieldRules] = FieldRules()

    def check(self) -> None:
        """Check rules that concern several fields; `validate_record` calls it last.

        Raises:
            SchemaValidationError: The fields do not fit together.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a new dict of JSON values."""
        return {name: _plain(getattr(self, name)) for name in self.__struct_fields__}


class RecordTypes(Mapping[str, "type[StreamRecord]"]):
    """Kind -> type of every record that travels in a stream.

    The types of plugins are loaded when a kind is not known, or when all are listed. So a module
    must not list them while it is imported.

    Attributes:
        load_more: Imports the modules that plugins declare; set by `quark_core.backends`.
    """

    def __init__(self) -> None:
        self._types: dict[str, type[StreamRecord]] = {}
        self._lock = threading.RLock()
        self._is_loading = False
        self.load_more: Callable[[], None] | None = None

    def __getitem__(self, kind: str) -> type[StreamRecord]:
        found = self._types.get(kind)
        if found is None:
            self._load()
            found = self._types.get(kind)
        if found is None:
            raise UnknownKindError(
                f"records of kind {kind!r:.60} are unknown here: the plugin that defines them "
                "is not installed, or a newer version of Quark wrote them"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(tuple(self._types))

    def __len__(self) -> int:
        self._load()
        return len(self._types)

    def add(self, record_type: type[StreamRecord]) -> None:
        """Make a type known.

        Raises:
            TypeError: Another type has its kind or its table.
        """
        name = f"{record_type.__module__}.{record_type.__qualname__}"
        for known in self._types.values():
            if name == f"{known.__module__}.{known.__qualname__}":
                continue  # the module is loaded anew
            if record_type.KIND == known.KIND:
                raise TypeError(f"the kind {known.KIND!r} belongs to {known.__qualname__}")
            if record_type.TABLE == known.TABLE:
                raise TypeError(f"the table {known.TABLE!r} belongs to {known.__qualname__}")
        self._types[record_type.KIND] = record_type

    def _load(self) -> None:
        if self.load_more is None:
            return
        with self._lock:
            load, is_nested = self.load_more, self._is_loading
            if load is None or is_nested:
                return
            self._is_loading = True
            try:
                load()
            finally:
                self._is_loading, self.load_more = False, None


RECORD_TYPES = RecordTypes()
"""The types of records that this process knows."""


class StreamRecord(Record, frozen=True, gc=False):
    """A record that a writer puts into a run's stream.

    A type of records is a class with a `KIND` and a `TABLE` of its own, in a module of
    `records.kinds` or in one that a plugin names in `quark_register_record_kinds`. All else
    follows from it: how it is encoded and stored, its table in mirrors and exports, its curves,
    and its name in `quark`.

    Attributes:
        KIND: Name of the type, wherever records travel.
        TABLE: Name of its table in mirrors and exports, a plural.
        HAS_FIGURES: Whether its numbers are worth a curve.
        IS_ANALYSIS: Whether analyzers find it out, so that it is kept in generations.
    """

    run_id: str | None
    writer_id: str
    attempt: int
    rank: int
    sequence: int
    time_us: int

    KIND: ClassVar[str] = ""
    TABLE: ClassVar[str] = ""
    HAS_FIGURES: ClassVar[bool] = True
    IS_ANALYSIS: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.KIND:
            RECORD_TYPES.add(cls)

    @property
    def id(self) -> str:
        """ID that is unique over all runs: writer, kind and sequence number."""
        return f"{self.writer_id}-{self.KIND}-{self.sequence}"

    @property
    def timestamp(self) -> str:
        """`time_us` as ISO 8601 text in UTC."""
        return format_time(self.time_us)

    def list_figures(self) -> Iterator[tuple[str, float]]:
        """List the curves that the record adds a point to, each with its value.

        Keys consist of the table, the name and the field. Mirrors may use other names for the
        curves of some types.
        """
        if not self.HAS_FIGURES:
            return
        named = [getattr(self, field) for field in self.RULES.names]
        stem = "/".join([self.TABLE, *(name for name in named if name)])
        for field in self.__struct_fields__:
            value = getattr(self, field)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and field not in _PLACES:
                yield f"{stem}/{field}", float(value)

    def to_dict(self) -> dict[str, Any]:
        """Return `id`, the fields, and `timestamp` instead of `time_us`, as JSON values."""
        out: dict[str, Any] = {"id": self.id}
        for name in self.__struct_fields__:
            if name == "time_us":
                out["timestamp"] = self.timestamp
            else:
                out[name] = _plain(getattr(self, name))
        return out


def start_fields(timestamp: object) -> tuple[None, str, int, int, int, int]:
    """The fields that every record begins with, of one that nobody has written yet."""
    return None, "", 0, 0, 0, now_us() if timestamp is None else check_timestamp(timestamp)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value


def now_us() -> int:
    """Microseconds since the epoch, UTC."""
    return time_ns() // 1000


def check_timestamp(timestamp: object) -> int:
    """Microseconds of an ISO 8601 text or a datetime; without an offset it is UTC.

    Raises:
        SchemaValidationError: It is neither.
    """
    if isinstance(timestamp, datetime):
        timestamp = timestamp.isoformat()
    if not isinstance(timestamp, str):
        raise SchemaValidationError(
            f"timestamp must be an ISO 8601 str, not {type(timestamp).__name__}"
        )
    try:
        return parse_time(timestamp)
    except (ValueError, OverflowError):
        raise SchemaValidationError(
            f"timestamp must be ISO 8601 such as 2026-05-07T09:30:00Z, got {timestamp!r:.60}"
        ) from None
