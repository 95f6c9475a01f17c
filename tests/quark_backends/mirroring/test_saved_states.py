"""What a mirror of an earlier version has noted on this machine is taken up again, byte by byte.

The files in `tests/assets/mirrors` were written by version 0.1.
"""

import json
import shutil
from pathlib import Path

import pytest

from quark_backends.csv.backend import CsvBackend
from quark_backends.mirror_state import load_state, save_state
from quark_backends.mlflow.points import NameMap
from quark_backends.mlflow.run import MlflowFolder
from quark_backends.wandb.backend import OpenRun, WandbOptions
from quark_backends.wandb.local_files import STATE_NAME, WandbState
from quark_backends.wandb.mirror import WandbMirror
from quark_core.backends.contract import BackendConfig
from quark_core.errors import BackendRejected
from quark_core.testing.fakes import BatchMaker

SAVED = Path(__file__).parents[2] / "assets" / "mirrors"
# Nobody listens there.
MLFLOW_URI = "http://127.0.0.1:9"


def make_batches(first=1.5):
    """What the mirrors had got, another value first where the content is to be another."""
    maker = BatchMaker("run0")
    return [
        maker.metrics(("m", 0, first), ("val/AR@100", 0, 2.5)),
        maker.events("e", severity="error" if first == 1.5 else "info"),
        maker.metrics(("m", 1, 0.5)),
    ]


def read_files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("owner.json", "metrics.csv")
    }


def check_goes_on(open_backend, name, tmp_path):
    """A mirror of files goes on where the saved one was, and writes what that would have."""
    folder = tmp_path / "out" / "run0"
    shutil.copytree(SAVED / name / "before", folder)
    backend = open_backend(BackendConfig(storage_dir=tmp_path, run_id="run0", location="out"))
    first, second, third = make_batches()
    backend.write_group([first, second])
    assert read_files(folder) == read_files(SAVED / name / "before")
    with pytest.raises(BackendRejected, match="other content"):
        backend.write(make_batches(first=9.0)[1])
    backend.write(third)
    assert read_files(folder) == read_files(SAVED / name / "after")
    backend.close()


def test_csv_files_go_on_where_an_earlier_version_was(tmp_path):
    check_goes_on(CsvBackend, "csv", tmp_path)


def test_event_files_go_on_where_an_earlier_version_was(tmp_path):
    pytest.importorskip("tensorboard")
    from quark_backends.tensorboard.backend import TensorboardBackend

    check_goes_on(TensorboardBackend, "tensorboard", tmp_path)


def test_mlflow_knows_what_an_earlier_version_has_sent(tmp_path):
    pytest.importorskip("mlflow")
    from quark_backends.mlflow.backend import MlflowBackend

    run_path = tmp_path / "run"
    shutil.copytree(SAVED / "mlflow", run_path / "mirrors" / "mlflow")
    backend = MlflowBackend(
        BackendConfig(storage_dir=tmp_path, run_path=run_path, run_id="run0", location=MLFLOW_URI)
    )
    # The server is not even asked.
    backend.write_group(make_batches()[:2])
    with pytest.raises(BackendRejected, match="other content"):
        backend.write(make_batches(first=9.0)[1])
    assert read_files(run_path / "mirrors" / "mlflow") == read_files(SAVED / "mlflow")


def assert_goes_on(folder, saved):
    """What an earlier version knew stands there as it did; a later one may know more."""
    now, before = read_files(folder), read_files(saved)
    assert now.keys() == before.keys()
    for name, data in before.items():
        assert json.loads(data).items() <= json.loads(now[name]).items() or data == now[name], name


def test_mlflow_files_are_written_as_by_an_earlier_version(tmp_path):
    shutil.copytree(SAVED / "mlflow", tmp_path / "mlflow")
    state = MlflowFolder(tmp_path / "mlflow", MLFLOW_URI)
    run, writer = state.load_run(), state.load_writer("writer0")
    assert (run.mlflow_run_id, run.attempt, run.ended) == ("0123", 1, ("failed", 1_700_000_001_000))
    assert (writer.head, writer.offset, writer.recent[1]) == (1, 1, ("n", 0, None, 10, 10))
    assert state.load_writer("writer 1:x").head == 4
    names = NameMap(state.folder / "names.json").find("metrics", [("new", "new")])
    assert names["VAL/AR@100"] == "VAL/AR_at_100_h_29cfaa374b3d"
    (state.folder / "names.json").unlink()
    NameMap(state.folder / "names.json").find("metrics", [(n, n) for n in names if n != "new"])
    for path in (state.folder / "run.json", *(state.folder / "writers").iterdir()):
        path.unlink()
    state.save_run(run)
    state.save_writer("writer0", writer)
    state.save_writer("writer 1:x", state.load_writer("writer 1:x"))
    assert_goes_on(tmp_path / "mlflow", SAVED / "mlflow")


def test_wandb_goes_on_where_an_earlier_version_was(tmp_path):
    folder = tmp_path / "wandb"
    shutil.copytree(SAVED / "wandb", folder)
    opening = OpenRun("run0", "p", str(folder), WandbOptions(), (), 1.0)
    # The library is not even asked.
    mirror = WandbMirror(None, opening)
    assert mirror.apply(make_batches()[:2]) == ""
    with pytest.raises(BackendRejected, match="other content"):
        mirror.apply([make_batches(first=9.0)[1]])
    state = load_state(folder / STATE_NAME, WandbState)
    assert state.writers["writer0"].number == 1
    assert state.file.offset == 77
    (folder / "state.json").unlink()
    save_state(folder / STATE_NAME, state)
    assert_goes_on(folder, SAVED / "wandb")


@pytest.mark.parametrize("left", [b"", b"{", b"[]"])
def test_a_file_that_is_torn_counts_as_none(tmp_path, left):
    state = MlflowFolder(tmp_path, MLFLOW_URI)
    state.folder.mkdir()
    (state.folder / "run.json").write_bytes(left)
    (tmp_path / "state.json").write_bytes(left)
    assert state.load_run().attempt == -1
    assert load_state(tmp_path / STATE_NAME, WandbState).attempt == -1


@pytest.mark.parametrize("left", [b"", b"{", b"[]"])
def test_a_torn_note_of_csv_files_costs_no_rows(tmp_path, left):
    shutil.copytree(SAVED / "csv" / "before", tmp_path / "out" / "run0")
    (tmp_path / "out" / "run0" / "state.json").write_bytes(left)
    config = BackendConfig(storage_dir=tmp_path, run_id="run0", location="out")
    with pytest.raises(ValueError):  # noqa: PT011 - of the JSON
        CsvBackend(config)
    rows = (tmp_path / "out" / "run0" / "metrics_long.csv").read_bytes()
    assert rows == (SAVED / "csv" / "before" / "metrics_long.csv").read_bytes()
