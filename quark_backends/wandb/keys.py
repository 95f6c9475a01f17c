"""Names of series as keys of W&B."""

from __future__ import annotations

import hashlib
import re

from quark_backends.wandb.log_file import HISTORY_KEY

__all__ = ["AXES", "KeyTable"]

AXES = ("quark/step", "quark/epoch", "quark/time", "quark/attempt", HISTORY_KEY)
"""What each row carries beside its figures."""

_PLAIN = re.compile(r"[_a-zA-Z][_a-zA-Z0-9]*")


class KeyTable:
    """Finds the key of a name; the same name always has the same key, and no two share one.

    Keys that begin with `_` are W&B's own (`_step`), and those in `AXES` the
    mirror's: such names get `key` before them.

    Args:
        known: Name -> key where they differ; added to.
        strict: Whether keys consist of letters, digits and `_` only.
    """

    def __init__(self, known: dict[str, str], *, strict: bool) -> None:
        self._known = known
        self._strict = strict
        self._owners = {key: name for name, key in known.items()}

    def find(self, name: str) -> str:
        """The key of a name."""
        key = self._known.get(name)
        if key is not None:
            return key
        key = self._encode(name)
        if self._owners.setdefault(key, name) != name:
            key = f"{key}_{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:8]}"
            self._owners[key] = name
        if key != name or self._strict:
            self._known[name] = key
        return key

    def _encode(self, name: str) -> str:
        key = f"key{name}" if name.startswith("_") or name in AXES else name
        if self._strict and not _PLAIN.fullmatch(key):
            key = re.sub(r"[^_a-zA-Z0-9]", "_", key)
            key = key if _PLAIN.fullmatch(key) else f"key_{key}"
        return key
