"""Numbers of any library as Python floats, without importing any, and mappings of them flat."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import Any, NoReturn

from quark_core.errors import SchemaValidationError

_log = logging.getLogger("quark")

_MAX_DEPTH = 32

_warned: set[str] = set()


def to_float(value: Any, argument: str, call: str) -> float:
    """A Python, numpy or torch number, bool, or array or tensor of one element, as a float.

    A value on a GPU makes the caller wait for it; the first one of each call is warned of. A
    number beyond float64 becomes an infinity. Of a sharded tensor it is the part that this
    process holds, which the first one of each call is warned of; no collective runs.

    Args:
        value: The number.
        argument: How errors name it.
        call: The public call that it was given to, such as "metrics.log".

    Raises:
        SchemaValidationError: A str, an array of several elements, a complex
            number or anything else that is no real number.
    """
    try:
        return _to_float(value, argument, call)
    except SchemaValidationError:
        raise
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        _refuse(value, argument)


def to_amount(value: Any, argument: str, call: str) -> float:
    """A number as of `to_float`, where True and False would be a mistake: a loss, a time.

    Raises:
        SchemaValidationError: As of `to_float`; also a bool.
    """
    if type(value) is float:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        raise SchemaValidationError(f"{argument} must be a number, not bool")
    return to_float(value, argument, call)


def names_part(value: Any) -> bool:
    """Whether a tensor is sharded, so that this process holds a part of it (a DTensor)."""
    if not hasattr(value, "full_tensor"):
        return False
    is_whole = all(place.is_replicate() for place in value.placements)
    return not is_whole and value.device_mesh.size() > 1


def _take_part(value: Any, argument: str, call: str) -> float:
    """The value of a sharded tensor's local part; NaN where this process has none."""
    if names_part(value) and f"{call} part" not in _warned:
        _warned.add(f"{call} part")
        _log.warning(
            "%s is a sharded tensor (DTensor), so %s() logs only the part on this process. For "
            "the whole, write value.full_tensor().item() in all processes.",
            argument,
            call,
        )
    local = value.to_local()
    return _to_float(local, argument, call) if local.numel() else math.nan


def _to_float(value: Any, argument: str, call: str) -> float:
    kind = type(value)
    dtype = str(getattr(value, "dtype", ""))
    if "time" in dtype:
        _refuse(value, argument)  # numpy counts its durations among the integers
    if kind is int or (isinstance(value, (Real, Decimal)) and kind is not bool):
        return _convert(value, argument)
    if kind is bool:
        return float(value)
    if isinstance(value, (str, bytes)) or value is None:
        _refuse(value, argument)
    if not dtype or "complex" in dtype or not _has_one_element(value):
        _refuse(value, argument)
    if hasattr(value, "full_tensor"):
        return _take_part(value, argument, call)
    if getattr(value, "is_cuda", False) and call not in _warned:
        _warned.add(call)
        warnings.warn(
            f"{argument} is a CUDA tensor, so each {call}() waits for the GPU. Log less often, "
            "or move all values to the CPU together",
            RuntimeWarning,
            stacklevel=5,
        )
    if not hasattr(value, "item"):
        _refuse(value, argument)
    try:
        item = value.item()
    except (RuntimeError, TypeError, ValueError):
        _refuse(value, argument)  # such as a tensor on the meta device, which has no value
    if not isinstance(item, (int, float)):
        _refuse(value, argument)
    return _convert(item, argument)


def _has_one_element(value: Any) -> bool:
    return getattr(value, "ndim", 1) == 0 or all(
        size == 1 for size in getattr(value, "shape", (0,))
    )


def _convert(value: Any, argument: str) -> float:
    try:
        return float(value)
    except OverflowError:
        # As a longer float than ours is converted by numpy.
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        _refuse(value, argument)


def flatten(metrics: Mapping[Any, Any], argument: str) -> dict[str, Any]:
    """Mappings within a mapping, as one: `{"train": {"loss": 0.1}}` becomes `train/loss`.

    Raises:
        SchemaValidationError: A name is no str, two are the same, mappings lie too deep within
            one another or cannot be read; the message begins with the argument.
    """
    flat: dict[str, Any] = {}
    try:
        _flatten_into(flat, metrics, "", argument, _MAX_DEPTH)
    except SchemaValidationError:
        raise
    except Exception as error:  # noqa: BLE001 - a foreign object may raise anything
        raise SchemaValidationError(
            f"{argument} contains a mapping that cannot be read: {type(error).__name__}"
        ) from None
    return flat


def _flatten_into(
    flat: dict[str, Any], metrics: Mapping[Any, Any], prefix: str, argument: str, depth: int
) -> None:
    if not depth:
        raise SchemaValidationError(
            f"{argument} has mappings nested more than {_MAX_DEPTH} levels deep"
        )
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise SchemaValidationError(
                f"{argument}: the name of a metric must be a str, not {type(name).__name__}"
            )
        key = f"{prefix}/{name}" if prefix else name
        if isinstance(value, Mapping):
            _flatten_into(flat, value, key, argument, depth - 1)
        elif key in flat:
            raise SchemaValidationError(f"{argument} has {key!r} twice, once in a nested mapping")
        else:
            flat[key] = value


def _refuse(value: object, argument: str) -> NoReturn:
    try:
        shape = tuple(value.shape)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        shape = ()
    what = type(value).__name__ if not shape else f"{type(value).__name__} of shape {shape}"
    raise SchemaValidationError(f"{argument} must be a number, not {what}")
