"""`quark show` finds one run and makes it readable."""

import json
import math
import re
import shutil

import pytest
from calls import read_json

import quark


@pytest.fixture
def store(tmp_path, start):
    config = {"lr": 0.003, "model": {"depth": 3, "name": "resnet"}, "sizes": [1, 2]}
    with (
        start(tmp_path, "abc-1", config=config, name="first", tags=["t1", "t2"], notes="why") as s,
        quark.MetricsLogger(s) as metrics,
        quark.EventLogger(s) as events,
    ):
        for step, (loss, accuracy) in enumerate([(4.0, 0.25), (0.5, 0.75), (1.0, 0.625)]):
            metrics.log_many({"train/loss": loss, "val/accuracy": accuracy, "lr": 1.0}, step=step)
        for value in (math.nan, 2.0, math.inf):
            metrics.log("test/loss", value, epoch=7)
        events.log("checkpoint_saved", step=2, payload={"path": "last.pt"})
        s.add_log("Careful now.", identifier="Warning", step=3)
    with start(tmp_path, "abc-2", "other", name="second"):
        pass
    return tmp_path


def find_metric(text, key):
    (line,) = [line for line in text.splitlines() if line.startswith(f" {key} ")]
    return line.replace(key, "", 1).split()


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["abc-1", "first"])
def test_an_id_or_a_name_finds_the_run(invoke, store, name):
    shown = json.loads(invoke("show", name, "-d", store, "--json").stdout)
    assert shown["run"]["id"] == "abc-1"


@pytest.mark.long
def test_a_unique_beginning_of_the_id_is_enough(invoke, tmp_path, log_run):
    for run_id in ("1234", "12355", "123"):
        log_run(tmp_path, run_id)
    for prefix, run_id in (("1234", "1234"), ("1235", "12355"), ("123", "123")):
        shown = json.loads(invoke("show", prefix, "-d", tmp_path, "--json").stdout)
        assert shown["run"]["id"] == run_id


@pytest.mark.long
def test_a_name_of_two_runs_is_ambiguous(quark_command, tmp_path, log_run):
    for run_id in ("one", "two"):
        log_run(tmp_path, run_id, name="same")
    done = quark_command("show", "same", "-d", tmp_path)
    assert done.returncode == 2
    assert "'same' matches 2 runs: two, one. Pass the run ID." in done.stderr


def test_a_run_that_the_store_has_taken_in_has_no_folder_named(invoke, tmp_path, log_run):
    log_run(tmp_path, "taken")
    folder = tmp_path / ".quark" / "runs" / "taken"
    shutil.rmtree(folder, ignore_errors=True)
    told = f"path     {tmp_path / '.quark'} (merged into the store's files)"
    assert told in invoke("show", "taken", "-d", tmp_path, columns=300).stdout
    folder.mkdir(parents=True)
    assert f"path     {folder} " in invoke("show", "taken", "-d", tmp_path, columns=300).stdout


@pytest.mark.long
def test_summary_and_config_are_shown(invoke, store):
    text = invoke("show", "abc-1", "-d", store).stdout
    assert "vision abc-1" in text
    for label, value in (
        ("status", "completed"),
        ("name", "first"),
        ("tags", "t1, t2"),
        ("notes", "why"),
    ):
        assert re.search(rf"{label} +{value} ", text)
    for key, value in (
        ("lr", "0.003"),
        ("model.depth", "3"),
        ("model.name", "resnet"),
        ("sizes", r"\[1, 2\]"),
    ):
        assert re.search(rf"^ {key} +{value} *$", text, re.M)


@pytest.mark.long
def test_metrics_have_first_last_and_best_in_the_right_direction(invoke, store):
    text = invoke("show", "abc-1", "-d", store).stdout
    assert find_metric(text, "train/loss") == ["3", "4", "1", "↓", "0.5", "1"]
    assert find_metric(text, "val/accuracy") == ["3", "0.25", "0.625", "↑", "0.75", "1"]
    metrics = {
        item["key"]: item
        for item in json.loads(invoke("show", "abc-1", "-d", store, "--json").stdout)["metrics"]
    }
    assert metrics["train/loss"]["direction"] == "min"
    assert metrics["val/accuracy"]["direction"] == "max"
    assert (metrics["lr"]["direction"], metrics["lr"]["best"]) == (None, None)
    assert list(metrics) == sorted(metrics)


