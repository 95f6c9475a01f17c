"""DDP, FSDP2 and tensor parallelism in two processes under torchrun, with gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("distributed_program.py")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What each of the two ranks found, for each kind."""
    folder = tmp_path_factory.mktemp("launch")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", str(PROGRAM), str(folder)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensor"])
def test_each_rank_is_probed_for_itself(launched, kind):
    first, second = (found[kind] for found in launched)
    assert first["names"] == second["names"] == (["0"] if kind == "tensor" else ["0", "1", "2"])
    assert first["mean"] != second["mean"]
    records = [record for record in first["records"] if record["rank"] == 0]
    assert len(records) == len(first["names"]) * 2 * 2
    record = next(
        record
        for record in records
        if (record["module_name"], record["summary_type"], record["step"]) == ("0", "activation", 0)
    )
    assert record["module_type"] == "Linear"
    assert record["mean"] == pytest.approx(first["mean"], rel=1e-5)
    assert record["norm"] == pytest.approx(first["norm"], rel=1e-5)
    assert record["element_count"] == first["count"]
    assert record["metadata"] == ({"scope": "local_shard"} if kind == "tensor" else None)


@pytest.mark.long
def test_layers_in_tensor_parallel_say_which_part_they_are(launched):
    """What a layer gives is a plain tensor there, of which the layer after it takes a part too."""
    first, second = (found["parallel"] for found in launched)
    assert first["count"] == second["count"] == 6 * 8
    scopes = {}
    for record in first["records"]:
        metadata = record["metadata"] or {}
        scopes.setdefault(record["module_name"], set()).add(metadata.get("scope"))
    assert scopes == {"0": {"local_shard"}, "1": {"local_shard"}, "2": {None}}
    records = [r for r in first["records"] if r["rank"] == 0 and r["module_name"] == "0"]
    assert {record["element_count"] for record in records} == {6 * 8}
