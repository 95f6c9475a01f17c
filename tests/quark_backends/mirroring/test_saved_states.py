"""A note of a mirror on this machine that is torn counts as none, and costs no rows."""

import pytest

from quark_backends.csv.backend import CsvBackend
from quark_backends.mirror_state import load_state
from quark_backends.mlflow.run import MlflowFolder
from quark_backends.wandb.local_files import STATE_NAME, WandbState
from quark_core.backends.contract import BackendConfig
from quark_core.testing.fakes import BatchMaker

TORN = [b"", b"{", b"[]"]


@pytest.mark.parametrize("left", TORN)
def test_a_file_that_is_torn_counts_as_none(tmp_path, left):
    state = MlflowFolder(tmp_path, "http://127.0.0.1:9")
    state.folder.mkdir()
    (state.folder / "run.json").write_bytes(left)
    (tmp_path / "state.json").write_bytes(left)
    assert state.load_run().attempt == -1
    assert load_state(tmp_path / STATE_NAME, WandbState).attempt == -1


@pytest.mark.parametrize("left", TORN)
def test_a_torn_note_of_csv_files_costs_no_rows(tmp_path, left):
    config = BackendConfig(storage_dir=tmp_path, run_id="run0", location="out")
    backend = CsvBackend(config)
    backend.write(BatchMaker("run0").metrics(("m", 0, 1.5)))
    backend.close()
    files = tmp_path / "out" / "run0"
    rows = (files / "metrics_long.csv").read_bytes()
    (files / "state.json").write_bytes(left)
    with pytest.raises(ValueError):  # noqa: PT011 - of the JSON
        CsvBackend(config)
    assert (files / "metrics_long.csv").read_bytes() == rows
