"""Generations of analysis outputs as files, where a database may not be used."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import msgspec

from quark_backends.store.connection import StoreConnection
from quark_backends.store.generations import Bodies, add_generation, encode_outputs
from quark_core.backend import Generation
from quark_core.errors import BackendUnavailable, SchemaValidationError

__all__ = ["GenerationFiles"]

_FOLDER = "generations"
_SUFFIX = ".qg"


class _File(msgspec.Struct, frozen=True):
    analyzer: str
    number: int
    replaces: bool
    bodies: Bodies


class GenerationFiles:
    """The generations of one run, a file each, which is there as a whole or not at all.

    Args:
        run_path: The run's own directory.
    """

    def __init__(self, run_path: Path) -> None:
        self._folder = run_path / _FOLDER

    def write(self, generation: Generation) -> int:
        """Store a generation; returns its number, 1 for the first of its analyzer.

        Raises:
            SchemaValidationError: Records of another run, or under another kind's name.
            BackendUnavailable: The file cannot be written.
        """
        bodies = encode_outputs(generation)
        name = quote(generation.analyzer, safe="")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            number = 1 + sum(path.name.startswith(f"{name}.") for path in self._list())
            while True:
                file = _File(generation.analyzer, number, generation.replaces, bodies)
                scratch = self._folder / f"{name}.{number}.{os.getpid()}.part"
                scratch.write_bytes(msgspec.msgpack.encode(file))
                try:
                    # Unlike a rename, this fails where another process has the number.
                    os.link(scratch, self._folder / f"{name}.{number}{_SUFFIX}")
                except FileExistsError:
                    number += 1
                    continue
                finally:
                    scratch.unlink()
                return number
        except OSError as error:
            raise BackendUnavailable(f"{self._folder}: {error}", backend="embedded") from error

    def play(self, connection: StoreConnection, run_pk: int, known: set[Path]) -> None:
        """Add to a database the generations that are not among the known ones.

        Raises:
            BackendUnavailable: A file cannot be read.
        """
        for path in self._list():
            if path in known:
                continue
            try:
                file = msgspec.msgpack.decode(path.read_bytes(), type=_File)
            except (OSError, msgspec.DecodeError, SchemaValidationError) as error:
                raise BackendUnavailable(f"{path}: {error}", backend="embedded") from error
            add_generation(
                connection, run_pk, file.analyzer, file.number, file.replaces, file.bodies
            )
            known.add(path)

    def _list(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}"))
