"""The search space of a sweep: the values of each parameter, and how they are written as text."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from quark_core.config.arguments import check_label, describe_argument
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import normalize_json

MOST_GRID_TRIALS = 1_000_000
"""How many trials a grid may have."""

_MOST_PARAMETERS = 500
_MOST_CHOICES = 10_000
_MOST_GRID_VALUES = 10_000
_MOST_STEPS = 2**53  # beyond, a float no longer tells one from the next


@dataclass(frozen=True, slots=True)
class Uniform:
    """Numbers between two, each as likely as any other; see `uniform`."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    count: int | None = None

    def draw(self, generator: random.Random) -> float:
        """One of them."""
        if self.step is not None:
            return self.low + self.step * generator.randrange(self._count_steps())
        if self.log:
            drawn = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            drawn = generator.uniform(self.low, self.high)
        return min(max(drawn, self.low), self.high)

    def list_values(self, name: str) -> list[Any]:
        """Those of a grid.

        Raises:
            SchemaValidationError: They are without end, or too many.
        """
        if self.step is not None and self.count is None:
            _check_grid_values(name, self._count_steps(), "quark.uniform")
            return [self.low + self.step * place for place in range(self._count_steps())]
        if self.count is None:
            raise SchemaValidationError(
                f'space[{name!r}] is continuous, but search="grid" requires a finite number of '
                "values. Use quark.uniform(…, count=5), or pass a list"
            )
        return _spread(self.low, self.high, self.count, log=self.log)

    def to_dict(self) -> dict[str, Any]:
        """As a definition has it."""
        return _describe("uniform", self)

    def _count_steps(self) -> int:
        assert self.step is not None
        return math.floor((self.high - self.low) / self.step + 1e-9) + 1


