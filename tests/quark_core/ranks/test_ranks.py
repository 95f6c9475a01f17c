"""Ranks: each launcher is recognised, garbage is passed over, and torch is never imported."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.programs import run_code
from launching import by_hand, openmpi, slurm

import quark
from quark_core.backends.contract import BackendDefinition, RankPolicy
from quark_core.backends.registry import default_registry
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.ranks.launches import (
    ALL_RANKS,
    RANK_ZERO,
    RankInfo,
    choose_ranks,
    detect_rank,
    parse_ranks,
)
from quark_core.runs.backend_choice import choose_backend, plan_backends

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
    done = run_code(code, env=environ)
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


@pytest.mark.long
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
    assert "another process is already lead rank 0" in errors


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
    assert all("This rank stores no records" in rank["warnings"][0] for rank in ranks)
    assert all(rank["took_s"] < 30 for rank in ranks)
    assert not list(tmp_path.glob(".quark/runs/*"))


@pytest.mark.long
def test_a_store_that_only_some_ranks_can_write(tmp_path, start_ranks, runs_of):
    (tmp_path / "file").touch()
    ranks, _ = start_ranks(tmp_path, [by_hand(0, 1)], "ranks=all")
    (run_id,) = runs_of(tmp_path)
    assert ranks[0]["run_id"] == run_id


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


@pytest.mark.parametrize(
    ("given_ranks", "included", "leader", "text"),
    [
        ("zero", {0}, 0, "zero"),
        (" ALL ", {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 0, "all"),
        ([3, 1, 3], {1, 3}, 1, "1,3"),
        ("2-4,8", {2, 3, 4, 8}, 2, "2-4,8"),
        ("0 8+9", {0, 8, 9}, 0, "0,8-9"),
        (range(2), {0, 1}, 0, "0-1"),
        ((0,), {0}, 0, "zero"),
    ],
)
def test_ranks_are_words_lists_or_texts(given_ranks, included, leader, text):
    choice = parse_ranks(given_ranks, "ranks")
    assert {rank for rank in range(10) if choice.includes(rank)} == included
    assert (choice.leader, str(choice)) == (leader, text)


@pytest.mark.parametrize(
    "bad", ["", "none", "1-", "3-1", "-1", [], [-1], [True], ["0"], [1.0], 3, 1.5, [10**9], "0,,x"]
)
def test_bad_ranks_are_refused_by_name(bad, tmp_path):
    with pytest.raises(SchemaValidationError, match="ranks"):
        quark.start_run(project="p", storage_dir=tmp_path, ranks=bad)
    assert list(tmp_path.iterdir()) == []


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=40))
def test_a_choice_and_its_text_mean_the_same(ranks):
    choice = parse_ranks(ranks, "ranks")
    assert parse_ranks(str(choice), "ranks") == choice
    assert all(choice.includes(rank) for rank in ranks)
    assert sum(last - first + 1 for first, last in choice.spans) == len(ranks)
    assert choice.leader == min(ranks)


def test_the_variable_is_the_default(monkeypatch):
    assert choose_ranks(None) is None
    monkeypatch.setenv("QUARK_RANKS", "all")
    assert choose_ranks(None) == ALL_RANKS
    assert choose_ranks("zero") == RANK_ZERO
    monkeypatch.setenv("QUARK_RANKS", "some")
    with pytest.raises(SchemaValidationError, match="QUARK_RANKS"):
        choose_ranks(None)


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("csv:./out?ranks=0-1", "./out"),
        ("csv:./out?x=1&ranks=0+1", "./out"),
        ("mlflow+http://host:5000?ranks=0-1", "http://host:5000"),
        ("mlflow+http://host:5000?ranks=0-1&token=a", "http://host:5000?token=a"),
        ("https://host/quark?ranks=0%2C1", "https://host/quark"),
    ],
)
def test_a_backend_does_not_see_its_ranks(text, location):
    choice = choose_backend(text, default_registry())
    assert choice.location == location
    assert "ranks" not in dict(choice.options)
    assert [choice.ranks.includes(rank) for rank in (0, 1, 2)] == [True, True, False]
    # What asks for it again, in a journal or a context, has them still.
    assert choice.specification == text


def names(rank, backends, ranks):
    chosen = None if ranks is None else parse_ranks(ranks, "ranks")
    plan = plan_backends(backends, RankInfo(rank, rank, 4), ranks=chosen)
    return [choice.definition.name for choice in plan.choices]


@pytest.mark.parametrize(
    ("backends", "ranks", "zero", "one"),
    [
        ("csv", None, ["embedded", "csv"], []),
        ("csv", "all", ["embedded", "csv"], ["embedded", "csv"]),
        ("mlflow", "all", ["embedded", "mlflow"], ["embedded"]),
        ("mlflow:x?ranks=all", None, ["embedded", "mlflow"], ["mlflow"]),
        ("csv:x?ranks=1", "all", ["embedded"], ["embedded", "csv"]),
        ("embedded:?ranks=all", None, ["embedded"], ["embedded"]),
        ("embedded:?ranks=zero,mlflow", "all", ["embedded", "mlflow"], []),
        ("mlflow", [1, 2], [], ["embedded", "mlflow"]),
        ("none", "all", [], []),
    ],
)
def test_a_backends_own_ranks_win_then_the_sessions_then_its_policy(backends, ranks, zero, one):
    assert names(0, backends, ranks) == zero
    assert names(1, backends, ranks) == one


def test_a_backend_for_every_rank_is_there_unless_the_session_says_otherwise():
    registry = default_registry()
    everywhere = BackendDefinition(
        name="everywhere",
        summary="",
        open=lambda config: None,
        rank_policy=RankPolicy.ALL,
        own_process=False,
    )

    class Registry:
        names = registry.names
        find_default_primary = registry.find_default_primary

        def find(self, name):
            return everywhere if name == "everywhere" else registry.find(name)

    def plan(ranks):
        return plan_backends("everywhere", RankInfo(1, 1, 2), Registry(), ranks=ranks).mirrors

    assert [choice.definition.name for choice in plan(None)] == ["everywhere"]
    assert plan(RANK_ZERO) == ()
    assert len(plan(ALL_RANKS)) == 1
