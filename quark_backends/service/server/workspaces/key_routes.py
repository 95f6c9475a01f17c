"""Lets the admins of a workspace make, list, rotate and revoke its keys."""

from __future__ import annotations

from starlette.types import ASGIApp

from quark_backends.service.protocol import (
    ErrorCode,
    KeyInfo,
    KeyList,
    KeyRequest,
    NewKey,
    RotateRequest,
)
from quark_backends.service.server.http.call import Call
from quark_backends.service.server.http.replies import ServiceFailure
from quark_backends.service.server.workspaces.control_database import ControlDatabase, StoredKey
from quark_backends.service.server.workspaces.keys import make_key, rotate_key
from quark_core.records import format_time
from quark_core.records.base import now_us

_MICROSECONDS = 1_000_000


async def list_keys(call: Call) -> ASGIApp:
    """The keys of the workspace, oldest first, without their secrets."""
    control = call.service.control
    found = await call.service.threads.key(control.list_keys, call.principal.workspace)
    return call.reply(KeyList([_describe(each) for each in found]))


async def create_key(call: Call) -> ASGIApp:
    """Make a key; this reply is the only place where all of it is told."""
    request = await call.decode(KeyRequest)
    expires_us = None
    if request.expires_in_s is not None:
        expires_us = now_us() + int(request.expires_in_s * _MICROSECONDS)
    text, made = await call.service.threads.key(
        make_key,
        call.service.control,
        workspace=call.principal.workspace,
        name=request.name,
        scopes=request.scopes,
        expires_us=expires_us,
    )
    return call.reply(NewKey(text, _describe(made)))


async def rotate(call: Call) -> ASGIApp:
    """Make a key like another one, which lives on for the time that is asked for."""
    request = await call.decode(RotateRequest)
    old = await _find(call)
    text, made = await call.service.threads.key(
        rotate_key, call.service.control, old, overlap_s=request.overlap_s
    )
    call.service.guard.forget(old.id)
    return call.reply(NewKey(text, _describe(made)))


async def revoke_key(call: Call) -> ASGIApp:
    """Revoke a key; other processes believe in it until what they know is too old."""
    old = await _find(call)
    control = call.service.control
    await call.service.threads.key(control.end_key, old.id, revoked_us=now_us())
    call.service.guard.forget(old.id)
    found = await call.service.threads.key(control.find_key, old.id)
    return call.reply(_describe(found or old))


async def _find(call: Call) -> StoredKey:
    """The key that the path names, if the workspace has it."""
    key_id = call.path_text("key_id")
    control: ControlDatabase = call.service.control
    found = await call.service.threads.key(control.find_key, key_id)
    if found is None or found.workspace != call.principal.workspace:
        raise ServiceFailure(ErrorCode.NOT_FOUND, "the workspace has no such key", field="key_id")
    return found


def _describe(key: StoredKey) -> KeyInfo:
    def spell(moment_us: int | None) -> str | None:
        return None if moment_us is None else format_time(moment_us)

    return KeyInfo(
        id=key.id,
        name=key.name,
        scopes=tuple(sorted(key.scopes)),
        created_at=format_time(key.created_us),
        expires_at=spell(key.expires_us),
        revoked_at=spell(key.revoked_us),
        last_used_at=spell(key.last_used_us),
    )
