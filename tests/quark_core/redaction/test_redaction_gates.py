"""Records reach a channel by `put`, which redacts them; `append` is for what has no text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.programs import run_code
from secrets_corpus import COMMAND_LINES, SHAPES, TEXTS, URLS
from secrets_corpus import NAMES as secrets_corpus_NAMES
from service_fixtures import call, serving
from test_kept_nowhere import find_kept

import quark
from quark.analysis.outputs import open_analysis
from quark_core.config.redaction import REDACTED, redact_arguments, redact_text, redact_values
from quark_core.config.redaction.replacement import _list_written
from quark_core.delivery.channel import Channel
from quark_core.records import RECORD_TYPES, AlertRecord, EventRecord, EvidenceRecord
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


SECRET = SHAPES["github"]


def test_what_an_analyzer_finds_is_redacted_before_it_is_kept(tmp_path):
    evidence = EvidenceRecord("event", "user_log", f"the log says password={SECRET}")
    alert = AlertRecord(
        *(None, "", 0, 0, 0, 0),
        *("odd_logs", "runtime", "warning", f"Says {SECRET}", "", "", ""),
        evidence=(evidence,),
        metadata=JsonObject({"line": SECRET}),
    )
    mirror = tmp_path / "mirror"
    with quark.start_run(project="p", storage_dir=tmp_path, backends=f"csv:{mirror}") as session:
        target = open_analysis(session)
        assert target.write("rules", True, {"alert": [alert]}) == 1
        found = target.read_outputs("alert", "rules").to_records()

    assert [one.title for one in found] == ["Says [redacted]"]
    assert [one.evidence[0].source for one in found] == ["user_log"]
    assert find_kept(tmp_path, {"it": SECRET}) == []


def test_what_curl_sends_to_a_service_is_redacted(tmp_path):
    with serving(tmp_path) as server, server.client("default", "admin") as client:
        start = {
            "project": f"of {SECRET}",
            "run_id": "r1",
            "name": f"of {SECRET}",
            "notes": SECRET,
            "tags": [SECRET],
            "config": {"db": {"pass": "correct" + "horse"}, "lr": 0.1},
        }
        assert client.post("/v1/runs", json=start).is_success
        assert client.post("/v1/runs/r1/tags", json={"tags": [f"t {SECRET}"]}).is_success
        line = {"message": f"token={SECRET}", "payload": {"x": SECRET}}
        assert client.post("/v1/runs/r1/logs", json=line).is_success
        shown = call(client, "load_run", run_id="r1").text

    assert SECRET not in shown
    assert "correct" + "horse" not in shown
    assert find_kept(tmp_path, {"it": SECRET, "password": "correct" + "horse"}) == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    "command", [["show", "{}"], ["export", "{}", "--format", "csv", "-o", "{out}"]]
)
def test_commands_show_and_export_no_secret(tmp_path, command):
    with quark.start_run(
        project="p", storage_dir=tmp_path, name=f"n {SECRET}", config={"hf_key": SECRET}
    ) as session:
        session.add_log(f"password={SECRET}")
    words = [word.format(session.run_id, out=tmp_path / "out") for word in command]
    done = run_code("from quark.cli import main; main()", *words, "--storage-dir", tmp_path)

    assert SECRET not in done.stdout + done.stderr
    assert find_kept(tmp_path, {"it": SECRET}) == []


# What a redaction may not do: take long, raise, or change what it has redacted before.
#
# Texts of a megabyte are made of what each rule begins with. In time that grows
# with the square of the length any of them would take hours.

MEGABYTE = 1_000_000
PIECES = (
    *("a 0 _ - . = : / @ \" ' \\ < > ; & ? # ~ + , ( [ { a- a. a= a: a_ =a :a -a /a .a").split(),
    *('a=" a=\' a=\\" :// a:// ://a ://a: ://a:a@ ://a:1/ ://@ http://a: ?a= ?sig= ;a=').split(),
    *('&token= password password= password=" password=\\" password=\\\\" --password --a').split(),
    *("--pass= -p -u -ua: --a= token= token: tokens= key key= pwd=/ Bearer Basic bearer").split(),
    *("login password' <password> <a> </ eyJ -eyJ eyJ. eyJa. sk- sk-a -sk- sk-proj- hf_").split(),
    *("ghp_ LTAI -LTAI EAAA -EAAA xai- SG. SG.a. dp. qk_ qk_a_ xoxb- SK 1// :AA -us Q~ M.").split(),
    *("12345678:AA abc1Q~ .atlasv1. pat -----BEGIN -----END PuTTY-User-Key-File- hvs.").split(),
    *('v1.0- A3- A3-AAAAAA -AAAAA 4b1d oy2 dapi authorization: cookie: Cookie:" cookie:<').split(),
    *("'a': {\"a\": password=[redacted] [redacted]").split(),
    *("a ", " ", "\t", "\n", "a\n", "password ", "password  ", "API key ", "key= ", "login a "),
    *("-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "login ", "password: \n"),
    *("-----BEGIN A PRIVATE KEY-----\n", "Bearer a", "Basic aaaaaaaa ", "token = "),
    *("machine a login b password c ", "ß", "é=", "\U0001d518", "\ud800", "\0", "\u202e"),
)


@pytest.mark.sampled
@pytest.mark.parametrize("first", "abcdefgh")
def test_a_hostile_text_is_done_soon(first):
    for piece in PIECES["abcdefgh".index(first) :: 8]:
        text = (piece * (MEGABYTE // 10 // len(piece)))[: MEGABYTE // 10]

        assert isinstance(redact_text(text), str)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "piece", ["a", "a=", "tokens=", 'password=\\"', "a://", "qk_", "-eyJ", "pwd=/", "-----BEGIN "]
)
def test_a_hostile_megabyte_is_done_soon(piece):
    text = (piece * (MEGABYTE // len(piece) + 1))[:MEGABYTE]

    assert isinstance(redact_text(text), str)


@pytest.mark.long
def test_a_long_command_line_and_a_long_name_are_done_soon():
    assert len(redact_arguments(["--password", "x", "-p"] * 10_000)) == 30_000
    assert redact_values({"x" * MEGABYTE: "y", "a_" * 100_000 + "password": "z"})
    assert redact_arguments(["-" * MEGABYTE, "--" + "a" * MEGABYTE + "=1"])


@pytest.mark.long
def test_a_secret_is_found_behind_a_megabyte():
    secret = SHAPES["github"]

    assert secret not in redact_text("x " * (MEGABYTE // 2) + secret)
    assert "hunter2" not in redact_text("x " * (MEGABYTE // 2) + "password=hunter2")


FRAGMENTS = st.sampled_from(
    [*PIECES, *TEXTS, *URLS, *secrets_corpus_NAMES, *SHAPES.values(), " ", "\n", "hunter2"]
)
HOSTILE_TEXTS = st.lists(FRAGMENTS | st.text(max_size=6), max_size=12).map("".join)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | HOSTILE_TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HOSTILE_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(HOSTILE_TEXTS)
def test_a_text_redacted_twice_is_as_redacted_once(text):
    once = redact_text(text)

    assert redact_text(once) == once


@pytest.mark.long
@given(st.dictionaries(HOSTILE_TEXTS, JSON_VALUES, max_size=4))
def test_any_json_values_can_be_redacted_and_stay_json(values):
    before = json.dumps(values)
    redacted = redact_values(values)

    assert len(redacted) == len(values)
    assert json.loads(json.dumps(redacted)) == redacted
    assert json.dumps(values) == before


@given(st.lists(HOSTILE_TEXTS | st.sampled_from([w for line in COMMAND_LINES for w in line])))
def test_a_command_line_stays_as_long_as_it_is(arguments):
    assert len(redact_arguments(arguments)) == len(arguments)


@given(st.sampled_from(sorted(SHAPES.values())), HOSTILE_TEXTS, HOSTILE_TEXTS)
def test_a_shape_is_found_among_anything(secret, before, after):
    shown = redact_text(f"{before} {secret} {after}")

    assert f" {secret} " not in shown
    assert REDACTED in shown
