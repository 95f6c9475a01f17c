"""What a run is made of, found out while it runs: its sources, its environment, its switches.

Nothing of it is done on the training thread, and whatever fails costs a warning at most.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_core.artifacts.payload_folder import PayloadFolder, PutPayload
from quark_core.config import settings
from quark_core.errors import QuarkError
from quark_core.records import ArtifactRecord, EnvironmentSnapshot
from quark_core.records.artifact_layout import KEPT_SOURCES, object_path
from quark_core.records.json_object import JsonObject, normalize_json
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.names import check_text, split_name
from quark_core.records.run_digests import digest_environment
from quark_core.runs.environment import GitState, complete_environment
from quark_core.system.process import importing

if TYPE_CHECKING:
    from quark_core.provenance.installed_packages import InstalledPackages
    from quark_core.provenance.source_keeping import SourceKeeper, SourceMode
    from quark_core.runs.open_run import OpenRun

__all__ = ["MadeOf", "choose_mode"]

_log = logging.getLogger("quark")

# What the training thread still imports for its first value comes before it.
_FIRST_S = 0.1
_LOOKS_S = (5.0, 60.0)
_GIT_TIMEOUT_S = 10.0
# What is looked at again may be set by the first steps, and what is imported by them.
_ENDING_S = 2.0


class MadeOf:
    """Finds out what a run is made of; for the process that leads it.

    Looks at the start, 5 s and 60 s later, and at the end. What is late (the end waits 2 s for
    it at most) is not recorded.

    Args:
        run: The run.
        environment: What is known of its environment at once.
        git: The git tree, if there is one.
    """

    def __init__(self, run: OpenRun, environment: dict[str, Any], git: GitState | None) -> None:
        self._run, self._known, self._git = run, environment, git
        self._started = time.monotonic()
        self._pid = os.getpid()
        self._ending = threading.Event()
        self._first: threading.Thread | None = None
        self._later: threading.Thread | None = None
        self._keeper: SourceKeeper | None = None
        self._mode: SourceMode = "off"
        self._chosen: tuple[SourceMode, str] | None = None
        self._values: dict[str, Any] | None = None
        self._packages: InstalledPackages | None = None
        self._traced: set[object] = set()

    def start(self) -> threading.Thread | None:
        """Begin; returns the thread of the first look, or None where there is none to spare."""
        self._first = threading.Thread(
            target=self._look_first, name="quark-environment", daemon=True
        )
        self._later = threading.Thread(target=self._look_later, name="quark-sources", daemon=True)
        try:
            self._first.start()
        except RuntimeError:
            # Without a thread the environment stays as far as it is known at once.
            self._first = self._later = None
            return None
        return self._first

    def bind(self) -> None:
        """A forked child leaves this to its parent."""

    def settle(self) -> None:
        """Look for the last time, before the run ends; waits 2 s at most."""
        if os.getpid() != self._pid:
            return
        self._ending.set()
        deadline = time.monotonic() + _ENDING_S
        for thread in (self._first, self._later):
            if thread is not None and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        self._note_traced(asks=False)

    def _choose(self, *, asks: bool) -> tuple[SourceMode, str]:
        """What is kept; a store elsewhere may have to be asked, for which no training waits."""
        if self._chosen is None and asks:
            self._chosen = choose_mode(self._run)
        return self._chosen or (
            "digest",
            "it was not known in time whether the store takes sources",
        )

    def _look_first(self) -> None:
        run = self._run
        self._ending.wait(_FIRST_S)
        self._note_traced()
        try:
            with importing():
                from quark_core.provenance.installed_packages import find_packages
                from quark_core.provenance.source_finding import find_root
                from quark_core.provenance.source_keeping import SourceKeeper
            self._mode, reason = self._choose(asks=True)
            if self._mode != "off":
                root = find_root(str(self._known["process"]["cwd"]))
                self._keeper = SourceKeeper(_Place(run), root, self._mode, reason)
                self._look_at_sources()
            packages = self._packages = find_packages(self._ending.is_set)
            snapshot = complete_environment(self._known, self._git, packages)
        except Exception as error:  # noqa: BLE001 - what is known at once must do
            _log.debug("what the run is made of could not be found out: %s", error)
            return
        self._values = dict(snapshot.values)
        if run.is_over:
            return
        if self._keeper is not None:
            self._keep_list(self._keeper, packages.text)
        self._emit_environment(snapshot)
        self._keep_git_diff()
        if self._later is not None and self._mode != "off":
            try:
                self._later.start()
            except RuntimeError:
                self._later = None

    def _look_later(self) -> None:
        for look_s in (*_LOOKS_S, None):
            if look_s is None:
                self._ending.wait()
            else:
                self._ending.wait(max(0.0, self._started + look_s - time.monotonic()))
            if self._run.is_over:
                return
            self._note_traced()
            self._look_at_sources()
            self._look_at_environment()
            if self._ending.is_set():
                return

    def _note_traced(self, *, asks: bool = True) -> None:
        """Record the functions under `quark.trace` that came since the last look."""
        found = sys.modules.get("quark_core.provenance.traced_functions")
        if found is None or self._run.is_over or not self._run.stream.active:
            return
        for traced in found.list_traced():
            if traced in self._traced:
                continue
            self._traced.add(traced)
            try:
                # Whoever asks for digests alone wants no text of the code to be kept.
                with_text = self._choose(asks=asks)[0] != "digest"
                described = found.describe_function(traced, with_text=with_text)
                if described is not None:
                    digest, level, metadata = described
                    _Place(self._run).emit_fingerprint(
                        "code", traced.name, digest, level, JsonObject(metadata)
                    )
            except Exception as error:  # noqa: BLE001 - whatever a function may be
                _log.warning("the function %r is not traced: %s", traced.name, error)

    def _look_at_sources(self) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        try:
            keeper.look()
        except Exception as error:  # noqa: BLE001 - whatever a program's modules may be
            self._keeper = None
            _log.warning("the sources of the run are not kept any more: %s", error)

    def _look_at_environment(self) -> None:
        """Record the environment once more where it has become another: the newest counts."""
        if self._values is None:
            return
        try:
            from quark_core.provenance.installed_packages import find_packages
            from quark_core.provenance.numeric_facts import describe_machine, describe_switches

            packages = self._packages = find_packages(self._ending.is_set, self._packages)
            known = self._values
            now = {**known, **describe_machine()}
            if switches := describe_switches():
                now["switches"] = switches
            imported = sorted({*known["imported"], *packages.imported})
            versions = {name: packages.versions.get(name) for name in packages.imported}
            now["imported"] = imported
            now["packages"] = dict(sorted({**known["packages"], **versions}.items()))
            now = normalize_json(now, "environment")
            if now != known:
                self._values = now
                self._emit_environment(EnvironmentSnapshot(JsonObject(now)))
        except Exception as error:  # noqa: BLE001 - what was known before must do
            _log.debug("the environment could not be looked at again: %s", error)

    def _emit_environment(self, snapshot: EnvironmentSnapshot) -> None:
        run = self._run
        run.emit_lifecycle("environment", snapshot.values)
        if self._mode != "off":
            digest = digest_environment(snapshot.values)
            _Place(run).emit_fingerprint(
                "environment", "environment", digest, "imported", JsonObject({})
            )

    def _keep_list(self, keeper: SourceKeeper, text: str) -> None:
        try:
            from quark_core.provenance.kept_sources import PACKAGES_KEY

            keeper.keep_payload(PACKAGES_KEY, text.encode("utf-8", "replace"))
        except Exception as error:  # noqa: BLE001 - the digest must do
            _log.debug("the list of packages is not kept: %s", error)

    def _keep_git_diff(self) -> None:
        known = (self._values or {}).get("git") or {}
        if self._git is None or self._keeper is None or not known.get("dirty"):
            return
        if self._mode != "keep" or self._git.commit is None:
            return
        with importing():
            from quark_core.provenance.git_changes import read_git_diff
            from quark_core.provenance.kept_sources import CHANGES_KEY, GIT_DIFF
        text = read_git_diff(self._git.root, _GIT_TIMEOUT_S)
        if text is None or self._run.is_over:
            return
        try:
            digest = self._keeper.keep_payload(CHANGES_KEY, text.encode("utf-8", "replace"))
        except Exception as error:  # noqa: BLE001 - the sources say the same
            _log.debug("the diff of the git tree is not kept: %s", error)
            return
        if digest is not None:
            metadata = JsonObject({"commit": self._git.commit, "size_bytes": len(text)})
            _Place(self._run).emit_fingerprint("code", GIT_DIFF, digest, "bytes", metadata)


class _Place:
    """A run, as what keeps something for it sees it; see `KeepingPlace`."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self.storage_dir: Path = run.context.storage_dir
        self.directory: Path | None = run.payload_directory

    def find_payloads(self) -> PayloadFolder | None:
        return self._run.stream.payloads

    def emit_payload(self, key: str, payload_format: str, put: PutPayload) -> None:
        self._run.emit(
            ArtifactRecord,
            KEPT_SOURCES,
            key,
            *split_name(key),
            payload_format,
            put.size_bytes,
            put.sha256,
            payload_relative_path=object_path(put.sha256),
        )

    def emit_fingerprint(
        self, subject: str, key: str, digest: str, level: str, metadata: JsonObject
    ) -> None:
        self._run.emit(
            FingerprintRecord,
            subject,
            check_text(key, "key"),
            digest,
            level,
            metadata=metadata or None,
        )


def choose_mode(run: OpenRun) -> tuple[SourceMode, str]:
    """What is kept of a run's sources, and why no more.

    Raises:
        SchemaValidationError: QUARK_SOURCES is no such word.
    """
    asked = settings.source_mode()
    if asked == "off" or not run.stream.active:
        return "off", ""
    if asked == "digest":
        return "digest", f"{settings.SOURCES}=digest"
    if run.payload_directory is not None:
        return "keep", ""
    try:
        if getattr(run.reader, "keeps_sources", False):
            return "keep", ""
    except QuarkError as error:
        _log.debug("whether the store takes sources is not known: %s", error)
        return "digest", "the store could not be asked whether it takes sources"
    return "digest", "the store is elsewhere, and its owner has not said that it takes sources"
