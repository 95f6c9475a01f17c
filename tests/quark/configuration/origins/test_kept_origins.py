"""Origins of settings are kept with the run: in every store, redacted, bounded, told."""

import argparse
import json
import sys

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark.configuration.setting_origins import note_source
from quark_core.records import ConfigSnapshot
from quark_core.records.json_object import JsonObject
from quark_core.runs.config_reading import read_config


def make_config(argv=()):
    layers = quark.Layers()

    @layers.add(default=True)
    def defaults(c):
        c.lr, c.db = 0.001, {"password": "hunter2hunter2", "host": "x"}

    @layers.add(priority=1)
    def high_lr(c):
        c.lr = 0.01

    return layers.resolve(list(argv))


def tell(snapshot, key):
    return [(each.source, each.value) for each in snapshot.group_origins().get(key, ())]


def invoke(*arguments):
    done = CliRunner().invoke(cli, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def run(tmp_path):
    config = make_config(["high_lr", "lr=0.02"])
    with quark.start_run(project="digits", config=config, storage_dir=tmp_path) as session:
        pass
    return tmp_path, session.id


def test_a_stored_run_knows_what_gave_its_settings_their_values(run):
    root, run_id = run
    stored = quark.search_runs(storage_dir=root)[0].stored
    assert stored.run.id == run_id
    assert tell(stored.config, "lr") == [
        ("command line", 0.02),
        ("high_lr", 0.01),
        ("defaults", 0.001),
    ]
    (newest, *_, oldest) = stored.config.group_origins()["lr"]
    assert newest.place is None
    line = make_config.__code__.co_firstlineno + 5
    assert oldest.place.endswith(f"test_kept_origins.py:{line}")


def test_secrets_are_redacted_in_origins_as_in_values(run):
    root, _ = run
    stored = quark.search_runs(storage_dir=root)[0].stored
    assert tell(stored.config, "db.password") == [("defaults", "[redacted]")]
    for path in root.rglob("*"):
        if path.is_file():
            assert b"hunter2" not in path.read_bytes(), path


def test_show_tells_why_a_setting_has_its_value(run):
    root, run_id = run
    said = invoke("show", run_id, "-d", root, "--why", "lr")
    assert said.startswith("lr = 0.02  <- command line <- 0.01 high_lr (")
    assert " <- 0.001 defaults (" in said
    everything = invoke("show", run_id, "-d", root, "--why")
    assert [line.partition(" ")[0] for line in everything.splitlines()] == [
        "lr",
        "db.password",
        "db.host",
    ]
    told = json.loads(invoke("show", run_id, "-d", root, "--why", "db", "--json"))
    assert told["db.host"]["value"] == "x"
    assert told["db.host"]["origins"][0]["source"] == "defaults"
    assert "from" in invoke("show", run_id, "-d", root)


def test_show_says_what_is_not_there(run):
    root, run_id = run
    done = CliRunner().invoke(cli, ["show", run_id, "-d", str(root), "--why", "lrr"])
    assert done.exit_code == 1
    assert "no config value 'lrr'; did you mean 'lr'" in done.output


def test_why_names_what_gave_a_setting_its_value(tmp_path):
    runs = []
    for word, loss in (("high_lr", 1.0), ("lr=0.5", 2.0)):
        with quark.start_run(
            project="digits", config=make_config([word]), storage_dir=tmp_path
        ) as session:
            runs.append(session.id)
            for step in range(5):
                quark.MetricsLogger(session).log("val/loss", loss + step * 0.01, step=step)
    result = quark.explain_change(*runs, storage_dir=tmp_path)
    told = [each for each in (*result.causes, *result.differences) if each.place == "lr"]
    assert "set by command line, before by high_lr (" in told[0].summary


def test_a_later_change_is_an_origin_of_its_own(tmp_path):
    config = make_config(["high_lr"])
    with quark.start_run(project="digits", config=config, storage_dir=tmp_path) as session:
        session.config.update(lr=0.5)
        session.update_config({"plain": 1})
    config = quark.search_runs(storage_dir=tmp_path)[0].stored.config
    assert tell(config, "lr") == [
        ("config.update", 0.5),
        ("high_lr", 0.01),
        ("defaults", 0.001),
    ]
    assert "test_kept_origins.py:" in config.group_origins()["lr"][0].place
    assert tell(config, "plain") == [("update_config", 1)]
    assert tell(config, "db.host") == [("defaults", "x")]


def test_a_plain_dictionary_that_is_changed_knows_what_it_was(tmp_path):
    with quark.start_run(project="d", config={"lr": 1, "x": 2}, storage_dir=tmp_path) as session:
        session.config["lr"] = 3
    config = quark.search_runs(storage_dir=tmp_path)[0].stored.config
    assert tell(config, "lr") == [("config.update", 3), ("start", 1)]
    assert tell(config, "x") == []


def test_a_parser_says_what_was_given_and_what_is_a_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1", "--fast"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("-w", "--width", type=int, default=8)
    parser.add_argument("--fast", action="store_true")
    snapshot = read_config(parser)
    told = {key: each[0].label for key, each in snapshot.group_origins().items()}
    assert told == {
        "lr": "command line (--lr)",
        "width": "argparse default (--width)",
        "fast": "command line (--fast)",
    }


def test_of_parsed_arguments_what_the_command_line_says_is_known(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr=0.1", "--model.depth", "3", "name=x"])
    values = {"lr": 0.1, "model": {"depth": 3}, "name": "x", "width": 8}
    for config in (argparse.Namespace(**values), values):
        origins = read_config(config).origins
        assert {each.key: each.label for each in origins} == {
            "lr": "command line (--lr)",
            "model.depth": "command line (--model.depth)",
            "name": "command line",
        }
    # What has another value was not given there.
    assert read_config({"lr": 0.2}).origins == ()


def test_interpolations_of_omegaconf_are_origins():
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"lr": 0.1, "half": "${lr}", "s": {"password": "${lr}"}})
    snapshot = read_config(config)
    assert [each.label for each in snapshot.group_origins()["half"]] == ["interpolation (${lr})"]
    # How a secret is put together is nobody's business either.
    assert tell(snapshot, "s.password") == []


