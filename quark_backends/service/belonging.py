"""What client and server say to each other of projects and groups; a part of the protocol."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quark_core.backends.edits import BelongingEdit

_Text = Annotated[str, Meta(max_length=512)]


class BelongingRequest(BelongingEdit, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/project` and `POST /v1/groups`: what is to be changed of a project or group.

    Attributes:
        project: Name of the project.
        by: Who changes it, as `user@host`; the service adds the id of the key.
        path: The group's; null for the project.
    """

    project: _Text
    by: Annotated[str, Meta(min_length=1, max_length=250)]
    path: _Text | None = None


class GroupList(msgspec.Struct, frozen=True):
    """`GET /v1/groups`: groups as `quark_core.backends.edits.StoredGroup.to_dict()`."""

    groups: list[dict[str, Any]]
