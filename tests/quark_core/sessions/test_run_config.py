"""What a session says of its run: id, name and configuration."""

import pytest

import quark


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
        session.config["model"]["widths"].append(3)
        assert session.config["model"] == {"widths": [1, 2]}
        with pytest.raises(TypeError):
            session.config["model"] = {}


def test_a_run_without_a_configuration_has_an_empty_one(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
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
