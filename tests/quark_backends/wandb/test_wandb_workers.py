"""Processes that a training forks log to W&B too, and long names stay apart there."""

import os
import textwrap
from importlib.util import find_spec

import pytest
from test_wandb_faults import launch, sync

import quark

if find_spec("wandb") is None:
    pytest.skip("needs wandb", allow_module_level=True)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_workers_of_a_data_loader_log_to_w_and_b(tmp_path, read_mirror):
    pytest.importorskip("torch")
    script = """
        import torch, warnings
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        session = quark.start_run(project="vision", backends="wandb")
        class Dataset:
            def __len__(self):
                return 12
            def __getitem__(self, index):
                quark.MetricsLogger(session).log("worker", float(index), step=index)
                return index
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 0.0, step=0)
        # W&B's process is there when the workers are forked.
        session.flush("stored")
        for lane in session.open_run.stream._lanes:
            while lane.report().waiting:
                lane.nudge()
                time.sleep(0.02)
        loader = torch.utils.data.DataLoader(
            Dataset(), num_workers=2, batch_size=2, multiprocessing_context="fork"
        )
        for step, batch in enumerate(loader, 1):
            metrics.log("m", float(batch[0]), step=step)
        session.end_run()
        print(session.run_path, flush=True)
    """
    job = launch(tmp_path, textwrap.dedent(script))
    output, _ = job.communicate(timeout=250)
    assert job.returncode == 0
    run_path = tmp_path / ".quark" / "runs" / os.path.basename(output.strip())
    sync(tmp_path)
    mirrored = read_mirror(run_path)
    assert sorted(step for step, _ in mirrored.points("m")) == list(range(7))
    assert sorted(step for step, _ in mirrored.points("worker")) == list(range(12))
    marks = [mark for row in mirrored.rows for mark in row["quark/seq"].split()]
    assert len(marks) == len(set(marks))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:metric .* breaks Quark's naming rule:RuntimeWarning")
def test_long_names_stay_apart_in_w_and_b(start, read_mirror):
    names = ["x" * 250, "x" * 249 + "y", "a\\b", "%", "Loss", "loss"]
    with start() as session:
        metrics = quark.MetricsLogger(session)
        for index, name in enumerate(names):
            metrics.log(name, float(index), step=index)
    mirrored = read_mirror(session.run_path)
    for index, name in enumerate(names):
        assert mirrored.points(name) == [(index, index)], name
