"""Reads a run's configuration, with what plugins know of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import msgspec

from quark_core.backends.registry import default_registry
from quark_core.config.snapshot import ConfigDescription, snapshot_config
from quark_core.records import ConfigSnapshot

_log = logging.getLogger("quark")


def read_config(config: object) -> ConfigSnapshot:
    """Take a config as it is now, redacted; see `snapshot_config` for the accepted types.

    Plugins can read more types, and know where settings have their values from.

    Raises:
        SchemaValidationError: Neither the core nor a plugin can read `config`.
    """
    if config is None:
        return snapshot_config(None)
    found = default_registry().ask("quark_describe_config", config=config)
    if not isinstance(found, ConfigDescription):
        return snapshot_config(config if found is None else found)
    snapshot = snapshot_config(found.values)
    if found.add_origins is None:
        return snapshot
    try:
        return found.add_origins(snapshot)
    except Exception:  # noqa: BLE001 - origins are worth no run
        _log.exception("the origins of the config values are not stored")
        return snapshot


def change_config(
    before: ConfigSnapshot, after: ConfigSnapshot, given: Sequence[ConfigSnapshot], call: str
) -> ConfigSnapshot:
    """A changed configuration with its origins, as far as plugins know them.

    Args:
        before: The configuration so far.
        after: The new one, without origins.
        given: The changes, each as `read_config` returned it.
        call: The function that the program called for it.
    """
    found = default_registry().ask(
        "quark_config_changed", before=before, after=after, given=given, call=call
    )
    if isinstance(found, ConfigSnapshot):
        return found
    changed = {key for each in given for key in each.values}
    kept = (each for each in before.origins if changed.isdisjoint(_list_prefixes(each.key)))
    return msgspec.structs.replace(after, origins=tuple(kept))


def _list_prefixes(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))
