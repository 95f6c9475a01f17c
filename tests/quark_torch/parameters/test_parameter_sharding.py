"""Parameters of models that are spread over processes, with the real libraries (gloo)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TRAINING = Path(__file__).with_name("sharded_training.py")

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of a kind of training: what each of two processes has found."""
    folder = tmp_path_factory.mktemp("sharded")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    finished = subprocess.run(
        [*launcher, "--nproc_per_node=2", str(TRAINING), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_LOG_LEVEL": "ERROR"},
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]

    def read(kind):
        return [json.loads((folder / f"{kind}{rank}.json").read_text()) for rank in range(2)]

    return read


def close(first, second):
    return abs(first - second) <= 2e-6 * max(1.0, abs(second))


@pytest.mark.long
def test_data_parallel(results):
    ranks = results("ddp")
    for told in ranks:
        for record, expected in told["snapshots"]:
            assert record["metadata"] is None
            assert record["in_optimizer"]
            for name in ("value_norm", "gradient_norm", "update_norm"):
                assert close(record[name], expected[name])
        assert [record["parameter_name"] for record, _ in told["snapshots"]][:4] == [
            "0.weight",
            "0.bias",
            "2.weight",
            "2.bias",
        ]
    # Gradients are those after the reduction, so that all ranks found the same.
    found = [
        [(record["gradient_norm"], record["update_norm"]) for record, _ in told["snapshots"]]
        for told in ranks
    ]
    assert found[0] == found[1]
    # Only the first process of a run writes by default.
    assert ranks[0]["stored"] == len(ranks[0]["snapshots"])


@pytest.mark.long
def test_fully_sharded(results):
    ranks = results("fsdp")
    for told in ranks:
        for record, expected in told["snapshots"]:
            assert record["metadata"]["scope"] == "local_shard"
            assert record["metadata"]["global_shape"] == expected["global_shape"]
            assert record["element_count"] == expected["element_count"]
            assert record["module_type"] == "Linear"
            for name in ("value_norm", "gradient_norm", "update_norm"):
                if expected["element_count"]:
                    assert close(record[name], expected[name])
                else:
                    assert record[name] is None
    norms = [[record["value_norm"] for record, _ in told["snapshots"]] for told in ranks]
    assert norms[0] != norms[1]
    # 3 rows over 2 processes: shards of 2 and of 1.
    assert [told["snapshots"][2][0]["shape"] for told in ranks] == [[2, 8], [1, 8]]
