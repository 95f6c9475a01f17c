"""The counter of a cgroup that says where memory ran out."""

import time

import msgspec
import pytest

import quark
from quark_core.runs.backend_choice import open_reader
from quark_core.system import process
from quark_core.system.process import MemoryKills, count_more_kills, find_loss, find_memory_kills

VERSION_2 = ("0::/user.slice/job 7\n", "user.slice/job 7/memory.events")
VERSION_1 = ("5:cpu:/\n4:memory:/docker/ab\n", "memory/docker/ab/memory.oom_control")
JOINED = ("4:cpu,memory:/x\n0::/\n", "cpu,memory/x/memory.oom_control")
# A container sees its own cgroup as the root, whatever its place says.
OWN = ("0::/../../elsewhere\n", "memory.events")


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Writes the counter of a cgroup, and where the process says that it is."""
    monkeypatch.setattr(process, "CGROUPS", tmp_path / "fs")

    def write(line, name, count):
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"low 0\noom 3\noom_kill {count}\noom_group_kill 0\n")
        (tmp_path / "cgroup").write_text(line)
        return tmp_path / "cgroup"

    return write


@pytest.mark.parametrize("layout", [VERSION_2, VERSION_1, JOINED, OWN])
def test_the_counter_is_found_and_compared(cgroups, layout):
    before = find_memory_kills(cgroups(*layout, 2))
    assert before is not None
    assert before.count == 2
    assert count_more_kills(before) == 0
    cgroups(*layout, 3)
    assert count_more_kills(before) == 1


def test_where_there_is_none_nothing_is_said(tmp_path, cgroups):
    assert find_memory_kills(tmp_path / "nowhere") is None
    (tmp_path / "cgroup").write_text("0::/gone\n")
    assert find_memory_kills(tmp_path / "cgroup") is None
    assert count_more_kills(MemoryKills(str(tmp_path / "fs/gone/memory.events"), 0)) == 0


def test_no_other_file_is_read_for_what_a_run_says(tmp_path, cgroups):
    cgroups(*VERSION_2, 1)
    (tmp_path / "secret").write_text("oom_kill 9\n")
    for path in (tmp_path / "secret", tmp_path / "fs" / ".." / "secret"):
        assert count_more_kills(MemoryKills(str(path), 0)) == 0


def lose(identity, monkeypatch):
    monkeypatch.setattr(process, "is_alive", lambda _: False)
    return find_loss("running", identity, 0)


def test_a_process_that_vanished_as_memory_ran_out_says_so(cgroups, monkeypatch):
    kills = find_memory_kills(cgroups(*VERSION_2, 0))
    identity = msgspec.structs.replace(process.current_process(), memory_kills=kills)
    assert lose(identity, monkeypatch).cause == "vanished"
    cgroups(*VERSION_2, 1)
    loss = lose(identity, monkeypatch)
    assert loss.cause == "out_of_memory"
    assert "oom_kill rose by 1" in loss.message


@pytest.mark.parametrize("backend", [None, "csv"])
def test_what_the_run_has_outlived_counts_no_more(tmp_path, cgroups, monkeypatch, backend):
    """A worker that was killed is told with a heartbeat, and is no cause of what comes later."""
    place = cgroups(*VERSION_2, 0)
    monkeypatch.setattr(
        "quark_core.runs.attempts.find_memory_kills", lambda: find_memory_kills(place)
    )
    root = tmp_path / "store"
    session = quark.start_run(project="p", storage_dir=root, backends=backend)
    cgroups(*VERSION_2, 1)
    session.open_run.stream._on_beat()
    session.flush()
    for _ in range(3000):  # a mirror takes its time
        if session.report_delivery().complete:
            break
        time.sleep(0.02)
    reader = open_reader(root)
    if backend is not None:
        reader = quark.open_run(session.run_id, root, backend=backend).open_run.reader
    monkeypatch.setattr(process, "is_alive", lambda _: False)
    assert reader.load_run(session.run_id).ending.cause == "vanished"
    cgroups(*VERSION_2, 2)
    assert reader.load_run(session.run_id).ending.cause == "out_of_memory"
    monkeypatch.undo()
    session.end_run()
