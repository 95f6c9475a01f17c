"""Records reach a channel by `put`, which redacts them; `append` is for what has no text."""

import re
from pathlib import Path

import pytest

from quark_core.config.redaction import REDACTED
from quark_core.config.redaction.replacement import _list_written
from quark_core.delivery.channel import Channel
from quark_core.records import RECORD_TYPES, EventRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.schema import column_types

ROOT = Path(__file__).resolve().parents[3]
# What hands over rows of numbers, and what stands between a channel and its queue.
MAY_APPEND = {
    "quark_core/delivery/stream.py",
    "quark/sweeps/trial.py",
    "quark_core/writers/buffered_writer.py",
    "quark_core/writers/metrics.py",
}
# Texts that are how a value is found again, or of a fixed set of words.
NAMES = {
    *("metric_key", "namespace", "metric_name", "event_type", "severity", "action", "boundary"),
    *("node", "module_name", "module_type", "summary_type", "hook_direction", "parameter_name"),
    *("parameter_role", "dtype", "distribution_type", "optimizer_name", "optimizer_group_name"),
    *("artifact_type", "artifact_key", "artifact_name", "payload_format", "sha256"),
    *("payload_relative_path", "metadata_relative_path", "rule_id", "category", "alert_id"),
    *("artifact_run_id", "artifact_id", "alias"),
    *("score_key", "status", "phase_name", "display_name", "unit", "clock", "digest", "level"),
}
FEATURES = ("quark/analysis", "quark/notifications", "quark/provenance", "quark/sweeps")
NUMBERS = {"tensor_shape", "shape", "bin_edges", "counts", "sequence_lengths", "gpus"}


def test_nothing_but_plain_metrics_is_appended_without_a_look():
    appends = re.compile(r"\b_append\(|\bchannel(?:\([^)]*\))?\.append\b")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("quark_core", "quark_torch", *FEATURES)
        for path in (ROOT / folder).rglob("*.py")
        if appends.search(path.read_text())
    }

    assert found == MAY_APPEND


@pytest.mark.parametrize("kind", [kind for kind in RECORD_TYPES if kind != "lifecycle"])
def test_every_field_that_people_write_is_redacted(kind):
    """A new field with a text in it is looked at; what a type calls plain is named here too."""
    texts = {name for name, encoding in column_types(kind).items() if encoding in ("t", "j")}
    rules = RECORD_TYPES[kind].RULES
    not_looked_at = texts - set(_list_written(kind)) - {*rules.names, *rules.words}

    assert not_looked_at - NAMES - NUMBERS - {"contributing_alert_ids"} == set()
    assert set(_list_written(kind)) <= texts


def test_what_is_put_comes_out_redacted_and_what_has_nothing_to_hide_as_it_is():
    channel = Channel("event", capacity_items=10)
    plain = EventRecord("r", "w", 0, 0, 0, 0, "a", "info", payload=JsonObject({"x": "y"}))
    secret = EventRecord("r", "w", 0, 0, 1, 0, "a", "info", payload=JsonObject({"db_pass": "y"}))

    assert channel.put(plain) is plain
    assert channel.put(secret).payload == {"db_pass": REDACTED}
    assert list(channel.items)[1].payload == {"db_pass": REDACTED}
