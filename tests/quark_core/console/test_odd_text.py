"""Bytes that are no UTF-8, in the command line and in what is printed, cost no run and no line."""

import os
import subprocess
import sys

import quark
from quark_core.records import EventRecord
from quark_core.records.codec import decode_body, encode_records
from quark_core.records.json_object import JsonObject, decode_json, encode_json
from quark_core.records.kinds.console import ConsoleRecord
from quark_core.records.query import Query

ODD = "/data/caf\udce9"


def run_script(folder, code, *args):
    environ = {**os.environ, "LC_ALL": "C.UTF-8", "QUARK_QUIET": "1"}
    return subprocess.run(
        [sys.executable, "-B", "-c", code, *args], cwd=folder, env=environ, capture_output=True
    )


def test_a_run_starts_with_arguments_that_are_no_utf8(tmp_path):
    code = """
import argparse, quark
parser = argparse.ArgumentParser()
parser.add_argument("--data")
with quark.start_run(project="p", config=parser.parse_args()) as session:
    quark.MetricsLogger(session).log("loss", 1.0, step=0, metadata={"path": session.config["data"]})
    quark.EventLogger(session).log("loaded", payload={"path": parser.parse_args().data})
print(session.run_id)
"""
    done = run_script(tmp_path, code, "--data", b"/data/caf\xe9")
    assert done.returncode == 0, done.stderr
    run = quark.open_run(done.stdout.decode().split()[-1], tmp_path)
    assert run.config["data"] == "/data/caf?"
    (loaded,) = quark.EventLogger(run).read(event_type="loaded")
    assert loaded.payload == {"path": "/data/caf?"}


def test_a_line_that_is_no_unicode_costs_no_other_line(tmp_path):
    code = """
import sys, quark
sys.stdout.reconfigure(errors="surrogateescape")
sys.stderr.reconfigure(errors="surrogateescape")
with quark.start_run(project="p", capture="sys") as session:
    for i in range(50):
        print("line", i, "\\udce9" if i == 20 else "")
        print("error", i, file=sys.stderr)
print(session.run_id)
"""
    done = run_script(tmp_path, code)
    assert done.returncode == 0, done.stderr
    run_id = done.stdout.decode("utf-8", "replace").split()[-1]
    found = quark.open_run(run_id, tmp_path).open_run.read("console", Query())
    lines = found["text"].tolist()
    assert sum(line.startswith("line") for line in lines) == 50
    assert sum(line.startswith("error") for line in lines) == 50
    assert "line 20 ?" in lines


def test_a_text_that_is_no_unicode_costs_no_other_record():
    texts = ["a", ODD, "b", "\ud800", ODD]
    origin = ("0" * 16, "w", 1, 0)
    lines = [
        ConsoleRecord(*origin, number, 0, "stdout", number, text, True, 0)
        for number, text in enumerate(texts)
    ]
    body = decode_body(encode_records(lines))
    assert body.to_list("text") == ["a", "/data/caf?", "b", "?", "/data/caf?"]
    same = [EventRecord(*origin, n, 0, "e", "info", None, None, ODD, None) for n in range(3)]
    assert decode_body(encode_records(same)).to_list("status") == ["/data/caf?"] * 3


def test_json_values_of_any_text_are_encoded():
    made = JsonObject({"argv": [ODD], ODD: 1})
    assert made == {"argv": ["/data/caf?"], "/data/caf?": 1} == decode_json(made.encoded)
    assert decode_json(encode_json([ODD, {"a": ODD}])) == ["/data/caf?", {"a": "/data/caf?"}]
