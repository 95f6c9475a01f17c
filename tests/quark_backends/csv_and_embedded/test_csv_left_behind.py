"""Rows of a process that was killed, whose journal another process delivers: each is there once."""

import pytest

from quark_backends.csv.plugin import quark_register_backends
from quark_core.backends.contract import BackendConfig
from quark_core.records.query import Query
from quark_core.testing.fakes import BatchMaker


@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_what_another_process_has_written_is_not_there_twice(tmp_path, is_acknowledged):
    config = BackendConfig(
        storage_dir=tmp_path, run_path=tmp_path / "run", run_id="run0", project="p"
    )
    definition = quark_register_backends()[0]
    maker = BatchMaker("run0")
    batches = [maker.start(), *(maker.metrics(("m", step, float(step))) for step in range(4))]
    first = definition.open(config)
    first.write_group(batches[:3])
    first.close()
    folder = next(tmp_path.rglob("state.json")).parent
    # As of a process beside the one that has the plain names.
    for name in ("metrics_long.csv", "lifecycle.csv", "state.json"):
        path = folder / name
        path.rename(path.with_name(f"{path.stem}-7-7{path.suffix}"))
    if not is_acknowledged:
        (folder / "state-7-7.json").unlink()
    second = definition.open(config)
    second.write_group(batches)
    second.close()
    steps = definition.open(config).read("run0", "metric", Query())["step"].tolist()
    assert steps == [0, 1, 2, 3]
    paths = folder.glob("metrics_long*.csv")
    rows = [line for path in paths for line in path.read_text().splitlines()]
    assert sum(line.startswith("0,") for line in rows) == (1 if is_acknowledged else 2)
