"""A type of record is one module: all that carries records carries it."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = '''
"""How spread out the attention of a head is."""

from typing import ClassVar

from quark_core.errors import SchemaValidationError
from quark_core.records.base import FieldRules, StreamRecord
from quark_core.records.json_object import JsonObject


class AttentionRecord(StreamRecord, frozen=True, gc=False):
    """The entropy of one attention head."""

    head_name: str
    entropy: float
    tokens: int = 0
    step: int | None = None
    kept: tuple[int, ...] = ()
    remark: str | None = None
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "attention"
    TABLE: ClassVar[str] = "attention_heads"
    RULES: ClassVar[FieldRules] = FieldRules(names=("head_name",), finite=("entropy",))

    def check(self) -> None:
        if self.entropy < 0:
            raise SchemaValidationError("AttentionRecord.entropy must not be negative")
'''
PROGRAM = """
import sys
import quark
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES
from quark_core.records.base import start_fields
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query

AttentionRecord = quark.AttentionRecord
REMARK = "with ghp_" + 36 * "a"
SECRET = JsonObject({"api_key": "hunter2", "heads": 8})
assert RECORD_TYPES["attention"] is AttentionRecord

def make(step, entropy=1.5, head="h0"):
    return AttentionRecord(*start_fields(None), head, entropy, 7, step, (1, 2), REMARK, SECRET)

session = quark.start_run(project="p", storage_dir=sys.argv[1], backends=sys.argv[2])
for step in range(400):
    session.write([make(step, step / 100, f"h{step % 2}")])
try:
    session.write([make(0, -1.0)])
except SchemaValidationError as error:
    assert "entropy" in str(error)
else:
    raise SystemExit("a negative entropy was taken")
session.end_run()
print(session.run_id, session.run_path)
"""


@pytest.fixture
def added(tmp_path):
    """The core with one more file."""
    shutil.copytree(
        ROOT / "quark_core", tmp_path / "core" / "quark_core", ignore=lambda *_: ["__pycache__"]
    )
    place = tmp_path / "core" / "quark_core" / "records" / "kinds" / "attention.py"
    place.write_text(MODULE)
    path = os.pathsep.join([str(tmp_path / "core"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def run(environment, *command):
    done = subprocess.run(
        [sys.executable, "-P", *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_type_that_is_one_file_is_stored_read_mirrored_and_exported(added, tmp_path):
    told = run(added, "-c", PROGRAM, tmp_path / "store", "csv,tensorboard").split()
    run_id, run_path = told[0], Path(told[1])
    read = run(
        added,
        "-c",
        "import sys, quark\n"
        "from quark_core.records.query import Query\n"
        "found = quark.open_run(sys.argv[2], sys.argv[1]).open_run.read('attention', Query())\n"
        "records = found.to_records()\n"
        "print(found.count, records[7].head_name, records[7].entropy, records[7].kept)\n"
        "print(records[7].remark, dict(records[7].metadata))\n"
        "print(found.to_pandas().shape[0])\n",
        tmp_path / "store",
        run_id,
    )
    told = "with [redacted] {'api_key': '[redacted]', 'heads': 8}"
    assert read.splitlines() == ["400 h1 0.07 (1, 2)", told, "400"]
    (table,) = run_path.rglob("attention_heads.csv")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 400
    assert (rows[7]["head_name"], float(rows[7]["entropy"])) == ("h1", 0.07)
    out = tmp_path / "out"
    place = ["--storage-dir", tmp_path / "store", "--format", "jsonl", "--output", out]
    run(added, "-m", "quark", "export", run_id, *place)
    assert any("attention" in path.name for path in out.rglob("*")), list(out.rglob("*"))


@pytest.mark.long
def test_its_numbers_are_curves_of_mirrors(added):
    program = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from quark_backends.mirror_records import Curves\n"
        "from quark_backends.mlflow.points import key_and_text, list_values, make_metric\n"
        "from quark_backends.wandb.history import RowMaker\n"
        "from quark_backends.wandb.local_files import WandbState\n"
        "from quark_core.records.kinds.attention import AttentionRecord\n"
        "record = AttentionRecord('r', 'w', 0, 1, 0, 0, 'h0', 1.5, 7, 3)\n"
        "print(dict(Curves('system').list_values(record)))\n"
        "values = list_values('attention', [record], 20)\n"
        "print({key_and_text(make_metric(*one))[1]: one[1] for one in values})\n"
        "maker = RowMaker(WandbState(), strict_names=False, layers=50)\n"
        "batch = SimpleNamespace(writer_id='w', number=0)\n"
        "(row,) = maker.make(batch, [record])\n"
        "print({k: v for k, v in row.values.items() if not k.startswith('quark/')})\n"
    )
    curves = {"rank1/attention_heads/h0/entropy": 1.5, "rank1/attention_heads/h0/tokens": 7.0}
    assert run(added, "-c", program).splitlines() == [str(curves)] * 3


def test_a_rule_reads_it_while_it_comes_and_afterwards(added, tmp_path):
    program = (
        "import sys, quark\n"
        "from quark.analysis.monitor_state import RunFeed\n"
        "from quark.analysis.outputs import open_analysis\n"
        "from quark_core.records.base import start_fields\n"
        "session = quark.start_run(project='p', storage_dir=sys.argv[1])\n"
        "feed = RunFeed(session.open_run)\n"
        "feed.open()\n"
        "session.write([quark.AttentionRecord(*start_fields(None), 'h0', 1.5, 7, 3)])\n"
        "session.flush()\n"
        "feed.poll()\n"
        "print(feed.step, feed.load(ended=False).read_rows('attention')['entropy'].tolist())\n"
        "feed.close()\n"
        "session.end_run()\n"
        "data = open_analysis(quark.open_run(session.run_id, sys.argv[1])).load()\n"
        "print(data.read_rows('attention')['entropy'].tolist())\n"
    )
    assert run(added, "-c", program, tmp_path).splitlines() == ["3 [1.5]", "[1.5]"]


def test_two_types_of_one_kind_are_refused(added):
    program = (
        "from typing import ClassVar\n"
        "from quark_core.records import StreamRecord\n"
        "try:\n"
        "    class Other(StreamRecord, frozen=True, gc=False):\n"
        "        KIND: ClassVar[str] = 'attention'\n"
        "except TypeError as error:\n"
        "    print(error)\n"
    )
    assert run(added, "-c", program).strip() == ("the kind 'attention' belongs to AttentionRecord")


@pytest.mark.long
def test_the_tests_of_all_types_take_it_as_it_is(added):
    names = [
        "records/test_records.py",
        "records/test_codec.py",
        "redaction/test_redaction_gates.py",
    ]
    run(
        added,
        *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "attention"),
        *(ROOT / "tests" / "quark_core" / name for name in names),
    )
