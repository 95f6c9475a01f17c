"""Fingerprints of files, folders, tables and datasets, through a session."""

import os
import random
import socket
import threading
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import quark
from quark.provenance.arrays import detach_device_values
from quark.provenance.fingerprints import sketch_output
from quark_core.records.query import Query

torch = pytest.importorskip("torch")
MIB = 1024 * 1024

Pair = namedtuple("Pair", "first second")


@pytest.fixture
def session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path / "store") as session:
        yield session


@pytest.fixture
def take(session):
    def look(source, key="train", **arguments):
        return session.fingerprint_data(key, source, **arguments).wait(60)

    return look


def make_folder(root, words=("a", "b")):
    (root / "sub").mkdir(parents=True)
    for word in words:
        (root / f"{word}.txt").write_text(word)
        (root / "sub" / word).write_text(word * 2)
    return root


def test_a_folder_is_the_same_wherever_it_lies(take, tmp_path):
    one, other = make_folder(tmp_path / "one"), make_folder(tmp_path / "other")
    first = take(one)
    assert (first.level, first.metadata["files"]) == ("full", 4)
    assert take(str(other)).digest == first.digest
    (other / "sub" / "a").write_text("ax")
    assert take(other).digest != first.digest
    (other / "sub" / "a").write_text("aa")
    (other / "sub" / "a").rename(other / "sub" / "c")
    assert take(other).digest != first.digest
    assert take(tmp_path / "one" / "*.txt").metadata["files"] == 2


def test_a_large_file_is_read_in_places_or_whole(take, tmp_path):
    file = tmp_path / "large.bin"
    content = bytearray(os.urandom(3 * MIB))
    file.write_bytes(content)
    sample, full = take(file), take(file, level="full")
    assert (sample.level, full.level) == ("sample", "full")
    content[100_000] ^= 1  # between two places
    file.write_bytes(content)
    assert take(file).digest == sample.digest
    assert take(file, level="full").digest != full.digest
    file.write_bytes(content + b"x")
    assert take(file).digest != sample.digest


def test_special_files_links_in_circles_and_broken_ones_hold_up_nothing(take, tmp_path):
    folder = make_folder(tmp_path / "data")
    os.mkfifo(folder / "pipe")
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    listening = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(folder)  # the path of a socket must be short
    try:
        listening.bind("sock")
    finally:
        os.chdir(here)
        listening.close()
    found = take(folder)
    assert found.metadata["special"] == ["pipe", "sock"]
    assert found.metadata["unreadable"] == ["gone"]
    assert found.level == "partial"


def test_a_fifo_alone_is_refused_in_words_and_not_waited_for(session, tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe")
    pending = session.fingerprint_data("train", tmp_path / "pipe")
    assert pending.wait(10) is None
    assert "not a regular file" in pending.reason
    assert "not a regular file" in caplog.text
    missing = session.fingerprint_data("val", tmp_path / "nowhere")
    assert missing.wait(10) is None
    assert "FileNotFoundError" in missing.reason


def test_a_file_that_grows_is_read_to_where_it_was(take, tmp_path, monkeypatch):
    file = tmp_path / "growing"
    file.write_bytes(b"x" * 64 * MIB)
    looks, fstat = [], os.fstat

    def look_and_grow(number):
        """The file has grown once it was looked at, and before it is read."""
        found = fstat(number)
        if os.path.samestat(found, file.stat()):
            looks.append(found.st_size)
            with file.open("ab") as out:
                out.write(b"y" * 4096)
        return found

    monkeypatch.setattr(os, "fstat", look_and_grow)
    found = take(file, level="full")
    monkeypatch.undo()
    assert looks[0] == 64 * MIB
    assert found.level == "partial"
    assert found.metadata["changed"] == ["growing"]


def test_hashes_of_dvc_and_lfs_are_taken(take, tmp_path):
    (tmp_path / "data.dvc").write_text(
        "outs:\n- md5: d41d8cd98f00b204e9800998ecf8427e.dir\n  size: 3\n"
    )
    found = take(tmp_path / "data.dvc")
    assert (found.digest, found.level) == ("d41d8cd98f00b204e9800998ecf8427e.dir", "pointer")
    lfs = tmp_path / "model.bin"
    lfs.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 12\n")
    assert take(lfs).digest == f"sha256:{'ab' * 32}"


def test_arrays_and_tables_are_looked_at_by_value(take):
    pd = pytest.importorskip("pandas")
    values = np.arange(100.0)
    assert take(values).digest == take(values.copy()).digest
    assert take(torch.arange(3)).level == "full"
    long = pd.DataFrame({"n": np.arange(100_000), "t": ["x"] * 100_000})
    found = take(long)
    assert (found.level, found.metadata["rows"]) == ("sample", 100_000)
    assert take(long, level="full").level == "full"


class Items:
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(self.values[index])), "y": self.values[index]}


def test_a_dataset_is_looked_at_by_length_and_items(take):
    found = take(Items(range(1000)))
    assert (found.level, found.metadata["length"], found.metadata["read"]) == ("items", 1000, 64)
    assert take(Items(range(1000))).digest == found.digest
    assert take(Items(range(1001))).digest != found.digest
    assert take(Items(range(1, 1001))).digest != found.digest


