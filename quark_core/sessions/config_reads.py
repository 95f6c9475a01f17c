"""Which keys of a tracked configuration a run has read, kept when it ends."""

from __future__ import annotations

from quark_core.config.tracked import TrackedConfig, list_reads
from quark_core.records.base import start_fields
from quark_core.records.json_object import JsonObject
from quark_core.runs.open_run import OpenRun
from quark_core.writers.records import write_records

CONFIG_READS = "config_reads"
"""Key of the fingerprint, of the subject environment, that says it."""

_LEVEL = "keys"
_MOST_KEYS = 5_000


class ConfigReads:
    """Writes down at the run's end which keys of its configuration were read.

    A run that is killed says nothing: then nobody knows. Of a launch of several processes
    this one knows its own reads alone, and those of its forked children.
    """

    def __init__(self, run: OpenRun, config: TrackedConfig) -> None:
        self._run = run
        self._config = config

    def bind(self) -> None:
        """Nothing is kept of a stream."""

    def settle(self) -> None:
        """Write it down."""
        if self._run.forked or not self._run.stream.active:
            return
        read, known = list_reads(self._config)
        if len(known) > _MOST_KEYS:
            return
        # Late: only who tracks a configuration needs them.
        import xxhash

        from quark_core.records.kinds.provenance import FingerprintRecord

        digest = xxhash.xxh3_128_hexdigest("\n".join(read).encode("utf-8", "replace"))
        said = JsonObject({"read": read, "known": known})
        record = FingerprintRecord(
            *start_fields(None), "environment", CONFIG_READS, digest, _LEVEL, metadata=said
        )
        write_records(self._run, [record])


def note_reads(run: OpenRun, config: object) -> ConfigReads | None:
    """Let a run that was given a tracked configuration say at its end what was read of it."""
    if not isinstance(config, TrackedConfig) or not run.leads:
        return None
    reads = ConfigReads(run, config)
    run.writers.add(reads)
    return reads
