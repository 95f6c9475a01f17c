"""Root of the `quark` command: each command is in the module of its name."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from io import StringIO
from typing import Any

import click

from quark.cli.command_groups import SuggestingGroup
from quark.cli.completion import answer_shell, install_option, is_completing
from quark.cli.terminal import guard_streams
from quark_core.config import settings
from quark_core.errors import (
    ArtifactNotFoundError,
    QuarkError,
    RunNotFoundError,
    StoreNotFoundError,
    UnknownBackendError,
)
from quark_core.system.terminal_text import clean_text
from quark_core.version import __version__

_GROUPS = {
    "View runs": {
        "runs": "List, filter and sort runs.",
        "show": "Show a run's config, metrics and latest events.",
        "ui": "Open the web UI.",
        "follow": "Follow a running run in the terminal.",
        "logs": "Print a run's console output.",
        "samples": "List and search a run's text samples.",
        "report": "Write a standalone HTML report.",
    },
    "Diagnose and compare": {
        "analyze": "Diagnose a run: alerts, health scores and phases.",
        "compare": "Compare two runs, or two groups of seeds.",
        "why": "Explain why the result of a run changed.",
        "sources": "Show, compare or restore a run's source code.",
        "traces": "List the versions of traced functions in a project.",
    },
    "Organize": {
        "edit": "Edit a run's name, notes, tags and groups, or archive it.",
        "groups": "List groups of runs, or describe one.",
        "artifacts": "List and copy artifacts; show versions and lineage.",
        "stop": "Ask a running training process to stop.",
    },
    "Sweeps": {
        "sweep": "Search hyperparameters with any number of workers.",
    },
    "Move data": {
        "import": "Import runs from TensorBoard, W&B, MLflow and others.",
        "export": "Export a run to Parquet, CSV or JSON Lines.",
        "mirror": "Show, verify or fill the mirrors of a run.",
        "sync": "Deliver records that earlier processes left behind.",
        "mcp": "Serve runs to a language model over MCP (read-only).",
    },
    "Storage": {
        "du": "Show disk usage by project and run.",
        "rm": "Move runs to the trash.",
        "restore": "Restore runs from the trash.",
        "gc": "Delete the runs in the trash permanently.",
        "backup": "Back up a store, or verify a backup.",
        "doctor": "Check for undelivered, rejected or damaged records.",
        "backends": "List storage backends and plugins, or create a backend.",
    },
    "Team server": {
        "serve": "Run the server for a team.",
        "keys": "Create, list, rotate and revoke API keys.",
        "db": "Back up, restore or upgrade the server's databases.",
    },
}
"""Heading in the help -> commands below it: name, also of module and function -> summary."""

_COMMANDS = frozenset(name for commands in _GROUPS.values() for name in commands)

_NOT_THERE = (ArtifactNotFoundError, RunNotFoundError, StoreNotFoundError, UnknownBackendError)

_MODULES = {"import": "import_runs"}
"""Those whose names Python keeps for itself."""


# Commands that installed plugins add, each imported when it is called.

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_PLACE = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True, slots=True)
class PluginCommand:
    """A command that a plugin declares.

    Attributes:
        name: The word after `quark`.
        place: Its object, as `module:attribute`.
        plugin: Name of the plugin's entry point.
    """

    name: str
    place: str
    plugin: str

    def load(self) -> click.Command:
        """Import the command.

        Raises:
            click.ClickException: The module cannot be imported, or holds no command there.
        """
        module, _, attribute = self.place.partition(":")
        try:
            found: Any = getattr(import_module(module), attribute)
        except (Exception, SystemExit) as error:
            raise self._refuse(f"{type(error).__name__}: {error}") from error
        if not isinstance(found, click.Command):
            raise self._refuse(f"it is a {type(found).__name__}, not a click.Command")
        return found

    def _refuse(self, reason: str) -> click.ClickException:
        return click.ClickException(
            clean_text(
                f"command {self.name!r} of the plugin {self.plugin!r} cannot be used"
                f" ({self.place}): {reason}"
            )
        )


@cache
def find_plugin_commands(own: Container[str]) -> dict[str, PluginCommand]:
    """The commands of all plugins by name; stderr says what was left out.

    Args:
        own: Names that Quark has commands for.
    """
    if not _has_foreign_plugins():
        return {}  # Quark's own plugins declare no commands, and loading them takes 0.1 s
    from quark_core.backends.registry import default_registry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # printed below, in a line each
        registry = default_registry()
    for item in registry.left_out:
        _print(f"ignored the plugin {item.name!r} of {item.origin}: {item.reason}")
    found: dict[str, PluginCommand] = {}
    for plugin, declared in registry.collect("quark_register_commands"):
        try:
            commands = dict(declared)
        except (TypeError, ValueError):
            kind = type(declared).__name__
            _print(f"ignored the commands of the plugin {plugin!r}: a {kind} is not a mapping")
            continue
        for name, place in commands.items():
            reason = _find_fault(name, place)
            if name in own:
                reason = "Quark has a command of this name"
            elif name in found:
                reason = f"the plugin {found[name].plugin!r} has a command of this name"
            if reason is None:
                found[name] = PluginCommand(name, place, plugin)
            else:
                _print(f"ignored the command {name!r} of the plugin {plugin!r}: {reason}")
    return found


def _has_foreign_plugins() -> bool:
    """Whether another distribution has plugins; finds that out without loading one."""
    # Late: most commands need no plugin.
    from importlib.metadata import entry_points

    from quark_core.hookspecs import ENTRY_POINT_GROUP, PLUGIN_GROUP

    return any(
        not point.value.startswith(("quark.", "quark_backends."))
        for group in (ENTRY_POINT_GROUP, PLUGIN_GROUP)
        for point in entry_points(group=group)
    )


def _find_fault(name: object, place: object) -> str | None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return "it is not a lowercase word"
    if not isinstance(place, str) or not _PLACE.fullmatch(place):
        return f"it is at {place!r}, not at 'module:attribute'"
    return None


def _print(text: str) -> None:
    click.echo(clean_text(f"quark: {text}"), err=True)


class _Commands(SuggestingGroup):
    """A group whose commands are imported when they are called, so that --help is quick."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """See `click.Group`; mistakes of the command line begin as all of Quark's errors do."""
        run: Callable[..., Any] = super().main
        if not standalone_mode:
            return run(*args, standalone_mode=False, **extra)
        try:
            status = run(*args, standalone_mode=False, **extra)
        except click.ClickException as error:
            told = StringIO()
            error.show(told)
            click.echo(re.sub("(?m)^Error: ", "quark: ", told.getvalue()), nl=False, err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("quark: aborted", err=True)
            sys.exit(1)
        # What --help and --version exit with comes back as a number.
        sys.exit(status if isinstance(status, int) else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click gives it
        return [*sorted(_COMMANDS), *sorted(find_plugin_commands(_COMMANDS))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            # Plugins are looked for only here and for help: that takes time.
            declared = find_plugin_commands(_COMMANDS).get(cmd_name)
            if declared is None:
                return None
            try:
                return declared.load()
            except click.ClickException:
                if ctx.resilient_parsing:  # a shell asks what it may offer
                    return None
                raise
        name = _MODULES.get(cmd_name, cmd_name)
        command = getattr(import_module(f"quark.cli.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        declared = find_plugin_commands(_COMMANDS)
        # Their modules are not imported: one that is slow or broken must not spoil the help.
        other = {name: f"From the plugin {declared[name].plugin!r}." for name in sorted(declared)}
        # As wide as the longest name, so that the columns of all sections are in line.
        width = max(map(len, [*_COMMANDS, *other]))
        for heading, commands in {**_GROUPS, "Other": other}.items():
            if commands:
                with formatter.section(heading):
                    formatter.write_dl(
                        [(f"{name:<{width}}", text) for name, text in commands.items()]
                    )


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quark")
@install_option
def cli() -> None:
    """View, compare and manage training runs."""


def main() -> None:
    """Entry point: an error of Quark's, or of the system's, is one line and exit status 1 or 2."""
    if is_completing():
        answer_shell(cli)
    guard_streams()
    # A run that a command makes speaks by the command.
    os.environ.setdefault(settings.QUIET, "1")
    try:
        cli()
    except BrokenPipeError:
        # The reader (head, less) has left; Python must not complain at its exit.
        sys.stderr.close()
        sys.exit(141)
    except (QuarkError, OSError) as error:
        click.echo(f"quark: {error}", err=True)
        # What does not exist was mistyped, mostly: a mistake in the command line.
        sys.exit(2 if type(error) in _NOT_THERE else getattr(error, "exit_status", 1))
