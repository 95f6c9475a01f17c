"""What a shell offers behind `quark …`: runs, projects, tags, metrics; and how it comes to ask.

The shell calls `quark` anew at each press of the tab key, so that little is imported here,
and an answer that is not there in time is none. Nothing that goes wrong is ever told: text
in the middle of a line that somebody types is worse than no help.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from click.shell_completion import CompletionItem, get_completion_class

from quark.cli.options import argument
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead

_VARIABLE = "_QUARK_COMPLETE"
_PATIENCE_S = 2.0
_MOST = 100
_MOST_RUNS = 10_000
_HELP_CHARACTERS = 60
_SHELLS = ("bash", "zsh", "fish")
_BEGIN, _END = "# >>> quark completion >>>", "# <<< quark completion <<<"

# A shell puts a word on the line as it is, and the names of runs may be a stranger's: nothing
# that a shell would take for more than a word is ever offered.
_FIT = re.compile(r"[\w.@+%][\w./@:+,=%-]*")

T = TypeVar("T")
Found = list[CompletionItem]


def is_completing() -> bool:
    """Whether this process answers a shell, rather than does what is on its command line."""
    return _VARIABLE in os.environ


def answer_shell(command: click.Command) -> None:
    """Answer the shell that asks, whatever goes wrong; does not return."""
    logging.disable(logging.CRITICAL)
    with suppress(BaseException):
        # Warnings of libraries too.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
        command(prog_name="quark")
    # A thread that waits for a service, or a library's, is not waited for.
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(0)


def _completes(
    find: Callable[[SupportsRead, click.Context, str], Found],
) -> Callable[[click.Context, click.Parameter, str], Found]:
    """What a look into the store of a line finds; nothing where that fails or takes too long."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> Found:
        del param
        answers: list[Found] = []

        def work() -> None:
            # See the module: nothing is told.
            with suppress(BaseException):
                answers.append(find(_open(ctx), ctx, incomplete))

        # Of a service that is down nobody knows how long it takes; the thread ends with us.
        thread = threading.Thread(target=work, name="quark-completion", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        return answers[0] if answers else []

    return complete


@_completes
def complete_runs(reader: SupportsRead, _: click.Context, incomplete: str) -> Found:
    """Ids of runs that begin so, newest first, and names that do; each with project and name."""
    from quark_core.runs.run_ids import find_labels

    found = []
    labels = find_labels(reader, "", _MOST_RUNS)
    for label in labels:
        name = label.name or ""
        if label.run_id.startswith(incomplete):
            text = label.run_id
        elif incomplete and name.startswith(incomplete):
            text = name
        else:
            continue
        if not _FIT.fullmatch(text):
            continue
        told = " ".join(each for each in (label.project, name, label.status) if each)
        found.append(CompletionItem(text, help=clean_line(told)[:_HELP_CHARACTERS]))
        if len(found) == _MOST:
            break
    return found


RUN = argument(shell_complete=complete_runs)
"""A run that a command is about."""


@_completes
def complete_projects(reader: SupportsRead, _: click.Context, incomplete: str) -> Found:
    """Projects that begin so."""
    from quark_core.runs.run_ids import find_labels

    labels = find_labels(reader, "", _MOST_RUNS)
    return _offer((label.project for label in labels), incomplete)


@_completes
def complete_groups(reader: SupportsRead, _: click.Context, incomplete: str) -> Found:
    """Paths of groups that begin so, those that hold others included."""
    paths = (path for run in reader.list_runs() for path in run.run.groups)
    parts = (path.split("/") for path in paths)
    return _offer(
        ("/".join(each[:end]) for each in parts for end in range(1, len(each) + 1)),
        incomplete,
    )


@_completes
def complete_sweeps(reader: SupportsRead, ctx: click.Context, incomplete: str) -> Found:
    """Names of sweeps that begin so, newest first, each with its project and state."""
    from quark_core.backends.coordination import SupportsCoordination

    store: object = reader
    if not isinstance(store, SupportsCoordination):
        return []
    found: dict[str, CompletionItem] = {}
    for sweep in store.list_sweeps(ctx.params.get("project")):
        if sweep.name.startswith(incomplete) and _FIT.fullmatch(sweep.name):
            told = clean_line(f"{sweep.project} {sweep.state}")[:_HELP_CHARACTERS]
            found.setdefault(sweep.name, CompletionItem(sweep.name, help=told))
    return list(found.values())[:_MOST]


@_completes
def complete_metrics(reader: SupportsRead, ctx: click.Context, incomplete: str) -> Found:
    """Metrics that begin so, as they were logged: of the run of this line, or of all."""
    from quark.cli.store_access import find_run
    from quark_core.records.names import decode_name
    from quark_core.runs.run_search import list_names, summarize_run

    run = ctx.params.get("run")
    if run:
        keys = list(summarize_run(reader, str(find_run(reader, str(run)).run.id)).metrics)
    else:
        keys = list(list_names(reader, text=incomplete, limit=_MOST).metrics)
    return _offer(map(decode_name, keys), incomplete)


@_completes
def complete_tags(reader: SupportsRead, _: click.Context, incomplete: str) -> Found:
    """Tags that begin so."""
    from quark_core.runs.run_search import list_names

    names = list_names(reader, text=incomplete, limit=_MOST)
    return _offer((tag.tag for tag in names.tags), incomplete)


def _offer(words: Iterator[str], incomplete: str) -> Found:
    fit = (word for word in words if _FIT.fullmatch(word))
    found = dict.fromkeys(word for word in fit if word.startswith(incomplete))
    return [CompletionItem(word) for word in sorted(found)[:_MOST]]


def _open(ctx: click.Context) -> SupportsRead:
    from quark_core.config.arguments import resolve_storage_dir
    from quark_core.runs.backend_choice import open_reader

    directory = ctx.params.get("storage_dir")
    backend = ctx.params.get("backend")
    if backend:
        from quark_core.runs.run_reader import open_foreign_store

        return open_foreign_store(directory, str(backend)).reader
    return open_reader(resolve_storage_dir(directory), takes_over=False)


def install_option(command: Callable[..., T]) -> Callable[..., T]:
    """Add --install-completion to the root of the commands."""
    return click.option(
        "--install-completion",
        is_flag=False,
        flag_value="",
        default=None,
        expose_value=False,
        is_eager=True,
        metavar="[bash|zsh|fish]",
        callback=_install,
        help="Install shell completion of commands, options, runs and names.",
    )(command)


def _install(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    del param
    if value is None or ctx.resilient_parsing:
        return
    shell = value or Path(os.environ.get("SHELL", "")).name
    if shell not in _SHELLS:
        raise click.BadParameter(
            f"{shell!r} is not supported. Choose 'bash', 'zsh' or 'fish': "
            "`quark --install-completion bash`.",
            param_hint="--install-completion",
        )
    for line in install_completion(shell):
        click.echo(line)
    ctx.exit()


def install_completion(shell: str) -> list[str]:
    """Write what a shell needs into this user's own files; again changes nothing.

    Args:
        shell: bash, zsh or fish.

    Returns:
        What was done, and how it is undone, for people.

    Raises:
        OSError: A file cannot be written.
    """
    script = _write_script(shell)
    given = os.environ.get("XDG_CONFIG_HOME", "")
    config = Path(given) if os.path.isabs(given) else Path.home() / ".config"
    if shell == "fish":
        path = config / "fish" / "completions" / "quark.fish"
        done = [_put(path, script)]
        undo = f"To remove it: rm {path}"
    else:
        path = config / "quark" / f"completion.{shell}"
        folder = os.environ.get("ZDOTDIR") if shell == "zsh" else None
        start = Path(folder or Path.home()) / f".{shell}rc"
        done = [_put(path, script), _add_block(start, path)]
        undo = f"To remove it: rm {path}, and delete the lines from {_BEGIN!r} on in {start}"
    return [*done, undo, f"Start a new {shell} to use it."]


def _write_script(shell: str) -> str:
    found = get_completion_class(shell)
    assert found is not None
    if shell == "bash":
        # Only the text: to ask for the version of bash would take a process.
        template = found.source_template
        values = {
            "complete_func": "_quark_completion",
            "complete_var": _VARIABLE,
            "prog_name": "quark",
        }
        return template % values
    script: str = found(
        click.get_current_context().find_root().command, {}, "quark", _VARIABLE
    ).source()
    if shell == "zsh":
        script = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n" + script
    return script


def _put(path: Path, text: str) -> str:
    try:
        if path.read_text("utf-8") == text:
            return f"{path} is up to date."
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return f"Wrote {path}."


def _add_block(start: Path, script: Path) -> str:
    import shlex

    # Bytes: what is not ours stays as it is, in whatever encoding.
    known = start.read_bytes() if start.exists() else b""
    place = shlex.quote(str(script))
    begin, end = f"{_BEGIN}\n".encode(), f"{_END}\n".encode()
    block = begin + f"[ -f {place} ] && . {place}\n".encode() + end
    if block in known:
        return f"{start} already loads it."
    before, has_begin, rest = known.partition(begin)
    _, has_end, after = rest.partition(end)
    if has_begin and has_end:
        # Of an earlier time, for a file at another place. A full disk must not cost the file.
        target = start.resolve()
        scratch = target.with_name(f"{target.name}.quark{os.getpid()}")
        try:
            scratch.write_bytes(before + block + after)
            shutil.copymode(target, scratch)
            os.replace(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)
        return f"{start} loads it: the existing three lines were updated."
    with start.open("ab") as file:
        file.write((b"\n" if known and not known.endswith(b"\n") else b"") + block)
    return f"{start} loads it: three lines were added at the end."
