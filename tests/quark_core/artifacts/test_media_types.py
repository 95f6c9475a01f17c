"""What a payload is, out of its bytes: a name and a claim change nothing."""

import io
import pickle
import zipfile

import pytest

from quark_core.artifacts.payload_formats import HEAD_BYTES, identify_media

SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'


@pytest.mark.parametrize(
    ("head", "media_type"),
    [
        (b"\x89PNG\r\n\x1a\n....", "image/png"),
        (b"\xff\xd8\xff\xe0..", "image/jpeg"),
        (b"GIF89a<script>", "image/gif"),
        (b"RIFF....WEBPVP8 ", "image/webp"),
        (b"RIFF....WAVEfmt ", "audio/wav"),
        (b"%PDF-1.7\n", "application/pdf"),
        (b"\0\0\0\x20ftypisom", "video/mp4"),
        (b"\x1f\x8b\x08\0", "application/gzip"),
        (b"PAR1....", "application/vnd.apache.parquet"),
        (b"", "application/octet-stream"),
        (b"\x80\x05\x95", "application/octet-stream"),
        (b"a\0b", "application/octet-stream"),
        (b"\xfd\xfd\xfd", "application/octet-stream"),
        (b"plain text\n\x1b[1mbold\x1b[0m", "text/plain"),
        ("Grüße ".encode() * 2, "text/plain"),
        (b"\xef\xbb\xbfwith a mark", "text/plain"),
        ("a < b".encode("utf-16"), "text/plain"),
        (b"x = 1 < 2 <b>", "text/plain"),
        (b"<weights> 3", "text/plain"),
        (b'{"a": 1}', "application/json"),
        (b"  [1, 2]", "application/json"),
        (b"[section]\nkey = 1", "text/plain"),
        (b"{ braces }", "text/plain"),
        (b"<!DOCTYPE html><p>", "text/html"),
        (b"\n <SCRIPT>alert(1)</SCRIPT>", "text/html"),
        (b"<!-- hidden --><iframe src=x>", "text/html"),
        (b"<!-- never closed <script>", "text/html"),
        (b"<img src=x onerror=alert(1)>", "text/html"),
        ("<html>".encode("utf-16"), "text/html"),
        (b"<a", "text/html"),
        (SVG.encode(), "image/svg+xml"),
        (f'<?xml version="1.0"?>\n<!-- drawn -->\n{SVG}'.encode(), "image/svg+xml"),
        (b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY a "b">]><svg:svg>', "image/svg+xml"),
        (f"<!-- first -->{SVG}".encode(), "image/svg+xml"),
        (b'<?xml version="1.0"?><data/>', "application/xml"),
        (b'<?xml version="1.0"?><html xmlns="x">', "text/html"),
    ],
)
def test_a_payload_is_what_its_bytes_say(head, media_type):
    assert identify_media(head) == media_type


def test_a_text_may_be_cut_within_a_character():
    text = ("x" * (HEAD_BYTES - 1) + "é").encode()
    assert identify_media(text[:HEAD_BYTES]) == "text/plain"


def test_every_artifact_says_what_it_is(artifacts, tmp_path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a", "b")
    for payload, payload_format, media_type in (
        ("hello", None, "text/plain"),
        ("<script>alert(1)</script>", None, "text/html"),
        (b"\x89PNG\r\n\x1a\n", None, "image/png"),
        (file.getvalue(), None, "application/zip"),
        (pickle.dumps([1]), "bytes", "application/octet-stream"),
    ):
        record = artifacts.store("t", "n", payload, payload_format=payload_format)
        assert record.metadata == {"media_type": media_type}
    path = tmp_path / "innocent.png"
    path.write_bytes(b"<!doctype html><script>alert(1)</script>")
    for record in (artifacts.store_file("t", "n", path), artifacts.log_file(path)):
        assert record.metadata["media_type"] == "text/html"
        assert artifacts.load(record) == path.read_bytes()
    told_by_its_format = artifacts.store("t", "n", {"a": 1}, metadata={"mine": 2})
    assert told_by_its_format.payload_format == "json"
    assert told_by_its_format.metadata == {"mine": 2}
    said = artifacts.store("t", "n", b"1,2", metadata={"media_type": "text/csv"})
    assert said.metadata == {"media_type": "text/csv"}
