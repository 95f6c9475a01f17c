"""`quark.watch` without `watch.step`: steps are counted by the optimizer's."""

import gc

import pytest
import torch
from torch import nn

import quark


@pytest.fixture
def session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        yield session


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def make_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model):
    model(torch.randn(6, 4)).square().mean().backward()


def train(model, *optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(model)
    for optimizer in optimizers:
        optimizer.step()


def steps(run):
    """Steps of layers, of parameters and of telemetry."""
    records = (
        quark.HookEngine(run, nn.Linear(1, 1)).read(),
        quark.ParameterDiagnostics(run, nn.Linear(1, 1)).read_summaries(),
        quark.SystemTelemetry(run).read(),
    )
    return tuple(sorted({record.step for record in each}) for each in records)


def odd_events(run):
    known = {"run_started", "run_ended", "grad_scaler_found"}
    return [each for each in quark.EventLogger(run).read() if each.event_type not in known]


@pytest.mark.long
def test_five_lines_record_layers_parameters_and_telemetry(tmp_path, model):
    optimizer = make_sgd(model)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.watch(session, model, optimizer, every_n_steps=3)
        gc.collect()
        for _ in range(10):
            train(model, optimizer)
    run = quark.open_run(session.run_id, tmp_path)
    assert steps(run) == ([1, 3, 6, 9], [1, 3, 6, 9], [3, 6, 9])
    weights = [
        each
        for each in quark.ParameterDiagnostics(run, model).read_summaries()
        if each.parameter_name == "0.weight"
    ]
    for record in weights:
        assert record.update_norm == pytest.approx(0.1 * record.gradient_norm, rel=1e-4)
    assert odd_events(run) == []
    assert not any(module._forward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.long
def test_calls_of_step_take_over_without_counting_twice(session, model):
    optimizer = make_sgd(model)
    with quark.watch(session, model, optimizer, every_n_steps=1) as watch:
        for _ in range(3):
            train(model, optimizer)
        for step in range(10, 13):
            watch.step(step)
            train(model, optimizer)
    assert steps(session) == ([1, 2, 10, 11, 12], [1, 2, 10, 11, 12], [1, 2, 10, 11, 12])
    assert odd_events(session) == []


def test_calls_from_the_first_step_on_leave_nothing_to_count(session, model):
    optimizer = make_sgd(model)
    with quark.watch(session, model, optimizer, every_n_steps=1) as watch:
        for step in range(5, 8):
            watch.step(step)
            train(model, optimizer)
    assert steps(session) == ([5, 6, 7],) * 3


def test_a_call_at_the_end_of_the_body_counts_alone(session, model):
    optimizer = make_sgd(model)
    with quark.watch(session, model, optimizer, every_n_steps=1) as watch:
        for step in range(3):
            train(model, optimizer)
            watch.step(step)
    assert set(steps(session)[1]) <= {0, 1, 2}


def test_micro_batches_are_parts_of_a_step(session, model):
    optimizer = make_sgd(model)
    with quark.watch(session, model, optimizer, every_n_steps=2):
        for _ in range(5):
            optimizer.zero_grad()
            for _ in range(4):
                backward(model)
            optimizer.step()
    assert steps(session)[1] == [1, 2, 4]


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
def test_several_optimizers_that_step_in_turn_make_one_step(session, model, named):
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    given = (first, second) if named else None
    with quark.watch(session, model, given, every_n_steps=1):
        for _ in range(6):
            train(model, first, second)
    assert steps(session)[0] == [1, 2, 3, 4, 5]


def test_of_two_optimizers_the_one_that_steps_more_often_counts(session, model):
    often = torch.optim.SGD(model[0].parameters(), lr=0.1)
    seldom = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with quark.watch(session, model, (often, seldom), every_n_steps=1, telemetry=True):
        for turn in range(12):
            train(model, often)
            if turn % 4 == 3:
                seldom.step()
    assert steps(session)[2] == list(range(2, 12))


def test_optimizers_of_other_models_do_not_count(session, model):
    other = nn.Linear(4, 2)
    mine, foreign = make_sgd(model), make_sgd(other)
    with quark.watch(session, model, mine, every_n_steps=1):
        for _ in range(3):
            train(model, mine)
            train(other, foreign)
    assert steps(session)[0] == [1, 2]


class Wrapper(torch.optim.Optimizer):
    """As SAM: its base optimizer makes the step, within its own or without."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base_optimizer = base

    def step(self, closure=None):
        self.base_optimizer.step()


@pytest.mark.parametrize("within", [True, False])
def test_a_wrapper_and_what_it_wraps_make_one_step(session, model, within):
    wrapper = Wrapper(make_sgd(model))
    with quark.watch(session, model, wrapper, every_n_steps=1):
        for _ in range(4):
            wrapper.zero_grad()
            backward(model)
            (wrapper if within else wrapper.base_optimizer).step()
    assert steps(session)[1] == [1, 2, 3]


def test_a_step_that_a_scaler_leaves_out_is_none(session, model):
    optimizer = make_sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with quark.watch(session, model, optimizer, every_n_steps=1):
        for turn in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).square().mean() * (torch.inf if turn == 3 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert steps(session)[2] == [1, 2, 3, 4]


def test_a_resumed_run_counts_on(tmp_path, model):
    optimizer = make_sgd(model)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.watch(session, model, optimizer, every_n_steps=1)
        for step in range(3):
            train(model, optimizer)
            quark.MetricsLogger(session).log("loss", 1.0, step=step)
    with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, reopen=True) as again:
        quark.watch(again, model, optimizer, every_n_steps=1)
        for _ in range(3):
            train(model, optimizer)
    assert steps(quark.open_run(session.run_id, tmp_path))[0] == [1, 2, 4, 5]


@pytest.mark.long
def test_a_run_that_has_ended_lets_the_watch_and_the_model_go(tmp_path, model):
    import weakref

    optimizer = make_sgd(model)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        watch = weakref.ref(quark.watch(session, model, optimizer, every_n_steps=1))
        train(model, optimizer)
    train(model, optimizer)
    gc.collect()
    assert watch() is None


def test_what_fails_while_counting_is_told_of_and_costs_no_step(session, model, monkeypatch):
    optimizer = make_sgd(model)
    watch = quark.watch(session, model, optimizer, every_n_steps=1)
    monkeypatch.setattr(watch.telemetry, "start_step", lambda *_, **__: 1 / 0)
    for _ in range(3):
        train(model, optimizer)
    (told,) = odd_events(session)
    assert (told.event_type, told.payload["where"]) == ("instrumentation_failed", "counting steps")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # what Lightning and its libraries warn of is theirs
def test_lightning_counts_by_its_optimizer(session):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch, _):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return make_sgd(self.net)

        def on_train_start(self):
            quark.watch(session, self, self.optimizers().optimizer, every_n_steps=1)

    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4
    )
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Module(), data)
    session.end_run()
    assert trainer.global_step == 4
    assert steps(session)[0] == [1, 2, 3]
