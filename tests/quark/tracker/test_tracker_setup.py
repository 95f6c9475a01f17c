"""Names, variables, ranks and what cannot be had: what setup_tracker makes of them."""

import inspect
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import quark
from quark_core.errors import SchemaValidationError
from quark_core.testing.fakes import ScriptedBackend, define_scripted


def names_of(tracker):
    return sorted([*tracker._mirrors, *(lane.name for lane in tracker._lanes)])


LOGGING = {
    "log": "self, metrics, step=None, commit=True",
    "log_config": "self, config",
    "log_table": "self, key, columns, data",
    "log_image": "self, key, image_path, caption=None",
    "log_artifacts": "self, paths",
    "watch": "self, model, **kwargs",
    "finish": "self",
}
MAKING = "self, project_name=None, config=None, outdir=None, rank=None, **kwargs"


def spell(function):
    """A signature without its annotations."""
    signature = inspect.signature(function)
    plain = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))[1:-1]


def test_its_signatures_are_those_that_scripts_use():
    assert spell(quark.setup_tracker) == (
        "project_name=None, backends=None, config=None, outdir=None, rank=None, **kwargs"
    )
    assert spell(quark.register_backend) == "name, cls"
    for cls in (quark.Tracker, quark.TrackerBackend, quark.CSVBackend):
        assert {name: spell(getattr(cls, name)) for name in LOGGING} == LOGGING
    assert spell(quark.Tracker.get_backend) == "self, name"
    assert spell(quark.Tracker.__init__).startswith("self, backends=()")
    assert spell(quark.NullTracker.__init__) == "self"
    assert spell(quark.CSVBackend.__init__) == "self, outdir, rank=0"
    assert spell(quark.WandbBackend.__init__) == MAKING
    assert spell(quark.MLflowBackend.__init__) == MAKING
    for cls in (quark.WandbBackend, quark.MLflowBackend):
        assert isinstance(cls.run, property)
        assert isinstance(cls.run_url, property)
    assert isinstance(quark.Tracker.wandb_run, property)
    assert isinstance(quark.Tracker.mlflow_run, property)
    assert quark.TrackerBackend.__abstractmethods__ == {"log", "log_config", "finish"}
    assert quark.TrackerBackend.name == "base"


@pytest.mark.parametrize("backends", ["none", "", " , ", [], ["none"], ()])
def test_none_is_a_tracker_that_does_nothing(tmp_path, backends):
    tracker = quark.setup_tracker("p", backends=backends, outdir=tmp_path)
    assert isinstance(tracker, quark.NullTracker)
    assert isinstance(tracker, quark.Tracker)
    assert list(tmp_path.iterdir()) == []


def test_a_null_tracker_takes_every_call(tmp_path):
    with quark.NullTracker() as tracker:
        tracker.log({"a": 1}, step=1, commit=False)
        tracker.log_config({"a": 1})
        tracker.log_table("t", ["a"], [[1]])
        tracker.log_image("i", "absent.png", caption="c")
        tracker.log_artifacts({})
        assert tracker.watch(object()) is None
        assert tracker.get_backend("wandb") is None
        assert (tracker.wandb_run, tracker.mlflow_run, tracker.session) == (None, None, None)
        assert (tracker.run_id, tracker.active, tracker.report_calls()) == (None, False, ())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [1, 7])
