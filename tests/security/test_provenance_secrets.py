"""Keys that stand in what a run is made of, and in what is said of it, are nowhere in the store."""

import contextlib
import io
import os
import subprocess
import sys
import zipfile
import zlib

import msgspec
import pytest
from wide_bounds import keep_sources_in_children

import quark
from quark_core.records.query import Query
from quark_core.records.schema import dump_record

TOKEN = "ghp_" + "0123456789abcdefABCDEF0123456789abcd"
PASSWORD = "correct-horse-battery-7391"

SCRIPT = f'''
import sys
import quark

api_key = "{PASSWORD}"
HEADERS = {{"Authorization": "Bearer {TOKEN}"}}

@quark.trace("call", output=True)
def call(url):
    token = "{TOKEN}"
    return {{"answer": token, "api_key": "{PASSWORD}"}}

config = quark.tracked({{"lr": 0.1, "api_key": "{PASSWORD}", "url": "https://u:{PASSWORD}@x.y/"}})
session = quark.start_run(
    project="p", storage_dir=sys.argv[1], config=config, group="g/{TOKEN}",
    version="v-{TOKEN}",
)
metrics = quark.MetricsLogger(session)
config["api_key"]
session.annotate(api_key="{PASSWORD}", note="use {TOKEN}", nested={{"api_key": "{PASSWORD}"}})
session.add_to_group("h/{TOKEN}")
session.update_config(password="{PASSWORD}", remark="{TOKEN}")
session.fingerprint("answer", {{"token": "{TOKEN}", "api_key": "{PASSWORD}", "l": ["{TOKEN}"]}})
session.fingerprint("text", "{TOKEN}").wait(30)
session.fingerprint("named {TOKEN}", 1.0)
session.fingerprint_data("missing", "/nowhere/{TOKEN}/data").wait(30)
session.fingerprint_data("mapping", {{"api_key": "{PASSWORD}", "t": "{TOKEN}"}}).wait(30)
for batch in quark.watch_data([{{"id": ["{TOKEN}"], "api_key": "{PASSWORD}"}}], "train"):
    call("x")
for batch in quark.watch_data([{{"id": ["{TOKEN}"]}}], "ids", sample_ids="id"):
    pass
metrics.log("m", 1.0, step=0)
session.end_run()
project = quark.project("p", storage_dir=sys.argv[1])
project.update(description="key {TOKEN}", fields={{"api_key": "{PASSWORD}"}}, tags=["{TOKEN}"])
project.group("g").update(description="key {TOKEN}", fields={{"api_key": "{PASSWORD}"}})
print(session.run_id)
'''


def git(folder, *arguments):
    name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *name, *arguments], cwd=folder, check=True, capture_output=True)


def unpack(data):
    """What is in a payload, however it is packed."""
    yield data
    with contextlib.suppress(zlib.error):
        yield zlib.decompress(data)
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(data)) as pack:
        for name in pack.namelist():
            yield pack.read(name)


def find_secrets(data):
    return [secret for secret in (TOKEN, PASSWORD) if secret.encode() in data]


def list_texts(run):
    """Everything that is kept of a run, as text: packed records are no text in the file."""
    reader, run_id = run.open_run.reader, run.run_id
    yield "run", msgspec.json.encode(msgspec.to_builtins(reader.load_run(run_id), order=None))
    for kind in reader.count(run_id) if hasattr(reader, "count") else KINDS:
        for record in reader.read(run_id, kind, Query(all_attempts=True)).to_records():
            yield kind, msgspec.json.encode(dump_record(record))


KINDS = ("metric", "event", "artifact", "lifecycle", "aggregate", "fingerprint", "console")


@pytest.mark.long
def test_keys_in_sources_fields_groups_arguments_and_values_are_not_kept(tmp_path):
    project, runs = tmp_path / "project", tmp_path / "runs"
    project.mkdir()
    git(project, "init", "-q")
    script = project / "train.py"
    script.write_text("nothing = 1\n")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "x")
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(runs), "--token", TOKEN, f"--api-key={PASSWORD}"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **keep_sources_in_children(), "QUARK_CAPTURE": "sys"},
    )
    assert done.returncode == 0, done.stderr
    run = quark.open_run(done.stdout.split()[-1], runs)
    sources = quark.read_sources(run, runs)
    assert "[redacted]" in sources["train.py"].text.lower() or sources["train.py"].reason
    found = [
        (path.relative_to(runs), secret)
        for path in sorted(runs.rglob("*"))
        if path.is_file()
        for piece in unpack(path.read_bytes())
        for secret in find_secrets(piece)
    ]
    found += [(name, secret) for name, text in list_texts(run) for secret in find_secrets(text)]
    assert found == [], found