def test_a_tracked_configuration_and_one_within_another_know_theirs():
    config = make_config(["high_lr"])
    assert tell(read_config(quark.tracked(config)), "lr")[0] == ("high_lr", 0.01)
    snapshot = read_config({"train": config, "seed": 1})
    assert tell(snapshot, "train.lr")[0] == ("high_lr", 0.01)
    assert tell(snapshot, "seed") == []


def test_what_is_changed_in_place_after_all_was_changed_by_code():
    layers = quark.Layers()

    @layers.add(default=True)
    def base(c):
        c.sizes = [1]

    config = layers.resolve([])
    config.sizes.append(2)
    assert tell(read_config(config), "sizes") == [("code", [1, 2]), ("base", [1])]


def test_origins_are_bounded():
    config = quark.LayeredConfig()
    for number in range(200):
        config.lr = number
    config.text = "x" * 5000
    for number in range(4000):
        config[f"key_{number}"] = "y" * 150
    snapshot = read_config(config)
    assert len(snapshot.group_origins()["lr"]) == 12
    assert len(snapshot.group_origins()["text"][0].value) == 400
    assert len(json.dumps(snapshot.to_data()["origins"])) < 300_000
    assert any("origins were not stored" in note for note in snapshot.notes)
    assert len(snapshot.values) == 4002


@pytest.mark.parametrize(
    "origins",
    [None, 3, "x", {}, [1], [{"key": 1}], [{"key": "lr", "source": None}], [{"key": "lr"}]],
)
def test_what_is_no_origin_is_let_go(origins):
    snapshot = ConfigSnapshot.from_data({"values": {"lr": 1}, "notes": [], "origins": origins})
    assert snapshot == ConfigSnapshot(JsonObject({"lr": 1}))
    assert "origins" not in snapshot.to_data()


def test_a_snapshot_comes_back_from_its_data():
    snapshot = read_config(make_config(["high_lr"]))
    assert ConfigSnapshot.from_data(json.loads(json.dumps(snapshot.to_data()))) == snapshot
    assert ConfigSnapshot.from_data(json.loads(json.dumps(snapshot.to_dict()))) == snapshot


def test_a_source_is_noted_of_some_settings():
    given = {"lr": 0.1, "x": 2, "absent": 1}
    snapshot = note_source(read_config({"lr": 0.1, "x": 1}), given, "trial 3 of lr-search")
    assert tell(snapshot, "lr") == [("trial 3 of lr-search", 0.1)]
    assert tell(snapshot, "x") == []


def test_a_source_that_raises_costs_nothing_but_the_origins(monkeypatch):
    monkeypatch.setattr(
        "quark.configuration.setting_origins._find", lambda *_: (_ for _ in ()).throw(OSError("x"))
    )
    snapshot = read_config({"lr": 0.1})
    assert snapshot.values == {"lr": 0.1}
    assert snapshot.origins == ()
