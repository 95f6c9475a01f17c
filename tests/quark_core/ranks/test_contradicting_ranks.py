"""Rank variables that contradict each other: bounded, told, and never a crash."""

import pytest
from launching import by_hand, openmpi, slurm


@pytest.mark.parametrize(
    "launcher",
    [slurm, *(pytest.param(one, marks=pytest.mark.long) for one in (openmpi, by_hand))],
    ids=lambda one: one.__name__,
)
def test_two_processes_that_are_both_rank_zero(tmp_path, start_ranks, runs_of, launcher):
    ranks, errors = start_ranks(
        tmp_path, [launcher(0, 2), launcher(0, 2)], "ranks=all", "together=2"
    )
    runs = runs_of(tmp_path)
    assert {rank["run_id"] for rank in ranks} == set(runs)
    assert list(runs.values()) == [("completed", 0, {(0, 0): 20})] * 2
    assert "another process leads this launch as rank 0" in errors


@pytest.mark.long
def test_the_other_ranks_join_the_first_of_two_leaders(tmp_path, start_ranks, runs_of):
    variables = [slurm(0, 3), slurm(0, 3), slurm(1, 3)]
    ranks, _ = start_ranks(tmp_path, variables, "ranks=all", "together=3")
    points = [found[2] for found in runs_of(tmp_path).values()]
    assert sorted(map(len, points)) == [1, 2]
    assert len({rank["run_id"] for rank in ranks}) == 2


@pytest.mark.long
def test_a_rank_beyond_its_world(tmp_path, start_ranks, runs_of):
    variables = [{**by_hand(0), "WORLD_SIZE": 1}, {**by_hand(5), "WORLD_SIZE": 2}]
    ranks, _ = start_ranks(tmp_path, variables, "ranks=all")
    (run_id,) = {rank["run_id"] for rank in ranks}
    assert runs_of(tmp_path) == {run_id: ("completed", 0, {(0, 0): 20, (0, 5): 20})}


@pytest.mark.long
def test_ranks_numbered_by_hand_in_a_job_are_believed(tmp_path, start_ranks, runs_of):
    """One task of SLURM starts all ranks, each of which has that task's SLURM_PROCID."""
    variables = [{**slurm(0, 1), **by_hand(rank)} for rank in range(3)]
    ranks, _ = start_ranks(tmp_path, variables, "ranks=all")
    (run_id,) = {rank["run_id"] for rank in ranks}
    assert runs_of(tmp_path) == {run_id: ("completed", 0, {(0, rank): 20 for rank in range(3)})}


@pytest.mark.long
def test_tasks_that_are_numbered_the_other_way_round(tmp_path, start_ranks, runs_of):
    variables = [{**slurm(1 - rank, 2), **by_hand(rank, 2)} for rank in range(2)]
    ranks, _ = start_ranks(tmp_path, variables, "ranks=all")
    assert len({rank["run_id"] for rank in ranks}) == 1
    assert len(runs_of(tmp_path)) == 1


@pytest.mark.long
def test_a_leader_that_never_comes_is_waited_for_within_a_bound(tmp_path, start_ranks):
    variables = [{**by_hand(rank), "QUARK_LAUNCH_TIMEOUT_SECONDS": 0.5} for rank in (1, 2)]
    ranks, _ = start_ranks(tmp_path, variables, "ranks=all")
    assert [rank["run_id"] for rank in ranks] == [None, None]
    assert all(len(rank["warnings"]) == 1 for rank in ranks)
    assert all("This rank keeps nothing" in rank["warnings"][0] for rank in ranks)
    assert all(rank["took_s"] < 30 for rank in ranks)
    assert not list(tmp_path.glob(".quark/runs/*"))


@pytest.mark.long
def test_a_store_that_only_some_ranks_can_write(tmp_path, start_ranks, runs_of):
    (tmp_path / "file").touch()
    ranks, _ = start_ranks(tmp_path, [by_hand(0, 1)], "ranks=all")
    (run_id,) = runs_of(tmp_path)
    assert ranks[0]["run_id"] == run_id
