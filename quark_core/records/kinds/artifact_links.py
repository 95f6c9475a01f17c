"""Links of artifacts: the runs that used one, and the aliases that name one."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from quark_core.errors import SchemaValidationError
from quark_core.records.base import FieldRules, StreamRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.names import MOST_PINNED, is_sha256

ArtifactRelation = Literal["used", "alias", "unalias"]


class ArtifactLinkRecord(StreamRecord, frozen=True, gc=False):
    """Link of a run to a version of an artifact.

    Attributes:
        relation: `used`: this run used the version. `alias`: the alias now names this version, and
            no other version of this name in the project. `unalias`: the alias no longer names it.
        artifact_key: Full name of the artifact.
        artifact_run_id: ID of the run that logged it.
        artifact_id: ID of its `ArtifactRecord`.
        sha256: Hash of its payload.
        version: Number of the version when the link was made, or None if it was not known.
        alias: The alias. For `used`, the alias by which the version was requested, or None.
        step, epoch: Counters, or None.
        metadata: JSON values, or None.
    """

    relation: str
    artifact_key: str
    artifact_run_id: str
    artifact_id: str
    sha256: str
    version: int | None = None
    alias: str | None = None
    step: int | None = None
    epoch: int | None = None
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "artifact_link"
    TABLE: ClassVar[str] = "artifact_links"
    HAS_FIGURES: ClassVar[bool] = False
    RULES: ClassVar[FieldRules] = FieldRules(
        names=("artifact_key",),
        words={"relation": get_args(ArtifactRelation)},
        plain=("artifact_run_id", "artifact_id", "sha256", "alias"),
    )

    def check(self) -> None:
        """Reject a link without a target, and an alias without a name."""
        name = type(self).__name__
        if not is_sha256(self.sha256):
            raise SchemaValidationError(f"{name}.sha256 must be 64 lowercase hexadecimal digits")
        if self.version is not None and not 0 <= self.version <= MOST_PINNED:
            raise SchemaValidationError(
                f"{name}.version must be from 0 to {MOST_PINNED}, got {self.version}"
            )
        if self.relation != "used" and self.alias is None:
            raise SchemaValidationError(f"{name}.alias is required for an alias")
