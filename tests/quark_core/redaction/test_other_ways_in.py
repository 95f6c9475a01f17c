"""Texts that reach a store by another way than a writer: analyzers, a service's own routes."""

import subprocess
import sys

import pytest
from secrets_corpus import SHAPES
from service_fixtures import call, serving
from test_kept_nowhere import find_kept

import quark
from quark.analysis.outputs import open_analysis
from quark_core.records import AlertRecord, EvidenceRecord
from quark_core.records.json_object import JsonObject

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
@pytest.mark.parametrize("command", [["show", "{}"], ["export", "{}", "-f", "csv", "-o", "{out}"]])
def test_commands_show_and_export_no_secret(tmp_path, command):
    with quark.start_run(
        project="p", storage_dir=tmp_path, name=f"n {SECRET}", config={"hf_key": SECRET}
    ) as session:
        session.add_log(f"password={SECRET}")
    words = [word.format(session.run_id, out=tmp_path / "out") for word in command]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from quark.cli import main; main()",
            *words,
            "--storage-dir",
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )

    assert SECRET not in done.stdout + done.stderr
    assert find_kept(tmp_path, {"it": SECRET}) == []
