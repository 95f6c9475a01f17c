"""`quark doctor` tells of what was moved away."""

import json

import pytest
from click.testing import CliRunner
from stores import Store

import quark
from quark.cli.main import cli


def doctor(tmp_path, *options):
    arguments = ["doctor", "-d", str(tmp_path), *options]
    return CliRunner().invoke(cli, arguments, env={"COLUMNS": "80"}, catch_exceptions=False)


def test_doctor_tells_what_was_set_aside_and_why(tmp_path):
    store = Store(tmp_path)
    writer = store.start()
    for step in range(3):
        writer.log(("loss", 1.0, step))
    assert "Damaged records" not in doctor(tmp_path).stdout
    store.connection.execute("UPDATE batch SET body = x'00ff' WHERE kind = 'metric' AND number = 1")
    store.compact()
    store.close()
    told = doctor(tmp_path)
    assert told.exit_code == 0
    assert "Damaged records in the store, which readers skip:" in told.stdout
    assert "run0" in told.stdout
    (found,) = json.loads(doctor(tmp_path, "--json").stdout)["damaged"]
    assert (found["run_id"], found["writer_id"], found["kind"]) == ("run0", writer.id, "metric")
    assert (found["records"], bool(found["reason"])) == (1, True)


def test_doctor_says_that_a_store_cannot_be_read(tmp_path):
    store = Store(tmp_path)
    store.connection.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(quark.SessionStoreError, match="schema version 99"):
        doctor(tmp_path)
