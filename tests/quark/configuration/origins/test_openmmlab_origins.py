"""OpenMMLab's configurations, made by mmengine itself: the chain of `_base_`, file by file."""

import warnings

import pytest

from quark.configuration.framework_origins import find_openmmlab_chains
from quark_core.runs.config_reading import read_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mmengine_config = pytest.importorskip("mmengine.config")

pytestmark = pytest.mark.filterwarnings("ignore")

FILES = {
    "_base_/models/resnet.py": """model = dict(
    type='ResNet',
    depth=50,
    head=dict(type='Cls', num_classes=1000))
lr = 0.1
token = 'x'
""",
    "_base_/runtime.yaml": "log_level: INFO\nmax_epochs: 100\n",
    "_base_/more.json": '{\n  "workers": 4\n}\n',
    "exp.py": """_base_ = ['./_base_/models/resnet.py', './_base_/runtime.yaml', '_base_/more.json']
model = dict(
    depth=101,
    head=dict(_delete_=True, type='Other'))
lr = 0.1 / 10
""",
    "lazy/base.py": "optimizer = dict(lr=0.1, type='SGD')\n",
    "lazy/new.py": """from mmengine.config import read_base
with read_base():
    from .base import *
optimizer.update(lr=0.02)
epochs = 3
""",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tell(snapshot):
    return {
        key: [(each.label, each.value) for each in chain]
        for key, chain in snapshot.group_origins().items()
    }


def test_each_setting_knows_its_file_and_what_that_replaced(folder):
    config = mmengine_config.Config.fromfile("exp.py")
    config.merge_from_dict({"max_epochs": 5})
    snapshot = read_config(config)
    assert snapshot.values["model"] == {"type": "ResNet", "depth": 101, "head": {"type": "Other"}}
    told = tell(snapshot)
    assert told["model.depth"] == [
        ("exp (exp.py:3)", 101),
        ("resnet (_base_/models/resnet.py:3)", 50),
    ]
    assert told["model.type"] == [("resnet (_base_/models/resnet.py:2)", "ResNet")]
    # `_delete_` takes nothing over.
    assert told["model.head.type"] == [("exp (exp.py:4)", "Other")]
    assert told["workers"] == [("more (_base_/more.json:2)", 4)]
    assert told["max_epochs"] == [("code", 5), ("runtime (_base_/runtime.yaml:2)", 100)]


def test_an_option_of_the_command_line_is_told(folder, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "exp.py", "--cfg-options", "max_epochs=5"])
    config = mmengine_config.Config.fromfile("exp.py")
    config.merge_from_dict({"max_epochs": 5})
    assert tell(read_config(config))["max_epochs"][0] == ("command line", 5)


def test_configurations_of_the_newer_style_are_read_too(folder):
    config = mmengine_config.Config.fromfile("lazy/new.py")
    told = tell(read_config({"cfg": config}))
    assert told["cfg.optimizer.lr"] == [
        ("new (lazy/new.py:4)", 0.02),
        ("base (lazy/base.py:1)", 0.1),
    ]
    assert told["cfg.epochs"] == [("new (lazy/new.py:5)", 3)]


class NamedFile:
    def __init__(self, filename):
        self.filename = filename


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("circle.py", "_base_ = 'circle.py'\nlr = 1\n"),
        ("broken.py", "lr = (\n"),
        ("gone.py", "_base_ = ['gone_too.py', 3]\nlr = 1\n"),
        ("deep.py", "lr = " + "dict(a=" * 90 + "1" + ")" * 90 + "\n"),
        ("run.py", "open('ran', 'w').write('x')\nlr = __import__('os').getpid()\n"),
        ("large.py", "lr = '" + "x" * 2_000_001 + "'\n"),
    ],
)
def test_files_that_mean_harm_are_not_run_and_end(tmp_path, name, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    found = find_openmmlab_chains(NamedFile(str(tmp_path / name)))
    assert not (tmp_path / "ran").exists()
    assert all(len(str(each.value)) < 2000 for chain in found.values() for each in chain)
    if name in ("circle.py", "gone.py"):
        assert [each.value for each in found["lr"]] == [1]


def test_a_configuration_of_no_file_is_of_nothing():
    assert find_openmmlab_chains(NamedFile(None)) == {}
    assert tell(read_config(mmengine_config.Config({"lr": 0.1}))) == {}
