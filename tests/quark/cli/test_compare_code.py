"""`quark compare` and `quark why` say the same of the code, or that it was not compared."""

import json
import os
import subprocess
import sys

import pytest
from wide_bounds import keep_sources_in_children

import quark

TRAIN = """
import sys, quark

def scale():
    return 9

with quark.start_run(project="p", config={"lr": 1}, storage_dir=sys.argv[1]) as session:
    metrics = quark.MetricsLogger(session)
    for step in range(12):
        metrics.log("val/loss", 1 / (step + scale()), step=step)
print(session.run_id)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of one script: the same twice, edited, with another comment, without its sources."""
    root = tmp_path_factory.mktemp("code")

    def train(text=TRAIN, **variables):
        (root / "train.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "train.py", str(root / "store")],
            cwd=root,
            env={**os.environ, **keep_sources_in_children(), "QUARK_QUIET": "1", **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    found = {"one": train(), "same": train()}
    found["edited"] = train(TRAIN.replace("return 9", "return 8"))
    found["commented"] = train(TRAIN.replace("return 9", "return 9  # nine"))
    found["unkept"] = train(QUARK_SOURCES="off")
    return root / "store", found


def compare(invoke, runs, name):
    store, ids = runs
    return invoke("compare", ids["one"], ids[name], "-d", store).stdout


@pytest.mark.long
def test_the_same_code_agrees(runs, invoke):
    said = compare(invoke, runs, "same")
    assert "No recorded setting changed: configuration, code and environment agree." in said


def test_an_edit_is_named_by_its_function_as_why_names_it(runs, invoke):
    said = compare(invoke, runs, "edited")
    assert "agree" not in said
    assert any(
        "train.py: scale" in line and "changed, 1 line" in line for line in said.splitlines()
    )
    store, ids = runs
    told = json.loads(invoke("compare", ids["one"], ids["edited"], "-d", store, "--json").stdout)
    compared = [each["path"] for each in told["changes"] if each["section"] == "code"]
    found = quark.explain_change(ids["one"], ids["edited"], storage_dir=store)
    why = [each.place for each in (*found.causes, *found.differences) if each.kind == "code"]
    assert compared == why == ["train.py: scale"]
    assert told["agreeing"] == ["config", "environment"]


def test_a_comment_is_no_change_and_is_told(runs, invoke):
    said = " ".join(compare(invoke, runs, "commented").split())
    assert "configuration, code and environment agree." in said
    assert "train.py differs only in comments or layout" in said


def test_code_that_was_not_kept_is_said_not_to_be_compared(runs, invoke):
    said = " ".join(compare(invoke, runs, "unkept").split())
    assert "configuration and environment agree. Not compared: code." in said
    assert f"The code was not compared: run {runs[1]['unkept']} has no source snapshot." in said


def test_without_anything_recorded_nothing_agrees(invoke, log_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # in no checkout, whose commit would say what ran
    for name in ("one", "two"):
        log_run(tmp_path, name, values={"val/loss": [1.0] * 9})
    said = " ".join(invoke("compare", "one", "two", "-d", tmp_path).stdout.split())
    assert "No recorded setting changed: environment agrees." in said
    assert "Not compared: configuration and code." in said


def test_groups_of_other_code_are_told_apart_by_it(runs, invoke):
    store, ids = runs
    done = invoke("compare", ids["one"], f"{ids['edited']},{ids['same']}", "-d", store, "--json")
    (change,) = [each for each in json.loads(done.stdout)["changes"] if each["section"] == "code"]
    assert (change["path"], change["kind"], len(change["primary"])) == ("sources", "varies", 2)
