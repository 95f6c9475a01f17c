"""Equal payloads lie on the disk once, and what the caller does later changes nothing."""

import multiprocessing
import os
import threading

import numpy as np
import pytest
from payload_tools import assert_clean, assert_whole, list_objects, run_script, sha256

import quark


def test_equal_payloads_cost_once(artifacts, session, tmp_path):
    data = os.urandom(300_000)
    path = tmp_path / "same.bin"
    path.write_bytes(data)
    records = [
        artifacts.store("a", "one", data, step=1),
        artifacts.store("b", "two", bytearray(data)),
        artifacts.store("c", "three", np.frombuffer(data, "u1"), payload_format="bytes"),
        artifacts.store_file("d", "four", path),
        artifacts.log_file(path),
        quark.ArtifactStore(session).store("a", "one", data, step=1),
    ]
    (place,) = list_objects(session).values()
    inodes = {(session.run_path / r.payload_relative_path).stat().st_ino for r in records}
    assert inodes == {place.stat().st_ino}
    files = [p for p in (session.run_path / "artifacts").rglob("*") if p.is_file()]
    own = [p.lstat().st_size for p in files if p.suffix != ".json"]
    assert sum(size for size in own if size > 1_000) == len(data)
    for record in records:
        assert_whole(artifacts, record, data)
    assert_clean(session)


def test_what_differs_in_one_bit_is_kept_twice(artifacts, session):
    for data in (b"\0" * 1_000, b"\0" * 999 + b"\1", b"\0" * 999):
        assert_whole(artifacts, artifacts.store("t", "n", data), data)
    assert len(list_objects(session)) == 3


def test_many_threads_at_once(artifacts, session):
    payloads = [os.urandom(size) for size in (1, 4_000, 200_000)]
    barrier = threading.Barrier(8)
    records = [[] for _ in range(8)]

    def work(index):
        barrier.wait()
        for turn in range(12):
            data = payloads[(index + turn) % 3]
            records[index].append((artifacts.store("t", f"w{index}", data, step=turn), data))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(list_objects(session)) == sorted(map(sha256, payloads))
    for index, stored in enumerate(records):
        assert artifacts.read(artifact_key=f"w{index}") == tuple(record for record, _ in stored)
        for record, data in stored:
            assert artifacts.load(record) == data
    everything = artifacts.read()
    assert len({record.id for record in everything}) == 96
    assert len({record.payload_relative_path for record in everything}) == 96
    assert_clean(session)


def store_from_context(context, name, payloads):
    with quark.ArtifactStore(context) as artifacts:
        for step, data in enumerate(payloads):
            record = artifacts.store("t", name, data, step=step)
            assert artifacts.load(record) == data
            assert artifacts.load(record.id) == data


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn"])
def test_other_processes_store_through_the_context(session, artifacts, method):
    start = multiprocessing.get_context(method)
    payloads = [bytes([index]) * 100_000 for index in range(3)]
    mine = artifacts.store("t", "parent", payloads[0])
    workers = [
        start.Process(target=store_from_context, args=(session.context, f"w{n}", payloads))
        for n in range(2)
    ]
    for worker in workers:
        worker.start()
    for step, data in enumerate(payloads):
        artifacts.store("t", "parent", data, step=step)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    for index in range(2):
        found = artifacts.read(artifact_key=f"w{index}")
        assert [artifacts.load(record) for record in found] == payloads
    assert artifacts.load(mine) == payloads[0]
    assert sorted(list_objects(session)) == sorted(map(sha256, payloads))
    assert len({record.writer_id for record in artifacts.read()}) == 3
    assert_clean(session)


FORKS = """
def work(artifacts, name):
    for step in range(5):
        record = artifacts.store("t", name, bytes([step]) * 50_000, step=step)
        assert record.payload_relative_path.startswith("artifacts/t/")
        assert artifacts.load(record) == bytes([step]) * 50_000
    try:
        artifacts.load(record.id)
    except quark.SessionStoreError as error:
        assert "forked" in str(error)
    else:
        os._exit(9)
    artifacts.store_file("t", name, sys.argv[2], step=5)

if __name__ == "__main__":
    with quark.start_run(project="p", storage_dir=storage_dir) as session:
        artifacts = quark.ArtifactStore(session)
        first = artifacts.store("t", "parent", b"\\0" * 50_000)
        pid = os.fork()
        if pid == 0:
            work(artifacts, "raw")
            sys.exit(0)
        fork = multiprocessing.get_context("fork")
        workers = [fork.Process(target=work, args=(artifacts, f"w{i}")) for i in range(2)]
        for worker in workers:
            worker.start()
        work_here = [artifacts.store("t", "parent", bytes([n]) * 50_000) for n in range(5)]
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert [artifacts.load(r) for r in work_here] == [bytes([n]) * 50_000 for n in range(5)]
    print(session.run_id)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_children_store_into_their_parents_run(tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(b"file" * 1_000)
    warnings = {"PYTHONWARNINGS": "ignore::DeprecationWarning"}
    run_id = run_script(tmp_path, FORKS, path, **warnings).split()[0]
    session = quark.open_run(run_id, tmp_path / "runs")
    artifacts = quark.ArtifactStore(session)
    expected = [bytes([step]) * 50_000 for step in range(5)]
    for name in ("w0", "w1", "raw"):
        found = artifacts.read(artifact_key=name)
        assert [record.step for record in found] == list(range(6))
        assert [artifacts.load(record) for record in found] == [*expected, path.read_bytes()]
    assert len(artifacts.read(artifact_key="parent")) == 6
    assert len({record.writer_id for record in artifacts.read()}) == 4
    assert len(list_objects(session)) == 6
    assert list(session.run_path.glob("journal/*")) == []
    assert_clean(session)


def test_what_is_changed_after_the_call_changes_nothing(artifacts):
    buffer, numbers = bytearray(b"before"), np.arange(4.0)
    listed, nested, metadata = [1, [2]], {"a": {"b": [1]}}, {"m": [1]}
    records = [
        artifacts.store("t", "n", buffer, metadata=metadata),
        artifacts.store("t", "n", memoryview(buffer)),
        artifacts.store("t", "n", numbers, payload_format="bytes"),
        artifacts.store("t", "n", listed),
        artifacts.store("t", "n", nested),
        artifacts.log_histogram("h", bins=numbers, counts=listed[:1] * 3),
        artifacts.log_table("h", {"a": numbers, "b": numbers}),
        artifacts.log_image("i", numbers.reshape(2, 2) / 4),
    ]
    before = [artifacts.load(record) for record in records]
    buffer[:] = b"behind"
    numbers[:] = -1
    listed[1].append(3)
    listed.clear()
    nested["a"]["b"] = None
    metadata["m"].append(2)
    assert [artifacts.load(record) for record in records] == before
    assert before[:2] == [b"before", b"before"]
    assert before[3:5] == [[1, [2]], {"a": {"b": [1]}}]
    assert records[0].metadata["m"] == [1]
    assert artifacts.read()[0].metadata["m"] == [1]


@pytest.mark.long
def test_a_buffer_that_is_altered_during_the_call_is_kept_under_its_own_hash(artifacts, session):
    buffer = bytearray(8 * 1024 * 1024)
    stop = threading.Event()

    def scribble():
        turn = 0
        while not stop.is_set():
            turn += 1
            for place in range(0, len(buffer), 65_536):
                buffer[place] = turn % 256

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        records = [artifacts.store("t", "n", buffer) for _ in range(4)]
    finally:
        stop.set()
        thread.join()
    for record in records:
        assert len(artifacts.load(record)) == len(buffer)  # which checks the hash
    assert_clean(session)
