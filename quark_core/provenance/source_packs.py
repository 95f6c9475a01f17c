"""Packs of sources: which there shall be, and how one is made."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence

from quark_core.provenance.kept_sources import ManifestEntry
from quark_core.provenance.source_notes import KnownPack

__all__ = ["choose_refilled", "make_pack"]

# Zip files cannot say that there is no time; all packs of equal content shall be equal bytes.
_NO_TIME = (1980, 1, 1, 0, 0, 0)
_LEVEL = 6
# How many files are packed without a pause in which others may run.
_FILES_AT_ONCE = 8
_PAUSE_S = 0.0005

_MOST_PACKS = 8
# A pack is filled anew together with what is new where that is so much of it.
_SHARE_OF_NEW = 0.5
# Or where so little of it is still in use.
_SHARE_OF_USED = 0.5


def make_pack(texts: Mapping[str, bytes]) -> bytes:
    """A zip file of texts by their hashes; equal texts make equal bytes.

    Lets other threads run in between: this one never holds them up for longer than a few files.
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as pack:
        for number, name in enumerate(sorted(texts)):
            if number % _FILES_AT_ONCE == _FILES_AT_ONCE - 1:
                time.sleep(_PAUSE_S)
            member = zipfile.ZipInfo(name, _NO_TIME)
            member.compress_type = zipfile.ZIP_DEFLATED
            pack.writestr(member, texts[name])
    return out.getvalue()


def choose_refilled(
    packs: Sequence[KnownPack], wanted: Iterable[ManifestEntry], lacking: Iterable[ManifestEntry]
) -> frozenset[str]:
    """Hashes of the packs whose files go into a new one, together with what is new.

    So a run has a few packs, whose sizes differ as powers do, and an edit of one file writes a
    small one: of many edits each byte is written again a few times at most.

    Args:
        packs: Those that the last run has.
        wanted: The files of this run.
        lacking: Those of them that no pack has.
    """
    sizes = {entry.sha256: entry.size_bytes for entry in wanted}
    new = sum(entry.size_bytes for entry in lacking)
    if not new:
        return frozenset()
    used = {pack.sha256: sum(sizes.get(member, 0) for member in pack.members) for pack in packs}
    counts = {pack.sha256: sum(1 for member in pack.members if member in sizes) for pack in packs}
    refilled: set[str] = set()
    ordered = sorted((pack for pack in packs if counts[pack.sha256]), key=lambda p: used[p.sha256])
    left = len(ordered) + 1
    for pack in ordered:
        is_sparse = counts[pack.sha256] < _SHARE_OF_USED * len(pack.members)
        if new >= _SHARE_OF_NEW * used[pack.sha256] or is_sparse or left > _MOST_PACKS:
            refilled.add(pack.sha256)
            new += used[pack.sha256]
            left -= 1
    return frozenset(refilled)
