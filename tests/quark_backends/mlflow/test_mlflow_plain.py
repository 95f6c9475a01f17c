"""A run looks in MLflow as if it had been logged there: no `quark/…`, few tags of Quark's."""

import json
import time

import pytest

import quark
from quark_backends.mlflow.lifecycle import make_user_tags
from quark_core.runs import recovery

odd_names = pytest.mark.filterwarnings("ignore:metric .* breaks Quark's naming rule:RuntimeWarning")


@pytest.fixture
def begin(tmp_path, server, project):
    def start(**arguments):
        arguments.setdefault("project", project)
        return quark.start_run(storage_dir=tmp_path, backends=f"mlflow+{server.uri}", **arguments)

    return start


def list_quarks(run):
    return {key for key in run.data.tags if key.startswith("quark.")}


def test_tags_are_what_they_say():
    tags = ["baseline", "group:alpha", "lr=0.1", "a:b=c", "http://x/y", "12:30", "C:\\x"]
    assert make_user_tags([*tags, "data=a", "data:b"]) == {
        "baseline": "true",
        "group": "alpha",
        "lr": "0.1",
        "a": "b=c",
        "http://x/y": "true",
        "12:30": "true",
        "C:\\x": "true",
        "data": "a, b",
    }
    # Readers believe these: nobody's tag becomes one.
    assert set(make_user_tags(["mlflow.user=eve", "quark.run_id=1", "MLFLOW.parentRunId=2"])) == {
        "quark.tag.mlflow.user=eve",
        "quark.tag.quark.run_id=1",
        "quark.tag.MLFLOW.parentRunId=2",
    }


def test_a_run_has_what_mlflow_has_a_place_for_and_no_more(
    begin, client, find_runs, list_paths, history
):
    with begin(
        name="first try", notes="Notes.", tags=["baseline", "group:alpha"], config={"lr": 0.1}
    ) as session:
        metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
        for step in range(20):
            metrics.log("train/loss", 1.0 / (step + 1), step=step)
        events.log("checkpoint_saved", step=3)
        session.add_tag("late")
    (run,) = find_runs()
    assert run.info.run_name == "first try"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    tags = run.data.tags
    assert (tags["baseline"], tags["group"], tags["late"]) == ("true", "alpha", "true")
    assert tags["mlflow.note.content"] == "Notes."
    assert list_quarks(run) == {"quark.run_id"}
    assert not [key for key in run.data.metrics if key.startswith("quark")]
    assert len(history(run.info.run_id, "train/loss")) == 20
    assert list_paths() == []
    found = client.search_runs([run.info.experiment_id], "tags.baseline = 'true'")
    assert [one.info.run_id for one in found] == [run.info.run_id]


@odd_names
def test_a_run_is_read_back_as_mlflow_has_it(begin, server, tmp_path):
    with begin(name="n", tags=["baseline", "group=alpha"], config={"lr": 0.1}) as session:
        quark.MetricsLogger(session).log("val/AR@100", 0.5, step=3)
    opened = quark.open_run(session.run_id, tmp_path, backend=f"mlflow+{server.uri}")
    (point,) = quark.MetricsLogger(opened).read()
    assert (point.metric_key, point.step, point.value) == (
        quark.MetricsLogger(session).read()[0].metric_key,
        3,
        0.5,
    )
    stored = opened.open_run.reader.load_run(session.run_id)
    assert stored.run.tags == ("baseline", "group=alpha")
    assert (stored.run.status, stored.run.name) == ("completed", "n")


@odd_names
def test_only_names_that_are_others_in_mlflow_are_written_down(begin, fetch, list_paths):
    with begin() as session:
        quark.MetricsLogger(session).log("val/AR@100", 0.5, step=3)
    assert list_paths() == ["quark/name_map.json"]
    names = json.loads(fetch("quark/name_map.json"))["metrics"]
    assert "val/AR_at_100" in names.values()


def test_the_machine_has_mlflows_names(begin, find_runs):
    with begin() as session:
        telemetry = quark.SystemTelemetry(session)
        telemetry.sample(step=0)
        deadline = time.monotonic() + 60
        while not telemetry.read() or telemetry.read()[-1].ram_used_bytes is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            telemetry.sample(step=1)
    (run,) = find_runs()
    assert {
        "system/system_memory_usage_megabytes",
        "system/system_memory_usage_percentage",
    } <= run.data.metrics.keys()


@pytest.mark.long
def test_a_run_of_an_earlier_version_keeps_all_when_it_is_taken_up(
    tmp_path, server, project, find_runs, list_paths
):
    session = quark.start_run(
        project=project,
        storage_dir=tmp_path,
        backends=f"mlflow:{server.uri}?quark=full",
        tags=["old"],
    )
    quark.MetricsLogger(session).log("loss", 1.0, step=0)
    session.end_run("failed")
    before = set(list_paths())
    again = quark.resume_run(
        run_id=session.run_id, storage_dir=tmp_path, backends=f"mlflow+{server.uri}"
    )
    quark.MetricsLogger(again).log("loss", 0.5, step=1)
    again.end_run()
    (run,) = find_runs()
    assert run.data.tags["quark.attempt"] == "1"
    assert run.data.tags["quark.status"] == "completed"
    assert before < set(list_paths())
    opened = quark.open_run(session.run_id, tmp_path, backend=f"mlflow+{server.uri}")
    assert [point.value for point in quark.MetricsLogger(opened).read()] == [1.0, 0.5]


def _settle(tmp_path):
    deadline = time.monotonic() + 120
    while any(lane.state != "delivered" for lane in recovery.sync(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.sampled
@pytest.mark.parametrize("level", ["minimal", "full"])
def test_edits_after_the_end_reach_mlflow(tmp_path, server, project, find_runs, level):
    with quark.start_run(
        project=project,
        storage_dir=tmp_path,
        backends=f"mlflow:{server.uri}?quark={level}",
        name="before",
        notes="Old.",
        tags=["a", "stage:raw"],
    ) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    quark.edit_run(
        session.run_id,
        name="after",
        notes="New.",
        add_tags=["best", "stage:done"],
        remove_tags=["a", "stage:raw"],
        storage_dir=tmp_path,
    )
    _settle(tmp_path)
    (run,) = find_runs()
    assert run.info.run_name == "after"
    assert run.info.status == "FINISHED"
    tags = run.data.tags
    assert (tags["mlflow.note.content"], tags["best"], tags["stage"]) == ("New.", "true", "done")
    assert "a" not in tags
    quark.edit_run(session.run_id, notes="", remove_tags=["stage:done"], storage_dir=tmp_path)
    _settle(tmp_path)
    (run,) = find_runs()
    assert {"mlflow.note.content", "stage"}.isdisjoint(run.data.tags)


@pytest.mark.long
def test_edits_while_it_trains_reach_mlflow(begin, tmp_path, find_runs):
    session = begin(name="before")
    metrics = quark.MetricsLogger(session)
    metrics.log("loss", 1.0, step=0)
    session.flush()
    quark.edit_run(session.run_id, name="after", add_tags=["best"], storage_dir=tmp_path)
    session.end_run()
    _settle(tmp_path)
    (run,) = find_runs()
    assert run.info.run_name == "after"
    assert run.data.tags["best"] == "true"
    assert run.info.status == "FINISHED"


def test_a_pair_of_tags_of_one_key_stand_beside_each_other(begin, find_runs):
    with begin(tags=["data=coco", "data=voc"]):
        pass
    (run,) = find_runs()
    assert run.data.tags["data"] == "coco, voc"
