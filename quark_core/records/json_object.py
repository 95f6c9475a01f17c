"""JSON values as records keep them: normalised once, encoded once, immutable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, NoReturn

import msgspec

from quark_core.errors import SchemaValidationError

_MAX_DEPTH = 64
# A record wraps what it was given in levels of its own: a field's value lies in two more.
_MAX_STORED_DEPTH = _MAX_DEPTH + 8
_INT64_MAX = 2**63 - 1
_CONTAINERS = frozenset({dict, list})
# No shorter text has an integer beyond 64 bits.
_LONG_NUMBER_DIGITS = 19
# Most of what is flattened is of these, and asking whether it is a mapping takes longer.
_LEAVES = frozenset({str, int, float, bool, type(None), list})

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


def encode_json(value: Any) -> bytes:
    """Encode a value that `normalize_json` has made."""
    if type(value) is JsonObject:
        return value.encoded
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        # Bytes of a command line or a file's name that are no UTF-8 must not cost a whole batch.
        return _encoder.encode(_normalize(msgspec.to_builtins(value), "value", 0))


def decode_json(encoded: bytes | memoryview) -> Any:
    """Decode what `encode_json` has made; objects come back as `JsonObject`.

    Raises:
        SchemaValidationError: It is no JSON, or none that `normalize_json` makes: whoever stored
            it could have been anybody, and what reads it walks through it and writes it again.
    """
    try:
        value = _decoder.decode(encoded)
        check_plain(value, encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaValidationError(f"a JSON text is damaged: {error}") from None
    return JsonObject(value) if isinstance(value, dict) else value


def count_values(encoded: bytes) -> int:
    """About how many values a JSON text holds, at least."""
    return encoded.count(b",") + encoded.count(b"[") + encoded.count(b"{") + 1


def check_plain(value: Any, encoded: bytes | memoryview) -> None:
    """Refuse a decoded value that `normalize_json` would not have made.

    Args:
        value: It.
        encoded: The text that it was decoded from, by which most values are known to be plain.

    Raises:
        SchemaValidationError: It is nested too deeply, or holds an integer beyond 64 bits.
    """
    text = encoded if isinstance(encoded, bytes) else bytes(encoded)
    if text.count(b"[") + text.count(b"{") > _MAX_STORED_DEPTH:
        level = [value]
        for _ in range(_MAX_STORED_DEPTH):
            level = [
                item
                for outer in level
                for item in (outer.values() if type(outer) is dict else outer)
                if type(item) in _CONTAINERS
            ]
            if not level:
                break
        else:
            raise SchemaValidationError(
                f"a JSON text is nested deeper than {_MAX_STORED_DEPTH} levels"
            )
    if len(text) >= _LONG_NUMBER_DIGITS:
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:
            raise SchemaValidationError("a JSON text contains an integer beyond 64 bits") from None


class JsonObject(dict[str, Any]):
    """A read-only dict of JSON values that carries its own encoding.

    It is taken at the call, so what the caller does to the original later
    changes nothing; what is stored is `encoded`, so a change of a nested
    list changes nothing either.

    Args:
        items: Its values.
        encoded: The same encoded, where that is known.
        is_redacted: Whether secrets were taken out of all of it: it is not gone through again.
    """

    __slots__ = ("_encoded", "is_redacted")

    def __init__(
        self,
        items: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        encoded: bytes = b"",
        *,
        is_redacted: bool = False,
    ) -> None:
        super().__init__(items)
        if not encoded:
            try:
                encoded = _encoder.encode(dict(self))
            except UnicodeEncodeError:
                clean = _normalize(dict(self), "value", 0)
                dict.clear(self)
                dict.update(self, clean)
                encoded = _encoder.encode(clean)
        self._encoded = encoded
        self.is_redacted = is_redacted

    @property
    def encoded(self) -> bytes:
        """UTF-8 JSON, as it was when this object was made."""
        return self._encoded

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise TypeError("records are immutable: copy this dict with dict(...) to change it")

    __setitem__ = __delitem__ = _refuse
    __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonObject, (dict(self),)

    def __hash__(self) -> int:  # type: ignore[override]
        # Equal objects may be encoded differently: {"a": 1} and {"a": 1.0}, or in another order.
        return hash(frozenset(self))


def normalize_object(value: Mapping[str, Any] | None, argument: str) -> JsonObject | None:
    """Take a mapping as it is now; None and an empty mapping stay what they are.

    Raises:
        SchemaValidationError: `value` is not a mapping, or holds something that
            JSON cannot hold; the message names the path within `argument`.
    """
    if value is None or type(value) is JsonObject:
        return value
    if not isinstance(value, Mapping):
        raise SchemaValidationError(
            f"{argument} must be a mapping of JSON values, not {type(value).__name__}"
        )
    return JsonObject(normalize_json(value, argument))


def normalize_json(value: Any, argument: str) -> Any:
    """Turn a value into plain JSON types.

    Tuples become lists, numpy and torch scalars become Python numbers, enum
    members their values, paths strings. Of two keys that become
    one, such as 1 and "1", the later has its type behind it. NaN and the infinities, which JSON
    lacks, become the strings "NaN", "Infinity" and "-Infinity"; integers
    beyond 64 bits become strings; lone surrogates become "?".

    Raises:
        SchemaValidationError: Something else is in there; the message says where.
    """
    try:
        return _normalize(value, argument, 0)
    except (SchemaValidationError, MemoryError, RecursionError):
        raise
    except Exception as error:
        # A foreign object may raise anything while it is read.
        raise SchemaValidationError(f"{argument} cannot be read: {type(error).__name__}") from error


def _normalize(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if kind is str:
        return value if value.isascii() else clean_text(value)
    if kind is bool or value is None:
        return value
    if kind is int:
        return value if -_INT64_MAX - 1 <= value <= _INT64_MAX else _spell_integer(value, path)
    if kind is float:
        return value if math.isfinite(value) else _name_non_finite(value)
    if depth >= _MAX_DEPTH:
        raise SchemaValidationError(f"{path} is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        out: dict[str, Any] = {}
        for key, item in value.items():
            name = _normalize_key(key, path)
            if name in out:
                name = mark_key(name, key, out)
            out[name] = _normalize(item, f"{path}.{key}", depth + 1)
        return out
    if isinstance(value, (list, tuple)):
        return [_normalize(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    return _normalize(_convert_scalar(value, path), path, depth + 1)


def mark_key(name: str, key: object, taken: Mapping[str, Any]) -> str:
    """The name of a key whose own is taken: JSON has one "1" for both 1 and "1"."""
    marked, count = f"{name} ({type(key).__name__})", 2
    while marked in taken:
        marked, count = f"{name} ({type(key).__name__} {count})", count + 1
    return marked


def _normalize_key(key: object, path: str) -> str:
    if isinstance(key, Enum):
        key = key.value
    if isinstance(key, str):
        return clean_text(str(key))
    if isinstance(key, int) and not isinstance(key, bool):
        return _spell_integer(key, path)
    if isinstance(key, (bool, float)):
        return str(key)
    raise SchemaValidationError(f"{path} has a key of type {type(key).__name__}. JSON needs str")


def _convert_scalar(value: Any, path: str) -> Any:
    """Unwrap the scalar-like objects that stand in training configs and payloads."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, PurePath):
        return str(value)
    # numpy and torch scalars, without importing either
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        item = value.item()
        if isinstance(item, (bool, int, float, str)):
            return item
    hint = "; call .tolist() on it first" if hasattr(value, "tolist") else ""
    raise SchemaValidationError(
        f"{path} is of type {type(value).__name__}, which is not JSON-serializable{hint}"
    )


def clean_text(text: str) -> str:
    """The text with halves of surrogate pairs replaced, which stand for bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _spell_integer(value: int, path: str) -> str:
    try:
        return str(value)
    except ValueError:
        # Python refuses to spell out integers of thousands of digits.
        raise SchemaValidationError(
            f"{path} has an integer of {value.bit_length()} bits, which JSON cannot represent"
        ) from None


def _name_non_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def flatten_json(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of each leaf, keys of nested mappings joined by dots.

    Lists and empty mappings are leaves.
    """
    found: list[tuple[str, Any]] = []
    _collect_leaves(values, prefix, found)
    return iter(found)


def _collect_leaves(values: Mapping[Any, Any], prefix: str, found: list[tuple[str, Any]]) -> None:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if type(value) not in _LEAVES and isinstance(value, Mapping) and value:
            _collect_leaves(value, f"{path}.", found)
        else:
            found.append((path, value))
