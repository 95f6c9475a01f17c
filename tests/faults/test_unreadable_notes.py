"""A small file of a store that says nothing costs only what it was of; everybody reads the rest."""

import json

import pytest
from click.testing import CliRunner
from test_takeover import kill

import quark
from quark.cli.main import cli
from quark_core.delivery.journal_folder import find_folders
from quark_core.runs.backend_choice import open_reader

CONTENTS = {
    "nested": b'{"other": ' + b"[" * 100_000,
    "no_text": b'{"run_id": "\xff", "writer_id": "\xff"}',
    "a_list": b"[1]",
    "empty": b"",
}
PLACES = {
    "manifest": "journal.json",
    "damage": "damaged.json",
    "lease": "lanes/embedded.lease",
    "mark": "lanes/embedded.mark",
    "ledger": "../../delivered.jsonl",
    "quarantine": "../../quarantine/embedded/WRITER-0.batch",
}
# Nobody knows whose a journal without its manifest is.
UNKNOWN = {"manifest"}


def ask(root, *arguments):
    done = CliRunner().invoke(cli, [*arguments, "-d", str(root)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


@pytest.mark.sampled
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_file_that_says_nothing_harms_no_reader_and_no_other_run(tmp_path, place, content):
    # None but the first is left when all of it is read for the first time.
    hit, other = kill(tmp_path), kill(tmp_path)
    (folder,) = find_folders(tmp_path, hit)
    name = PLACES[place].replace("WRITER", folder.path.name)
    path = (folder.path / name).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(CONTENTS[content])
    shown = json.loads(ask(tmp_path, "show", other, "--json"))
    assert [each["count"] for each in shown["metrics"] if each["key"] == "loss"] == [50]
    for arguments in (["runs"], ["show", hit], ["doctor"], ["du"]):
        ask(tmp_path, *arguments)
    done = CliRunner().invoke(cli, ["sync", str(tmp_path)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    if place in UNKNOWN:
        assert open_reader(tmp_path).load_run(hit).state == "lost"
    else:
        with_all = quark.MetricsLogger(quark.open_run(hit, tmp_path)).read(metric_key="loss")
        assert len(with_all) == 50
