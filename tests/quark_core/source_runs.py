"""Runs whose sources a test says, honest ones and such as nobody honest has."""

import hashlib

from quark.provenance.source_snapshots import KeepingPlace
from quark.provenance.sources import digest_sources
from quark_core.artifacts.source_packs import (
    MANIFEST_KEY,
    PACK_KEY,
    ManifestEntry,
    encode_manifest,
    make_pack,
)
from quark_core.records.json_object import JsonObject


def keep_payload(session, key, data):
    """Keep bytes as the run's; returns their hash."""
    place = KeepingPlace(session.open_run)
    put = place.find_payloads().put_bytes(data)
    assert put.failure is None
    place.emit_payload(key, "bytes", put)
    return put.sha256


def keep_manifest(session, entries, **known):
    """Say that the run is made of these files."""
    manifest = keep_payload(session, MANIFEST_KEY, encode_manifest(entries))
    digest = digest_sources((entry.path, entry.sha256) for entry in entries)
    facts = {"root": "/project", "entry": "script", "manifest": manifest, **known}
    KeepingPlace(session.open_run).emit_fingerprint(
        "code", "sources", digest, "bytes", JsonObject(facts)
    )


def keep_sources(session, texts, more=(), **known):
    """Have a run be made of texts by their paths, as if it had been looked at."""
    data = {path: text.encode() for path, text in texts.items()}
    hashes = {path: hashlib.sha256(text).hexdigest() for path, text in data.items()}
    packed = {sha256: data[path] for path, sha256 in hashes.items()}
    pack = keep_payload(session, PACK_KEY, make_pack(packed))
    entries = [
        ManifestEntry(path, hashes[path], len(text), pack=pack) for path, text in data.items()
    ]
    keep_manifest(session, [*entries, *more], **known)
    return pack
