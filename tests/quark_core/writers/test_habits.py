"""What people write who come from another tracker: it works, or a sentence says what to write."""

import re
import threading
from types import MappingProxyType

import numpy as np
import pytest
from kit.programs import run_threads

import quark
from quark import ArtifactStore, DataDiagnostics, EventLogger, MetricsLogger, TrainingSession
from quark_core.config import migration_hints
from quark_core.errors import SchemaValidationError
from quark_core.writers.buffered_writer import BufferedWriter


def list_points(metrics):
    return [(each.metric_key, each.value, each.step) for each in metrics.read()]


def test_log_takes_a_mapping_as_log_many_does(metrics):

    assert metrics.log({"loss": 0.1, "lr": np.float32(0.5)}, step=3) is None
    assert metrics.log(MappingProxyType({"loss": 0.2}), step=4, namespace="val") is None

    assert list_points(metrics) == [("loss", 0.1, 3), ("lr", 0.5, 3), ("val/loss", 0.2, 4)]


@pytest.mark.parametrize("call", ["log", "log_many"])
def test_mappings_within_mappings_are_flattened(metrics, call):
    nested = {"train": {"loss": 0.1, "top": {"1": True, "5": 0.9}}, "lr": 0.5, "empty": {}}

    getattr(metrics, call)(nested, step=1)
    getattr(metrics, call)({"train": {"loss": 0.2}}, step=2)
    getattr(metrics, call)({"train": 0.3}, step=3)
    getattr(metrics, call)({"train": {"loss": 0.4}}, step=4)

    assert list_points(metrics) == [
        ("train/loss", 0.1, 1),
        ("train/top/1", 1.0, 1),
        ("train/top/5", 0.9, 1),
        ("lr", 0.5, 1),
        ("train/loss", 0.2, 2),
        ("train", 0.3, 3),
        ("train/loss", 0.4, 4),
    ]


def test_the_name_of_a_mapping_is_checked_as_a_part_of_its_metrics_only(session, recwarn):
    MetricsLogger(session).log({"a" * 200: {"b": 1.0}}, step=1)

    assert not recwarn


def test_a_value_that_is_no_number_is_told_with_its_metric(session):
    with pytest.raises(SchemaValidationError, match=r"not str \(metric 'train/loss'\)"):
        MetricsLogger(session).log("train/loss", "abc", step=1)


def make_circle():
    circle = {}
    circle["a"] = circle
    return circle


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({"a/b": 1.0, "a": {"b": 2.0}}, "metrics has 'a/b' twice"),
        ({"a": {1: 2.0}}, "name of a metric must be a str, not int"),
        (make_circle(), "32 levels deep"),
    ],
    ids=["twice", "number", "circle"],
)
def test_bad_mappings_are_named_and_refused_whole(session, metrics, named):
    logger = MetricsLogger(session)
    with pytest.raises(SchemaValidationError, match=named):
        logger.log({"good": 1.0, **metrics}, step=1)
    assert logger.read() == ()


def test_a_call_without_a_step_says_what_to_write(session, metrics):
    with pytest.raises(SchemaValidationError) as single:
        metrics.log("loss", 0.5)
    with pytest.raises(SchemaValidationError) as several:
        metrics.log({"loss": 0.5})

    assert str(single.value).startswith(
        "step or epoch is required: write metrics.log('loss', 0.5, step=step)"
    )
    assert "write metrics.log({…}, step=step)" in str(several.value)
    for each in (single, several):
        assert "session.step(step)" in str(each.value)
        assert "auto_step=True" in str(each.value)


def test_the_step_of_a_session_holds_for_all_its_writers_and_threads(session):
    metrics, events = MetricsLogger(session), EventLogger(session)
    artifacts, batches = ArtifactStore(session), DataDiagnostics(session)

    session.step(7)
    thread = threading.Thread(target=lambda: metrics.log("of/thread", 1.0))
    thread.start()
    thread.join()
    metrics.log("single", 1.0)
    metrics.log({"of/many": 1.0})
    metrics.log("with/epoch", 1.0, epoch=2)
    metrics.log("own", 1.0, step=3)
    events.log("checkpoint_saved")
    session.add_log("text")
    artifacts.store("facts", "settings", {"a": 1})
    batches.log_batch(loss=0.5)
    metrics.log({"next": 1.0})
    session.step(np.int64(8))
    metrics.log("next", 1.0)

    assert {each.metric_key: each.step for each in metrics.read()} == {
        "of/thread": 7,
        "single": 7,
        "of/many": 7,
        "with/epoch": 7,
        "own": 3,
        "next": 8,
    }
    assert [each.step for each in events.read(event_types=["checkpoint_saved", "user_log"])] == [
        7,
        7,
    ]
    assert [each.step for each in artifacts.read()] == [7]
    assert [each.step for each in batches.read()] == [7]


