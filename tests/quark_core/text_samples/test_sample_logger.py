"""SampleLogger: rows of text samples, written, bounded, redacted, found again."""

import math
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import quark
from quark_core.runs.sample_search import list_columns, order_samples


@pytest.fixture
def session(tmp_path):
    session = quark.start_run(project="rl", storage_dir=tmp_path)
    yield session
    session.end_run()


def test_a_row_comes_back_as_it_was(session):
    samples = quark.SampleLogger(session, "eval/generations")
    told = samples.log(
        prompt="2 + 2?", completion="4", reward=np.float32(0.5), step=3, task="sum", length=1,
        is_right=True, scores={"a": [1, 2.5]}, nothing=None,
    )  # fmt: skip
    (read,) = samples.read()
    assert read == told
    assert (read.set_name, read.prompt, read.completion, read.reward, read.step) == (
        "eval/generations", "2 + 2?", "4", 0.5, 3,
    )  # fmt: skip
    assert dict(read.columns) == {
        "task": "sum",
        "length": 1,
        "is_right": True,
        "scores": {"a": [1, 2.5]},
        "nothing": None,
    }
    assert read.cut is None


def test_rows_may_differ_in_their_columns_and_hold_rewards_that_are_not_finite(session):
    samples = quark.SampleLogger(session)
    rewards = [math.nan, math.inf, None, 1.0]
    for step, reward in enumerate(rewards):
        samples.log({f"column {step}": step, "reward": reward}, step=step)
    read = samples.read()
    assert [str(row.reward) for row in read] == ["nan", "inf", "None", "1.0"]
    assert list_columns(quark.find_samples(session)) == [f"column {n}" for n in range(4)]
    assert [row.step for row in samples.read(where="reward == nan")] == [0]
    assert [row.step for row in samples.read(where="reward > 0.5")] == [1, 3]
    assert [row.step for row in samples.read(where="reward == null")] == [2]


