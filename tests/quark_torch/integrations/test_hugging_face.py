"""`QuarkCallback` in a real Transformers Trainer."""

import json

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
