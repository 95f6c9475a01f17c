"""`QuarkCallback` in a real Transformers Trainer."""

import json
import math

import pytest
from frameworks import ask_to_stop, import_or_skip

import quark

# What Transformers and its libraries warn of is theirs.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")
import_or_skip("accelerate")
transformers, module = import_or_skip("transformers", "quark_torch.integrations.hugging_face")


class Model(torch.nn.Module):
    def __init__(self, fails_at=None):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.calls, self.fails_at = 0, fails_at
        self.config = transformers.PretrainedConfig(width=4)

    def forward(self, x, labels=None):
        self.calls += self.training
        if self.calls == self.fails_at:
            raise ValueError("planted")
        predicted = self.layer(x)
        return {"loss": (predicted - labels).pow(2).mean(), "logits": predicted}


def make_trainer(tmp_path, callback, *, model=None, **arguments):
    data = [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(16)]
    options = {"max_steps": 6, "logging_steps": 1, "save_steps": 2, "save_strategy": "steps"}
    return transformers.Trainer(
        model=model or Model(),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=4,
            learning_rate=0.01,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **{**options, **arguments},
        ),
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[callback],
    )


@pytest.mark.long
def test_a_training_is_logged_by_its_steps(tmp_path, runs, read):
    callback = module.QuarkCallback(project="nlp", storage_dir=tmp_path, tags=["t"])
    make_trainer(tmp_path, callback, eval_strategy="steps", eval_steps=3).train()
    (run,) = runs()
    assert (run.status, run.project_name) == ("completed", "nlp")
    assert [step for step, _ in read(run, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in read(run, "eval/loss")] == [3, 6]
    config = run.open_run.reader.load_run(run.run_id).config.values
    assert (config["trainer"]["learning_rate"], config["model"]["width"]) == (0.01, 4)
    events = [e for e in quark.EventLogger(run).read() if e.event_type == "checkpoint_saved"]
    assert [event.step for event in events] == [2, 4, 6]
    assert events[0].payload["path"] == str(tmp_path / "out" / "checkpoint-2")


@pytest.mark.long
def test_a_checkpoint_continues_its_run(tmp_path, runs, read):
    first = module.QuarkCallback(project="nlp", storage_dir=tmp_path)
    with pytest.raises(ValueError, match="planted") as raised:
        make_trainer(tmp_path, first, model=Model(fails_at=6)).train()
    first.close(raised.value)
    (run,) = runs()
    assert run.status == "failed"
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "quark_run.json").read_text())
    assert (state["run_id"], state["step"]) == (run.run_id, 4)
    again = module.QuarkCallback(project="nlp", storage_dir=tmp_path)
    make_trainer(tmp_path, again).train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    (run,) = runs()
    assert (run.status, run.context.run.attempt) == ("completed", 1)
    assert [step for step, _ in read(run, "train/loss")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_an_evaluation_afterwards_continues_the_run(tmp_path, runs, read):
    callback = module.QuarkCallback(project="nlp", storage_dir=tmp_path)
    trainer = make_trainer(tmp_path, callback)
    trainer.train()
    trainer.evaluate()
    callback.close()
    (run,) = runs()
    assert (run.status, run.context.run.attempt) == ("completed", 1)
    assert [step for step, _ in read(run, "eval/loss")] == [6]


@pytest.mark.long
def test_a_session_of_the_users_own_is_not_ended(tmp_path, read):
    with quark.start_run(project="mine", storage_dir=tmp_path, config={"seed": 7}) as session:
        make_trainer(tmp_path, module.QuarkCallback(session=session)).train()
        assert session.status == "running"
    run = quark.open_run(session.run_id, tmp_path)
    assert len(read(run, "train/loss")) == 6
    config = run.open_run.reader.load_run(run.run_id).config.values
    assert config["seed"] == 7
    assert config["trainer"]["learning_rate"] == 0.01


class Asker(transformers.TrainerCallback):
    """Asks the run to stop before a step, and waits until its session knows."""

    def __init__(self, callback, at_step):
        self.callback, self.at_step = callback, at_step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at_step:
            ask_to_stop(self.callback.session)


@pytest.mark.parametrize(("strategy", "saved"), [("steps", ["checkpoint-3"]), ("no", [])])
def test_a_run_that_is_asked_to_stop_ends_with_a_checkpoint(tmp_path, runs, read, strategy, saved):
    callback = module.QuarkCallback(project="nlp", storage_dir=tmp_path)
    trainer = make_trainer(
        tmp_path, callback, max_steps=500, save_steps=500, save_strategy=strategy
    )
    trainer.add_callback(Asker(callback, 2))
    trainer.train()
    assert trainer.state.global_step == 3
    (run,) = runs()
    assert run.status == "completed"
    assert [step for step, _ in read(run, "train/loss")] == [1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == saved


class Odd(Model):
    """Its loss is no number in some calls; then its weights stay as they are, or not."""

    def __init__(self, bad, *, spares_weights=False):
        super().__init__()
        self.bad, self.spares_weights = bad, spares_weights

    def forward(self, x, labels=None):
        out = super().forward(x, labels)
        if self.training and self.calls in self.bad:
            loss = out["loss"]
            out["loss"] = (
                torch.nan_to_num(loss * 0) + torch.nan
                if self.spares_weights
                else (loss * torch.nan)
            )
        return out


def find_severities(run):
    return {alert.rule_id: alert.severity for alert in quark.AnalyzerEngine(run).analyze().alerts}


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_losses_that_the_trainer_filters_out_are_not_healthy(tmp_path, runs, read, max_grad_norm):
    callback = module.QuarkCallback(project="nlp", storage_dir=tmp_path)
    options = {"max_steps": 24, "logging_steps": 2, "save_strategy": "no"}
    trainer = make_trainer(
        tmp_path, callback, model=Odd({7}), max_grad_norm=max_grad_norm, **options
    )
    trainer.train()
    assert not torch.isfinite(trainer.model.layer.weight).all()
    (run,) = runs()
    losses = dict(read(run, "train/loss"))
    assert all(math.isfinite(losses[step]) for step in (2, 4, 6))
    assert all(math.isnan(losses[step]) for step in range(8, 25, 2))
    assert [n for _, n in read(run, "train/non_finite_losses")] == [2] * 9
    assert [n for _, n in read(run, "train/non_finite_gradients")] == [2] * 9
    assert all(math.isnan(norm) for step, norm in read(run, "train/grad_norm") if step >= 8)
    told = [each for each in quark.EventLogger(run).read() if each.event_type == "non_finite_loss"]
    assert [(each.severity, each.step) for each in told] == [("warning", 8)]
    assert find_severities(run)["non_finite_values"] == "critical"


def test_single_losses_that_are_filtered_out_are_counted(tmp_path, runs, read):
    callback = module.QuarkCallback(project="nlp", storage_dir=tmp_path)
    options = {"max_steps": 12, "logging_steps": 4, "save_strategy": "no"}
    model = Odd({6, 10}, spares_weights=True)
    make_trainer(tmp_path, callback, model=model, **options).train()
    (run,) = runs()
    assert all(math.isfinite(value) for _, value in read(run, "train/loss"))
    assert [n for _, n in read(run, "train/non_finite_losses")] == [1, 1]
    assert find_severities(run)["non_finite_values"] == "error"


def test_a_healthy_training_has_no_counts(tmp_path, runs, read):
    callback = module.QuarkCallback(project="nlp", storage_dir=tmp_path)
    trainer = make_trainer(tmp_path, callback, save_strategy="no")
    trainer.train()
    (run,) = runs()
    assert "train/non_finite_losses" not in set(quark.MetricsLogger(run).columns()["metric_key"])
    assert not trainer.model._forward_hooks
