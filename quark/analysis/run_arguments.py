"""Arguments of a command line as settings: what each one sets, and where its value stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from quark_core.records.runs import is_seed

_OPTION = re.compile(r"^--?[A-Za-z][\w.-]*$")
_ASSIGNMENT = re.compile(r"^(\+{0,2}[A-Za-z_][\w./@-]*)=(.*)$", re.DOTALL)
_SHORT_CARRIER = re.compile(r"^[A-Za-z]([A-Za-z_].*)$")
# Options that set nothing themselves, but say that settings follow.
_CARRIERS = frozenset(
    "set o opt opts option options override overrides cfg_options config_override "
    "config_overrides param params hparam hparams d define".split()
)
_WHOLE = re.compile(r"\d+")
_WORDS = {
    "True": ("true", "1", "yes"),
    "False": ("false", "0", "no"),
    "None": ("none", "null"),
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One setting that a command line gives.

    Attributes:
        name: Its name without dashes, or `#1` for the first argument without a name.
        text: Its value, or None of an option that stands alone.
        index: Which argument has the value, or the option that stands alone.
        prefix: What stands before the value in that argument, such as `--lr=`.
    """

    name: str
    text: str | None
    index: int
    prefix: str = ""


def parse_arguments(arguments: Sequence[str]) -> Iterator[Argument]:
    """The settings of a command line, the script left out.

    `--lr 0.1`, `--lr=0.1`, `lr=0.1`, `+lr=0.1`, `--set lr=0.1`, `-o lr=0.1` and `SEED 3` have
    names, as `--fast` has; others are told by their place among those without a name.
    """
    index, plain = 0, 0
    while index < len(arguments):
        here, text = index, arguments[index]
        index += 1
        assigned = _split(text)
        follows = arguments[index] if index < len(arguments) else None
        if assigned is not None:
            yield Argument(*assigned[:2], here, assigned[2])
        elif _OPTION.match(text):
            name = text.lstrip("-")
            if follows is None or _is_option(follows):
                yield Argument(name, None, here)
            elif _ASSIGNMENT.match(follows) or _is_pair(arguments, index):
                if not _is_carrier(name):
                    yield Argument(name, None, here)
            else:
                yield Argument(name, follows, index)
                index += 1
        elif _is_pair(arguments, here):
            yield Argument(text, follows, index)
            index += 1
        else:
            plain += 1
            yield Argument(f"#{plain}", text, here)


def _split(text: str) -> tuple[str, str, str] | None:
    """Name and value of `name=value`, and what stands before the value."""
    bare = text.lstrip("-")
    found = _ASSIGNMENT.match(bare)
    if found is None or (bare is not text and text[: len(text) - len(bare)] not in ("-", "--")):
        return None
    name, value = found[1].lstrip("+"), found[2]
    inner = _ASSIGNMENT.match(value) if _is_carrier(name) else None
    if inner is not None:
        name, value = inner[1].lstrip("+"), inner[2]
    elif text[0] == "-" and text[1] != "-" and (short := _SHORT_CARRIER.match(name)):
        # `-Dseed=3`: the letter is the option, and the rest what it sets.
        name = short[1] if is_seed(short[1]) and not is_seed(name) else name
    return name, value, text[: len(text) - len(value)]


def _is_option(text: str) -> bool:
    """Whether an argument is an option, with a value or without, and no value itself."""
    is_given = text.startswith("-") and _split(text) is not None
    return is_given or _OPTION.match(text) is not None


def _is_carrier(name: str) -> bool:
    return spell_argument(name) in _CARRIERS or len(name) == 1


def _is_pair(arguments: Sequence[str], index: int) -> bool:
    """Whether a seed's name and its number stand there as two words, without dashes."""
    return (
        index + 1 < len(arguments)
        and is_seed(arguments[index])
        and not arguments[index].startswith("-")
        and _WHOLE.fullmatch(arguments[index + 1]) is not None
    )


def spell_argument(name: str) -> str:
    """A name in one spelling, however dashes and capitals are written."""
    return name.lstrip("+-~").replace("-", "_").lower()


def index_names(paths: Iterable[str]) -> dict[str, list[str]]:
    """Names as an argument may spell them -> the keys of a configuration that they may be."""
    found: dict[str, list[str]] = {}
    for path in paths:
        for name in _list_spellings(path):
            found.setdefault(name, []).append(path)
    return found


# Runs of a project have the same keys: each is worked out once.
@lru_cache(maxsize=4_096)
def _list_spellings(path: str) -> frozenset[str]:
    spelled = spell_argument(path)
    return frozenset((spelled, spelled.rpartition(".")[2], spelled.replace(".", "_")))


def find_setting(
    argument: Argument, by_name: Mapping[str, Sequence[str]], settings: Mapping[str, Any]
) -> str | None:
    """The key of a configuration that an argument of its name only says again, or None.

    Args:
        argument: The argument.
        by_name: Of the settings, as `index_names` has it.
        settings: Key -> value.
    """
    spelled, text = spell_argument(argument.name), argument.text
    for candidate in (spelled, spelled.removeprefix("no_")):
        for path in by_name.get(candidate, ()):
            if text is None and isinstance(settings[path], bool):
                return path
            if text is not None and says_value(text, settings[path]):
                return path
    return None


def says_value(text: str, value: Any) -> bool:
    """Whether the text of an argument is this value."""
    if isinstance(value, str):
        return text == value
    if isinstance(value, bool) or value is None:
        return text.lower() in _WORDS[str(value)]
    if isinstance(value, (int, float)):
        try:
            return float(text) == float(value)
        except (ValueError, OverflowError):
            return False
    try:
        return bool(msgspec.json.decode(text) == value)
    except msgspec.DecodeError:
        return False
