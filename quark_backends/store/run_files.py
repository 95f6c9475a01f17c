"""Where the files of a run lie, and whether a process still writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from quark_backends.store.layout import StoreLayout
from quark_core import settings
from quark_core.delivery.journal_folder import JournalFolder, Manifest, find_folders

__all__ = ["find_journals", "find_journals_elsewhere", "is_written", "list_paths", "trash_path"]


def trash_path(layout: StoreLayout, run_id: str) -> Path:
    """Where a run's own directory lies while the run is in the trash."""
    return layout.root / "trash" / run_id


def find_journals_elsewhere(layout: StoreLayout) -> dict[str, list[Path]]:
    """The journals of this store's runs that lie under QUARK_JOURNAL_DIR, by run."""
    found: dict[str, list[Path]] = {}
    if not os.environ.get(settings.JOURNAL_DIR, "").strip():
        return found
    for folder in find_folders(layout.root.parent):
        if layout.root not in folder.path.parents:
            manifest = folder.read_manifest()
            if manifest is not None:
                found.setdefault(manifest.run_id, []).append(folder.path)
    return found


def find_journals(path: Path) -> Iterator[tuple[JournalFolder, Manifest]]:
    """The journals in a run's directory, or the one that a directory is."""
    for candidate in (path, *list_paths(path / "journal")):
        if candidate.is_dir():
            folder = JournalFolder(candidate)
            manifest = folder.read_manifest()
            if manifest is not None:
                yield folder, manifest


def is_written(path: Path) -> bool:
    """Whether a living process still writes a journal in a directory."""
    return any(folder.is_written(manifest) for folder, manifest in find_journals(path))


def list_paths(folder: Path, prefix: str = "") -> list[Path]:
    """What is in a directory, sorted; nothing where there is none."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [folder / name for name in names if name.startswith(prefix)]
