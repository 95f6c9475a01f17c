"""Whether SQLite may be trusted with a folder: network file systems lie about locks."""

from __future__ import annotations

import os
import re
from pathlib import Path

JOURNAL_ONLY = "QUARK_JOURNAL_ONLY"

_MOUNTS = Path("/proc/self/mounts")
_NETWORK_TYPES = frozenset(
    """
    9p afs beegfs ceph cifs cvmfs fhgfs fuse.ceph fuse.gcsfuse fuse.glusterfs fuse.goofys
    fuse.juicefs fuse.rclone fuse.s3fs fuse.sshfs glusterfs gpfs lustre nfs nfs4 orangefs
    panfs pvfs2 quobyte smb2 smb3 smbfs virtiofs vboxsf wekafs
    """.split()
)


def find_network_filesystem(path: Path, mounts: str | None = None) -> str | None:
    """Type of the network file system that a path lies on, or None for a local one.

    QUARK_JOURNAL_ONLY=1 treats every path as one, QUARK_JOURNAL_ONLY=0 none.

    Args:
        path: The path; it need not exist.
        mounts: Text in the form of /proc/mounts, read from there by default.
            Where there is none (macOS, Windows) every path counts as local.
    """
    forced = os.environ.get(JOURNAL_ONLY, "").strip()
    if forced:
        return None if forced == "0" else f"{JOURNAL_ONLY}={forced}"
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text("utf-8", "surrogateescape")
        except OSError:
            return None
    place = path.resolve()
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[1]))
        depth = len(point.parts)
        # The later of two mounts on one point covers the earlier.
        if depth >= best and (place == point or point in place.parents):
            best, kind = depth, fields[2]
    return kind if kind in _NETWORK_TYPES else None
