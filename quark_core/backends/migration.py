"""Brings a local store of an older Quark up to date."""

from __future__ import annotations

from pathlib import Path

from quark_core.backends.contract import BackendConfig
from quark_core.backends.registry import default_registry
from quark_core.config.arguments import resolve_storage_dir
from quark_core.errors import SchemaMigrationError, SchemaValidationError, SessionStoreError
from quark_core.records import format_time, parse_time
from quark_core.records.times import now_us


def migrate_store(storage_dir: str | Path | None = None, *, generated_at: str | None = None) -> int:
    """Migrate a local store, written by an older Quark, to the current schema.

    Opening a store does the same where it has to; this does it at a time of
    your choice, and lets a large store shrink afterwards. May be called again
    and by several processes at once: a store that is current is left as it is.

    Args:
        storage_dir: The storage root, which holds `.quark`; the working
            directory by default.
        generated_at: When the migration counts as done, as ISO 8601 text; kept
            in the store's marker. Now by default.

    Returns:
        The schema version that the store has now: `CURRENT_SCHEMA_VERSION`.

    Raises:
        SchemaMigrationError: There is no store, it is not ours, newer than
            this Quark, damaged, cannot be written, or a run of an older Quark
            is writing to it. It was left as it was.
        SchemaValidationError: `storage_dir` is no path, or `generated_at` no
            ISO 8601 text.
    """
    moment = _check_moment(generated_at)
    try:
        root = resolve_storage_dir(storage_dir)
    except SessionStoreError as error:
        raise SchemaMigrationError(str(error)) from error
    migrate = default_registry().find_default_primary().migrate
    assert migrate is not None
    return migrate(BackendConfig(storage_dir=root), moment)


def _check_moment(generated_at: str | None) -> str:
    if generated_at is None:
        return format_time(now_us())
    if not isinstance(generated_at, str):
        raise SchemaValidationError(
            f"generated_at must be an ISO 8601 str, not {type(generated_at).__name__}"
        )
    try:
        parse_time(generated_at)
    except (ValueError, OverflowError):
        raise SchemaValidationError(
            f"generated_at must be ISO 8601 such as 2026-05-07T00:00:00Z, got {generated_at!r}"
        ) from None
    return generated_at
