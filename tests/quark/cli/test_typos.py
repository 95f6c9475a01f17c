"""What is mistyped is refused with its name and with what there is; nothing is made of it."""

import json
import sys

import pytest

import quark
from quark.cli.main import main

FILES = {
    "prose.csv": "hello world\nthis is no table\n",
    "object.csv": '{"a": 1}\n',
    "header.csv": "step,loss\n",
}


@pytest.fixture
def place(tmp_path, monkeypatch, log_run):
    """A working directory with a store, and files that are no tables."""
    for run_id in ("r1", "r2"):
        log_run(tmp_path / "store", run_id, values={"train/loss": [2.0, 1.0], "acc": [0.1, 0.9]})
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(monkeypatch, capfd):
    """The command as a shell has it: its status, and what it says."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["quark", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
            raise SystemExit(0)
        said = capfd.readouterr()
        return ended.value.code or 0, " ".join((said.out + said.err).split())

    return run


def list_files(place):
    """All that is there; SQLite's own files beside a database that is read do not count."""
    return sorted(
        path.relative_to(place).as_posix()
        for path in place.rglob("*")
        if not path.name.endswith(("-wal", "-shm"))
    )


STORE = ["-d", "store"]
NO_RUN = "no run begins with 'typo'"
NO_STORE = "holds no Quark store"
NO_SERVICE = "does not exist: --store"
SERVICE = ["--store", "sqlite:///typo/service.db"]
TYPOS = [
    # a store
    (["keys", "create", *SERVICE], NO_SERVICE),
    (["keys", "list", *SERVICE], NO_SERVICE),
    (["keys", "revoke", "abcd", *SERVICE], NO_SERVICE),
    (["keys", "rotate", "abcd", *SERVICE], NO_SERVICE),
    (["db", "upgrade", *SERVICE], NO_SERVICE),
    (["db", "version", *SERVICE], NO_SERVICE),
    (["db", "backup", "copy", *SERVICE], NO_SERVICE),
    (["db", "restore", "typo", *SERVICE], "typo is no backup"),
    (["backup", "--verify", "typo"], "typo is no backup"),
    (["backup", "copy", "-d", "typo"], NO_STORE),
    *(
        ([*command, "-d", "typo"], NO_STORE)
        for command in (
            ["runs"],
            ["show", "r1"],
            ["analyze", "r1"],
            ["compare", "r1", "r2"],
            ["follow", "r1", "--once"],
            ["report", "r1"],
            ["export", "r1", "-o", "out", "--format", "csv"],
            ["artifacts", "r1"],
            ["groups"],
            ["traces", "p"],
            ["samples", "r1"],
            ["sources", "r1"],
            ["stop", "r1"],
            ["edit", "r1", "--name", "x"],
            ["rm", "r1"],
            ["restore", "r1"],
            ["gc"],
            ["du"],
            ["doctor"],
            ["mirror", "status", "r1"],
            ["why", "r1", "r2"],
            ["logs", "r1"],
            ["ui", "--port", "0"],
        )
    ),
    (["sync", "typo"], NO_STORE),
    (["runs", *STORE, "--backend", "csv:typo"], "--backend: there are no runs at csv:typo"),
    (["runs", *STORE, "--backend", "typo"], "there is no backend 'typo'"),
    # a run
    *(
        ([*command, *STORE], NO_RUN)
        for command in (
            ["show", "typo"],
            ["analyze", "typo"],
            ["analyze", "r1", "--against", "typo"],
            ["compare", "r1", "typo"],
            ["follow", "typo", "--once"],
            ["report", "r1", "typo"],
            ["export", "typo", "-o", "out", "--format", "csv"],
            ["artifacts", "typo"],
            ["samples", "typo"],
            ["sources", "typo"],
            ["stop", "typo"],
            ["edit", "typo", "--name", "x"],
            ["rm", "typo"],
            ["mirror", "status", "typo"],
            ["mirror", "replay", "typo"],
            ["why", "r1", "typo"],
            ["logs", "typo"],
        )
    ),
    (["restore", "typo", *STORE], "no run in the trash begins with 'typo'"),
    # a metric, a rule, a project, a group, an artifact, a sweep
    (["analyze", "r1", *STORE, "--objective", "zebra"], "no metric 'zebra'; there are"),
    (["analyze", "r1", *STORE, "--objective", "los"], "near it: 'train/loss'"),
    (["analyze", "r1", *STORE, "--rule", "typo"], "there is no rule 'typo'"),
    (["follow", "r1", *STORE, "--once", "--metric", "zebra"], "no metric 'zebra'; there are"),
    (["compare", "r1", "r2", *STORE, "--target", "zebra", "at_least", "1"], "metric 'zebra'"),
    (["why", "r1", "r2", *STORE, "--metric", "zebra"], "metric 'zebra'"),
    (["runs", *STORE, "--group-by", "config", "--metric", "zebra"], "metric 'zebra'"),
    (["runs", *STORE, "--project", "typo"], "--project: there is no project 'typo' in the store"),
    (["groups", "typo", *STORE], "PROJECT: there is no project 'typo' in the store"),
    (["traces", "typo", *STORE], "PROJECT: there is no project 'typo' in the store"),
    (["artifacts", "versions", *STORE, "-p", "typo"], "--project: there is no project 'typo'"),
    (["artifacts", "versions", "typo", *STORE], "NAME: there is no artifact 'typo'"),
    (["artifacts", "get", "typo:best", *STORE], "no artifact 'typo'"),
    (["runs", *STORE, "--group", "typo"], "--group: there is no group 'typo' here"),
    (["sweep", "show", "typo", *STORE], "there is no sweep 'typo' in the store"),
    (["sweep", "run", "typo", *STORE, "--", "python"], "there is no sweep 'typo' in the store"),
    # what is imported
    *(
        (["import", tool, "typo", "-d", "new"], "typo")
        for tool in (
            *("tensorboard", "aim", "ato", "clearml", "comet", "csv", "mlflow", "neptune"),
            *("track", "trackio", "wandb"),
        )
    ),
    *(
        (["import", tool, "empty", "-d", "new"], "there are no runs")
        for tool in ("tensorboard", "clearml", "comet", "csv", "neptune", "track", "wandb")
    ),
    (["import", "csv", "prose.csv", "-d", "new"], "no table of metrics"),
    (["import", "csv", "object.csv", "-d", "new"], "no table of metrics"),
    (["import", "csv", "header.csv", "-d", "new"], "no table of metrics"),
    (["import", "csv", ".", "-d", "new"], "no table of metrics"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("arguments", "said"), TYPOS, ids=[" ".join(each) for each, _ in TYPOS])
def test_a_typo_is_refused_and_makes_nothing(place, call, arguments, said):
    before = list_files(place)
    status, told = call(*arguments)
    assert status == 2, told
    assert said in told
    assert list_files(place) == before


def test_what_is_right_is_taken_beside_what_is_not(place, call):
    (place / "table.csv").write_text("step,loss\n0,1.0\n1,0.5\n")
    status, told = call("import", "csv", ".", "-d", "new", "--json")
    assert status == 1, told
    runs = json.loads(told)["runs"]
    assert sorted(run["points"] for run in runs) == [0, 0, 0, 2]
    assert len(quark.search_runs(storage_dir=place / "new")) == 1


def test_an_objective_that_was_mistyped_is_not_stored(place, call):
    assert call("analyze", "r1", *STORE, "--objective", "zebra")[0] == 2
    status, told = call("show", "r1", *STORE)
    assert status == 0
    assert "zebra" not in told
    assert "analyzed at generation" not in told