def test_a_dataset_that_is_random_says_so_and_takes_no_random_number_of_the_training(take):
    class Augmented(Items):
        def __getitem__(self, index):
            return torch.rand(2), random.random(), np.random.rand()

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    found = take(Augmented(range(10)))
    assert found.level == "length"
    assert found.metadata["not_the_same_twice"] is True
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_a_dataset_that_raises_costs_a_warning(take, caplog):
    class Broken(Items):
        def __getitem__(self, index):
            if index > 5:
                raise OSError("no such shard")
            return super().__getitem__(index)

    found = take(Broken(range(10)))
    assert (found.level, found.metadata["failed"]) == ("partial", 4)
    assert "no such shard" in caplog.text


def test_what_has_no_end_is_refused_with_what_to_do(session):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield 1

    for source in (Endless(), iter([1]), (n for n in [1]), torch.utils.data.DataLoader([1])):
        with pytest.raises(quark.SchemaValidationError, match="watch_data"):
            session.fingerprint_data("train", source)
    with pytest.raises(quark.SchemaValidationError, match="Plugins can add types"):
        session.fingerprint_data("train", object())
    with pytest.raises(quark.SchemaValidationError, match="level must be"):
        session.fingerprint_data("train", [1], level="all")


def test_a_dataset_of_hugging_face_has_its_own(take):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"a": [1, 2]})
    found = take(dataset)
    assert (found.digest, found.level) == (dataset._fingerprint, "huggingface")


def test_an_array_of_gigabytes_is_not_copied(take, tmp_path):
    import tracemalloc

    large = np.lib.format.open_memmap(
        tmp_path / "large.npy", mode="w+", dtype="f4", shape=(1024, 1024, 1024)
    )
    tracemalloc.start()
    try:
        found = take(large)
        sketched = take(large[:, ::2], key="strided")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.level, sketched.level) == ("sample", "sample")
    assert peak < 64 * MIB


def test_a_run_ends_though_a_source_hangs(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.3")
    let_go = threading.Event()

    class Hanging:
        shape = (1,)
        dtype = "f4"

        def __array__(self, *_, **__):
            let_go.wait(30)
            return np.zeros(1)

    session = quark.start_run(project="p", storage_dir=tmp_path)
    pending = session.fingerprint_data("train", Hanging())
    begun = threading.active_count()
    session.end_run()
    assert session.status == "completed"
    assert not pending.done
    let_go.set()
    assert pending.wait(10) is None
    assert begun >= 1


def test_output_is_taken_as_it_is_at_the_call_and_found_in_the_run(session):
    values = np.arange(4.0)
    with session.step(7):
        record = session.fingerprint("predictions", values).wait()
    values[0] = 9
    again = session.fingerprint("predictions", values, step=8).wait()
    assert record.digest != again.digest
    session.flush()
    rows = session.open_run.read("fingerprint", Query(equals={"subject": "output"})).to_records()
    assert [(row.key, row.step, row.digest) for row in rows] == [
        ("predictions", 7, record.digest),
        ("predictions", 8, again.digest),
    ]
    assert rows[0].sketch["parts"][0]["values"] == [0.0, 1.0, 2.0, 3.0]


def test_output_on_a_device_is_the_same_as_on_the_processor(session, device):
    value = {"logits": torch.arange(12.0).reshape(3, 4), "label": "cat"}
    here = session.fingerprint("here", value).wait()
    there = session.fingerprint("there", {**value, "logits": value["logits"].to(device)}).wait(30)
    assert there.digest == here.digest


def test_a_forked_process_looks_by_itself(session):
    session.fingerprint("predictions", 1.0)
    pid = os.fork()
    if pid == 0:
        try:
            session.fingerprint("child", 2.0).wait(5)
            session.fingerprint_data("more", [1, 2]).wait(5)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_values_that_are_taken_for_a_thread_are_as_they_were():
    values, tensor = np.arange(3.0), torch.arange(3.0)
    given = {"a": [values, (tensor, "x")], "p": Pair(tensor, 1)}
    expected = sketch_output(given).digest
    bring_over = detach_device_values(given)
    values[0] = tensor[0] = 9
    assert sketch_output(bring_over()).digest == expected
    assert given["a"][0] is values
    huge = torch.empty(1, dtype=torch.uint8).expand(300 * MIB)
    assert detach_device_values([huge]) is None


def test_ranks_that_keep_no_records_or_do_not_lead_do_no_work(session):
    session.open_run.leads = False
    pending = session.fingerprint_data("train", [1])
    assert pending.wait(1) is None
    assert "another process" in pending.reason
    session.open_run.leads = True


def test_show_lists_fingerprints_and_texts_of_others_steer_no_terminal(tmp_path):
    from click.testing import CliRunner

    from quark.cli.main import cli

    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        session.fingerprint("pred\x1b[31mictions", [1.0], step=4)
        session.fingerprint_data("train", [1, 2]).wait(30)
    shown = CliRunner().invoke(cli, ["show", session.id, "--storage-dir", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "data train" in shown.output
    assert "step 4" in shown.output
    assert "\x1b[31m" not in shown.output
