"""What every record is: immutable, quick to make, and a dataclass to whoever asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import PurePath
from typing import Any, ClassVar, get_type_hints

import msgspec

__all__ = ["Record", "StreamRecord", "format_time", "parse_time", "start_fields"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def format_time(time_us: int) -> str:
    """ISO 8601 in UTC with microseconds, such as `2026-05-07T09:30:00.000000Z`."""
    moment = _EPOCH + timedelta(microseconds=time_us)
    return f"{moment.isoformat(timespec='microseconds').removesuffix('+00:00')}Z"


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


class Record(msgspec.Struct, frozen=True, gc=False):
    """Base of every record: immutable, comparable, picklable, `to_dict()`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]] = _DataclassFields()  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """A new dict of plain JSON-like values, in the order of the fields."""
        return {name: _plain(getattr(self, name)) for name in self.__struct_fields__}


class StreamRecord(Record, frozen=True, gc=False):
    """A record that a writer puts into a run's stream."""

    run_id: str | None
    writer_id: str
    attempt: int
    rank: int
    sequence: int
    time_us: int

    KIND: ClassVar[str] = ""

    @property
    def id(self) -> str:
        """Unique over all runs: writer, kind and sequence."""
        return f"{self.writer_id}-{self.KIND}-{self.sequence}"

    @property
    def timestamp(self) -> str:
        """`time_us` as ISO 8601 text in UTC."""
        return format_time(self.time_us)

    def to_dict(self) -> dict[str, Any]:
        """`id`, the fields, and `timestamp` in place of `time_us`, as JSON-like values."""
        out: dict[str, Any] = {"id": self.id}
        for name in self.__struct_fields__:
            if name == "time_us":
                out["timestamp"] = self.timestamp
            else:
                out[name] = _plain(getattr(self, name))
        return out


def start_fields(timestamp: object) -> tuple[None, str, int, int, int, int]:
    """The fields that every record begins with, of one that nobody has written yet."""
    from quark_core.times import check_timestamp, now_us

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
