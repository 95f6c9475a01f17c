"""The command of a trial: what `quark sweep run NAME -- python train.py` starts for its parameters.

No shell takes part: each argument stays one, whatever is in it. Parameters may come out of a
store that others write to, so that into an argument which is itself a line for a shell only plain
values are put.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from quark_core.errors import SchemaValidationError

ArgumentForm = Literal["flags", "assignments", "none"]
"""How parameters are appended: `--lr 0.01`, `lr=0.01` (Hydra, `quark.Layers`), or not at all."""

_PLACEHOLDER = re.compile(r"\{([^{}\s]+)\}")
_ALL = "parameters"
# What no shell takes for more than a word.
_PLAIN = re.compile(r"[\w.+@%:,/=-]*")
_LIKENESS = 0.75


def check_command(command: Sequence[str]) -> None:
    """See that a command can be started, before any trial is claimed for it.

    Raises:
        SchemaValidationError: There is none, or no such program.
    """
    if not command or not command[0]:
        raise SchemaValidationError(
            "say behind -- what to run for each trial, as in: "
            "quark sweep run NAME -- python train.py"
        )
    program = command[0]
    if _PLACEHOLDER.search(program) or shutil.which(program) is not None:
        return
    if Path(program).is_file():
        hint = f"it is no program that may be run; python {program} runs a script"
    else:
        hint = "there is no such program on the path"
    raise SchemaValidationError(f"{program!r} cannot be started: {hint}")


def check_placeholders(command: Sequence[str], names: Iterable[str]) -> None:
    """See that what is meant for a parameter's place is one; other braces are the script's own.

    Raises:
        SchemaValidationError: It is nearly a parameter's name.
    """
    known = [*names, _ALL]
    for argument in command:
        for name in _PLACEHOLDER.findall(argument):
            near = get_close_matches(name, known, n=1, cutoff=_LIKENESS)
            if name not in known and near:
                raise SchemaValidationError(
                    f"{{{name}}} names no parameter of the sweep; did you mean {{{near[0]}}}?"
                )


def build_command(
    command: Sequence[str], parameters: Mapping[str, Any], form: ArgumentForm = "flags"
) -> list[str]:
    """The command with the parameters of a trial.

    Where it has placeholders, `{lr}` for one parameter or `{parameters}` for all of them as
    JSON, these are filled in and nothing is appended. Else each parameter is appended.

    Args:
        command: What was given behind `--`.
        parameters: Of the trial.
        form: How they are appended.

    Raises:
        SchemaValidationError: A value is none that a command can be given, or one that a shell
            might take for a command would stand in a line for one.
    """
    texts = {name: describe_value(value) for name, value in parameters.items()}
    # A parameter of that name comes first: it is what the sweep has.
    texts = {_ALL: json.dumps(dict(parameters), ensure_ascii=False), **texts}
    for name, text in texts.items():
        if not _can_be_given(name + text) or name.startswith("-"):
            raise SchemaValidationError(f"parameter {name!r:.60} cannot be given to a command")
    filled = [_fill(argument, texts) for argument in command]
    if any(set(_PLACEHOLDER.findall(argument)) & set(texts) for argument in command):
        return filled
    del texts[_ALL]
    if _ALL in parameters:
        texts[_ALL] = describe_value(parameters[_ALL])
    return [*filled, *_append(texts, form)]


def repeat_name(name: str, sweep_id: str) -> str:
    """What to call a sweep in a line that somebody may copy into a shell: its name or its id.

    The name may be a stranger's.
    """
    return shlex.quote(sweep_id if name.startswith("-") else name)


def describe_value(value: object) -> str:
    """A value as an argument of a command: a text as it is, anything else as JSON has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _append(texts: Mapping[str, str], form: ArgumentForm) -> list[str]:
    if form == "none":
        return []
    if form == "assignments":
        return [f"{name}={text}" for name, text in texts.items()]
    words: list[str] = []
    for name, text in texts.items():
        # Behind a space it would be taken for the next option.
        words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return words


def _fill(argument: str, texts: Mapping[str, str]) -> str:
    is_line = len(argument.split()) > 1

    def put(found: re.Match[str]) -> str:
        name = found[1]
        if name not in texts:
            return found[0]
        text = texts[name]
        if is_line and not _PLAIN.fullmatch(text):
            raise SchemaValidationError(
                f"{{{name}}} stands in {argument[:60]!r}, where a shell would read its value "
                f"{text[:60]!r}: give it as an argument of its own, or read QUARK_PARAMETERS"
            )
        return text

    return _PLACEHOLDER.sub(put, argument)


def _can_be_given(text: str) -> bool:
    """Whether a text can be an argument: it has no NUL, and all of it are characters."""
    try:
        return "\0" not in text and bool(text.encode())
    except UnicodeEncodeError:
        return False