@pytest.mark.long
def test_values_that_are_not_finite_are_counted(invoke, store):
    text = invoke("show", "abc-1", "-d", store).stdout
    assert find_metric(text, "test/loss") == "2 not finite 3 - - ↓ 2 7".split()
    shown = json.loads(invoke("show", "abc-1", "-d", store, "--json").stdout)
    (item,) = [item for item in shown["metrics"] if item["key"] == "test/loss"]
    assert (item["non_finite"], item["first"], item["last"], item["best_at"]) == (2, None, None, 7)


def test_a_metric_that_was_never_finite_is_shown(invoke, tmp_path, log_run):
    log_run(tmp_path, "run", values={"loss": [math.nan, math.nan], "acc": [math.inf]})
    text = invoke("show", "run", "-d", tmp_path).stdout
    assert find_metric(text, "loss") == "2 not finite 2 - - - -".split()
    assert find_metric(text, "acc") == "1 not finite 1 - - - -".split()


def test_curves_are_drawn_for_metrics_of_several_points(invoke, tmp_path, log_run):
    log_run(tmp_path, "run", values={"loss": [3.0, 1.0, 2.0], "single": [1.0]})
    text = invoke("show", "run", "-d", tmp_path).stdout
    assert "1 … 3   steps 0 … 2" in text
    assert text.count("steps") == 1


@pytest.mark.long
def test_the_last_events_are_shown(invoke, store):
    text = invoke("show", "abc-1", "-d", store).stdout.partition("last events")[2]
    assert "Careful now." in text
    assert re.search(r"warning +user_log step 3", text)
    assert re.search(r'checkpoint_saved step 2 +\{"path": "last.pt"\}', text)
    last = invoke("show", "abc-1", "-d", store, "--logs", "1").stdout.partition("last events")[2]
    assert len(last.strip().splitlines()) == 1
    assert "run_ended" in last
    assert "last events" not in invoke("show", "abc-1", "-d", store, "--logs", "0").stdout


@pytest.mark.long
def test_json_is_whole_and_strict(invoke, store):
    shown = read_json(invoke("show", "abc-1", "-d", store, "--json"))
    assert shown["config"]["values"]["model"] == {"depth": 3, "name": "resnet"}
    assert shown["project"]["name"] == "vision"
    assert shown["environment"]["values"]["process"]["pid"] > 0
    types = [event["event_type"] for event in shown["events"]]
    assert (types[0], types[-1]) == ("run_started", "run_ended")
    assert {"checkpoint_saved", "user_log"} < set(types)


@pytest.mark.long
def test_a_run_without_metrics_and_config_is_shown(invoke, store):
    result = invoke("show", "second", "-d", store)
    assert result.exit_code == 0
    assert "No metrics yet." in result.stdout
    assert "run_started" in result.stdout


def test_brackets_are_shown_as_they_are(invoke, tmp_path, start):
    odd = "[/red] [bold]x"
    with start(tmp_path, "run", odd, name=odd, notes=odd, config={odd: odd}, tags=[odd]) as session:
        session.add_log(odd)
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    result = invoke("show", "run", "-d", tmp_path)
    assert result.exit_code == 0
    assert result.stdout.count(odd) == 7


def test_data_that_were_given_and_data_that_came_are_both_shown(invoke, tmp_path):
    with quark.start_run(project="digits", storage_dir=tmp_path) as session:
        session.fingerprint_data("train", [1.0, 2.0]).wait(30)
        for _ in quark.watch_data([[1.0], [2.0]]):
            pass
    shown = invoke("show", session.run_id, "-d", tmp_path).stdout
    assert shown.count("data train") == 2
