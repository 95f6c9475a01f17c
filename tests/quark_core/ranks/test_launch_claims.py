"""Launch identities by variables, and which claim of a run a rank believes."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import by_hand, older_openmpi, openmpi, pmi, slurm

import quark
from quark_core.ranks import launches as launch_claims
from quark_core.ranks.launches import Launch, RunClaims, find_launch
from quark_core.records.query import Query
from quark_core.runs import backend_choice
from quark_core.system.process import ProcessIdentity

AGENT = "/tmp/torchelastic_x/none_y/attempt_{}/{}/error.json"


def torchrun(rank, restart=0, nodes=1, agent=AGENT, **others):
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": restart,
        "TORCHELASTIC_ERROR_FILE": agent.format(restart, rank),
        "GROUP_WORLD_SIZE": nodes,
        "RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        **others,
    }


def find(variables):
    return find_launch({name: str(value) for name, value in variables.items()})


@pytest.mark.parametrize(
    ("launcher", "source", "is_exact"),
    [
        (torchrun, "torchrun", True),
        (slurm, "slurm", True),
        (openmpi, "openmpi", True),
        (older_openmpi, "openmpi", True),
        (pmi, "pmi", False),
        (by_hand, "environment", False),
    ],
)
def test_ranks_of_a_launch_have_one_key(launcher, source, is_exact):
    found = [find(launcher(rank)) for rank in range(3)]
    assert len({launch.key for launch in found}) == 1
    assert {(launch.source, launch.is_exact, launch.restart) for launch in found} == {
        (source, is_exact, 0)
    }
    derived = {launch.derive_run_id("p") for launch in found}
    assert (None in derived) is not is_exact
    assert len(derived) == 1


def test_a_torchrun_agent_is_told_by_its_folder_and_keeps_its_key_at_a_restart():
    first, again = find(torchrun(0)), find(torchrun(0, restart=2))
    assert (again.key, again.restart) == (first.key, 2)
    other = find(torchrun(0, agent=AGENT.replace("none_y", "none_z")))
    assert other.key != first.key
    several = [find(torchrun(0, nodes=2, agent=f"/tmp/{n}/attempt_{{}}/{{}}/e")) for n in "ab"]
    assert several[0].key == several[1].key
    assert several[0].node_key != several[1].node_key
    assert not several[0].is_exact


@pytest.mark.parametrize(
    "changed",
    [{"SLURM_JOB_ID": 1}, {"SLURM_STEP_ID": 1}, {"SLURM_CLUSTER_NAME": "d"}],
    ids=lambda changed: next(iter(changed)),
)
def test_another_job_step_or_cluster_is_another_launch(changed):
    assert find(slurm(0)).key != find(slurm(0, **changed)).key


def test_a_process_without_a_launcher_is_of_no_launch():
    assert find({}) is None
    assert find({"RANK": "1"}) is None
    assert find({"SLURM_PROCID": "1"}) is None
    assert find({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}) is None


NAMES = [*torchrun(0), *slurm(0), *openmpi(0), *older_openmpi(0), *pmi(0), "WORLD_SIZE"]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=9) | st.integers(0, 9).map(str)))
def test_any_variables_give_a_launch_or_none(environ):
    launch = find_launch(environ)
    assert launch is None or (launch.restart >= 0 and len(launch.key) == 16)


EXACT = Launch("slurm", "k", 0, True)
VAGUE = Launch("environment", "v", 0, False)
GONE = ProcessIdentity("another-host", 1, "1")


@pytest.fixture
def claims(tmp_path, monkeypatch):
    """Makes the claims of one run, of as many processes as there are calls."""

    def make(launch, name="p"):
        monkeypatch.setattr(launch_claims, "_counts", launch_claims.Counter())
        return RunClaims(tmp_path, launch, name)

    return make


def dead_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    identity = ProcessIdentity(launch_claims.current_process().host, child.pid, "1")
    child.wait()
    return identity


def age(claims, seconds, **changes):
    """Make a claim older, and say other things in it."""
    path = claims._path
    claim = msgspec.structs.replace(launch_claims._load(path), **changes)
    path.write_bytes(msgspec.json.encode(claim))
    moment = time.time() - seconds
    os.utime(path, (moment, moment))


def test_what_the_leader_claims_the_others_find(claims):
    assert claims(VAGUE).wait(0) is None
    assert claims(VAGUE).claim("run", 3)
    found = claims(VAGUE).wait(0)
    assert (found.run_id, found.attempt, found.ended) == ("run", 3, False)
    assert claims(VAGUE, "other").wait(0) is None
    assert claims(replace(VAGUE, restart=1)).wait(0) is None


@pytest.mark.parametrize("launch", [EXACT, VAGUE], ids=["exact", "vague"])
def test_an_older_claim_is_joined_only_where_its_leader_lives(claims, launch):
    claims(launch).claim("run", 0)
    age(claims(launch), 86400)
    assert claims(launch).wait(0).run_id == "run"  # its leader is this process
    age(claims(launch), 86400, ended=True)
    assert claims(launch).wait(0) is None
    age(claims(launch), 86400, ended=False, process=dead_process())
    assert claims(launch).wait(0) is None
    # Of another host nobody knows; then the launch itself must be sure.
    age(claims(launch), 86400, process=GONE)
    assert (claims(launch).wait(0) is not None) is launch.is_exact


def test_a_claim_of_another_host_that_is_a_little_older_is_taken_last(claims):
    claims(VAGUE).claim("run", 0)
    age(claims(VAGUE), launch_claims.find_age_s() + 20, process=GONE)
    assert claims(VAGUE)._look(is_last=False) is None
    assert claims(VAGUE).wait(0.05).run_id == "run"


def test_an_ended_run_is_joined_by_a_rank_that_was_there_before(claims):
    leader = claims(VAGUE)
    leader.claim("run", 0)
    leader.end()
    assert claims(VAGUE).wait(0).ended


def test_only_a_restart_takes_up_what_was_claimed(claims):
    leader = claims(EXACT)
    leader.claim("run", 0)
    leader.end()
    assert claims(EXACT).find_restarted() is None
    assert claims(EXACT).is_used
    assert claims(replace(EXACT, restart=1)).find_restarted().run_id == "run"


def test_a_restart_is_found_though_the_port_has_changed(claims):
    first = Launch("torchrun", "port-1", 0, False, "agent")
    claims(first).claim("run", 0)
    again = Launch("torchrun", "port-2", 1, False, "agent")
    assert claims(again).find_restarted().run_id == "run"
    # Another agent on this host, which met at the first one's port.
    other = Launch("torchrun", "port-1", 1, False, "agent-2")
    assert claims(other).find_restarted() is None


def test_of_two_leaders_one_is_first(claims):
    assert claims(EXACT).claim("one", 0, replaces=False)
    assert not claims(EXACT).claim("two", 0, replaces=False)
    assert claims(EXACT).wait(0).run_id == "one"


def test_the_second_run_of_a_process_is_another_one(tmp_path):
    first, second = (RunClaims(tmp_path, Launch("slurm", "twice", 0, True), "p") for _ in "ab")
    assert first.name != second.name
    assert first.derived_run_id != second.derived_run_id


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"run_id": 3}'])
def test_a_damaged_claim_is_none(claims, damage):
    claims(EXACT).claim("run", 0)
    claims(EXACT)._path.write_bytes(damage)
    assert claims(EXACT).wait(0) is None
    assert claims(EXACT).claim("again", 0)
    assert claims(EXACT).wait(0).run_id == "again"


def test_where_nothing_can_be_written_nothing_is_claimed_and_nothing_fails(tmp_path):
    (tmp_path / ".quark").touch()
    claims = RunClaims(tmp_path, EXACT, "p")
    assert claims.claim("run", 0)
    assert claims.wait(0.05) is None
    claims.end()


def test_without_hard_links_a_claim_is_made_all_the_same(claims, monkeypatch):
    def refuse(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert claims(EXACT).claim("one", 0, replaces=False)
    assert not claims(EXACT).claim("two", 0, replaces=False)
    assert claims(EXACT).wait(0).run_id == "one"


def test_old_claims_are_deleted(claims, tmp_path):
    claims(EXACT).claim("run", 0)
    age(claims(EXACT), 40 * 86400)
    claims(VAGUE).claim("new", 0)
    assert len(list((tmp_path / ".quark" / "launches").iterdir())) == 1


def test_a_reader_of_journals_sees_a_rank_that_came_before_the_run(tmp_path, monkeypatch):
    """On a network file system the journal of rank 1 may be there before that of rank 0."""
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    monkeypatch.setenv("QUARK_RUN_ID", "early")
    monkeypatch.setenv("WORLD_SIZE", "2")
    reader = None
    sessions = []
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        session = quark.start_run(project="p", storage_dir=tmp_path, ranks="all")
        sessions.append(session)
        metrics = quark.MetricsLogger(session)
        metrics.log("loss", float(rank), step=0)
        session.flush("durable")
        if reader is None:
            reader = backend_choice.open_reader(tmp_path)
            assert reader.list_runs() == []
    assert list(reader.read("early", "metric", Query())["rank"]) == [0, 1]
    for session in sessions:
        session.end_run()