def test_other_ranks_do_nothing(tmp_path, monkeypatch, recorder, rank):
    assert isinstance(
        quark.setup_tracker("p", "csv,recorder", outdir=tmp_path, rank=rank), quark.NullTracker
    )
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert isinstance(quark.setup_tracker("p", "csv,recorder"), quark.NullTracker)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"QUARK_TRACKER_BACKENDS": "csv", "QUARK_BACKENDS": "recorder"}, ["csv"]),
        ({"QUARK_BACKENDS": "csv", "EZPZ_TRACKER_BACKENDS": "recorder"}, ["csv"]),
        ({"EZPZ_TRACKER_BACKENDS": "csv , recorder", "EZPZ_TRACKERS": "x"}, ["csv", "recorder"]),
        ({"EZPZ_TRACKERS": "recorder"}, ["recorder"]),
        ({"QUARK_TRACKER_BACKENDS": "none", "EZPZ_TRACKERS": "csv"}, []),
    ],
)
def test_the_environment_names_backends(monkeypatch, recorder, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with quark.setup_tracker("p") as tracker:
        assert names_of(tracker) == expected
    with quark.setup_tracker("p", backends="csv") as tracker:
        # What the script says comes first, and the run has no mirror that it did not name.
        assert names_of(tracker) == ["csv"]
        assert {lane.backend for lane in tracker.session.report_delivery().lanes} == {
            *("embedded", "csv")
        }


def test_the_environment_and_the_libraries_stay_as_they_are(tmp_path, monkeypatch, define):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (".env", ".amsc.env"):
        (tmp_path / name).write_text("MLFLOW_TRACKING_URI=http://127.0.0.1:1\nAMSC_API_KEY=key\n")
    monkeypatch.setenv("AM_SC_API_KEY", "key")
    monkeypatch.setenv("MLFLOW_TRACKING_INSECURE_TLS", "true")
    rest = pytest.importorskip("mlflow.utils.rest_utils")
    request, before, filters = rest.http_request, dict(os.environ), list(warnings.filters)
    define(define_scripted("mlflow", ScriptedBackend()))
    with quark.setup_tracker("p", "mlflow") as tracker:
        tracker.log({"a": 1.0})
    assert rest.http_request is request
    assert dict(os.environ) == before
    assert list(warnings.filters) == filters


def test_without_any_word_it_is_wandb(define):
    define(define_scripted("wandb", ScriptedBackend()))
    with quark.setup_tracker("p") as tracker:
        assert names_of(tracker) == ["wandb"]


@pytest.mark.long
def test_an_unknown_backend_is_left_out_with_a_warning(said):
    with quark.setup_tracker("p", backends=["csv", "nope", "no such/thing"]) as tracker:
        assert names_of(tracker) == ["csv"]
    assert [text.split(" (")[0] for text in said()] == [
        "Unknown tracker backend 'nope'",
        "Unknown tracker backend 'no such/thing'",
    ]
    # What there is instead is listed once.
    assert [text.count("tensorboard") for text in said()] == [1, 1]
    assert isinstance(quark.setup_tracker("p", backends="nope"), quark.NullTracker)


@pytest.mark.parametrize("folder", [False, True])
def test_a_library_that_is_not_installed_is_left_out(define, monkeypatch, tmp_path, said, folder):
    definition = define_scripted("wandb", ScriptedBackend())
    define(replace(definition, needs=("no_such_library",)))
    if folder:
        # As W&B's own files make one, which Python takes for a package.
        (tmp_path / "no_such_library").mkdir()
        monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(quark.setup_tracker("p", backends="wandb"), quark.NullTracker)
    assert said() == [
        "tracker backend 'wandb' is not available "
        "(missing dependency: No module named 'no_such_library')"
    ]
    with quark.setup_tracker("p", backends="csv,wandb") as tracker:
        assert names_of(tracker) == ["csv"]


def test_mirrors_get_the_run_s_records(define):
    scripted = ScriptedBackend()
    define(define_scripted("elsewhere", scripted))
    with quark.setup_tracker("p", backends="elsewhere", config={"lr": 1}) as tracker:
        tracker.log({"loss": 0.5}, step=3)
        assert tracker.get_backend("elsewhere").name == "elsewhere"
    kinds = {batch.kind for batch in scripted.stored}
    assert {"metric", "lifecycle"} <= kinds


def test_options_of_wandb_reach_its_mirror():
    backend = quark.WandbBackend(
        "p/q", entity="e & f", mode="offline", tags=["b", "a"], resume="allow", group=None
    )
    assert backend.specification == ("wandb:?project=p%2Fq&mode=offline&entity=e+%26+f&tags=a%3Bb")
    assert quark.WandbBackend().specification == "wandb"
    assert quark.MLflowBackend("p", run_name="r", nested=True).specification == "mlflow"


def test_the_environment_names_the_experiment(monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "an & other")
    assert quark.MLflowBackend("p").specification == "mlflow:?experiment=an+%26+other"


@pytest.mark.long
def test_the_run_has_name_notes_and_tags():
    with quark.setup_tracker(
        "p", "quark", name="n", notes="about", tags={"kind": "test", "n": 1}
    ) as tracker:
        run = tracker.session.context.run
    assert (run.name, run.notes, run.tags) == ("n", "about", ("kind=test", "n=1"))
    with quark.setup_tracker("p", "quark", run_name="r", tags="a, b", description="d") as tracker:
        assert (tracker.session.context.run.name, tracker.session.context.run.notes) == ("r", "d")
        assert tracker.session.context.run.tags == ("a", "b")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WB_PROJECT": "first", "WANDB_PROJECT": "second"}, "first"),
        ({"WANDB_PROJECT": "second", "WB_PROJECT_NAME": "third"}, "second"),
        ({"WB_PROJECT_NAME": "third", "MLFLOW_EXPERIMENT_NAME": "fourth"}, "third"),
        ({"MLFLOW_EXPERIMENT_NAME": "fourth"}, "fourth"),
    ],
)
def test_the_environment_names_the_project(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with quark.setup_tracker(backends="quark") as tracker:
        assert tracker.session.project_name == expected
    with quark.setup_tracker("given", backends="quark") as tracker:
        assert tracker.session.project_name == "given"


@pytest.mark.long
def test_without_any_word_the_project_is_the_script(tmp_path, child_environment):
    script = tmp_path / "train_something.py"
    script.write_text(
        "import quark\n"
        "with quark.setup_tracker(backends='quark') as tracker:\n"
        "    print(tracker.session.project_name)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**child_environment, "PYTHONPATH": str(Path(quark.__file__).parents[1])},
    )
    assert (done.stdout, done.stderr) == ("train_something\n", "")


@pytest.mark.parametrize("storage_dir", [None, "store"])
def test_the_store_lies_in_the_folder_or_elsewhere(tmp_path, storage_dir):
    more = {} if storage_dir is None else {"storage_dir": storage_dir}
    with quark.setup_tracker("p", "csv", outdir="out", **more) as tracker:
        tracker.log({"a": 1})
    assert (tmp_path / (storage_dir or "out") / ".quark" / "quark.db").is_file()
    assert (tmp_path / "out" / "metrics.csv").is_file()


def test_a_path_of_any_name_is_found_again(tmp_path):
    out = tmp_path / "a b&c=d+e%20,f?g#h" / "sk-1234567890abcdefghijklmnopqrstuv"
    with quark.setup_tracker("p", "csv", outdir=out) as tracker:
        tracker.log({"a": 1})
    assert (out / "metrics.csv").read_text() == "step,a\n0,1.0\n"


def test_a_run_that_cannot_be_started_costs_a_warning(tmp_path, recorder, said):
    (tmp_path / "file").write_text("")
    assert isinstance(
        quark.setup_tracker("p", backends="csv", outdir=tmp_path / "file"), quark.NullTracker
    )
    assert "the run could not be started" in said()[-1]
    with quark.setup_tracker("p", backends="recorder", outdir=tmp_path / "file") as tracker:
        assert names_of(tracker) == ["recorder"]
        tracker.log({"a": 1})
    assert tracker.get_backend("recorder").calls == [("log", {"a": 1}, None, True), ("finish",)]


def test_a_config_that_is_none_costs_a_warning(said):
    with quark.setup_tracker("p", backends="quark", config=3) as tracker:
        assert tracker.active
    assert "the run has no config" in said()[0]


@pytest.mark.parametrize(("name", "cls"), [("", dict), ("a,b", dict), (3, dict), ("a", 3)])
def test_what_cannot_be_registered_is_refused(name, cls):
    with pytest.raises(SchemaValidationError, match=r"name|cls"):
        quark.register_backend(name, cls)


def test_importing_quark_does_not_bring_in_the_tracker(child_environment):
    code = "import sys, quark; print('quark.tracker' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**child_environment, "PYTHONPATH": str(Path(quark.__file__).parents[1])},
    )
    assert done.stdout == "False\n"


