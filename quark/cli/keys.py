"""`quark keys`: who may use a persistence service."""

from __future__ import annotations

import re
from contextlib import closing
from typing import TYPE_CHECKING, Literal

import click

from quark.cli.command_groups import SuggestingGroup
from quark.cli.options import argument, option, takes_options
from quark.cli.service_options import STORE, open_deployment
from quark.cli.store_access import AS_JSON, print_json
from quark.cli.texts import Console, Text
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records import format_time
from quark_core.records.base import now_us

if TYPE_CHECKING:
    from quark_backends.service.server.deployment import ControlDatabase, Deployment, StoredKey

_DURATION = re.compile(r"(\d+)([smhdw])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MICROSECONDS = 1_000_000
_DATE_WIDTH = len("2026-11-21")
_LEAST_PREFIX = 4
_SHOWN_KEYS = 10


@click.group(cls=SuggestingGroup)
def keys() -> None:
    """Create, list, rotate and revoke API keys.

    Works on the server's databases, also while the server is not running. A
    running server applies the changes within 30 seconds.
    """


@keys.command()
@takes_options
def create(
    *,
    store: str = STORE,
    workspace: str = option(
        "Workspace of the key. Created if it does not exist.", default="default"
    ),
    scopes: tuple[Literal["read", "ingest", "write", "admin"], ...] = option(
        "Permission of the key. Repeatable.", "--scope", show_default="read and ingest"
    ),
    name: str = option("Name of the key.", default="key"),
    expires: str | None = option(
        "Lifetime of the key: 12h, 30d, 8w.", metavar="TIME", show_default="unlimited"
    ),
) -> None:
    """Create an API key, and print it once.

    The server stores only a hash, so the key cannot be shown again.
    """
    lifetime_s = None if expires is None else _parse_duration(expires, "--expires")
    with closing(_open(store)) as deployment:
        if deployment.add_workspace(workspace):
            click.echo(f"Created the workspace {workspace!r}.", err=True)
        from quark_backends.service.server.keys import make_key

        key, _ = make_key(
            deployment.control,
            workspace=workspace,
            name=name,
            scopes=scopes or ("read", "ingest"),
            expires_us=None if lifetime_s is None else now_us() + lifetime_s * _MICROSECONDS,
        )
    click.echo(key)


@keys.command("list")
@takes_options
def list_keys(
    *,
    store: str = STORE,
    workspace: str | None = option("Only keys of this workspace."),
    as_json: bool = AS_JSON,
) -> None:
    """List API keys, oldest first, without their secrets."""
    with closing(_open(store)) as deployment:
        found = deployment.control.list_keys(workspace)
    moment_us = now_us()
    if as_json:
        print_json([_describe(each, moment_us) for each in found])
        return
    from rich.table import Table

    console = Console()
    if not found:
        console.print("No API keys. `quark keys create` creates one.")
        return
    table = Table(box=None, pad_edge=False)
    # What is copied from here into a command is never cut.
    table.add_column("id", no_wrap=True, min_width=max(len(each.id) for each in found))
    for column in ("workspace", "name", "scopes", "state"):
        table.add_column(column, overflow="fold", min_width=len(column))
    for column in ("created", "last used"):
        table.add_column(column, no_wrap=True, min_width=_DATE_WIDTH)
    for each in found:
        told = _describe(each, moment_us)
        state = str(told["state"])
        if state == "live" and each.expires_us is not None:
            state = f"until {_shorten(told['expires_at'])}"
        table.add_row(
            each.id,
            *(Text(text) for text in (each.workspace, each.name, " ".join(sorted(each.scopes)))),
            state,
            *(_shorten(told[name]) for name in ("created_at", "last_used_at")),
        )
    console.print(table)


@keys.command()
@takes_options
def revoke(*, store: str = STORE, key_id: str = argument()) -> None:
    """Revoke an API key.

    A running server rejects the key within 30 seconds.
    KEY_ID is the key's ID, or at least its first 4 characters if no other key has
    them.
    """
    with closing(_open(store)) as deployment:
        found = _find(deployment.control, key_id)
        deployment.control.end_key(found.id, revoked_us=now_us())
    click.echo(f"Revoked key {found.id} ({found.name}, workspace {found.workspace}).")


@keys.command()
@takes_options
def rotate(
    *,
    store: str = STORE,
    key_id: str = argument(),
    overlap: str = option("Time for which the old key stays valid: 0s, 2h, 1d.", default="1d"),
) -> None:
    """Replace an API key, and print the new key once.

    The new key has the same name, scopes and workspace. The old key stays valid
    for the time of --overlap. KEY_ID is the key's ID, or at least its first 4
    characters if no other key has them.
    """
    overlap_s = _parse_duration(overlap, "--overlap")
    with closing(_open(store)) as deployment:
        from quark_backends.service.server.keys import rotate_key

        old = _find(deployment.control, key_id)
        key, _ = rotate_key(deployment.control, old, overlap_s=overlap_s)
    click.echo(f"Key {old.id} expires in {overlap}. New key:", err=True)
    click.echo(key)


def _open(store: str) -> Deployment:
    deployment = open_deployment(store)
    if deployment.control.read_version() == 0:
        deployment.upgrade()
    deployment.control.check_version()
    return deployment


def _find(control: ControlDatabase, given: str) -> StoredKey:
    """The key of an id or of its beginning; a whole key does as well.

    Raises:
        SessionStoreError: There is none, or several; it lists them.
    """
    key_id = given.strip().removeprefix("qk_").partition("_")[0].rstrip("…")
    found = control.find_key(key_id)
    if found is not None:
        return found
    fitting = [each for each in control.list_keys() if each.id.startswith(key_id)]
    if len(fitting) == 1 and len(key_id) >= _LEAST_PREFIX:
        return fitting[0]
    if not key_id or not fitting:
        raise SessionStoreError(
            f"no key matches {key_id[:40]!r}. `quark keys list` lists the keys."
        )
    listed = "".join(
        f"\n  {each.id}  {each.workspace}  {each.name}" for each in fitting[:_SHOWN_KEYS]
    )
    more = len(fitting) - _SHOWN_KEYS
    raise SessionStoreError(
        f"KEY_ID {key_id!r} is ambiguous. Pass at least {_LEAST_PREFIX} characters that no other "
        f"key has:{listed}" + (f"\n  and {more} more" if more > 0 else "")
    )


def _parse_duration(text: str, option: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise SchemaValidationError(f"{option} is not a duration, such as '12h' or '30d'.")
    return int(match[1]) * _UNITS_S[match[2]]


def _describe(key: StoredKey, moment_us: int) -> dict[str, object]:
    if key.revoked_us is not None:
        state = "revoked"
    else:
        state = "live" if key.is_live(moment_us) else "expired"
    return {
        "id": key.id,
        "workspace": key.workspace,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "state": state,
        "created_at": format_time(key.created_us),
        **{
            name: None if value is None else format_time(value)
            for name, value in (
                ("expires_at", key.expires_us),
                ("revoked_at", key.revoked_us),
                ("last_used_at", key.last_used_us),
            )
        },
    }


def _shorten(moment: object) -> str:
    return str(moment)[:10] if moment else "-"
