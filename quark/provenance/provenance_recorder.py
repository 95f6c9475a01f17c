"""ProvenanceRecorder: records the sources, packages and switches of a run, and its git diff.

Nothing of it is done on the training thread, and what fails costs a warning at most.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quark_core.config import settings
from quark_core.config.arguments import working_directory
from quark_core.errors import QuarkError
from quark_core.records.json_object import JsonObject
from quark_core.records.runs import digest_environment
from quark_core.runs.environment import WELL_KNOWN_PACKAGES, read_git_state
from quark_core.runs.open_run import OpenRun
from quark_core.system.process import find_module_file, importing

if TYPE_CHECKING:
    from quark.provenance.environment import InstalledPackages
    from quark.provenance.source_snapshots import KeepingPlace, SourceKeeper, SourceMode

_log = logging.getLogger("quark")

_GIT_TIMEOUT_S = 10.0


class ProvenanceRecorder:
    """Records what a run is made of; for the process that leads it.

    The thread of `quark_core.runs.environment` calls it.

    Args:
        run: The run.
    """

    # The last look at the environment comes before the last one at traced functions.
    looks_on = True

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._folder = working_directory()
        # When a script has run to its end, Python removes `__file__` from its module.
        self._script = find_module_file(sys.modules.get("__main__"))
        self._keeper: SourceKeeper | None = None
        self._mode: SourceMode = "off"
        self._chosen: tuple[SourceMode, str] | None = None
        self._facts: dict[str, Any] = {}
        self._packages: InstalledPackages | None = None
        self._is_noted = False
        self._traced: set[object] = set()
        run.writers.add(self)

    @cached_property
    def _place(self) -> KeepingPlace:
        with importing():
            from quark.provenance.source_snapshots import KeepingPlace
        return KeepingPlace(self._run)

    def bind(self) -> None:
        """A forked child leaves this to its parent."""

    def settle(self) -> None:
        """Record the traced functions that came since the last look, before the run ends."""
        if not self._run.forked:
            self._record_traced(asks=False)

    def describe_environment(self) -> dict[str, Any]:
        """Look at all that a run is made of; the facts for the record of its environment."""
        try:
            return self._look()
        except Exception as error:  # noqa: BLE001 - what the core finds must do
            _log.debug("the provenance of the run could not be recorded: %s", error)
            return {}

    def _look(self) -> dict[str, Any]:
        is_first = self._packages is None
        if not is_first and self._mode == "off":
            return {}
        self._record_traced()
        if is_first and self._keeper is None:
            self._begin_keeping()
        self._look_at_sources()
        with importing():
            from quark.provenance.environment import (
                describe_machine,
                describe_switches,
                find_packages,
            )
        packages = self._packages = find_packages(before=self._packages)
        facts = {**self._facts, **describe_machine(), **self._describe_packages(packages)}
        if switches := describe_switches():
            facts["switches"] = switches
        self._facts = facts
        return facts

    def _describe_packages(self, packages: InstalledPackages) -> dict[str, Any]:
        """Which packages are installed, and which were imported at this look or before."""
        before: dict[str, str] = self._facts.get("packages", {})
        imported = {*packages.imported, *self._facts.get("imported", ())}
        known = {name.lower(): name for name in packages.versions}
        wanted = {known[name] for name in WELL_KNOWN_PACKAGES if name in known} | imported
        digest = hashlib.sha256(packages.text.encode("utf-8", "replace")).hexdigest()
        return {
            "imported": sorted(imported),
            "packages": {
                name: packages.versions.get(name, before.get(name)) for name in sorted(wanted)
            },
            # As the list was that is kept.
            "installed": self._facts.get("installed")
            or {"count": len(packages.versions), "digest": digest},
        }

    def note_environment(self, values: Mapping[str, Any]) -> None:
        """Record the digest of an environment that was recorded, and what goes with it once."""
        if self._mode == "off" or self._packages is None:
            return
        is_first, self._is_noted = not self._is_noted, True
        if is_first and self._keeper is not None:
            self._keep_list(self._keeper, self._packages.text)
        digest = digest_environment(values)
        self._place.emit_fingerprint(
            "environment", "environment", digest, "imported", JsonObject({})
        )
        if is_first and self._keeper is not None:
            self._keep_git_diff(self._keeper, values.get("git"))

    def _begin_keeping(self) -> None:
        with importing():
            from quark.provenance.source_snapshots import SourceKeeper, find_root
        self._mode, reason = self._choose(asks=True)
        if self._mode != "off":
            root = find_root(str(self._folder), self._script)
            self._keeper = SourceKeeper(self._place, root, self._mode, reason)

    def _choose(self, *, asks: bool) -> tuple[SourceMode, str]:
        """What is kept; a store elsewhere may have to be asked, for which no training waits."""
        if self._chosen is None and asks:
            self._chosen = choose_mode(self._run)
        return self._chosen or (
            "digest",
            "it was not known in time if the store accepts source snapshots",
        )

    def _look_at_sources(self) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        try:
            keeper.look()
        except Exception as error:  # noqa: BLE001 - whatever a program's modules may be
            self._keeper = None
            _log.warning("the sources of the run are no longer stored: %s", error)

    def _record_traced(self, *, asks: bool = True) -> None:
        """Record the functions under `quark.trace` that came since the last look."""
        run = self._run
        if run.is_over or not run.stream.active:
            return
        with importing():
            from quark.provenance.tracing import describe_function, list_traced
        for traced in list_traced():
            if traced in self._traced:
                continue
            self._traced.add(traced)
            try:
                # Whoever asks for digests alone wants no text of the code to be kept.
                with_text = self._choose(asks=asks)[0] != "digest"
                described = describe_function(traced, with_text=with_text)
                if described is not None:
                    digest, level, metadata = described
                    self._place.emit_fingerprint(
                        "code", traced.name, digest, level, JsonObject(metadata)
                    )
            except Exception as error:  # noqa: BLE001 - whatever a function may be
                _log.warning("the function %r is not traced: %s", traced.name, error)

    def _keep_list(self, keeper: SourceKeeper, text: str) -> None:
        try:
            from quark.provenance.sources import PACKAGES_KEY

            keeper.keep_payload(PACKAGES_KEY, text.encode("utf-8", "replace"))
        except Exception as error:  # noqa: BLE001 - the digest must do
            _log.debug("the list of packages cannot be stored: %s", error)

    def _keep_git_diff(self, keeper: SourceKeeper, known: object) -> None:
        if self._mode != "keep" or not isinstance(known, Mapping) or not known.get("dirty"):
            return
        git, commit = read_git_state(self._folder), known.get("commit")
        if git is None or commit is None:
            return
        with importing():
            from quark.provenance.environment import read_git_diff
            from quark.provenance.sources import CHANGES_KEY, GIT_DIFF
        text = read_git_diff(git.root, _GIT_TIMEOUT_S)
        if text is None or self._run.is_over:
            return
        try:
            digest = keeper.keep_payload(CHANGES_KEY, text.encode("utf-8", "replace"))
        except Exception as error:  # noqa: BLE001 - the sources say the same
            _log.debug("the diff of the git tree cannot be stored: %s", error)
            return
        if digest is not None:
            metadata = JsonObject({"commit": commit, "size_bytes": len(text)})
            self._place.emit_fingerprint("code", GIT_DIFF, digest, "bytes", metadata)


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
        _log.debug("it is unknown if the store accepts source snapshots: %s", error)
        return "digest", "the store did not answer if it accepts source snapshots"
    return "digest", "the store is remote, and its owner has not allowed source snapshots"