def test_a_block_with_a_step_puts_back_what_was_set_before(session, metrics):
    session.step(1)
    with pytest.raises(ZeroDivisionError), session.step(5) as scope:
        assert scope.step == 5
        metrics.log("m", 0.0)
        raise ZeroDivisionError
    metrics.log("m", 1.0)
    session.step(None)
    with pytest.raises(SchemaValidationError, match="step or epoch"):
        metrics.log("m", 2.0)

    assert list_points(metrics) == [("m", 0.0, 5), ("m", 1.0, 1)]


@pytest.mark.parametrize("step", [-1, "1", 1.5, True, 2**63])
def test_a_bad_step_of_a_session_is_refused_and_changes_nothing(session, step):
    session.step(4)
    with pytest.raises(SchemaValidationError, match=r"^step"):
        session.step(step)
    assert MetricsLogger(session).log("m", 1.0).step == 4


def test_a_logger_counts_the_steps_of_calls_that_give_none(session):
    metrics = MetricsLogger(session, auto_step=True)
    for turn in range(3):
        metrics.log({"loss": turn, "lr": 0.5})
    metrics.log({"loss": 9.0}, step=100)
    metrics.log_many({"loss": 3.0}, epoch=1)

    assert [each.step for each in metrics.read(metric_key="loss")] == [0, 1, 2, 100, 3]


def test_single_values_share_a_counted_step_until_a_name_comes_again(session):
    metrics = MetricsLogger(session, auto_step=True)
    for turn in range(3):
        metrics.log("loss", turn)
        metrics.log("accuracy", turn)
    metrics.log({"loss": 9.0})
    metrics.log("accuracy", 9.0)

    assert [(each.metric_key, each.step) for each in metrics.read()] == [
        ("loss", 0),
        ("accuracy", 0),
        ("loss", 1),
        ("accuracy", 1),
        ("loss", 2),
        ("accuracy", 2),
        ("loss", 3),
        ("accuracy", 3),
    ]


