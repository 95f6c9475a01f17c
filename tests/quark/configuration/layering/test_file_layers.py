"""Layers in files: lines, merging, and files that mean harm."""

import subprocess
import sys

import pytest

from quark import Layers, SchemaValidationError
from quark.configuration.layering.config_files import read_config_text

JSON = """{
  "lr": 0.1,
  "model": {"name": "a{b]:,\\"c", "depth": 3,
    "head": {"classes": 10}},
  "sizes": [1, {"lr": 2},
    3],
  "last": true
}
"""
TOML = '''lr = 0.1
note = """
lr = 7
"""
sizes = [
  1,
  2,
]
[model]   # a table
name = "x = [y]"
head.classes = 10
[model.tail]
"odd" = 1
[[many]]
lr = 3
'''
YAML = """# a comment
lr: 1e-3
base: &base
  depth: 3
model:
  <<: *base
  name: x
day: 2026-05-07
sizes: [1, 2]
"""


def test_json_knows_its_lines():
    found = read_config_text(JSON, ".json", "x.json")
    assert found.lines == {
        "lr": 2, "model": 3, "model.name": 3, "model.depth": 3, "model.head": 4,
        "model.head.classes": 4, "sizes": 5, "last": 7,
    }  # fmt: skip
    assert found.values["sizes"] == [1, {"lr": 2}, 3]


def test_toml_knows_its_lines():
    found = read_config_text(TOML, ".toml", "x.toml")
    assert found.lines == {
        "lr": 1, "note": 2, "sizes": 5, "model.name": 10, "model.head.classes": 11,
        "model.tail.odd": 13,
    }  # fmt: skip


def test_yaml_knows_its_lines_and_reads_numbers_as_everybody_means_them():
    pytest.importorskip("yaml")
    found = read_config_text(YAML, ".yaml", "x.yaml")
    assert found.values["lr"] == 0.001
    assert found.values["day"] == "2026-05-07"
    assert found.values["model"] == {"depth": 3, "name": "x"}
    assert found.lines["lr"] == 2
    assert found.lines["model.name"] == 7
    assert found.lines["model.depth"] == 4


@pytest.mark.parametrize(("ending", "text"), [("json", JSON), ("toml", TOML), ("yaml", YAML)])
def test_a_file_is_merged_and_each_setting_has_its_line(tmp_path, monkeypatch, ending, text):
    if ending == "yaml":
        pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"conf.{ending}").write_text(text)
    layers = Layers()

    @layers.add(default=True)
    def base(c):
        c.lr, c.model = 7, {"kept": 1}

    layers.add_file(f"conf.{ending}")
    config = layers.resolve([])
    assert config.model.kept == 1
    line = {"json": 2, "toml": 1, "yaml": 2}[ending]
    assert f"<- conf (conf.{ending}:{line}) <- 7 base (" in config.why("lr")


def test_a_file_may_be_named_on_the_command_line_or_be_absent(tmp_path):
    (tmp_path / "big.json").write_text('{"width": 512}')
    layers = Layers()
    layers.add_file(tmp_path / "big.json", name="big", default=False)
    layers.add_file(tmp_path / "absent.json", optional=True)
    assert layers.resolve([]) == {}
    assert layers.resolve(["big"]) == {"width": 512}
    with pytest.raises(SchemaValidationError, match="the layer 'big' already exists"):
        layers.add_file(tmp_path / "big.json")
    with pytest.raises(SchemaValidationError, match="path must be a path"):
        layers.add_file(3)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.json", b'{"a": 1, "a": 2}', "'a' occurs twice"),
        ("x.json", b"[1]", "contains a list, but a config must be a mapping"),
        ("x.json", b"{", "cannot be read"),
        ("x.json", b"\xff\xfe", "is not UTF-8"),
        ("x.json", b'{"a":' * 60_000 + b"1" + b"}" * 60_000, "nested too deep"),
        ("x.json", b'{"a":' * 40 + b"1" + b"}" * 40, "nested deeper than 32"),
        ("x.json", b'{"a": [' + b"1," * 200_000 + b"1]}", "more than 100,000 values"),
        ("x.json", b" " * 4_000_001, "more than 4 MB"),
        ("x.toml", b"a = 1\na = 2", "cannot be read"),
        ("x.ini", b"", "end with .json, .toml, .yaml, .yml"),
        ("x.yaml", b"a: 1\nb: 2\na: 3\n", "line 3: the key 'a' occurs twice"),
        ("x.yaml", b"a: !!python/object/apply:os.system ['true']\n", "could not determine"),
        ("x.yaml", b"a: !!python/name:os.system\n", "could not determine"),
        ("x.yaml", b"a: &a [*a]\n", "expands to more than"),
        ("x.yaml", b"a: &a {b: *a}\n", "expands to more than"),
        ("x.yaml", b"a: *gone\n", "line 1"),
        ("x.yaml", b"a: 1\n---\nb: 2\n", "another document"),
    ],
)
def test_files_that_mean_harm_are_refused(tmp_path, name, content, said):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_bytes(content)
    layers = Layers()
    layers.add_file(tmp_path / name)
    with pytest.raises(SchemaValidationError, match=said) as raised:
        layers.resolve([])
    assert name in str(raised.value)
    assert len(str(raised.value)) < 600


def test_a_bomb_of_aliases_is_refused_soon(tmp_path):
    pytest.importorskip("yaml")
    lines = ['a0: &a0 ["x", "x", "x", "x", "x", "x", "x", "x", "x", "x"]']
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    layers = Layers()
    layers.add_file(tmp_path / "bomb.yaml")
    with pytest.raises(SchemaValidationError, match="expands to more than"):
        layers.resolve([])


def test_without_pyyaml_yaml_says_what_to_install(tmp_path):
    (tmp_path / "x.yaml").write_text("a: 1\n")
    script = (
        "import sys; sys.modules['yaml'] = None\n"
        "import quark\n"
        "layers = quark.Layers(); layers.add_file('x.yaml'); layers.resolve([])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "pip install 'quark-tracker[yaml]'" in done.stderr


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    layers = Layers()
    layers.add_file(tmp_path / "gone.json")
    with pytest.raises(SchemaValidationError, match=r"gone\.json cannot be read: No such file"):
        layers.resolve([])
