"""Narrow terminals, those that show ASCII alone, and pipes: each table and view is fit for them."""

import pytest
from diagnosed_runs import overfit, succeed

KEY = "val/" + "a_rather_long_name_" * 8 + "loss"
# The views, and the columns in which each of them must have room.
VIEWS = {
    "analyze one --no-store": (40, 80),
    "compare one two": (60, 80, 120),
    "show one": (80,),
    "runs": (80,),
    "du": (80,),
    "backends": (80,),
}


def split(words, root):
    return words.split() if words == "backends" else [*words.split(), "-d", root]


@pytest.fixture
def long_names(tmp_path, log_run):
    """Two runs of which whatever can be long is long."""
    for run_id, losses in (("one", overfit()), ("two", succeed())):
        values = {
            "train/loss": losses["train/loss"],
            KEY: losses["val/loss"],
            "n" * 150: [1.0, 2.0],
            "least": [-1.23456e-30, 1e300],
        }
        log_run(
            tmp_path,
            run_id,
            "p" * 100,
            name=f"{run_id} {'name ' * 30}",
            tags=["t" * 100, *(f"tag-{number}" for number in range(40))],
            notes="n" * 300,
            config={"path" * 30: run_id + "v" * 300, "list": [*range(100), run_id]},
            values=values,
        )
    return tmp_path


@pytest.mark.sampled
@pytest.mark.parametrize("words", VIEWS)
def test_lines_are_folded_into_the_terminal(invoke, long_names, words):
    for columns in VIEWS[words]:
        result = invoke(*split(words, long_names), columns=columns)
        assert result.exit_code == 0
        assert [line for line in result.stdout.splitlines() if len(line) > columns] == []
    if words.startswith(("analyze", "compare")):
        assert KEY in "".join(result.stdout.split())


@pytest.fixture
def store(tmp_path, log_run):
    log_run(tmp_path, "one", values=overfit(), config={"lr": 0.5})
    log_run(tmp_path, "two", values=succeed(), config={"lr": 0.05})
    log_run(tmp_path, "odd", "проект", name="日本 " * 9, tags=["naïve"], config={"größe": "très"})
    return tmp_path


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("analyze one --no-store", "###"),
        ("compare one two", "old  "),
        ("show one", "completed"),
        ("show odd", "completed"),
        ("runs", "one"),
        ("du", "one"),
        ("backends", "embedded"),
    ],
)
def test_an_ascii_terminal_is_enough(quark_command, store, words, shown):
    done = quark_command(*split(words, store), LC_ALL="C", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert shown in done.stdout
    if words.startswith(("analyze", "compare")):
        assert "?" not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("words", ["analyze one --no-store", "compare one two"])
def test_a_terminal_gets_styles_and_a_pipe_none(quark_command, store, words):
    done = quark_command(*split(words, store))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []
    assert "\x1b[" in quark_command(*split(words, store), FORCE_COLOR="1").stdout
    plain = quark_command(*split(words, store), FORCE_COLOR="1", NO_COLOR="1").stdout
    assert "\x1b[3" not in plain