def test_many_rows_are_taken_in_the_forms_that_people_have(session):
    samples = quark.SampleLogger(session)
    assert samples.log_many([{"prompt": "a", "n": 1}, {"prompt": "b", "m": 2}], step=0) == 2
    assert samples.log_many({"prompt": ["c", "d"], "reward": [0.1, 0.2]}, step=1) == 2
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["e"], "reward": [0.3], "step": [2]})
    assert samples.log_many(frame) == 1
    read = samples.read()
    assert [(row.prompt, row.step) for row in read] == [
        ("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 2),
    ]  # fmt: skip
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert samples.log(prompt=chat, step=3).prompt == "user: hi\nassistant: hello"


def test_none_of_many_rows_is_kept_where_one_is_bad(session):
    samples = quark.SampleLogger(session)
    with pytest.raises(quark.SchemaValidationError, match=r"rows\[1\]"):
        samples.log_many([{"prompt": "a"}, {"prompt": "b", "thing": object()}], step=0)
    with pytest.raises(quark.SchemaValidationError, match="reward"):
        samples.log(prompt="a", reward="high")
    with pytest.raises(quark.SchemaValidationError, match="columns"):
        samples.log({str(n): n for n in range(101)})
    with pytest.raises(quark.SchemaValidationError, match="lists of one length"):
        samples.log_many({"prompt": ["a"], "reward": [1, 2]})
    with pytest.raises(quark.SchemaValidationError, match="not str"):
        samples.log_many("rows")
    assert samples.read() == ()


def test_a_huge_text_is_bounded_and_the_bound_told(session):
    samples = quark.SampleLogger(session, text_characters=100)
    row = samples.log(prompt="p" * 10_000_000, completion="short", step=0, notes="n" * 101)
    assert (len(row.prompt), row.completion) == (100, "short")
    assert dict(row.cut) == {"prompt": 10_000_000, "notes": 101}
    samples.log(prompt="p" * 200, step=1)
    (event,) = quark.EventLogger(session).read(event_type="samples_cut")
    assert "first 100 characters" in event.payload["message"]
    wide = samples.log({f"c{n}": "x" * 100 for n in range(90)})
    assert sum(map(len, wide.columns.values())) <= 262_144


def test_secrets_are_taken_out_of_every_text(session):
    secret = "ghp_" + 36 * "a"
    samples = quark.SampleLogger(session, text_characters=1000)
    row = samples.log(
        prompt=f"my token is {secret}", completion=f"{secret} it is", step=0,
        notes=f"see {secret}", api_key="hunter2", deep={"a": [f"{secret}"]},
        long="x" * 980 + " " + secret,
    )  # fmt: skip
    assert secret not in str(row)
    assert "hunter2" not in str(row)
    assert "ghp_aaa" not in str(row)
    assert secret not in str(samples.read())


def test_rows_are_found_by_text_condition_and_step(session):
    samples = quark.SampleLogger(session, "a")
    other = quark.SampleLogger(session, "b")
    for step in range(20):
        samples.log(prompt=f"Frage {step}", completion="ÄPFEL" if step == 7 else "Birnen",
                    reward=step / 20, step=step, kind={"deep": f"needle{step}"})  # fmt: skip
        other.log(prompt="x", step=step)
    assert [row.step for row in samples.read(search="äpfel")] == [7]
    assert [row.step for row in samples.read(search="needle12")] == [12]
    assert [row.step for row in samples.read(search="birnen", limit=2)] == [18, 19]
    assert len(samples.read(name="b", step_min=18)) == 2
    assert len(samples.read(step=5)) == 2
    found = samples.read(where=["reward >= 0.5", "reward < 0.6", "prompt ~ frage"])
    assert [row.step for row in found] == [10, 11]
    assert len(samples.read(where={"prompt": "x"})) == 20
    columns = quark.find_samples(session, name="a")
    assert columns.to_pandas()["reward"].iloc[3] == 0.15
    near = columns.take(order_samples(columns, None, near=9)[:3])["step"].tolist()
    assert sorted(near) == [8, 9, 10]
    backwards = columns.take(order_samples(columns, "prompt", descending=True))
    assert backwards["prompt"][0] == "Frage 9"
    for bad in (
        "reward",
        "> 3",
        5,
        "reward >>",
        "reward >",
        "reward >> 5",
        "prompt ==",
        "prompt ===",
    ):
        with pytest.raises(quark.SchemaValidationError, match="where"):
            samples.read(where=[bad])
    with pytest.raises(quark.SchemaValidationError, match=r"no sample has a column 'taks'.*reward"):
        samples.read(where="taks == math")
    assert len(samples.read(where="prompt ~ <")) == 0


def test_ten_thousand_rows_a_step_are_all_kept(session):
    samples = quark.SampleLogger(session)
    rows = [{"prompt": f"prompt {n}", "reward": float(n)} for n in range(10_000)]
    for step in range(2):
        assert samples.log_many(rows, step=step) == 10_000
    assert quark.find_samples(session).count == 20_000
    assert [row.step for row in samples.read(where="reward == 9999")] == [0, 1]


def test_a_killed_process_keeps_what_it_has_logged(tmp_path):
    program = """
    import os, signal, sys
    import quark
    session = quark.start_run(project="p", storage_dir=sys.argv[1])
    samples = quark.SampleLogger(session)
    for step in range(50):
        samples.log(prompt="p" * 3000, completion=f"answer {step}", step=step, note={"a": step})
    print(session.run_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), tmp_path],
        capture_output=True, text=True, env=os.environ, timeout=60,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    subprocess.run(
        [sys.executable, "-m", "quark", "sync", tmp_path], check=True, capture_output=True
    )
    found = quark.find_samples(quark.open_run(killed.stdout.strip(), tmp_path))
    assert found["completion"].tolist() == [f"answer {step}" for step in range(50)]
    assert set(map(len, found["prompt"])) == {3000}


def test_rows_of_all_ranks_are_told_apart(tmp_path, monkeypatch):
    program = (
        "import sys, quark\n"
        "session = quark.start_run(project='p', storage_dir=sys.argv[1], ranks='all')\n"
        "samples = quark.SampleLogger(session)\n"
        "samples.log(prompt=f'of {sys.argv[2]}', step=1)\n"
        "session.end_run()\n"
        "print(session.run_id)\n"
    )
    ids = []
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "QUARK_RUN_ID": "shared",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path, str(rank)],
            capture_output=True, text=True, env=environment, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        ids.append(done.stdout.split()[-1])
    assert set(ids) == {"shared"}
    run = quark.open_run("shared", tmp_path)
    assert quark.find_samples(run, rank=1)["prompt"].tolist() == ["of 1"]
    assert sorted(quark.find_samples(run)["rank"].tolist()) == [0, 1]


def test_a_closed_logger_takes_no_rows_and_reads_on(session):
    with quark.SampleLogger(session) as samples:
        samples.log(prompt="a", step=0)
    with pytest.raises(quark.InvalidRunStateError, match="SampleLogger is closed"):
        samples.log(prompt="b", step=1)
    assert len(samples.read()) == 1
