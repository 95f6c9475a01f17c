"""What is written to a console becomes whole lines, each once, and never too many."""

import os
import random
import subprocess
import sys

import pytest

import quark
from quark_core.records import EventRecord
from quark_core.records.codec import decode_body, encode_records
from quark_core.records.json_object import JsonObject, decode_json, encode_json
from quark_core.records.kinds.console import ConsoleRecord
from quark_core.records.query import Query
from quark_core.system.console import streams as lines_module
from quark_core.system.console.streams import LONGEST_LINE, LineAssembler


class Clock:
    """The time, as the assembler sees it: it passes where a test says so."""

    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s

    def time_ns(self):
        return int(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(lines_module, "time", clock)
    return clock


@pytest.fixture
def told(clock):
    return []


@pytest.fixture
def assembler(told):
    return LineAssembler(told.append)


def texts(told):
    return [(line.number, line.text, line.is_whole) for line in told]


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_the_same_however_the_text_is_cut_into_pieces(told, assembler, seed):
    draw = random.Random(seed)
    wanted = ["".join(draw.choices("ab \té😀", k=draw.randrange(12))) for _ in range(50)]
    text = "".join(line + draw.choice(["\n", "\r\n"]) for line in wanted)
    while text:
        size = draw.randrange(1, 9)
        assembler.feed(text[:size])
        text = text[size:]
    assembler.finish()
    assert texts(told) == [(number, line, True) for number, line in enumerate(wanted)]


def test_a_line_that_has_no_end_is_told_at_the_end_and_once_it_is_a_second_old(
    told, assembler, clock
):
    assembler.feed("loading")
    assembler.tick()
    assert told == []
    clock.now_s += 1.5
    assembler.tick()
    assembler.tick()
    assert texts(told) == [(0, "loading", False)]
    assembler.feed(" done\nnext")
    assembler.finish()
    assert texts(told)[1:] == [(0, "loading done", True), (1, "next", False)]


def test_a_progress_bar_is_one_line_that_is_told_at_a_bounded_rate(told, assembler, clock):
    for percent in range(1001):
        assembler.feed(f"\r{percent / 10:.1f} %|###|")
        clock.now_s += 0.01
    assembler.feed("\n")
    assert {line.number for line in told} == {0}
    assert 5 <= len(told) <= 12
    assert texts(told)[-1] == (0, "100.0 %|###|", True)


def test_an_old_bar_is_told_every_ten_seconds(told, assembler, clock):
    for second in range(3600):
        assembler.feed(f"\r{second}")
        clock.now_s += 1
    assert len(told) < 430


def test_a_bar_that_wipes_itself_away_leaves_the_line_to_what_comes_next(told, assembler):
    assembler.feed("\r 50 %")
    assembler.feed("\r      \r")
    assembler.feed("hello\n")
    assert texts(told) == [(0, "hello", True)]


def test_bars_below_one_another_are_one_line_each(told, assembler, clock):
    for outer in range(5):
        assembler.feed(f"\router {outer}")
        for inner in range(50):
            assembler.feed(f"\n\rinner {inner}\x1b[A")
            clock.now_s += 0.01
    assembler.feed("\n\r        \r\x1b[A")
    assembler.feed("\router done\nafter\nlater\n")
    last = {line.number: line.text.strip() for line in told}
    assert last == {0: "outer done", 1: "after", 2: "later"}
    assert len(told) < 20


def test_control_sequences_are_left_out(told, assembler):
    assembler.feed(
        "\x1b[1;31mred\x1b[0m \x1b]8;;https://x.example\x07link\x1b]8;;\x1b\\ \x1b[2K\x1bM"
    )
    assembler.feed("\x1b[3")
    assembler.feed("2mgreen\x1b(B\x1b[m\n")
    assert texts(told) == [(0, "red link green", True)]


def test_of_a_flood_the_first_and_the_newest_lines_are_told_and_the_others_counted(
    told, assembler, clock
):
    written = 0
    for _ in range(200):
        assembler.feed("".join(f"line {written + each}\n" for each in range(1000)))
        written += 1000
        clock.now_s += 0.005
    clock.now_s += 2
    assembler.tick()
    assert texts(told)[:3] == [(at, f"line {at}", True) for at in range(3)]
    assert texts(told)[-1] == (199_999, "line 199999", True)
    assert len(told) < 4000 + 2000 + 100 + 10
    assert len(told) + sum(line.left_out for line in told) == 200_000
    numbers = [line.number for line in told]
    assert numbers == sorted(set(numbers))


def test_one_text_of_100_mb_costs_little_and_is_counted(told, assembler):
    assembler.feed("first\n" + "x" * 99 + "\n" + ("y" * 99 + "\n") * 1_000_000 + "last\n")
    assembler.finish()
    assert told[0].text == "first"
    assert told[-1].text == "last"
    assert len(told) < 5000
    assert len(told) + sum(line.left_out for line in told) == 1_000_003


def test_a_line_without_an_end_is_held_in_bounded_memory(told, assembler):
    for _ in range(100):
        assembler.feed("z" * 100_000)
    assembler.feed("\nnext\n")
    assert [len(line.text) for line in told] == [LONGEST_LINE, 4]


def test_long_lines_spend_a_budget_of_their_own(told, assembler):
    for _ in range(1000):
        assembler.feed("w" * 10_000 + "\n")
    assert sum(len(line.text) for line in told) < 2 * 1024 * 1024


# Bytes that are no UTF-8, in the command line and in what is printed, cost no run and no line.

ODD = "/data/caf\udce9"


def run_script(folder, code, *args):
    environ = {**os.environ, "LC_ALL": "C.UTF-8", "QUARK_QUIET": "1"}
    return subprocess.run(
        [sys.executable, "-B", "-c", code, *args], cwd=folder, env=environ, capture_output=True
    )


def test_a_run_starts_with_arguments_that_are_no_utf8(tmp_path):
    code = """
import argparse, quark
parser = argparse.ArgumentParser()
parser.add_argument("--data")
with quark.start_run(project="p", config=parser.parse_args()) as session:
    quark.MetricsLogger(session).log("loss", 1.0, step=0, metadata={"path": session.config["data"]})
    quark.EventLogger(session).log("loaded", payload={"path": parser.parse_args().data})
print(session.run_id)
"""
    done = run_script(tmp_path, code, "--data", b"/data/caf\xe9")
    assert done.returncode == 0, done.stderr
    run = quark.open_run(done.stdout.decode().split()[-1], tmp_path)
    assert run.config["data"] == "/data/caf?"
    (loaded,) = quark.EventLogger(run).read(event_type="loaded")
    assert loaded.payload == {"path": "/data/caf?"}


def test_a_line_that_is_no_unicode_costs_no_other_line(tmp_path):
    code = """
import sys, quark
sys.stdout.reconfigure(errors="surrogateescape")
sys.stderr.reconfigure(errors="surrogateescape")
with quark.start_run(project="p", capture="sys") as session:
    for i in range(50):
        print("line", i, "\\udce9" if i == 20 else "")
        print("error", i, file=sys.stderr)
print(session.run_id)
"""
    done = run_script(tmp_path, code)
    assert done.returncode == 0, done.stderr
    run_id = done.stdout.decode("utf-8", "replace").split()[-1]
    found = quark.open_run(run_id, tmp_path).open_run.read("console", Query())
    lines = found["text"].tolist()
    assert sum(line.startswith("line") for line in lines) == 50
    assert sum(line.startswith("error") for line in lines) == 50
    assert "line 20 ?" in lines


def test_a_text_that_is_no_unicode_costs_no_other_record():
    texts = ["a", ODD, "b", "\ud800", ODD]
    origin = ("0" * 16, "w", 1, 0)
    lines = [
        ConsoleRecord(*origin, number, 0, "stdout", number, text, True, 0)
        for number, text in enumerate(texts)
    ]
    body = decode_body(encode_records(lines))
    assert body.to_list("text") == ["a", "/data/caf?", "b", "?", "/data/caf?"]
    same = [EventRecord(*origin, n, 0, "e", "info", None, None, ODD, None) for n in range(3)]
    assert decode_body(encode_records(same)).to_list("status") == ["/data/caf?"] * 3


def test_json_values_of_any_text_are_encoded():
    made = JsonObject({"argv": [ODD], ODD: 1})
    assert made == {"argv": ["/data/caf?"], "/data/caf?": 1} == decode_json(made.encoded)
    assert decode_json(encode_json([ODD, {"a": ODD}])) == ["/data/caf?", {"a": "/data/caf?"}]
