r"""Names that MLflow takes, and the map between them and Quark's keys.

MLflow takes letters and digits of any script, `_`, `.`, `-`, space and `/`,
in at most 250 characters, and no name that a path would resolve to another.
A key is first decoded to what the user wrote, then encoded:

    val/AR@100   -> val/AR_at_100
    top 5 %      -> top 5 _pct_
    a//b:c       -> a/b_x3a_c
    over 250     -> its first 230 characters, _h_ and 12 hex digits of its SHA-256

Two keys that come out the same stay apart, also where the database compares
without regard to case or accents: the later one gets the `_h_` ending.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from quark_backends.mirroring.saved_state import replace_file
from quark_core.api import decode_name

MAX_NAME_LENGTH = 250
NAME_MAP_VERSION = 1
_KEPT_LENGTH = 230
_SPELLED = {"@": "_at_", "%": "_pct_"}
# ":" is left out: a server on Windows refuses it.
_ILLEGAL = re.compile(r"[^\w.\- ]")


def encode_name(name: str) -> str:
    """Map any text to a name that MLflow takes; two texts may come out the same."""
    segments = [segment for segment in unicodedata.normalize("NFC", name).split("/") if segment]
    encoded = "/".join(map(_encode_segment, segments)) or "_"
    return encoded if len(encoded) <= MAX_NAME_LENGTH else _end_in_hash(encoded, name)


class NameMap:
    """Keys and the names they have in MLflow, kept in a file; a name never changes.

    Args:
        path: The file. The mirrors of several processes of one run share it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, dict[str, str]] = {}
        self._taken: dict[str, set[str]] = {}
        self._load()

    def find(self, group: str, wanted: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Names of keys, given now where there were none.

        Args:
            group: What the keys are of: names of two groups may be the same.
            wanted: Each key with the text that its name is made from.

        Returns:
            Key -> name, for every key of the group so far.
        """
        names = self._names.setdefault(group, {})
        new = {key: text for key, text in wanted if key not in names}
        if new:
            self._load()
            names = self._names.setdefault(group, {})
            taken = self._taken.setdefault(group, set())
            for key, text in new.items():
                if key not in names:
                    names[key] = self._choose(key, text, taken)
            replace_file(self._path, msgspec.json.encode(self._names))
        return names

    @property
    def has_changes(self) -> bool:
        """Whether a metric has another name in MLflow than the user gave it."""
        names = self._names.get("metrics", {})
        return any(decode_name(key.removeprefix("=")) != name for key, name in names.items())

    def to_dict(self) -> dict[str, Any]:
        """Keys and names of every group and process, and the version of this form."""
        self._load()
        return {"version": NAME_MAP_VERSION, **self._names}

    @staticmethod
    def _choose(key: str, text: str, taken: set[str]) -> str:
        name = encode_name(text)
        if _fold(name) in taken:
            name = _end_in_hash(name, key)
        taken.add(_fold(name))
        return name

    def _load(self) -> None:
        try:
            saved = msgspec.json.decode(self._path.read_bytes(), type=dict[str, dict[str, str]])
        except (FileNotFoundError, msgspec.DecodeError):
            return
        for group, names in saved.items():
            # What was given here stays, though another process may have written over it.
            self._names[group] = {**names, **self._names.get(group, {})}
        self._taken = {group: set(map(_fold, m.values())) for group, m in self._names.items()}


def _encode_segment(segment: str) -> str:
    if segment in (".", ".."):
        return "_x2e_" * len(segment)
    return _ILLEGAL.sub(lambda match: _SPELLED.get(match[0], f"_x{ord(match[0]):02x}_"), segment)


def _end_in_hash(name: str, source: str) -> str:
    digest = hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()[:12]
    return f"{name[:_KEPT_LENGTH]}_h_{digest}"


def _fold(name: str) -> str:
    """What is equal to the most forgiving collation of a database."""
    plain = unicodedata.normalize("NFKD", name.casefold())
    return "".join(c for c in plain if not unicodedata.combining(c)).rstrip()
