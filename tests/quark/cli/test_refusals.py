"""A mistake in the command line is refused by its name and with what there is; it makes nothing."""

import json
import re
import sys

import pytest

import quark
from quark.cli.main import main

FILES = {
    "prose.csv": "hello world\nthis is no table\n",
    "object.csv": '{"a": 1}\n',
    "header.csv": "step,loss\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a store, and with files that are no tables; what is refused changes none."""
    folder = tmp_path_factory.mktemp("refused")
    for run_id, name in (("r1", "first"), ("r2", "second")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUARK_RUN_ID", run_id)
            session = quark.start_run(project="vision", storage_dir=folder / "store", name=name)
        metrics = quark.MetricsLogger(session)
        for step, (loss, accuracy) in enumerate(((2.0, 0.1), (1.0, 0.9))):
            metrics.log_many({"train/loss": loss, "acc": accuracy}, step=step)
        session.end_run()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def place(folder, monkeypatch):
    """That folder as the working directory."""
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def call(monkeypatch, capfd):
    """The command as a shell has it: its status, and what it says on each stream."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["quark", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
            raise SystemExit(0)
        return ended.value.code or 0, *capfd.readouterr()

    return run


def list_files(place):
    """All that is there; SQLite's own files beside a database that is read do not count."""
    return sorted(
        path.relative_to(place).as_posix()
        for path in place.rglob("*")
        if not path.name.endswith(("-wal", "-shm"))
    )


STORE = ["-d", "store"]
NO_RUN = "no run matches 'typo' (ID, unique prefix or name) in the store PLACE/store"
NO_PROJECT = "no project 'typo' in the store PLACE/store. Projects: 'vision'."
NO_STORE = "no Quark store in"
NO_SERVICE = "does not exist. --store"
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
    (["db", "restore", "typo", *SERVICE], "typo is not a complete backup"),
    (["backup", "--verify", "typo"], "typo is not a complete backup"),
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
            ["sweep", "show"],
            ["sweep", "show", "x"],
            ["sweep", "pause", "x"],
            ["sweep", "run", "x", "--", "python"],
        )
    ),
    (["sync", "typo"], NO_STORE),
    (["runs", *STORE, "--backend", "csv:typo"], "--backend: no runs at csv:typo."),
    (["runs", *STORE, "--backend", "typo"], "'typo' is not an installed backend"),
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
            ["why", "typo"],
            ["compare", "r1", "r2,typo"],
            ["logs", "typo"],
        )
    ),
    (["restore", "typo", *STORE], "no run in the trash of the store PLACE"),
    (["show", "irst", *STORE], "no run matches 'irst' (ID, unique prefix or name) in the store "),
    (["show", "r", *STORE], '\'r\' matches 2 runs: r2 "second", r1 "first". Pass a longer prefix.'),
    (["analyze", "r", *STORE, "--fail-on", "error"], "'r' matches 2 runs: "),
    (["compare", "r1", "r", *STORE], "'r' matches 2 runs: "),
    (["compare", "r1", *STORE], "Missing argument 'NEW'. `quark runs` lists the runs."),
    (
        ["compare", "r1,,r2", "r2", *STORE],
        "'r1,,r2' has an empty entry. Separate runs with single commas.",
    ),
    (["why", "r1,r2", "r2", *STORE, "--check", "2"], "--check needs one run on each side"),
    # a metric, a rule, a project, a group, an artifact, a sweep
    (["analyze", "r1", *STORE, "--objective", "zebra"], "no metric 'zebra'; the metrics are"),
    (["analyze", "r1", *STORE, "--objective", "los"], "similar names: 'train/loss'"),
    *(
        (["analyze", "r1", *STORE, *words], said)
        for words, said in (
            (["--objective", ":max"], "--objective: objective must not be empty"),
            (["--rule", "typo"], "--rule: no rule 'typo'. Choose 'constant_inputs'"),
            (["--explain", "typo"], "--explain: no rule 'typo'"),
            (
                ["--explain", "plateau", "--rule", "divergence"],
                "--explain 'plateau' is not among the rules of --rule.",
            ),
            (["--mode", "absolute", "--rule", "plateau"], "'plateau' in the absolute mode"),
            (["--mode", "odd"], "'odd' is not one of"),
            (["--fail-on", "info"], "'info' is not one of"),
        )
    ),
    *(
        (["follow", "r1", *STORE, "--once", *words], said)
        for words, said in (
            (["-m", "zebra"], "--metric: the run has no metric 'zebra'; the metrics are"),
            (["-m", "los"], "--metric: the run has no metric 'los'; similar names: 'train/loss'"),
            (["-m", ""], "--metric"),
            (["--interval", "0"], "--interval"),
        )
    ),
    *(
        (["compare", "r1", "r2", *STORE, "--target", *words], said)
        for words, said in (
            (
                ["zebra", "at_least", "1"],
                "--target: none of the runs has metric 'zebra'; the metrics",
            ),
            (["ac", "at_least", "1"], "none of the runs has metric 'ac'; similar names: 'acc'"),
            (["loss", "below", "1"], "'below' is not one of"),
            (["loss", "at_most", "x"], "'x' is not a valid float"),
            (["loss", "at_most", "nan"], "--target: target_value must be a finite"),
            (["", "at_most", "1"], "--target: metric_key must be"),
        )
    ),
    (["why", "r1", "r2", *STORE, "--metric", "zebra"], "metric 'zebra'"),
    (["runs", *STORE, "--group-by", "config", "--metric", "zebra"], "metric 'zebra'"),
    (["runs", *STORE, "--project", "typo"], f"--project: {NO_PROJECT}"),
    (["groups", "typo", *STORE], f"PROJECT: {NO_PROJECT}"),
    (["traces", "typo", *STORE], f"PROJECT: {NO_PROJECT}"),
    (["artifacts", "versions", *STORE, "-p", "typo"], f"--project: {NO_PROJECT}"),
    (["artifacts", "versions", "typo", *STORE], "no artifact 'typo'"),
    (["artifacts", "get", "typo:best", *STORE], "no artifact 'typo'"),
    (["runs", *STORE, "--group", "typo"], "--group: no group 'typo' here"),
    *(
        (["runs", *STORE, *words], words[-2])
        for words in (
            ["--group-by", "name"],
            ["--group-by", "field."],
            ["--group", "a//b"],
            ["--group-by", "config", "--metric", "max("],
            ["--columns", "max("],
            ["--columns", "groups,config."],
            ["--limit", "-1"],
            ["--status", "finished"],
        )
    ),
    (["du", *STORE, "--limit", "-1"], "--limit"),
    (["groups", *STORE, "--metric", "lossless"], "mode is required"),
    (["edit", "r1", *STORE], "Nothing to change. Pass --name"),
    (["edit", "r1", *STORE, "--tag", "a", "--untag", "a"], "'a' cannot be both added and removed"),
    (["edit", "r1", *STORE, "--tag", ""], "tags[0]"),
    (["edit", "r1", *STORE, "--field", "gpu"], "--field 'gpu' is not NAME=VALUE."),
    *(
        (["logs", "r1", *STORE, "--since", time], "--since")
        for time in ("soon", "10", "10y", "99999999999d", "2026-13-01")
    ),
    (["mirror", "replay", "r1", *STORE, "--to", "nosuch"], "'nosuch' is not an installed backend"),
    (["ui", "store", "--no-open", "--base", "a b"], "base"),
    (["ui", "store", "--no-open", "--port", "70000"], "--port"),
    (["ui", "store", "--no-open", "-d", "store"], "DIRECTORY or --storage-dir"),
    (["ui", "store", "--no-open", "--backend", "nope"], "nope"),
    (["sweep", "show", "typo", *STORE], "no sweep 'typo' in the store"),
    (["sweep", "run", "typo", *STORE, "--", "python"], "no sweep 'typo' in the store"),
    # what is imported
    *(
        (["import", tool, "typo", "-d", "new"], "typo")
        for tool in (
            *("tensorboard", "aim", "ato", "clearml", "comet", "csv", "mlflow", "neptune"),
            *("track", "trackio", "wandb"),
        )
    ),
    *(
        (["import", tool, "empty", "-d", "new"], "no runs of ")
        for tool in ("tensorboard", "clearml", "comet", "csv", "neptune", "track", "wandb")
    ),
    (["import", "csv", "prose.csv", "-d", "new"], "not a table of metrics"),
    (["import", "csv", "object.csv", "-d", "new"], "not a table of metrics"),
    (["import", "csv", "header.csv", "-d", "new"], "not a table of metrics"),
    (["import", "csv", ".", "-d", "new"], "not a table of metrics"),
]


