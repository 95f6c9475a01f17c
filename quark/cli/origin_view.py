"""What `quark show RUN --why` prints: where settings have their values from."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import click

from quark.cli.store_access import print_json
from quark.configuration.layering.manual import tell_chain
from quark_core.records.json_object import flatten_json
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.backends.contract import StoredRun


def print_origins(stored: StoredRun, key: str, *, as_json: bool) -> None:
    """Print the origins of a setting and of those below it, a line for each.

    Args:
        stored: The run.
        key: The setting, dots between nested keys; "" for all.
        as_json: Whether as JSON: setting -> its value and origins, the newest first.

    Raises:
        click.ClickException: The run has no such setting.
    """
    config = stored.config
    settings: dict[str, Any] = {} if config is None else dict(flatten_json(config.values))
    chosen = {
        path: value
        for path, value in settings.items()
        if not key or path == key or path.startswith(f"{key}.")
    }
    if not chosen:
        raise click.ClickException(clean_line(_describe_absence(key, settings)))
    known = {} if config is None else config.group_origins()
    if as_json:
        print_json(
            {
                path: {
                    "value": value,
                    "origins": [origin.to_dict() for origin in known.get(path, ())],
                }
                for path, value in chosen.items()
            }
        )
        return
    for path, value in chosen.items():
        chain = [(each.source, each.place, each.value) for each in known.get(path, ())]
        click.echo(clean_line(tell_chain(path, chain or [("nobody has said what", None, value)])))


def _describe_absence(key: str, settings: dict[str, Any]) -> str:
    if not settings:
        return "the run has no configuration"
    near = difflib.get_close_matches(key, list(settings), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"the run has no setting {key!r}{hint}"
