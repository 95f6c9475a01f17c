"""Runs of other tools: what they are called, and where they lie, has brought nothing about."""

from dataclasses import replace

import pytest

from quark.analysis.comparison.changes import compare_settings, list_environment
from quark.analysis.explanation.differences import compare_traits
from quark.analysis.explanation.run_attributes import describe_traits
from quark_core.backends.run_summary import StoredRun
from quark_core.records import ConfigSnapshot, EnvironmentSnapshot, ProjectRecord, RunRecord
from quark_core.records.json_object import JsonObject

IDENTITY = {
    "run_name": "{0}-run", "run_id": "{0}", "wandb.run_url": "https://x/{0}", "notes": "tried {0}",
    "exp_name": "exp-{0}", "experiment.name": "{0}", "wandb.run.id": "{0}", "tags": ["{0}"],
    "mlflow_run_id": "{0}", "description": "{0}", "timestamp": "2026-{0}", "trial_number": "{0}",
}  # fmt: skip
TOOLS = {
    "wandb": {"run_id": "{0}", "folder": "/wandb/{0}", "summary": {"loss": 0.1}},
    "mlflow": {"run_id": "{0}", "artifact_uri": "s3://{0}"},
    "neptune": {"run_id": "{0}", "sys": {"creation_time": "{0}"}},
    "tensorboard": {"folder": "/logs/{0}"},
}


def fill(value, text):
    if isinstance(value, dict):
        return {key: fill(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [fill(each, text) for each in value]
    return value.format(text) if isinstance(value, str) else value


def take(text, **settings):
    """A run as an importer stores it."""
    config = {**fill(IDENTITY, text), **settings}
    at = "2026-01-01T00:00:00Z"
    return StoredRun(
        project=ProjectRecord("p", "p", "/store", at, at),
        run=RunRecord(
            text, "p", "p", "completed", None, None, 0, "/run", None, False, (), 0, f"{text}-run",
            f"tried {text}", at, at, at,
        ),
        state="completed",
        config=ConfigSnapshot(JsonObject(config)),
        environment=EnvironmentSnapshot(JsonObject(fill(TOOLS, text))),
    )  # fmt: skip


@pytest.mark.parametrize("several", [False, True])
def test_ids_names_notes_and_links_are_no_causes(several):
    one = [take(name, lr=0.1) for name in (("aa", "ab") if several else ("aa",))]
    two = [take(name, lr=0.2) for name in (("ba", "bb") if several else ("ba",))]
    found = compare_traits(list(map(describe_traits, one)), list(map(describe_traits, two)))
    assert [each.place for each in found.found] == ["lr"]


def test_settings_that_are_called_alike_stay_causes():
    names = {"model.name": "resnet", "model_name": "a", "dataset_name": "x", "optimizer.name": "s"}
    one = describe_traits(take("a", **names))
    two = describe_traits(take("a", **dict.fromkeys(names, "other")))
    found = {each.place for each in compare_traits([one], [two]).found}
    assert found == set(names)


def test_what_a_tool_said_of_its_run_is_no_environment():
    assert list_environment(take("aa")) == {}
    changes = compare_settings([take("aa", lr=1)], [take("ab", lr=1)])
    assert {change.section for change in changes} == {"config"}


def test_an_environment_that_one_run_has_not_recorded_is_no_change():
    bare, known = take("aa", lr=1), take("ab", lr=2)
    told = {"packages": {"torch": "2.0"}, "host": {"system": "Linux"}}
    told |= {"process": {"argv": ["train.py", "--width", "4"]}, "git": {"commit": "a" * 40}}
    known = replace(known, environment=EnvironmentSnapshot(JsonObject(told)))
    assert list_environment(known)
    for sides in (([bare], [known]), ([known], [bare])):
        assert {change.section for change in compare_settings(*sides)} == {"config"}
    told |= {"host": {"system": "Darwin"}}
    other = replace(known, environment=EnvironmentSnapshot(JsonObject(told)))
    changes = compare_settings([known], [other])
    assert [change.path for change in changes] == ["host.system"]
