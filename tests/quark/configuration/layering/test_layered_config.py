"""The mapping that layers make: dots, copies, and its memory."""

import copy
import json
import pickle
import tomllib

import pytest

from quark import LayeredConfig, Layers, SchemaValidationError


@pytest.fixture
def config():
    return LayeredConfig({"lr": 0.1, "optimizer": {"name": "sgd", "momentum": 0.9}, "sizes": [1]})


def test_dots_items_and_paths_are_the_same(config):
    assert config.optimizer.name == config["optimizer"]["name"] == config["optimizer.name"] == "sgd"
    assert config.get("optimizer.name") == "sgd"
    assert config.get("optimizer.absent", 3) == 3
    assert "optimizer.momentum" in config
    assert "optimizer.absent" not in config
    config.optimizer.name = "adam"
    config["optimizer.betas"] = [0.9, 0.99]
    assert config.to_dict()["optimizer"] == {"name": "adam", "momentum": 0.9, "betas": [0.9, 0.99]}


def test_a_path_makes_what_is_above_it():
    config = LayeredConfig()
    config["model.backbone.layers"] = [64, 128]
    assert config.model.backbone.layers == [64, 128]
    config["model.backbone"] = {"depth": 3}
    assert config == {"model": {"backbone": {"depth": 3}}}
    config["model.backbone.depth.of"] = 1
    assert config.model.backbone.depth.of == 1


def test_what_is_not_there_is_told_with_what_is_near(config):
    with pytest.raises(AttributeError, match="no key 'optimzer'; did you mean 'optimizer'"):
        config.optimzer  # noqa: B018
    with pytest.raises(KeyError, match="no key 'nam' in optimizer; did you mean 'name'"):
        config.optimizer["nam"]
    assert not hasattr(config, "absent")
    assert getattr(config, "absent", 7) == 7


def test_methods_are_no_keys(config):
    with pytest.raises(AttributeError, match="items is a method"):
        config.items = 3
    config["items"] = 3
    assert config["items"] == 3
    assert len(list(config.items())) == 4


@pytest.mark.parametrize("key", ["", "a..b", ".a", 3])
def test_bad_keys_are_refused(config, key):
    with pytest.raises(SchemaValidationError, match="config"):
        config[key] = 1


def test_what_holds_itself_ends():
    circle = {}
    circle["again"] = circle
    with pytest.raises(SchemaValidationError, match="has more than "):
        LayeredConfig(circle)


def test_update_merges_and_assignment_replaces(config):
    config.update({"optimizer": {"lr": 1}}, lr=0.2)
    assert config == {
        "lr": 0.2, "optimizer": {"name": "sgd", "momentum": 0.9, "lr": 1}, "sizes": [1],
    }  # fmt: skip
    config.optimizer = {"name": "adam"}
    assert config.optimizer == {"name": "adam"}
    config |= {"epochs": 3}
    assert config.epochs == 3
    assert isinstance(config, LayeredConfig)


def test_what_is_there_already_is_kept_where_that_is_asked_for(config):
    config.update_if_absent(lr=9, scheduler="cosine", optimizer={"name": "adam", "eps": 1e-8})
    assert config.lr == 0.1
    assert config.scheduler == "cosine"
    assert config.optimizer == {"name": "sgd", "momentum": 0.9, "eps": 1e-8}
    assert config.setdefault("lr", 5) == 0.1


def test_keys_are_taken_out(config):
    del config.lr
    assert config.pop("optimizer.momentum") == 0.9
    assert config.pop("absent", None) is None
    assert config.popitem() == ("sizes", [1])
    with pytest.raises(KeyError):
        del config["lr"]
    with pytest.raises(AttributeError):
        del config.lr
    config.clear()
    assert config == {}


def test_frozen_nothing_changes_it(config):
    config.freeze()
    for change in (
        lambda: config.__setitem__("lr", 1),
        lambda: setattr(config.optimizer, "name", "x"),
        lambda: config.update(lr=1),
        lambda: config.pop("lr"),
        lambda: config.__setitem__("optimizer.deep.er", 1),
    ):
        with pytest.raises(TypeError, match="frozen"):
            change()
    assert config.copy().update(lr=1) is None


def test_it_is_a_dict_to_whoever_wants_one(config):
    assert json.loads(json.dumps(config)) == config
    assert dict(**config)["lr"] == 0.1
    plain = config.to_dict()
    assert type(plain["optimizer"]) is dict
    plain["sizes"].append(2)
    assert config.sizes == [1]


@pytest.mark.parametrize(
    "take", [copy.copy, copy.deepcopy, lambda c: c.copy(), lambda c: pickle.loads(pickle.dumps(c))]
)
def test_copies_know_what_the_original_knew(take):
    layers = Layers()

    @layers.add(default=True)
    def base(c):
        c["optimizer.lr"] = 0.1

    config = layers.resolve(["optimizer.lr=0.2"])
    taken = take(config)
    assert taken == config
    assert taken.why() == config.why()
    taken.optimizer.lr = 0.3
    assert config.optimizer.lr == 0.2
    assert "<- 0.2 command line <- 0.1 base" in taken.why("optimizer.lr")


def test_why_tells_what_replaced_what_and_below_a_key_all(config):
    config.lr = 0.2
    said = config.why("lr")
    assert said.startswith("lr = 0.2  <- code (")
    assert "test_layered_config.py:" in said
    assert "<- 0.1 code (" in said
    assert [line.partition(" ")[0] for line in config.why("optimizer").splitlines()] == [
        "optimizer.name",
        "optimizer.momentum",
    ]
    with pytest.raises(KeyError, match="absent"):
        config.why("absent")


def test_a_part_that_was_replaced_writes_nothing_more(config):
    old = config.optimizer
    config.optimizer = {"name": "adam"}
    old.name = "lost"
    assert config.optimizer.name == "adam"
    assert "lost" not in config.why()


def test_a_setting_that_is_counted_up_has_a_bounded_memory(config):
    for number in range(1000):
        config.lr = number
    said = config.why("lr")
    assert said.count("<-") <= 51
    assert said.endswith(said[said.rindex("<- 0.1 code") :])


VALUES = {
    "lr": 1e-3,
    "name": 'a "quoted" one\n',
    "fast": True,
    "sizes": [1, 2],
    "optimizer": {"name": "adam", "betas": [0.9, 0.99], "deep": {"er": 1}},
    "empty": {},
    "odd key": {"a/b": 1},
}


@pytest.mark.parametrize("ending", ["json", "toml", "yaml"])
def test_a_saved_configuration_comes_back(tmp_path, ending):
    path = tmp_path / f"config.{ending}"
    LayeredConfig(VALUES).save(path)
    layers = Layers()
    layers.add_file(path)
    assert layers.resolve([]) == VALUES
    if ending == "toml":
        assert tomllib.loads(path.read_text()) == VALUES


def test_what_a_format_cannot_hold_is_named(tmp_path, config):
    config["model.weights"] = None
    with pytest.raises(SchemaValidationError, match=r"config\.model\.weights is None"):
        config.save(tmp_path / "x.toml")
    config["model.weights"] = object()
    with pytest.raises(SchemaValidationError, match=r"config\.model\.weights"):
        config.save(tmp_path / "x.json")
    with pytest.raises(SchemaValidationError, match="saved as"):
        LayeredConfig().save(tmp_path / "x.xyz")
