"""quark.tracked: which keys of a configuration were read."""

import copy
import json
import os
import pickle
from argparse import Namespace

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_core.config.snapshot import list_reads, tracked
from quark_core.records.query import Query

CONFIG = {"lr": 0.1, "never": 1, "optimizer": {"name": "sgd", "momentum": 0.9}}


def read_of(config):
    return list_reads(config)[0]


def test_keys_read_by_item_by_attribute_and_below_are_noted():
    config = tracked(CONFIG)
    assert config.lr == 0.1
    assert config["optimizer"].name == "sgd"
    assert config.get("absent") is None
    assert read_of(config) == ["lr", "optimizer.name"]


@pytest.mark.parametrize("walk", [dict, list, len, lambda c: {**c}, lambda c: list(c.items())])
def test_who_walks_over_it_has_read_all_of_it(walk):
    config = tracked(CONFIG)
    walk(config["optimizer"])
    assert read_of(config) == ["optimizer.momentum", "optimizer.name"]
    walk(config)
    assert read_of(config) == ["lr", "never", "optimizer.momentum", "optimizer.name"]


def test_asking_whether_a_key_is_there_reads_it():
    config = tracked(CONFIG)
    assert "never" in config
    assert read_of(config) == ["never"]


def test_a_pickle_and_a_deep_copy_count_as_having_read_all():
    for take in (copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))):
        config = tracked(CONFIG)
        assert take(config) == CONFIG
        assert len(read_of(config)) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_reads_of_forked_children_count():
    config = tracked(CONFIG)
    child = os.fork()
    if child == 0:
        config.never  # noqa: B018
        os._exit(0)
    os.waitpid(child, 0)
    assert read_of(config) == ["never"]


def test_it_cannot_be_changed_and_says_so():
    config = tracked(Namespace(lr=0.1))
    for change in (lambda: setattr(config, "lr", 1), lambda: config.__setitem__("lr", 1)):
        with pytest.raises(TypeError, match="lr"):
            change()
    with pytest.raises(AttributeError, match="absent"):
        config.absent  # noqa: B018


def test_what_is_no_mapping_is_refused():
    with pytest.raises(quark.SchemaValidationError, match="tracked: config must be"):
        tracked([1])


def test_a_run_keeps_at_its_end_what_was_read_and_its_own_snapshot_reads_nothing(tmp_path):
    config = quark.tracked(CONFIG)
    with quark.start_run(project="p", storage_dir=tmp_path, config=config) as session:
        assert config.lr == 0.1
    run = quark.open_run(session.run_id, storage_dir=tmp_path)
    assert dict(run.config) == CONFIG
    (said,) = run.open_run.read("fingerprint", Query()).to_records()
    assert said.key == "config_reads"
    assert json.loads(json.dumps(said.metadata))["read"] == ["lr"]


def test_show_says_which_keys_were_never_read(tmp_path):
    """Ato's `get_minimal_config`: what is left of a configuration that matters."""
    config = quark.tracked(CONFIG)
    with quark.start_run(project="p", storage_dir=tmp_path, config=config) as session:
        assert config.lr == 0.1
    shown = CliRunner().invoke(cli, ["show", session.id, "-d", str(tmp_path)])
    unread = sorted({"optimizer.momentum", "optimizer.name", "never"})
    assert f"1 of 4 keys were read, never: {', '.join(unread)}" in " ".join(shown.output.split())
