"""A forked child never touches what is its parent's, and loses nothing that it logs itself."""

import multiprocessing
import os
import sqlite3

import pytest
import torch
from kit.programs import run_file, values

import quark

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    # Python warns of every fork of a process with threads; that is what is tested here.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


HEAD = """
import os, sys, time, quark, multiprocessing
if __name__ == "__main__":
    storage_dir = sys.argv[1]
"""


def run_script(tmp_path, body):
    said = run_file(tmp_path, body, head=HEAD)
    return quark.open_run(said.split()[0], tmp_path / "runs")


def assert_whole(session):
    database = sqlite3.connect(session.context.db_path)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()
    left = list(session.context.storage_dir.glob(".quark/runs/*/journal/*"))
    assert left == []


@pytest.mark.sampled
@pytest.mark.parametrize("leaving", ["sys.exit(0)", "os._exit(0)", "pass"])
def test_a_fork_that_does_not_log_does_nothing(tmp_path, leaving):
    session = run_script(
        tmp_path,
        f"""
    with quark.start_run(project="p", storage_dir=storage_dir) as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 1.0, step=0)
        pid = os.fork()
        if pid == 0:
            {leaving}
        else:
            os.waitpid(pid, 0)
            metrics.log("m", 2.0, step=1)
            print(session.run_id)
""",
    )
    assert session.status == "completed"
    assert values(session, "m") == [1.0, 2.0]
    assert len({r.writer_id for r in quark.MetricsLogger(session).read()}) == 1
    assert_whole(session)


@pytest.mark.long
def test_a_fork_that_logs_gets_a_stream_of_its_own(tmp_path):
    session = run_script(
        tmp_path,
        """
    with quark.start_run(project="p", storage_dir=storage_dir, backends="csv") as session:
        metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
        metrics.log("parent", 0.0, step=0)
        pid = os.fork()
        if pid == 0:
            for step in range(300):
                metrics.log("child", float(step), step=step)
            events.log("child_done")
            try:
                metrics.read()
            except quark.SessionStoreError as error:
                assert "forked" in str(error)
            else:
                os._exit(9)
            grandchild = os.fork()
            if grandchild == 0:
                metrics.log_many({"grandchild": 1.0}, step=0)
                sys.exit(0)
            os.waitpid(grandchild, 0)
            sys.exit(0)
        for step in range(1, 300):
            metrics.log("parent", float(step), step=step)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print(session.run_id)
""",
    )
    assert values(session, "parent") == list(map(float, range(300)))
    assert values(session, "child") == list(map(float, range(300)))
    assert values(session, "grandchild") == [1.0]
    assert len({r.writer_id for r in quark.MetricsLogger(session).read()}) == 3
    types = [e.event_type for e in quark.EventLogger(session).read()]
    assert sorted(types) == ["child_done", "run_ended", "run_started"]
    assert session.status == "completed"
    assert_whole(session)


@pytest.mark.long
def test_forked_workers_of_multiprocessing_lose_nothing(tmp_path):
    session = run_script(
        tmp_path,
        """
    def work(metrics, name):
        for step in range(200):
            metrics.log(name, float(step), step=step)
    fork = multiprocessing.get_context("fork")
    with quark.start_run(project="p", storage_dir=storage_dir) as session:
        metrics = quark.MetricsLogger(session)
        workers = [fork.Process(target=work, args=(metrics, f"w{i}")) for i in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        print(session.run_id)
""",
    )
    for index in range(3):
        assert values(session, f"w{index}") == list(map(float, range(200)))
    assert_whole(session)


class LoggingDataset(torch.utils.data.Dataset):
    def __init__(self, metrics):
        self.metrics = metrics

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.metrics.log("data/index", float(index), step=index)
        return torch.tensor([float(index)])


@pytest.mark.long
def test_workers_of_a_data_loader_may_log(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        loader = torch.utils.data.DataLoader(
            LoggingDataset(metrics),
            batch_size=8,
            num_workers=2,
            multiprocessing_context=multiprocessing.get_context("fork"),
        )
        for step, batch in enumerate(loader):
            metrics.log("train/loss", float(batch.sum()), step=step)
    assert len(values(session, "train/loss")) == 8
    assert sorted(values(session, "data/index")) == list(map(float, range(64)))


@pytest.mark.long
def test_a_child_cannot_end_its_parents_run(tmp_path):
    session = run_script(
        tmp_path,
        """
    with quark.start_run(project="p", storage_dir=storage_dir) as session:
        pid = os.fork()
        if pid == 0:
            try:
                session.end_run("failed")
            except quark.InvalidRunStateError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        print(session.run_id)
""",
    )
    assert session.status == "completed"


@pytest.mark.long
def test_a_fork_while_other_threads_log_does_not_deadlock(tmp_path):
    session = run_script(
        tmp_path,
        """
    import threading
    with quark.start_run(project="p", storage_dir=storage_dir) as session:
        metrics = quark.MetricsLogger(session)
        stop = threading.Event()
        def work():
            step = 0
            while not stop.is_set():
                metrics.log("busy", float(step), step=step)
                step += 1
                if step % 50 == 0:
                    time.sleep(0.001)
        thread = threading.Thread(target=work)
        thread.start()
        for index in range(8):
            pid = os.fork()
            if pid == 0:
                metrics.log("child", float(index), step=index)
                metrics.flush()
                os._exit(0)
            os.waitpid(pid, 0)
        stop.set()
        thread.join()
        print(session.run_id)
""",
    )
    assert sorted(values(session, "child")) == list(map(float, range(8)))
    busy = values(session, "busy")
    assert busy == list(map(float, range(len(busy))))
