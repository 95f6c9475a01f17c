"""Ranks: each launcher is recognised, garbage is passed over, and torch is never imported."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_core.ranks.launches import RankInfo, detect_rank

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
SLURM = {"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "16",
}
PMI = {"PMI_RANK": "1", "MPI_LOCALRANKID": "1", "PMI_SIZE": "2"}
NAMES = [*TORCHRUN, *SLURM, *OPENMPI, *PMI]


def run_python(code, **environ):
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("environ", "info"),
    [
        ({}, RankInfo(0, 0, 1, "single process")),
        (TORCHRUN, RankInfo(5, 1, 8, "torchrun")),
        (SLURM, RankInfo(3, 0, 4, "slurm")),
        (OPENMPI, RankInfo(2, 2, 16, "openmpi")),
        (PMI, RankInfo(1, 1, 2, "pmi")),
        ({"PATH": "/bin", "HOSTNAME": "node1"}, RankInfo()),
        ({"LOCAL_RANK": "2", "WORLD_SIZE": "4"}, RankInfo()),
    ],
)
def test_each_launcher_is_recognised_by_its_variables(environ, info):
    assert detect_rank(environ) == info


@pytest.mark.parametrize("outer", [SLURM, OPENMPI, PMI], ids=["slurm", "openmpi", "pmi"])
def test_torchrun_inside_another_launcher_knows_better(outer):
    assert detect_rank({**outer, **TORCHRUN}) == RankInfo(5, 1, 8, "torchrun")


@pytest.mark.parametrize("rank", ["", "first", "-1", "1.0", " 3", "٣", "0x1", "None"])
def test_a_rank_that_is_no_number_is_passed_over(rank):
    assert detect_rank({"RANK": rank}) == RankInfo()
    assert detect_rank({**SLURM, "RANK": rank}) == RankInfo(3, 0, 4, "slurm")


@pytest.mark.parametrize("size", [None, "", "many", "0", "5"])
def test_the_world_is_never_smaller_than_the_rank_says(size):
    environ = {"RANK": "5", "LOCAL_RANK": "1"} | ({} if size is None else {"WORLD_SIZE": size})

    assert detect_rank(environ).world_size == 6


@pytest.mark.parametrize("local", [None, "", "x", "-2"])
def test_a_missing_local_rank_is_the_global_one(local):
    environ = {"RANK": "5", "WORLD_SIZE": "8"} | ({} if local is None else {"LOCAL_RANK": local})

    assert detect_rank(environ) == RankInfo(5, 5, 8, "torchrun")


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=4) | st.integers(0, 99).map(str)))
def test_any_variables_give_a_rank_within_its_world(environ):
    info = detect_rank(environ)

    assert 0 <= info.rank < info.world_size
    assert info.local_rank >= 0


def test_without_an_argument_the_variables_of_the_process_count():
    code = "from quark_core.ranks.launches import detect_rank; print(detect_rank())"

    assert run_python(code, **TORCHRUN) == str(RankInfo(5, 1, 8, "torchrun"))


def test_torch_is_never_imported():
    code = (
        "import sys; from quark_core.ranks.launches import detect_rank; detect_rank();"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] == 'torch'))"
    )

    assert run_python(code, **TORCHRUN) == "[]"


@pytest.mark.long
def test_a_running_process_group_knows_better_than_the_variables(tmp_path):
    pytest.importorskip("torch")
    code = """
import sys
import torch.distributed as dist
from quark_core.ranks.launches import detect_rank

print(detect_rank())
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
print(detect_rank())
dist.destroy_process_group()
print(detect_rank())
"""
    code = code.replace("sys.argv[1]", repr(str(tmp_path / "rendezvous")))
    lines = run_python(code, **TORCHRUN, GLOO_SOCKET_IFNAME="lo").splitlines()

    launched = str(RankInfo(5, 1, 8, "torchrun"))
    assert lines == [launched, str(RankInfo(0, 1, 1, "torch.distributed")), launched]