def test_counting_goes_on_after_what_a_resumed_run_has(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as first:
        metrics = MetricsLogger(first, auto_step=True)
        for _ in range(5):
            metrics.log({"loss": 1.0})
        first.end_run("interrupted")
    with quark.resume_run(run_id=first.run_id, storage_dir=tmp_path) as second:
        assert MetricsLogger(second, auto_step=True).log("loss", 2.0).step == 5
        second.end_run("interrupted")
    with quark.resume_run(run_id=first.run_id, storage_dir=tmp_path, from_step=3) as third:
        assert MetricsLogger(third, auto_step=True).log("loss", 2.0).step == 3


def test_threads_that_count_share_no_step_of_several_metrics(session):
    metrics = MetricsLogger(session, auto_step=True)

    def log():
        for _ in range(500):
            metrics.log({"a": 1.0, "b": 2.0})

    run_threads(log, 4)

    assert sorted(each.step for each in metrics.read(metric_key="a")) == list(range(2000))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s, m, d: quark.start_run("digits"), "start_run(project='digits')"),
        (
            lambda s, m, d: quark.start_run(projcet="digits"),
            "no argument 'projcet': write project=",
        ),
        (lambda s, m, d: quark.start_run(experiment="digits"), "write project="),
        (lambda s, m, d: quark.start_run(project="p", entity="me"), "QUARK_PERSISTENCE_URL"),
        (lambda s, m, d: quark.start_run(), "project"),
        (lambda s, m, d: quark.monitor(s, notfy=print), "write notify="),
        (lambda s, m, d: TrainingSession.resume_run("abc"), "resume_run(run_id='abc')"),
        (lambda s, m, d: m.log("loss", 0.5, stp=3), "no argument 'stp': write step="),
        (lambda s, m, d: m.log("loss", 0.5, 3), "step=3"),
        (lambda s, m, d: m.log("loss", 0.5, global_step=3), "write step="),
        (lambda s, m, d: m.log("loss", step=3), "metrics.log('loss', value, step=step)"),
        (lambda s, m, d: m.log({"loss": 0.5}, 3), "metrics.log({…}, step=step)"),
        (lambda s, m, d: m.log({"loss": 0.5}, stp=3), "no argument 'stp': write step="),
        (lambda s, m, d: m.log({"loss": 0.5}, step=3, metadata={}), "no description"),
        (lambda s, m, d: m.log_many({"loss": 0.5}, 3), "step=3"),
        (lambda s, m, d: m.log_many({"loss": 0.5}, stpe=3), "write step="),
        (lambda s, m, d: m.log({"loss": 0.5}, step=3, commit=False), "each call is kept at once"),
        (lambda s, m, d: quark.start_run(project="p", nested=True), "parent_run_id=outer.run_id"),
        (lambda s, m, d: quark.start_run(project="p", run_id="a"), "quark.resume_run(run_id=…)"),
        (lambda s, m, d: quark.start_run(project="p", id="a"), "quark.resume_run(run_id=…)"),
        (lambda s, m, d: quark.start_run(project="p", mode="offline"), "direction of objective="),
        (lambda s, m, d: quark.search_runs(filter_string="a < 1"), "write where="),
    ],
)
def test_arguments_that_do_not_fit_get_a_sentence(session, metrics, tmp_path, call, said):
    # A value of a type that does not fit is data; a name that is not known is none.
    with pytest.raises((TypeError, SchemaValidationError)) as caught:
        call(session, metrics, tmp_path)

    assert said in str(caught.value)
    assert metrics.read() == ()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda s, m: quark.init(project="p"), "quark.start_run(project="),
        (lambda s, m: quark.log({"loss": 1.0}), "metrics.log("),
        (lambda s, m: quark.log_metric("loss", 1.0), "metrics.log("),
        (lambda s, m: quark.finish(), "session.end_run()"),
        (lambda s, m: quark.SummaryWriter(), "quark.start_run("),
        (lambda s, m: quark.log_params({}), "session.config.update("),
        (lambda s, m: s.log({"loss": 1.0}), "quark.MetricsLogger(session)"),
        (lambda s, m: s.log_metric("loss", 1.0), "metrics.log("),
        (lambda s, m: s.track(1.0, name="loss"), "metrics.log("),
        (lambda s, m: s.finish(), "session.end_run()"),
        (lambda s, m: s.log_artifact("x"), "quark.ArtifactStore(session)"),
        (lambda s, m: s.set_tag("a", "b"), "session.add_tag("),
        (lambda s, m: m.add_scalar("loss", 1.0, 3), "metrics.log("),
        (lambda s, m: m.log_metric("loss", 1.0), "metrics.log("),
        (lambda s, m: m.finish(), "session.end_run()"),
        (lambda s, m: s.define_metric("loss", summary="min"), 'objective="val/loss", mode="min"'),
        (lambda s, m: m.define_metric("loss", summary="min"), 'objective="val/loss", mode="min"'),
        (lambda s, m: quark.define_metric("loss"), 'objective="val/loss", mode="min"'),
        (lambda s, m: s.alert("Slow", "it waits"), '.log("alert_raised", severity="error"'),
        (lambda s, m: quark.alert("Slow", "it waits"), '.log("alert_raised", severity="error"'),
        (lambda s, m: quark.use_artifact("model:best"), 'session.use_artifact("model:best")'),
        (lambda s, m: EventLogger(s).log_artifact("x"), "artifacts.log_file(path)"),
        (lambda s, m: setattr(s.config, "lr", 3), "session.config['lr'] = 3"),
        (lambda s, m: setattr(s, "tags", ["a"]), 'session.add_tag("baseline")'),
        (lambda s, m: setattr(s, "notes", "a"), "quark.edit_run(session, notes="),
        (lambda s, m: setattr(s, "name", "a"), "quark.edit_run(session, name="),
        (lambda s, m: setattr(s, "group", "a"), "session.add_to_group("),
        (lambda s, m: setattr(s, "config", {}), "session.config.update("),
        (lambda s, m: s.summary["best"], "session.annotate("),
    ],
)
def test_calls_of_other_trackers_get_a_sentence(session, ask, said):
    with pytest.raises(AttributeError) as caught:
        ask(session, MetricsLogger(session))

    assert said in str(caught.value)
    # What stands behind "Write" is what to write.
    assert not re.search(r"[Ww]rite (make|nothing)\b", str(caught.value))


