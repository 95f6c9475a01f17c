"""`QuarkLogger` in a real Lightning Trainer."""

import pytest
from frameworks import ask_to_stop, import_or_skip

import quark

# What Lightning and its libraries warn of is theirs.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")
lightning, module = import_or_skip("lightning.pytorch", "quark_torch.integrations.lightning")


class Module(lightning.LightningModule):
    def __init__(self, lr=0.1, fails_at=None, error=ValueError):
        super().__init__()
        self.save_hyperparameters("lr")
        self.layer = torch.nn.Linear(4, 1)
        self.fails_at, self.error = fails_at, error

    def training_step(self, batch, index):
        if self.fails_at == self.global_step:
            raise self.error("planted")
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val/loss", self.layer(batch[0]).pow(2).mean())

    def test_step(self, batch, index):
        self.log("test/loss", self.layer(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def load():
    data = torch.utils.data.TensorDataset(torch.randn(32, 4))
    return torch.utils.data.DataLoader(data, batch_size=8)


def make_trainer(logger, tmp_path, **arguments):
    return lightning.Trainer(
        logger=logger,
        accelerator="cpu",
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **{"max_epochs": 2, **arguments},
    )


def test_a_training_is_logged_by_its_steps(tmp_path, runs, read):
    logger = module.QuarkLogger(project="vision", storage_dir=tmp_path, tags=["l"], name="first")
    trainer = make_trainer(logger, tmp_path)
    trainer.fit(Module(lr=0.05), load(), load())
    (run,) = runs()
    assert (run.status, run.project_name, run.context.run.name) == ("completed", "vision", "first")
    assert [step for step, _ in read(run, "train/loss")] == list(range(8))
    assert [step for step, _ in read(run, "val/loss")] == [3, 7]
    records = quark.MetricsLogger(run).read(metric_key="train/loss")
    assert [record.epoch for record in records] == [0] * 4 + [1] * 4
    assert run.open_run.reader.load_run(run.run_id).config.values["lr"] == 0.05
    events = [e for e in quark.EventLogger(run).read() if e.event_type == "checkpoint_saved"]
    assert events[-1].payload["path"].endswith(".ckpt")
    assert run.run_id in events[-1].payload["path"]


@pytest.mark.long
def test_a_test_afterwards_continues_the_run(tmp_path, runs, read):
    logger = module.QuarkLogger(project="vision", storage_dir=tmp_path)
    trainer = make_trainer(logger, tmp_path, max_epochs=1)
    model = Module()
    trainer.fit(model, load())
    trainer.test(model, load(), verbose=False)
    (run,) = runs()
    assert (run.status, run.context.run.attempt) == ("completed", 1)
    assert len(read(run, "train/loss")) == 4
    assert len(read(run, "test/loss")) == 1


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "interrupted")]
)
def test_a_training_that_breaks_off_says_how(tmp_path, runs, read, error, status):
    logger = module.QuarkLogger(project="vision", storage_dir=tmp_path)
    with pytest.raises((ValueError, KeyboardInterrupt, SystemExit)):
        make_trainer(logger, tmp_path).fit(Module(fails_at=3, error=error), load())
    (run,) = runs()
    assert run.status == status
    assert [step for step, _ in read(run, "train/loss")] == [0, 1, 2]


def test_a_run_is_resumed(tmp_path, runs, read):
    first = module.QuarkLogger(project="vision", storage_dir=tmp_path)
    with pytest.raises(ValueError, match="planted"):
        make_trainer(first, tmp_path).fit(Module(fails_at=3), load())
    again = module.QuarkLogger(run_id=first.version, storage_dir=tmp_path, from_step=0)
    make_trainer(again, tmp_path, max_epochs=1).fit(Module(), load())
    (run,) = runs()
    assert (run.status, run.context.run.attempt) == ("completed", 1)
    assert [step for step, _ in read(run, "train/loss")] == list(range(4))


def test_a_session_of_the_users_own_is_not_ended(tmp_path, read):
    with quark.start_run(project="mine", storage_dir=tmp_path) as session:
        logger = module.QuarkLogger(session=session)
        make_trainer(logger, tmp_path, max_epochs=1).fit(Module(), load())
        assert session.status == "running"
        assert logger.version == session.run_id
        assert logger.experiment is session
    run = quark.open_run(session.run_id, tmp_path)
    assert len(read(run, "train/loss")) == 4


def test_other_ranks_start_no_run(tmp_path, runs, monkeypatch):
    monkeypatch.setattr(module.rank_zero_only, "rank", 1)
    logger = module.QuarkLogger(project="vision", storage_dir=tmp_path)
    logger.log_hyperparams({"lr": 1})
    logger.log_metrics({"m": 1.0}, step=0)
    logger.finalize("success")
    assert logger.version == ""
    assert not (tmp_path / ".quark").exists()


class Asker(lightning.Callback):
    """Asks the run to stop at the end of a batch, and waits until its session knows."""

    def __init__(self, logger, at_batch):
        super().__init__()
        self.logger, self.at_batch = logger, at_batch

    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == self.at_batch:
            ask_to_stop(self.logger.experiment)


def test_a_run_that_is_asked_to_stop_ends_as_by_early_stopping(tmp_path, runs, read):
    logger = module.QuarkLogger(project="vision", storage_dir=tmp_path)
    trainer = make_trainer(logger, tmp_path, max_epochs=50, callbacks=[Asker(logger, 5)])
    trainer.fit(Module(), load())
    assert trainer.global_step == 6
    (run,) = runs()
    assert run.status == "completed"
    assert [step for step, _ in read(run, "train/loss")] == list(range(6))
    assert len(list(tmp_path.rglob("*step=6.ckpt"))) == 1
    trainer.test(Module(), load(), verbose=False)
    assert logger.experiment.stop_requested is None
    logger.finalize("success")
