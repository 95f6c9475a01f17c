"""Under Hydra, which is really run here: which file, or which override, a value is from."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("hydra")

SCRIPT = """
import json, sys
import hydra
from omegaconf import OmegaConf
import quark

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    cfg.epochs = 12
    given = {"whole": cfg, "plain": OmegaConf.to_container(cfg, resolve=True), "own": {"lr": 9}}
    told = {}
    for name, config in given.items():
        with quark.start_run(project="p", config=config, storage_dir=sys.argv[0] + ".store") as run:
            pass
        snapshot = quark.open_run(run_id=run.id, storage_dir=sys.argv[0] + ".store").open_run.config
        told[name] = {
            key: [(each.label, each.value) for each in chain]
            for key, chain in snapshot.group_origins().items()
        }
    print("TOLD", json.dumps(told))

main()
"""
FILES = {
    "config.yaml": """defaults:
  - db: mysql
  - optim/adam@opt
  - _self_

lr: 0.1
epochs: 10
model:
  depth: 50
total: ${epochs}
""",
    "db/mysql.yaml": "host: localhost\npassword: hunter2hunter2\n",
    "db/pg.yaml": "defaults:\n  - mysql\n  - _self_\nhost: pghost\n",
    "optim/adam.yaml": "name: adam\nbetas: [0.9, 0.99]\n",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    root = tmp_path_factory.mktemp("hydra")
    for name, text in FILES.items():
        path = root / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py", "lr=0.3", "db=pg", "+new.key=3", "model.depth=101"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    return json.loads(line.removeprefix("TOLD "))


@pytest.mark.long
def test_an_override_replaces_what_a_file_says(told):
    assert told["whole"]["lr"] == [["command line", 0.3], ["config (conf/config.yaml:6)", 0.1]]
    assert told["whole"]["model.depth"][1] == ["config (conf/config.yaml:9)", 50]
    assert told["whole"]["new.key"] == [["command line", 3]]


def test_files_of_groups_are_named_in_the_order_of_merging(told):
    assert told["whole"]["db.host"] == [
        ["db/pg (conf/db/pg.yaml:4)", "pghost"],
        ["db/mysql (conf/db/mysql.yaml:1)", "localhost"],
    ]
    # Under the key that it was put under.
    assert told["whole"]["opt.name"] == [["optim/adam (conf/optim/adam.yaml:1)", "adam"]]


def test_secrets_are_redacted(told):
    assert told["whole"]["db.password"] == [["db/mysql (conf/db/mysql.yaml:2)", "[redacted]"]]


def test_interpolations_and_later_changes_are_told(told):
    assert told["whole"]["total"] == [
        ["interpolation (${epochs})", 12],
        ["config (conf/config.yaml:10)", "${epochs}"],
    ]
    assert told["whole"]["epochs"] == [["code", 12], ["config (conf/config.yaml:7)", 10]]


def test_a_plain_copy_knows_what_has_the_same_value(told):
    assert told["plain"]["lr"] == told["whole"]["lr"]
    assert told["plain"]["db.host"] == told["whole"]["db.host"]
    assert "epochs" not in told["plain"]


def test_a_mapping_of_somebodys_own_is_not_hydras(told):
    assert told["own"] == {}
