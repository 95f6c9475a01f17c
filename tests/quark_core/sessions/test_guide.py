"""The programs of the public guide run as they are printed there, in our words."""

import pytest

from quark import EventLogger, MetricsLogger, TrainingSession, open_run, resume_run, start_run


def test_custom_scalar_metrics(tmp_path):
    with (
        TrainingSession.start_run(project="custom-metrics", storage_dir=tmp_path) as session,
        MetricsLogger(session, batch_size=50) as metrics,
    ):
        first = metrics.log(
            "my_eval/f1_macro",
            0.812,
            step=120,
            epoch=2,
            description="Macro F1 on the holdout split.",
            metadata={"split": "holdout_internal", "threshold": 0.5},
        )
        metrics.log("data/duplicate_ratio", 0.034, step=120, epoch=2, metadata={"window": "epoch"})
        served = metrics.log(
            "latency_ms", 18.4, epoch=2, namespace="serving/shadow", metadata={"unit": "ms"}
        )
        assert (first.namespace, first.metric_name) == ("my_eval", "f1_macro")
        assert served.metric_key == "serving/shadow/latency_ms"
        assert served.step is None
        assert metrics.read() == (
            first,
            *metrics.read(namespace="data"),
            served,
        )
        assert metrics.read(metric_name="f1_macro")[0].metadata == {
            "split": "holdout_internal",
            "threshold": 0.5,
        }


def test_reading_metrics_back(tmp_path):
    with (
        TrainingSession.start_run(project="reading", storage_dir=tmp_path) as session,
        MetricsLogger(session) as metrics,
    ):
        for step in range(0, 1000, 10):
            metrics.log("train/loss", 1 / (step + 1), step=step)
            metrics.log("eval/accuracy", step / 1000, step=step)
        losses = metrics.read(metric_key="train/loss", step_min=100, step_max=500)
        assert [record.step for record in losses] == list(range(100, 501, 10))
        latest = metrics.read(namespace="eval", limit=20)
        assert [record.step for record in latest] == list(range(800, 1000, 10))
        assert latest[-1].to_dict()["value"] == 0.99


def test_minimal_run_lifecycle(tmp_path):
    with (
        TrainingSession.start_run(
            project="image-classifier",
            config={"model": "resnet18", "optimizer": "adamw", "lr": 3e-4, "epochs": 5},
            tags=["baseline", "dev"],
            storage_dir=tmp_path,
        ) as session,
        MetricsLogger(session, batch_size=50) as metrics,
        EventLogger(session, batch_size=20) as events,
    ):
        metrics.log("train/loss", 1.42, step=0, epoch=0)
        metrics.log("optimizer/lr", 3e-4, step=0, epoch=0)
        saved = events.log(
            "checkpoint_saved", step=0, epoch=0, payload={"path": "checkpoints/step-0.pt"}
        )
        note = session.add_log("Warmup completed without instability.", identifier="Info")

    assert saved.severity == "info"
    assert (note.event_type, note.severity) == ("user_log", "info")
    assert session.status == "completed"
    # Through a service it is a URI instead; see tests/quark_backends/service_client.
    assert str(session.run_path).endswith(f"/runs/{session.run_id}")
    again = open_run(session.run_id, tmp_path)
    assert again.context.run.tags == ("baseline", "dev")
    types = [event.event_type for event in EventLogger(again).read()]
    assert types == ["run_started", "checkpoint_saved", "user_log", "run_ended"]
    assert again.to_dict()["run"]["project_name"] == "image-classifier"
    assert again.to_dict()["project"]["root_path"] == str(tmp_path)


def test_structured_logs_and_a_runtime_error(tmp_path):
    def train_one_epoch():
        raise RuntimeError("CUDA error: device-side assert")

    with (
        pytest.raises(RuntimeError, match="device-side"),
        TrainingSession.start_run(project="classifier", storage_dir=tmp_path) as session,
    ):
        session.add_log("Loaded checkpoint from step 1200.", identifier="Info")
        with EventLogger(session, batch_size=20) as events:
            events.add_log(
                "Validation loss increased for three checks.",
                identifier="Warning",
                step=1280,
                payload={"window": 3},
            )
            train_one_epoch()

    assert session.status == "failed"
    events = EventLogger(open_run(session.run_id, tmp_path))
    (warning,) = events.read(severity="warning")
    assert warning.payload == {
        "message": "Validation loss increased for three checks.",
        "identifier": "Warning",
        "window": 3,
    }
    (error,) = events.read(event_type="runtime_error")
    assert error.severity == "error"
    assert error.payload["identifier"] == "Error"
    assert error.payload["message"] == "RuntimeError: CUDA error: device-side assert"
    assert "train_one_epoch" in error.payload["traceback"]
    assert events.read(event_types=["run_ended"])[0].status == "failed"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit(2)])
def test_an_interruption_is_logged_as_a_warning(tmp_path, interruption):
    with (
        pytest.raises((KeyboardInterrupt, SystemExit)),
        start_run(project="classifier", storage_dir=tmp_path) as session,
    ):
        raise interruption
    assert session.status == "interrupted"
    (event,) = EventLogger(session).read(event_type="runtime_interruption")
    assert (event.severity, event.payload["identifier"]) == ("warning", "Warning")


@pytest.mark.long
def test_resuming_an_interrupted_run(tmp_path):
    session = TrainingSession.start_run(project="resume-demo", storage_dir=tmp_path)
    session.end_run(status="interrupted")

    resumed = resume_run(run_id=session.run_id, storage_dir=tmp_path)
    resumed.add_tag("recovered")
    resumed.add_log("Recovered after a scheduled maintenance window.", identifier="Info")
    context = resumed.end_run(status="completed")

    assert (context.status, context.run.resume_count) == ("completed", 1)
    assert resumed.run_id == session.run_id
    stored = open_run(session.run_id, tmp_path)
    assert stored.context.run.tags == ("recovered",)
    types = [event.event_type for event in EventLogger(stored).read()]
    assert types == ["run_started", "run_ended", "run_resumed", "user_log", "run_ended"]
