"""Ranks that die, or whose variables contradict each other, before their mirrors."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from launching import slurm

import quark
from quark_core.errors import RunNotFoundError


def count(mirror, run_id):
    records = quark.MetricsLogger(quark.open_run(mirror, run_id)).read(metric_key="loss")
    return dict(Counter(record.rank for record in records))


@pytest.mark.long
def test_a_mirror_has_what_a_rank_logged_before_it_died(tmp_path, start_ranks, runs_of):
    mirror = f"csv:{tmp_path / 'mirror'}"
    variables = [slurm(rank, 3) for rank in range(3)]
    ranks, _ = start_ranks(
        tmp_path, variables, "ranks=all", "dies=1", "sleep_ms=10", f"backends={mirror}"
    )
    # The others were not kept.
    assert sorted(rank["rank"] for rank in ranks) == [0, 2]
    (run_id,) = runs_of(tmp_path)
    command = str(Path(sys.executable).with_name("quark"))
    subprocess.run([command, "sync", tmp_path], check=True, capture_output=True)
    assert count(mirror, run_id) == {0: 20, 1: 11, 2: 20}
    told = subprocess.run(
        [command, "mirror", "verify", run_id, "-d", tmp_path], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.long
def test_two_processes_that_are_both_rank_zero_have_a_mirror_each(tmp_path, start_ranks, runs_of):
    mirror = f"csv:{tmp_path / 'mirror'}"
    start_ranks(tmp_path, [slurm(0, 2), slurm(0, 2)], f"backends={mirror}")
    runs = runs_of(tmp_path)
    assert len(runs) == 2
    for run_id in runs:
        assert count(mirror, run_id) == {0: 20}


@pytest.mark.long
def test_by_default_only_rank_zero_is_mirrored(tmp_path, start_ranks, runs_of):
    mirror = f"csv:{tmp_path / 'mirror'}"
    # A rank beyond its world, and one that says so in two ways.
    odd = [slurm(0, 2), {**slurm(5, 2), "RANK": "5", "WORLD_SIZE": "2"}]
    start_ranks(tmp_path, odd, f"backends={mirror}")
    mirrored = {}
    for run_id in runs_of(tmp_path):
        try:
            mirrored[run_id] = count(mirror, run_id)
        except RunNotFoundError:
            mirrored[run_id] = {}
    assert list(mirrored.values()) == [{0: 20}]