def test_no_habit_stands_before_what_a_writer_has():
    for name in quark.__all__:
        writer = getattr(quark, name)
        if isinstance(writer, type) and issubclass(writer, BufferedWriter):
            # What it has itself stands before them in any case.
            for base in writer.__mro__[writer.__mro__.index(BufferedWriter) + 1 :]:
                assert not vars(base).keys() & migration_hints._WRITER.keys(), (name, base)


def test_a_session_is_no_mapping_and_says_what_to_write(session):
    with pytest.raises(TypeError, match=r"metrics\.log\(.*session\.config\['lr'\]"):
        session["lr"] = 1
    with pytest.raises(TypeError, match=r"metrics\.log\("):
        session["train/loss"].append(0.5)


def test_attributes_that_nobody_has_are_told_as_python_tells_them(session):
    with pytest.raises(AttributeError) as caught:
        session.nonsense  # noqa: B018
    assert str(caught.value) == "'TrainingSession' object has no attribute 'nonsense'"
    assert (caught.value.name, caught.value.obj) == ("nonsense", session)
    assert not hasattr(MetricsLogger(session), "__array__")
    with pytest.raises(AttributeError, match="module 'quark' has no attribute 'nonsense'"):
        quark.nonsense  # noqa: B018


def test_a_type_error_of_an_object_that_was_given_is_told_with_the_argument(tmp_path):
    class Odd:
        def __iter__(self):
            raise TypeError("starts a new run")

    with pytest.raises(
        SchemaValidationError, match=r"tags .*TypeError: starts a new run"
    ) as caught:
        quark.start_run(project="p", storage_dir=tmp_path, tags=Odd())
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    "call",
    [
        lambda metrics: metrics.log("a@1", 1.0, step=1),
        lambda metrics: metrics.log({"a@1": 1.0}, step=1),
        lambda metrics: metrics.log({"a": {"b@1": 1.0}}, step=1),
        lambda metrics: metrics.log_many({"a@1": 1.0}, step=1),
    ],
    ids=["log", "a dict", "a nested dict", "log_many"],
)
def test_a_warning_about_a_name_points_at_the_line_of_the_user(session, call):
    with pytest.warns(RuntimeWarning, match="naming rule") as told:
        call(MetricsLogger(session))
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    "read",
    [
        lambda metrics, key: metrics.read(metric_key=key),
        lambda metrics, key: metrics.columns(metric_key=key).to_records(),
        lambda metrics, key: list(metrics.iterate(metric_key=key)),
        lambda metrics, key: metrics.series(key).step.tolist(),
        lambda metrics, key: metrics.read_across_ranks(key).count.tolist(),
    ],
    ids=["read", "columns", "iterate", "series", "across_ranks"],
)
def test_a_read_of_an_unknown_metric_is_empty_and_says_once_which_names_are_near(
    session, metrics, caplog, read
):
    metrics.log({"train/loss": 1.0, "val/loss": 2.0, "accuracy": 0.5}, step=1)
    with pytest.warns(RuntimeWarning, match="naming rule"):
        metrics.log("mean@1", 3.0, step=1)

    for _ in range(2):
        assert not read(metrics, "los")
    assert not read(metrics, "meen@1")
    assert not read(metrics, "zebra")
    assert read(metrics, "train/loss")

    assert [each.getMessage() for each in caplog.records] == [
        f"run {session.run_id} has no metric 'los'; similar names: 'train/loss', 'val/loss'; "
        "nothing was read",
        f"run {session.run_id} has no metric 'meen@1'; similar names: 'mean@1'; nothing was read",
    ]


def test_a_filter_that_leaves_nothing_of_a_known_metric_is_no_mistake(metrics, caplog):
    metrics.log("train/loss", 1.0, step=1)

    assert metrics.read(metric_key="train/loss", step_min=5) == ()
    assert not caplog.records
