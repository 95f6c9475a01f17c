"""Lets the core read configurations that have layers and origins."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quark_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from quark_core.config.snapshot import ConfigDescription
    from quark_core.records import ConfigSnapshot


@hookimpl
def quark_describe_config(config: object) -> ConfigDescription:
    """Parse the command line for a parser, and find where settings have their values from."""
    from quark.configuration.setting_origins import add_chains, find_chains
    from quark_core.config.snapshot import ConfigDescription

    parsed = None
    if isinstance(config, ArgumentParser):
        from quark.configuration.layering.command_line import parse_arguments

        parsed = parse_arguments(config)
        config = parsed.values
    chains = find_chains(config, parsed)
    return ConfigDescription(config, lambda snapshot: add_chains(snapshot, chains))


@hookimpl
def quark_config_changed(
    before: ConfigSnapshot, after: ConfigSnapshot, given: Sequence[ConfigSnapshot], call: str
) -> ConfigSnapshot:
    """Note the call as the origin of what it has changed."""
    from quark.configuration.setting_origins import keep_change

    return keep_change(before, after, given, call)