@pytest.mark.parametrize(("arguments", "said"), TYPOS, ids=[" ".join(each) for each, _ in TYPOS])
def test_a_mistake_is_refused_and_makes_nothing(place, call, arguments, said):
    before = list_files(place)
    status, out, err = call(*arguments)
    told = " ".join((out + err).split())
    assert status == 2, told
    assert said.replace("PLACE", str(place)) in told
    assert "Traceback" not in told
    if arguments[0] != "import":  # which lists what could not be taken, as it does what was
        assert out == ""
        assert re.search("^quark: ", err, re.M)
    assert list_files(place) == before


def test_what_is_right_is_taken_beside_what_is_not(tmp_path, call):
    for name, text in {**FILES, "table.csv": "step,loss\n0,1.0\n1,0.5\n"}.items():
        (tmp_path / name).write_text(text)
    status, told, _ = call("import", "csv", str(tmp_path), "-d", str(tmp_path / "new"), "--json")
    assert status == 1, told
    runs = json.loads(told)["runs"]
    assert sorted(run["points"] for run in runs) == [0, 0, 0, 2]
    assert len(quark.search_runs(storage_dir=tmp_path / "new")) == 1


def test_an_objective_that_was_mistyped_is_not_stored(place, call):
    assert call("analyze", "r1", *STORE, "--objective", "zebra")[0] == 2
    status, told, _ = call("show", "r1", *STORE)
    assert status == 0
    assert "zebra" not in told
    assert "quark analyze" not in told