@dataclass(frozen=True, slots=True)
class Integers:
    """Whole numbers from one to another; see `integers`."""

    low: int
    high: int
    log: bool = False
    step: int = 1
    count: int | None = None

    def draw(self, generator: random.Random) -> int:
        """One of them."""
        if not self.log:
            return generator.randrange(self.low, self.high + 1, self.step)
        # Half a number more at each end, so that the ends are as likely as their neighbours.
        low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)
        return min(max(round(math.exp(generator.uniform(low, high))), self.low), self.high)

    def list_values(self, name: str) -> list[Any]:
        """Those of a grid.

        Raises:
            SchemaValidationError: They are too many.
        """
        if self.count is not None:
            spread = _spread(self.low, self.high, self.count, log=self.log)
            return list(dict.fromkeys(round(value) for value in spread))
        _check_grid_values(name, (self.high - self.low) // self.step + 1, "quark.integers")
        return list(range(self.low, self.high + 1, self.step))

    def to_dict(self) -> dict[str, Any]:
        """As a definition has it."""
        return _describe("integers", self)


@dataclass(frozen=True, slots=True)
class Choices:
    """Values of any kind, each as likely as any other; a single one is a setting that stays."""

    values: tuple[Any, ...]

    def draw(self, generator: random.Random) -> Any:
        """One of them."""
        return self.values[generator.randrange(len(self.values))]

    def list_values(self, name: str) -> list[Any]:  # noqa: ARG002
        """Those of a grid."""
        return list(self.values)

    def to_dict(self) -> dict[str, Any]:
        """As a definition has it."""
        return {"type": "choices", "values": list(self.values)}


ParameterRange = Uniform | Integers | Choices
"""What one parameter may be."""


def uniform(
    low: float,
    high: float,
    *,
    log: bool = False,
    step: float | None = None,
    count: int | None = None,
) -> Uniform:
    """Define a range of floats for the space of a sweep.

    Args:
        low, high: Ends of the range, both included.
        log: Whether to sample uniformly in the logarithm, as for learning rates. Defaults to False.
        step: Distance between values, counted from `low`. Not together with `log`.
        count: Number of evenly spaced values for a grid search.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
    """
    ends = _check_number(low, "low"), _check_number(high, "high")
    _check_ends(*ends, log=log)
    if step is not None:
        step = _check_number(step, "step")
        if log:
            raise SchemaValidationError("step and log cannot be combined. Remove one of them")
        if step <= 0:
            raise SchemaValidationError(f"step must be more than 0, got {step}")
        if (ends[1] - ends[0]) / step >= _MOST_STEPS:
            raise SchemaValidationError(f"step is too small for {low} to {high}: got {step}")
    return Uniform(*ends, bool(log), step, _check_count(count))


def integers(
    low: int, high: int, *, log: bool = False, step: int = 1, count: int | None = None
) -> Integers:
    """Define a range of integers for the space of a sweep.

    Args:
        low, high: Ends of the range, both included.
        log: Whether to sample uniformly in the logarithm. Needs `low` of at least 1. Defaults to
            False.
        step: Distance between values, counted from `low`. Not together with `log`. Defaults to 1.
        count: Number of evenly spaced values for a grid search. Defaults to all.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
    """
    for name, value in (("low", low), ("high", high), ("step", step)):
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
            raise SchemaValidationError(
                f"{name} must be a whole number, got {describe_argument(value)}"
            )
    _check_ends(low, high, log=log)
    if step < 1:
        raise SchemaValidationError(f"step must be at least 1, got {step}")
    if log and step != 1:
        raise SchemaValidationError("step and log cannot be combined. Remove one of them")
    return Integers(low, high, bool(log), step, _check_count(count))


RANGE_TEXT = re.compile(r"[A-Za-z_]+:[-+.\d][-+.\de]*:[-+.\d][-+.\de]*(:\d+)?$")
"""A text that was meant as a range, whatever range it names."""

_FORMS = "must be quark.uniform(…), quark.integers(…), a list of values or one value"


class Space:
    """All parameters of a sweep, by name, in the order in which they were given.

    Args:
        ranges: What each may be.
    """

    def __init__(self, ranges: Mapping[str, ParameterRange]) -> None:
        self.ranges = dict(ranges)

    def draw(self, seed: int, place: int) -> dict[str, Any]:
        """The parameters of one trial: the same for the same seed and place, everywhere.

        Each parameter is drawn by itself, so that one more of them changes no other.
        """
        return {
            name: values.draw(random.Random(mix_seed(seed, place, name, size_bytes=16)))
            for name, values in self.ranges.items()
        }

    def count_grid(self) -> int:
        """How many trials a grid has.

        Raises:
            SchemaValidationError: It has no end, or more than `MOST_GRID_TRIALS`.
        """
        count = math.prod(len(values) for values in self._list_all())
        if count > MOST_GRID_TRIALS:
            raise SchemaValidationError(
                f"space has {count:,} combinations, but a grid may have {MOST_GRID_TRIALS:,}. "
                'Pass fewer values, or use search="random"'
            )
        return count

    def iterate_grid(self) -> Iterator[dict[str, Any]]:
        """The parameters of each trial of a grid; the last parameter changes first."""
        names = list(self.ranges)
        for values in product(*self._list_all()):
            yield dict(zip(names, values, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """As a definition has it."""
        return {name: values.to_dict() for name, values in self.ranges.items()}

    def _list_all(self) -> list[list[Any]]:
        return [values.list_values(name) for name, values in self.ranges.items()]


def read_space(given: object, argument: str = "space") -> Space:
    """A space out of what a user gives, or out of a definition.

    A parameter is a `uniform` or `integers`, a list of values, one value that stays the same, or
    an object as `Space.to_dict` makes it.

    Raises:
        SchemaValidationError: A bad one; the message names it.
    """
    if not isinstance(given, Mapping) or not given:
        raise SchemaValidationError(
            f"{argument} must be a mapping of names to values, such as "
            '{"lr": quark.uniform(1e-5, 1e-1, log=True), "layers": [1, 2, 4]}, '
            f"got {describe_argument(given)}"
        )
    if len(given) > _MOST_PARAMETERS:
        raise SchemaValidationError(
            f"{argument} has {len(given)} parameters; at most {_MOST_PARAMETERS} are allowed"
        )
    ranges = {}
    for name, values in given.items():
        label = check_label(name, f"{argument} name")
        ranges[label] = _read_range(values, f"{argument}[{label!r}]")
    return Space(ranges)


def _read_range(given: object, where: str) -> ParameterRange:
    if isinstance(given, Uniform | Integers | Choices):
        return given
    if isinstance(given, Mapping):
        return _read_described(given, where)
    if isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray):
        if not given or len(given) > _MOST_CHOICES:
            raise SchemaValidationError(
                f"{where} must contain 1 to {_MOST_CHOICES:,} values, but has {len(given):,}"
            )
        return Choices(tuple(normalize_json(value, where) for value in given))
    if isinstance(given, str) and RANGE_TEXT.match(given):
        raise SchemaValidationError(
            f"{where} is the string {given!r:.60}, which looks like a range. In Python, write "
            "quark.uniform(low, high, log=…) or quark.integers(low, high). On the command line, "
            "write log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or logint:LOW:HIGH. If it is "
            "meant literally, put it into a list"
        )
    try:
        return Choices((normalize_json(given, where),))
    except SchemaValidationError as error:
        raise SchemaValidationError(f"{error}; it {_FORMS}") from None


def _read_described(given: Mapping[Any, Any], where: str) -> ParameterRange:
    options = {str(key): value for key, value in given.items()}
    kind = options.pop("type", None)
    try:
        if kind == "uniform":
            return uniform(**options)
        if kind == "integers":
            return integers(**options)
        if kind == "choices" and set(options) == {"values"}:
            return _read_range(list(options["values"]), where)
    except SchemaValidationError as error:
        raise SchemaValidationError(f"{where}: {error}") from None
    except TypeError:
        raise SchemaValidationError(
            f"{where} has options that {kind} does not support: {', '.join(sorted(options))[:60]}"
        ) from None
    raise SchemaValidationError(
        f"{where} {_FORMS}, got {describe_argument(given)}. To read the parameters of a W&B "
        "sweep or of Ato from a file, use `quark sweep new --space FILE`"
    )


def mix_seed(seed: int, *parts: object, size_bytes: int = 4) -> int:
    """A seed of so many bytes that comes from all of these."""
    said = "\0".join(str(part) for part in (seed, *parts)).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(said).digest()[:size_bytes], "big")


def _spread(low: float, high: float, count: int, *, log: bool) -> list[float]:
    if count == 1:
        return [low]
    if log:
        first, last = math.log(low), math.log(high)
        middle = [math.exp(first + (last - first) * k / (count - 1)) for k in range(1, count - 1)]
    else:
        middle = [low + (high - low) * k / (count - 1) for k in range(1, count - 1)]
    return [low, *middle, high]


def _check_grid_values(name: str, count: int, maker: str) -> None:
    if count > _MOST_GRID_VALUES:
        raise SchemaValidationError(
            f'space[{name!r}] has {count:,} values, but search="grid" tries all of them. Limit '
            f"them with {maker}(…, count=5), or pass a list"
        )


def _describe(kind: str, values: Uniform | Integers) -> dict[str, Any]:
    said: dict[str, Any] = {"type": kind, "low": values.low, "high": values.high}
    if values.log:
        said["log"] = True
    if values.step is not None and (kind == "uniform" or values.step != 1):
        said["step"] = values.step
    if values.count is not None:
        said["count"] = values.count
    return said


def _check_number(value: object, argument: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise SchemaValidationError(
            f"{argument} must be a finite number, got {describe_argument(value)}"
        )
    return number


def _check_ends(low: float, high: float, *, log: bool) -> None:
    if low >= high:
        raise SchemaValidationError(f"low must be below high, got {low} and {high}")
    if log and low <= 0:
        raise SchemaValidationError(f"low must be above 0 with log=True, got {low}")


def _check_count(count: object) -> int | None:
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_GRID_VALUES:
        raise SchemaValidationError(
            f"count must be a whole number from 1 to {_MOST_GRID_VALUES:,}, "
            f"got {describe_argument(count)}"
        )
    return count


FORMS = "log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or logint:LOW:HIGH, or choices A,B,C"
"""What stands behind a parameter's name, for messages."""

_MOST_BYTES = 1_000_000
_DESCRIBING = {"type", "param_type", "values", "value", "min", "max"}
_RANGES = ("log", "uniform", "int", "logint")


def read_setting(text: str, argument: str = "--set") -> tuple[str, object]:
    """The name and the values of a parameter, as `NAME=VALUES` says it.

    Values are a range, `log:1e-5:1e-1`, `uniform:0:0.5`, `int:1:4` or `logint:1:1000`, behind
    which a third number says how many values a grid takes; or choices with commas between,
    `adam,sgd` or `1,2,4`, of which one alone is fixed. A choice is read as JSON where it is some,
    and is a text otherwise; `["a,b", "c"]` has a comma in one.

    Raises:
        SchemaValidationError: It is no such thing; the message begins with `argument`.
    """
    name, equals, values = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise SchemaValidationError(f"{argument} must be NAME=VALUES, got {text[:60]!r}")
    return name, _read_text(values.strip(), f"{argument} {name}")


def read_space_file(path: Path) -> dict[str, object]:
    """The space in a file: names with their values, in JSON, TOML or YAML by its suffix.

    Values are texts as `read_setting` reads them, lists of choices, single values, or mappings:
    `{"type": "uniform", "low": …, "high": …, "log": …}`, those of Ato (`param_type`,
    `param_range`, `num_samples`, which is how many values a grid takes, `space_type`,
    `categories`), or those of W&B (`min`, `max`, `values`, `value`, `distribution`). They may
    stand below `space` or `parameters`.

    Raises:
        SchemaValidationError: It cannot be read, or holds no space; the message names it.
    """
    content = _read_file(path)
    for key in ("space", "parameters"):
        inner = content.get(key)
        # A parameter may be called so itself.
        if isinstance(inner, Mapping) and not _DESCRIBING & set(inner):
            content = inner
            break
    if not content:
        raise SchemaValidationError(f"--space {path}: the file has no parameters")
    return {
        str(name): _read_value(value, f"--space {path}: {name}") for name, value in content.items()
    }


def _read_file(path: Path) -> Mapping[str, Any]:
    where = f"--space {path}"
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise SchemaValidationError(f"{where} cannot be read: {error.strerror or error}") from None
    if len(data) > _MOST_BYTES:
        raise SchemaValidationError(f"{where} is larger than {_MOST_BYTES:,} bytes")
    content = _PARSERS.get(path.suffix.lower(), _parse_any)(data, where)
    if not isinstance(content, Mapping):
        raise SchemaValidationError(f"{where} must contain names with their values")
    return content


def _parse_json(data: bytes, where: str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SchemaValidationError(f"{where} is not JSON: {error}") from None


def _parse_toml(data: bytes, where: str) -> object:
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SchemaValidationError(f"{where} is not TOML: {error}") from None


def _parse_yaml(data: bytes, where: str) -> object:
    try:
        import yaml
    except ImportError:
        raise SchemaValidationError(
            f"{where}: YAML requires PyYAML (pip install pyyaml). JSON and TOML do not"
        ) from None
    try:
        return yaml.safe_load(data.decode("utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise SchemaValidationError(
            f"{where} is not YAML: {' '.join(str(error).split())}"
        ) from None


def _parse_any(data: bytes, where: str) -> object:  # noqa: ARG001
    raise SchemaValidationError(f"{where} must end with .json, .toml, .yaml or .yml")


_PARSERS: dict[str, Callable[[bytes, str], object]] = {
    ".json": _parse_json,
    ".toml": _parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}


def _read_value(value: object, where: str) -> object:
    if isinstance(value, str):
        return _read_text(value, where)
    if isinstance(value, Mapping):
        return _read_mapping({str(key): item for key, item in value.items()}, where)
    return _check_choices(list(value) if isinstance(value, (list, tuple)) else [value], where)


def _read_text(text: str, where: str) -> object:
    kind, colon, rest = text.partition(":")
    if colon and kind in _RANGES:
        return _read_range_text(kind, rest.split(":"), where)
    if RANGE_TEXT.match(text):
        raise SchemaValidationError(
            f"{where}: the range {kind!r} does not exist. Use {FORMS}. For a literal text that "
            f"looks like a range, write {json.dumps([text])}"
        )
    if not text:
        raise SchemaValidationError(f"{where} needs values: {FORMS}")
    found = _read_scalar(text)
    if isinstance(found, list):
        return _check_choices(found, where)
    return _check_choices([_read_scalar(part.strip()) for part in text.split(",")], where)


def _read_range_text(kind: str, parts: list[str], where: str) -> object:
    if len(parts) not in (2, 3):
        raise SchemaValidationError(
            f"{where} must be one of {FORMS}, got {kind}:{':'.join(parts)[:60]!r}"
        )
    low, high, *rest = (_read_number(part, where) for part in parts)
    count = _make_whole(rest[0], where) if rest else None
    is_whole = kind in ("int", "logint")
    return _make_range(low, high, where, log="log" in kind, is_whole=is_whole, count=count)


def _make_range(
    low: float, high: float, where: str, *, log: bool, is_whole: bool, count: int | None
) -> object:
    ends = [_make_whole(end, where) for end in (low, high)] if is_whole else []
    try:
        if is_whole:
            return integers(*ends, log=log, count=count)
        return uniform(low, high, log=log, count=count)
    except SchemaValidationError as error:
        raise SchemaValidationError(f"{where}: {error}") from None


def _read_number(value: object, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise SchemaValidationError(f"{where}: {str(value)[:40]!r} is not a finite number")
    return number


def _make_whole(number: float, where: str) -> int:
    if number != int(number):
        raise SchemaValidationError(f"{where}: {number:g} is not a whole number")
    return int(number)


def _read_scalar(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _check_choices(choices: list[object], where: str) -> list[object]:
    if not choices:
        raise SchemaValidationError(f"{where} has no choices")
    return choices


def _read_mapping(value: dict[str, Any], where: str) -> object:
    if "type" in value:
        return value  # as a definition has it; it is checked with the sweep
    if "param_type" in value:
        return _read_ato(value, where)
    if set(value) & {"min", "max", "values", "value"}:
        return _read_wandb(value, where)
    raise SchemaValidationError(
        f'{where} must be a string such as log:1e-5:1e-1, a list, {{"type": "uniform", "low": '
        '…, "high": …}, or a parameter of Ato or W&B. It has '
        f"{', '.join(map(repr, value))[:80] or 'nothing'}"
    )


def _read_wandb(value: Mapping[str, Any], where: str) -> object:
    _allow(value, ("min", "max", "values", "value", "distribution"), where)
    if "values" in value:
        return _list_choices(value["values"], where)
    if "value" in value:
        return [value["value"]]
    kind = str(value.get("distribution", ""))
    known = ("", "uniform", "int_uniform", "log_uniform_values")
    if kind not in known or "min" not in value or "max" not in value:
        raise SchemaValidationError(
            f"{where}: of W&B's forms, Quark reads value, values, and min with max, with the "
            "distributions uniform, int_uniform and log_uniform_values; got "
            f"{kind[:40] or 'one bound alone'!r}"
        )
    low, high = value["min"], value["max"]
    is_whole = kind == "int_uniform" or (not kind and all(type(end) is int for end in (low, high)))
    return _make_range(
        _read_number(low, where), _read_number(high, where), where,
        log=kind == "log_uniform_values", is_whole=is_whole, count=None,
    )  # fmt: skip


def _read_ato(value: Mapping[str, Any], where: str) -> object:
    allowed = ("param_type", "param_range", "num_samples", "space_type", "categories")
    _allow(value, allowed, where)
    kind = str(value["param_type"]).upper()
    if kind == "CATEGORY":
        return _list_choices(value.get("categories", ()), where)
    spacing = str(value.get("space_type", "LINEAR")).upper()
    if kind not in ("FLOAT", "INTEGER") or spacing not in ("LOG", "LINEAR"):
        raise SchemaValidationError(
            f"{where}: param_type must be FLOAT, INTEGER or CATEGORY, and space_type LOG or "
            f"LINEAR; got {kind[:40]!r} and {spacing[:40]!r}"
        )
    ends = value.get("param_range")
    if not isinstance(ends, (list, tuple)) or len(ends) != 2:
        raise SchemaValidationError(f"{where}: param_range must be [LOW, HIGH]")
    count = value.get("num_samples")
    if count is not None:
        count = _make_whole(_read_number(count, where), where)
    return _make_range(
        _read_number(ends[0], where), _read_number(ends[1], where), where,
        log=spacing == "LOG", is_whole=kind == "INTEGER", count=count,
    )  # fmt: skip


def _list_choices(choices: object, where: str) -> list[object]:
    if not isinstance(choices, (list, tuple)):
        raise SchemaValidationError(f"{where} must have a list of choices")
    return _check_choices(list(choices), where)


def _allow(value: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    odd = [name for name in value if name not in names]
    if odd:
        raise SchemaValidationError(
            f"{where}: {odd[0]!r} is not supported here. The names are {', '.join(names)}"
        )
