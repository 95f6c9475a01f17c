"""Spaces as people write them: on a command line, and in files of this and other tools."""

import json

import pytest

import quark
from quark.sweeps.space import Integers, Uniform, read_setting, read_space, read_space_file


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("lr=log:1e-5:1e-1", "lr", Uniform(1e-5, 1e-1, log=True)),
        ("lr=log:1e-5:1e-1:5", "lr", Uniform(1e-5, 1e-1, log=True, count=5)),
        ("dropout=uniform:0:0.5", "dropout", Uniform(0.0, 0.5)),
        ("shift=uniform:-1:1", "shift", Uniform(-1.0, 1.0)),
        ("layers=int:1:4", "layers", Integers(1, 4)),
        ("width=logint:16:1024", "width", Integers(16, 1024, log=True)),
        ("optimizer=adam,sgd", "optimizer", ["adam", "sgd"]),
        ("batch=16, 32,1e2", "batch", [16, 32, 100.0]),
        ("amp=true,false,null", "amp", [True, False, None]),
        ("epochs=20", "epochs", [20]),
        ("url=http://host:80", "url", ["http://host:80"]),
        ('path=["a,b", "c"]', "path", ["a,b", "c"]),
        ("a.b=x=y", "a.b", ["x=y"]),
        ('ratio=["lgo:1:2"]', "ratio", ["lgo:1:2"]),
        ("image=registry:5000/a:1", "image", ["registry:5000/a:1"]),
    ],
)
def test_a_setting_is_a_range_or_choices(text, name, values):
    assert read_setting(text) == (name, values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr", "--set must be NAME=VALUES, got 'lr'"),
        ("=1", "--set must be NAME=VALUES"),
        ("lr=", "--set lr needs values"),
        ("lr=log:1", "--set lr must be one of log:LOW:HIGH"),
        ("lr=log:0:1", "--set lr: low must be above 0"),
        ("lr=log:a:1", "--set lr: 'a' is not a finite number"),
        ("lr=uniform:0:inf", "--set lr: 'inf' is not a finite number"),
        ("lr=uniform:1:0", "--set lr: low must be below high"),
        ("n=int:1:2.5", "--set n: 2.5 is not a whole number"),
        ("n=int:1:4:0", "--set n: count must be"),
        ("lr=lgo:1e-5:1e-1", "--set lr: the range 'lgo' does not exist. Use log:LOW:HIGH"),
        ("n=Int:1:4", "--set n: the range 'Int' does not exist"),
        ("n=linear:1:4:3", "--set n: the range 'linear' does not exist"),
    ],
)
def test_what_is_no_setting_is_told_by_its_name(text, said):
    with pytest.raises(quark.SchemaValidationError, match=f"^{said}"):
        read_setting(text)


def test_spaces_of_other_tools_are_read(tmp_path):
    path = tmp_path / "ato.json"
    path.write_text(
        json.dumps(
            {
                "lr": {
                    "param_type": "FLOAT",
                    "param_range": [1e-5, 1e-1],
                    "num_samples": 20,
                    "space_type": "LOG",
                },
                "batch_size": {"param_type": "INTEGER", "param_range": [16, 128]},
                "model": {"param_type": "CATEGORY", "categories": ["resnet50", "resnet101"]},
            }
        )
    )
    assert read_space_file(path) == {
        "lr": Uniform(1e-5, 1e-1, log=True, count=20),
        "batch_size": Integers(16, 128),
        "model": ["resnet50", "resnet101"],
    }
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "program: train.py\nmethod: random\nparameters:\n"
        "  lr: {distribution: log_uniform_values, min: 1e-5, max: 0.1}\n"
        "  layers: {min: 1, max: 4}\n  optimizer: {values: [adam, sgd]}\n  epochs: {value: 3}\n"
    )
    assert read_space_file(path) == {
        "lr": Uniform(1e-5, 0.1, log=True),
        "layers": Integers(1, 4),
        "optimizer": ["adam", "sgd"],
        "epochs": [3],
    }


def test_a_file_says_what_settings_say_or_what_a_definition_has(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text(
        'lr = "log:1e-4:1e-1"\nbatch = [16, 32]\nepochs = 20\n'
        '[width]\ntype = "integers"\nlow = 8\nhigh = 64\nstep = 8\n'
    )
    space = read_space(read_space_file(path))
    assert space.to_dict() == {
        "lr": {"type": "uniform", "low": 1e-4, "high": 1e-1, "log": True},
        "batch": {"type": "choices", "values": [16, 32]},
        "epochs": {"type": "choices", "values": [20]},
        "width": {"type": "integers", "low": 8, "high": 64, "step": 8},
    }
    # A definition that `quark sweep show --json` has printed, too.
    path = tmp_path / "again.json"
    path.write_text(json.dumps({"space": space.to_dict(), "metric": "loss"}))
    assert read_space(read_space_file(path)).to_dict() == space.to_dict()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", "[" * 100_000, "is not JSON"),
        ("a.toml", "a = ", "is not TOML"),
        ("a.yaml", "a: [1", "is not YAML"),
        ("a.yaml", "a: !!python/object/apply:os.system ['true']", "is not YAML"),
        ("a.txt", "a", "must end with .json, .toml, .yaml or .yml"),
        ("a.json", "[1]", "must contain names with their values"),
        ("a.json", "{}", "the file has no parameters"),
        ("a.json", '{"a": {"odd": 1}}', "a must be a string such as"),
        ("a.json", '{"a": []}', "a has no choice"),
        ("a.json", '{"a": {"param_type": "TEXT"}}', "a: param_type must be FLOAT"),
        ("a.json", '{"a": {"param_type": "FLOAT"}}', "a: param_range must be"),
        ("a.json", '{"a": {"min": 1}}', "a: of W&B's forms"),
        ("a.json", '{"a": {"distribution": "normal", "min": 1, "max": 2}}', "a: of W&B's forms"),
        ("a.json", '{"a": {"values": [1], "q": 1}}', "a: 'q' is not supported here"),
        ("a.json", '{"a": "' + "x" * 1_000_001 + '"}', "is larger than"),
    ],
)
def test_a_file_that_holds_no_space_is_refused(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(quark.SchemaValidationError) as raised:
        read_space_file(path)
    assert str(raised.value).startswith(f"--space {path}")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(quark.SchemaValidationError, match="cannot be read: No such file"):
        read_space_file(tmp_path / "none.json")
