"""What a session says of its run: id, name and configuration."""

import copy
import json
import pickle
import threading
from types import SimpleNamespace

import pytest

import quark
from quark import EventLogger
from quark_core.errors import InvalidRunStateError, SchemaValidationError

KEY = "sk-1234567890abcdef1234567890abcdef"


def test_a_session_says_its_id_name_and_configuration(tmp_path):
    config = {"lr": 0.1, "model": {"width": 64}, "api_key": "sk-1234567890abcdef1234567890abcdef"}
    with quark.start_run(
        project="p", name="digits", config=config, storage_dir=tmp_path
    ) as session:
        assert session.id == session.run_id
        assert session.name == "digits"
        assert session.config["lr"] == 0.1
        assert dict(session.config)["model"] == {"width": 64}
        assert "sk-1234567890" not in str(dict(session.config))
        assert list(session.config) == ["lr", "model", "api_key"]
    opened = quark.open_run(session.run_id, tmp_path)
    assert opened.config == session.config
    assert opened.name == "digits"


def test_the_configuration_of_a_session_cannot_be_changed_through_what_it_gives(tmp_path):
    with quark.start_run(
        project="p", config={"model": {"widths": [1, 2]}}, storage_dir=tmp_path
    ) as session:
        for change in (
            lambda: session.config["model"].update(depth=3),
            lambda: session.config["model"].__setitem__("depth", 3),
            lambda: session.config["model"].pop("widths"),
            lambda: session.config["model"]["widths"].append(3),
            lambda: session.config["model"]["widths"].sort(),
        ):
            with pytest.raises(TypeError, match=r"write session\.config\['model'\] = copy"):
                change()
        assert session.config["model"] == {"widths": [1, 2]}
        own = copy.deepcopy(session.config["model"])
        own["widths"].append(3)
        assert pickle.loads(pickle.dumps(session.config["model"])) == {"widths": [1, 2]}
        assert json.loads(json.dumps(session.config["model"])) == {"widths": [1, 2]}
        session.config["model"] = own
        assert session.config["model"] == {"widths": [1, 2, 3]}


def test_a_run_without_a_configuration_has_an_empty_one(session):
    assert len(session.config) == 0
    assert session.config.get("lr") is None


def test_a_resumed_run_has_the_configuration_that_it_was_started_with(tmp_path):
    with quark.start_run(project="p", config={"lr": 0.1}, storage_dir=tmp_path) as session:
        pass
    with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, reopen=True) as resumed:
        assert resumed.config == {"lr": 0.1}


def test_the_text_of_a_configuration_is_one_short_line(tmp_path):
    config = {f"key{number}": "x" * 100 for number in range(50)}
    with quark.start_run(project="p", config=config, storage_dir=tmp_path) as session:
        assert "\n" not in repr(session.config)
        assert len(repr(session.config)) < 100


def read_changes(session):
    return [each.payload for each in EventLogger(session).read(event_type="config_changed")]


def test_a_configuration_is_changed_after_the_start_and_its_history_kept(tmp_path):
    config = {"lr": 0.1, "model": {"width": 64, "depth": 2}}
    with quark.start_run(project="p", config=config, storage_dir=tmp_path) as session:
        session.config.update({"lr": 0.01, "model": {"width": 128}}, seed=7)
        session.config["lr"] = 0.001
        session.config.update(SimpleNamespace(warmup=10))
        assert session.config == {"lr": 0.001, "model": {"width": 128}, "seed": 7, "warmup": 10}
        changes = read_changes(session)

    assert [each["changes"] for each in changes] == [
        {
            "lr": {"before": 0.1, "after": 0.01},
            "model": {"before": {"width": 64, "depth": 2}, "after": {"width": 128}},
            "seed": {"before": None, "after": 7},
        },
        {"lr": {"before": 0.01, "after": 0.001}},
        {"warmup": {"before": None, "after": 10}},
    ]
    assert changes[1]["message"] == "config: lr 0.01 becomes 0.001"
    opened = quark.open_run(session.run_id, tmp_path)
    assert opened.config == {"lr": 0.001, "model": {"width": 128}, "seed": 7, "warmup": 10}
    wanted = "config.lr < 0.005 and config.model.width == 128"
    (found,) = quark.search_runs(where=wanted, storage_dir=tmp_path)
    assert found.run_id == session.run_id
    assert not quark.search_runs(where="config.lr == 0.1", storage_dir=tmp_path)


def test_a_change_that_changes_nothing_leaves_no_trace(tmp_path):
    with quark.start_run(project="p", config={"lr": 0.1}, storage_dir=tmp_path) as session:
        session.config.update()
        session.config.update({"lr": 0.1})
        assert read_changes(session) == []


def test_secrets_stay_out_of_a_changed_configuration_and_of_its_history(tmp_path):
    with quark.start_run(project="p", config={"token": KEY}, storage_dir=tmp_path) as session:
        session.config.update({"api_key": KEY, "note": f"use {KEY}"})
        session.config["token"] = KEY[::-1]
        assert KEY not in str(dict(session.config))
        assert KEY not in str(read_changes(session))
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert KEY.encode() not in written


def test_a_resumed_run_goes_on_with_the_changed_configuration(tmp_path):
    with quark.start_run(project="p", config={"lr": 0.1}, storage_dir=tmp_path) as session:
        session.config["lr"] = 0.2
        session.end_run("interrupted")
    with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path) as resumed:
        assert resumed.config == {"lr": 0.2}
        resumed.config["lr"] = 0.3
    assert quark.open_run(session.run_id, tmp_path).config == {"lr": 0.3}


def test_threads_that_change_different_keys_lose_no_change(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        threads = [
            threading.Thread(target=session.config.update, kwargs={f"key{number}": number})
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert dict(quark.open_run(session.run_id, tmp_path).config) == {
        f"key{number}": number for number in range(8)
    }


def test_what_cannot_be_changed_says_so(tmp_path):
    with quark.start_run(project="p", config={"lr": 0.1}, storage_dir=tmp_path) as session:
        with pytest.raises(SchemaValidationError, match="config must be"):
            session.config.update([1, 2])
        with pytest.raises(TypeError, match=r"session\.config\['lr'\] = None"):
            del session.config["lr"]
        with pytest.raises(AttributeError, match=r"Write session\.config\['lr'\]"):
            session.config.lr  # noqa: B018
        assert not hasattr(session.config, "width")
    with pytest.raises(InvalidRunStateError, match=r"config\.update: the run has ended"):
        session.config["lr"] = 1
    with pytest.raises(InvalidRunStateError, match="reading only"):
        quark.open_run(session.run_id, tmp_path).config["lr"] = 1


@pytest.mark.parametrize("mirror", ["csv"])
def test_a_mirror_has_the_changed_configuration(tmp_path, mirror):
    with quark.start_run(
        project="p", config={"lr": 0.1}, storage_dir=tmp_path, backends=mirror
    ) as session:
        session.config["lr"] = 0.2
    opened = quark.open_run(session.run_id, tmp_path, backend=mirror)
    assert opened.config == {"lr": 0.2}
