"""Vendored files are what was published, but for changes that are written down."""

import hashlib
import json
from pathlib import Path

import pytest

import quark

VENDOR = Path(quark.__file__).parent / "page" / "static" / "vendor"
OWN = {"vendored.json", "preact.d.ts", "hooks.d.ts", "htm.d.ts"}
FILES = json.loads((VENDOR / "vendored.json").read_text("utf-8"))["files"]
MAX_VENDORED_BYTES = 220_000


def hash_text(text):
    return hashlib.sha256(text.encode()).hexdigest()


def restore(text, entry):
    """The text as it was published: without what was put around it, and each change undone."""
    text = text.removeprefix(entry["head"]).removesuffix(entry["tail"])
    for before, after in reversed(entry["changes"]):
        if after:
            assert text.count(after) == 1
            text = text.replace(after, before)
        else:
            text = text.removesuffix("\n") + before + "\n"
    return text


@pytest.mark.parametrize("entry", FILES, ids=[entry["file"] for entry in FILES])
def test_a_vendored_file_is_what_was_published(entry):
    text = (VENDOR / entry["file"]).read_text("utf-8")
    assert hash_text(text) == entry["sha256"]
    assert hash_text(restore(text, entry)) == entry["upstream_sha256"]
    assert entry["why"] or not (entry["changes"] or entry["tail"])


def test_every_file_is_on_the_list_and_each_package_has_its_licence():
    assert {path.name for path in VENDOR.iterdir()} == {e["file"] for e in FILES} | OWN
    licences = {e["package"] for e in FILES if e["path"] == "LICENSE"}
    assert licences == {e["package"] for e in FILES} == {"uplot", "preact", "htm"}
    assert sum(path.stat().st_size for path in VENDOR.iterdir()) <= MAX_VENDORED_BYTES