# What is known of a run in another tool.


def save_state(tracker, folder, name, **state):
    path = Path(tracker.session.run_path) / "mirrors" / folder
    path.mkdir(parents=True)
    (path / name).write_text(json.dumps(state))
    return path


@pytest.fixture
def mirrored(define):
    for name in ("wandb", "mlflow"):
        define(define_scripted(name, ScriptedBackend()))


def test_what_is_known_of_a_wandb_run(mirrored):
    page = "https://wandb.ai/team/p/runs/abc"
    with quark.setup_tracker("p", "wandb", entity="team", name="n", mode="online") as tracker:
        before = tracker.wandb_run
        assert (before.id, before.name, before.project, before.entity) == (None, "n", "p", "team")
        assert (before.url, before.directory) == (None, None)
        # As the mirror notes it down when it has begun the run.
        state = {"wandb_id": "abc", "url": page, "entity": "team"}
        place = save_state(tracker, "wandb/p-1234", "state.json", **state)
        run = tracker.wandb_run
        assert (run.id, run.directory, run.entity, run.url) == ("abc", place, "team", page)
        assert tracker.get_backend("wandb").run == run
        assert tracker.get_backend("wandb").run_url == page
        assert tracker.mlflow_run is None
        with pytest.raises(AttributeError):
            run.id = "other"


@pytest.mark.long
def test_what_is_known_of_an_mlflow_run(mirrored, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:word@localhost:5000/")
    page = "http://localhost:5000/#/experiments/7/runs/abc"
    for name, uri in (("mlflow", "localhost"), ("mlflow:http://other?layers=5", "other")):
        with quark.setup_tracker("p", name, outdir=uri) as tracker:
            assert (tracker.mlflow_run.id, tracker.mlflow_run.url) == (None, None)
            place = save_state(tracker, "mlflow/12", "run.json", mlflow_run_id="abc", url=page)
            run = tracker.mlflow_run
            assert (run.id, run.experiment, run.directory, run.url) == ("abc", "p", place, page)
            assert uri in run.tracking_uri
            assert "word" not in str(run)
            assert tracker.wandb_run is None


def test_where_a_run_is_is_told_once(tmp_path, recorder, caplog):
    with caplog.at_level("INFO", logger="quark"):
        tracker = quark.setup_tracker("p", "csv,recorder", outdir=tmp_path)
        tracker.finish()
    (told,) = [text for text in caplog.messages if text.startswith("tracker: run ")]
    assert told == (
        f"tracker: run {tracker.run_id} of project p is in {tmp_path / '.quark'}, "
        "and goes to csv, recorder"
    )


@pytest.mark.parametrize("content", ["", "[]", "{", "{}"])
def test_a_state_that_cannot_be_read_is_no_state(mirrored, content):
    with quark.setup_tracker("p", "wandb") as tracker:
        save_state(tracker, "wandb/x", "state.json")
        path = Path(tracker.session.run_path) / "mirrors" / "wandb" / "x" / "state.json"
        path.write_text(content)
        assert tracker.wandb_run.id is None
