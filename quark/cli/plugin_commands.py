"""Commands that installed plugins add to `quark`, each imported when it is called."""

from __future__ import annotations

import re
import warnings
from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import click

from quark_core.hookspecs import ENTRY_POINT_GROUP, PLUGIN_GROUP
from quark_core.system.terminal_text import clean_text

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
        _print(f"left out the plugin {item.name!r} of {item.origin}: {item.reason}")
    found: dict[str, PluginCommand] = {}
    for plugin, declared in registry.collect("quark_register_commands"):
        try:
            commands = dict(declared)
        except (TypeError, ValueError):
            kind = type(declared).__name__
            _print(f"left out the commands of the plugin {plugin!r}: a {kind} is not a mapping")
            continue
        for name, place in commands.items():
            reason = _find_fault(name, place)
            if name in own:
                reason = "it is a command of Quark"
            elif name in found:
                reason = f"the plugin {found[name].plugin!r} has it"
            if reason is None:
                found[name] = PluginCommand(name, place, plugin)
            else:
                _print(f"left out the command {name!r} of the plugin {plugin!r}: {reason}")
    return found


def _has_foreign_plugins() -> bool:
    """Whether another distribution has plugins; finds that out without loading one."""
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
