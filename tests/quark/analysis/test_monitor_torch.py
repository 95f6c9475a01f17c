import time

import pytest

import quark

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(session, learning_rate, steps, watch=None, breaks_at=None):
    """A small regression; returns the last step that was logged."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs @ torch.randn(8, 1) + 0.05 * torch.randn(256, 1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    metrics = quark.MetricsLogger(session)
    for step in range(steps):
        if step == breaks_at:
            optimizer.param_groups[0]["lr"] = 50.0
        chosen = torch.randint(0, 256, (32,))
        if watch is not None:
            watch.step(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
        loss.backward()
        optimizer.step()
        metrics.log("train/loss", loss.item(), step=step)
        time.sleep(0.001)
    return step


@pytest.mark.long
def test_a_training_that_diverges_is_halted(tmp_path):
    seen = []
    with (
        pytest.raises(quark.TrainingHalted) as caught,
        quark.start_run(project="p", storage_dir=tmp_path) as session,
    ):
        watch = quark.monitor(
            session, every_n_steps=20, on_alert=seen.append, halt_on="error", min_interval_s=0.05
        )
        train(session, 0.05, 60_000, breaks_at=300)
    alert = caught.value.alert
    assert alert in seen
    assert alert.severity in ("error", "critical")
    assert alert.step >= 295
    assert session.status == "failed"
    assert watch.halted
    steps = quark.MetricsLogger(quark.open_run(session.run_id, tmp_path)).columns()["step"]
    assert 300 < steps.max() < 59_999


@pytest.mark.long
def test_a_training_that_goes_well_is_left_alone(tmp_path):
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        quark.monitor(session, every_n_steps=20, halt_on="error", min_interval_s=0.05) as seen,
    ):
        assert train(session, 0.05, 600) == 599
    assert not [alert for alert in seen.alerts if alert.severity in ("error", "critical")]
    assert not seen.halted
    assert session.status == "completed"


@pytest.mark.long
def test_layers_and_parameters_come_to_the_rules(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with (
            quark.monitor(session, every_n_steps=20, min_interval_s=0.05) as monitor,
            quark.watch(session, model, optimizer=optimizer) as watch,
        ):
            for step in range(200):
                watch.step(step)
                optimizer.zero_grad()
                model(torch.randn(16, 4)).pow(2).mean().backward()
                optimizer.step()
        data = monitor._feed.load(ended=False)
        assert set(data.activations) == {"0", "1", "2"}
        assert len(data.parameters) == 4
    kept = quark.HookEngine(quark.open_run(session.run_id, tmp_path), model).read()
    assert sum(len(item) for item in data.activations.values()) == len(
        [record for record in kept if record.summary_type == "activation"]
    )
