"""Finds the installed backends, and keeps a reason for each plugin that was left out."""

from __future__ import annotations

import importlib.util
import logging
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pluggy

from quark_core import hookspecs
from quark_core.backends.contract import (
    API_VERSION,
    Backend,
    BackendConfig,
    BackendDefinition,
    Capability,
    SupportsArtifacts,
    SupportsChanges,
    SupportsGenerations,
    SupportsGrid,
    SupportsGroups,
    SupportsPages,
    SupportsPrimary,
    SupportsRead,
    SupportsReplay,
    SupportsSearch,
    SupportsSeries,
    TrackerForm,
)
from quark_core.backends.coordination import SupportsCoordination
from quark_core.backends.edits import SupportsBelonging, SupportsEdits, SupportsRemoval
from quark_core.config.arguments import resolve_storage_dir
from quark_core.errors import (
    BackendContractError,
    BackendUnusable,
    QuarkError,
    SchemaMigrationError,
    SchemaValidationError,
    SessionStoreError,
    UnknownBackendError,
)
from quark_core.records import format_time, parse_time
from quark_core.records.base import now_us
from quark_core.system.terminal_text import clean_text

_log = logging.getLogger("quark")
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")

_PACKAGES = ("quark_backends.", "quark_core.", "quark.")
# What a URL begins with is the scheme of a backend of ours.
_URL_SCHEMES = frozenset({"http", "https"})
_AGAIN = "; it is part of Quark, but this installation is incomplete: reinstall quark-tracker"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A plugin that cannot be used.

    Attributes:
        name: Name of its entry point, or of the backend it declared.
        origin: Distribution or object that it came from.
        reason: Why it was left out.
    """

    name: str
    origin: str
    reason: str


class BackendRegistry:
    """The backends of this process, by name and by URI scheme.

    One broken plugin never hides another: each is loaded, and asked for its
    definitions, under a guard of its own.
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
        self._manager.add_hookspecs(hookspecs)
        self._definitions: dict[str, BackendDefinition] = {}
        self._schemes: dict[str, str] = {}
        self._origins: dict[str, str] = {}
        self._left_out: list[LeftOut] = []

    @classmethod
    def discover(cls, points: Iterable[EntryPoint] | None = None) -> BackendRegistry:
        """Load every entry point of the groups `quark.backends` and `quark.plugins`."""
        registry = cls()
        if points is None:
            groups = (hookspecs.ENTRY_POINT_GROUP, hookspecs.PLUGIN_GROUP)
            points = [point for group in groups for point in entry_points(group=group)]
        for point in sorted(points, key=lambda p: (not p.value.startswith(_PACKAGES), p)):
            origin = point.dist.name if point.dist is not None else point.value
            try:
                plugin = point.load()
            except BaseException as error:  # a plugin may even call sys.exit while it is imported
                if isinstance(error, KeyboardInterrupt):
                    raise
                registry._leave_out(point.name, origin, f"import failed: {_describe(error)}")
                continue
            registry.register(plugin, name=point.name, origin=origin, place=point.value)
        return registry

    def register(
        self, plugin: Any, *, name: str, origin: str = "this process", place: str | None = None
    ) -> None:
        """Add one plugin and the backends that it declares; a broken one is left out.

        Args:
            plugin: The module or object.
            name: Name of its entry point.
            origin: Distribution that it came from.
            place: Where another process finds it, as `module:object`.
        """
        try:
            registered = self._manager.register(plugin, name=name)
            if registered is None:
                raise ValueError("it is blocked or already registered")
            self._manager.check_pending()
            found: list[BackendDefinition] = []
            for implementation in self._manager.hook.quark_register_backends.get_hookimpls():
                if implementation.plugin is plugin:
                    declared: Any = implementation.function()
                    found.extend(declared)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if self._manager.get_plugin(name) is plugin:
                self._manager.unregister(name=name)
            self._leave_out(name, origin, _describe(error))
            return
        for definition in found:
            reason = self._refusal(definition)
            if reason is None:
                found_at = definition if place is None else replace(definition, plugin=place)
                self._add(found_at, origin)
            else:
                self._leave_out(str(getattr(definition, "name", name)), origin, reason)

    def find(self, name: str) -> BackendDefinition:
        """The backend of this name or URI scheme.

        Raises:
            BackendContractError: Its plugin is installed but was left out.
            UnknownBackendError: There is none; the message lists what exists
                and names the extra to install, if there is one.
        """
        definition = self._definitions.get(self._schemes.get(name, name))
        if definition is not None:
            return definition
        for left_out in self._left_out:
            if left_out.name == name:
                raise BackendContractError(
                    f"backend {name!r} from {left_out.origin} cannot be used: {left_out.reason}",
                    backend=name,
                )
        raise UnknownBackendError(
            f"backends: {name!r} is not an installed backend (installed: "
            f"{', '.join(map(repr, self.names))}){_find_hint(name)}",
            backend=name,
        )

    def find_default_primary(self) -> BackendDefinition:
        """The store that runs go to where nobody says otherwise.

        Raises:
            UnknownBackendError: There is none: the installation is broken.
        """
        for definition in self._definitions.values():  # Quark's own come first
            if definition.is_default_primary:
                return definition
        raise UnknownBackendError(
            f"backends: no default store (installed: {', '.join(map(repr, self.names))}){_AGAIN}"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the usable backends, sorted."""
        return tuple(sorted(self._definitions))

    @property
    def definitions(self) -> tuple[BackendDefinition, ...]:
        """The usable backends, sorted by name."""
        return tuple(self._definitions[name] for name in self.names)

    def list_tracker_forms(self) -> list[tuple[str, TrackerForm]]:
        """How trackers ask for backends by name: the default one first, then Quark's own."""
        found = [(one.name, one.tracker) for one in self._definitions.values() if one.tracker]
        return sorted(found, key=lambda item: not item[1].is_default)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The plugins that cannot be used, each with its reason."""
        return tuple(self._left_out)

    def origin(self, name: str) -> str:
        """Distribution that a usable backend came from."""
        return self._origins[name]

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call a notice hook of every plugin; one that raises is logged and passed over."""
        self.collect(hook, **arguments)

    def ask(self, hook: str, **arguments: Any) -> Any:
        """The first answer of a hook that is not None; one that raises is logged and passed over.

        Two things pass: a QuarkError, which says what is wrong with the call that the user made,
        and SystemExit, by which a parser of a command line ends the program.
        """
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            wanted = {name: arguments[name] for name in implementation.argnames}
            try:
                answer = implementation.function(**wanted)
            except (QuarkError, SystemExit):
                raise
            except Exception:  # noqa: BLE001 - a plugin must not end a session
                _log.exception("plugin %s failed in %s", implementation.plugin_name, hook)
                continue
            if answer is not None:
                return answer
        return None

    def collect(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Name of each plugin and what a hook of it returned; one that raises is passed over."""
        found = []
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            wanted = {name: arguments[name] for name in implementation.argnames}
            try:
                found.append((implementation.plugin_name, implementation.function(**wanted)))
            except (Exception, SystemExit):  # noqa: BLE001 - a plugin must not end a session
                _log.exception("plugin %s failed in %s", implementation.plugin_name, hook)
        return found

    def load_record_kinds(self) -> None:
        """Import the modules in which plugins define types of records; a broken one is logged."""
        for plugin, modules in self.collect("quark_register_record_kinds"):
            if isinstance(modules, str) or not isinstance(modules, Iterable):
                _log.error(
                    "record kinds of plugin %s: %r is not a list of modules", plugin, modules
                )
                continue
            for module in modules:
                try:
                    import_module(module)
                except (Exception, SystemExit) as error:  # noqa: BLE001 - it may raise anything
                    reason = clean_text(_describe(error))
                    _log.error("record kinds of plugin %s in %r: %s", plugin, module, reason)

    def _add(self, definition: BackendDefinition, origin: str) -> None:
        self._definitions[definition.name] = definition
        self._origins[definition.name] = origin
        for scheme in definition.schemes:
            self._schemes.setdefault(scheme, definition.name)

    def _refusal(self, definition: object) -> str | None:
        if not isinstance(definition, BackendDefinition):
            return f"it declares {type(definition).__name__}, not a BackendDefinition"
        if not isinstance(definition.name, str) or not _NAME.fullmatch(definition.name):
            return f"its name {definition.name!r} must be one lowercase word"
        for field in ("schemes", "capabilities"):
            value = getattr(definition, field)
            if not isinstance(value, Iterable) or isinstance(value, str):
                return f"its {field} must be a collection, got {value!r:.60}"
        if definition.api_version != API_VERSION:
            return (
                f"it uses version {definition.api_version} of the backend contract, but this "
                f"Quark uses version {API_VERSION}"
            )
        if definition.name in self._definitions:
            return f"its name is already used by {self._origins[definition.name]}"
        return None

    def _leave_out(self, name: str, origin: str, reason: str) -> None:
        self._left_out.append(LeftOut(name, origin, reason))
        warnings.warn(
            clean_text(f"Quark ignores the plugin {name!r} from {origin}: {reason}"),
            RuntimeWarning,
            stacklevel=2,
        )


def _find_hint(name: str) -> str:
    """How to get a backend that is asked for and absent, where Quark itself has one."""
    for point in entry_points(group=hookspecs.ENTRY_POINT_GROUP, name=name):
        if point.value.startswith(_PACKAGES):
            found = BackendRegistry.discover([point])._definitions.get(name)
            how = None if found is None else found.install
            return f"; install it with: {how}" if how else _AGAIN
    return _AGAIN if name in _URL_SCHEMES else ""


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_default: BackendRegistry | None = None


def default_registry() -> BackendRegistry:
    """The registry of the installed plugins, found once a process."""
    global _default
    if _default is None:
        _default = BackendRegistry.discover()
    return _default


def migrate_store(storage_dir: str | Path | None = None, *, generated_at: str | None = None) -> int:
    """Migrate a local store from an older version of Quark to the current schema.

    Opening a store migrates it too. This function does it at a time of your choice, and lets a
    large store shrink afterwards. Repeated and concurrent calls are safe: a current store is not
    changed.

    Args:
        storage_dir: Folder that contains `.quark`. Defaults to the working directory.
        generated_at: Time recorded for the migration, as ISO 8601 text. Defaults to now.

    Returns:
        The schema version of the store: `CURRENT_SCHEMA_VERSION`.

    Raises:
        SchemaMigrationError: The store does not exist, is not a Quark store, is newer than this
            Quark, damaged or read-only, or an older Quark is writing to it. It was not changed.
        SchemaValidationError: `storage_dir` is not a path, or `generated_at` is not ISO 8601 text.
    """
    moment = _check_moment(generated_at)
    try:
        root = resolve_storage_dir(storage_dir)
    except SessionStoreError as error:
        raise SchemaMigrationError(str(error)) from error
    migrate = default_registry().find_default_primary().migrate
    assert migrate is not None
    return migrate(BackendConfig(storage_dir=root), moment)


def _check_moment(generated_at: str | None) -> str:
    if generated_at is None:
        return format_time(now_us())
    if not isinstance(generated_at, str):
        raise SchemaValidationError(
            f"generated_at must be an ISO 8601 str, not {type(generated_at).__name__}"
        )
    try:
        parse_time(generated_at)
    except (ValueError, OverflowError):
        raise SchemaValidationError(
            f"generated_at must be ISO 8601 such as 2026-05-07T00:00:00Z, got {generated_at!r:.60}"
        ) from None
    return generated_at


def find_missing_library(definition: BackendDefinition) -> str | None:
    """Name of the first library that a backend needs and this Python lacks, or None."""
    for name in definition.needs:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return name
        # A mere folder of that name, such as a library's own files, has no origin.
        if found is None or found.origin is None:
            return name
    return None


def require_libraries(definition: BackendDefinition) -> None:
    """Refuse to open a backend whose libraries are not installed.

    Raises:
        BackendUnusable: One is not; the message says how to install it.
    """
    missing = find_missing_library(definition)
    if missing is not None:
        how = definition.install or f"pip install {missing}"
        raise BackendUnusable(
            f"{missing} is not installed: {how}; the records wait", backend=definition.name
        )


PROTOCOLS: Mapping[Capability, type] = {
    Capability.PRIMARY: SupportsPrimary,
    Capability.READ: SupportsRead,
    Capability.GROUPS: SupportsGroups,
    Capability.REPLAY: SupportsReplay,
    Capability.SERIES: SupportsSeries,
    Capability.SEARCH: SupportsSearch,
    Capability.PAGES: SupportsPages,
    Capability.GRID: SupportsGrid,
    Capability.GENERATIONS: SupportsGenerations,
    Capability.ARTIFACTS: SupportsArtifacts,
    Capability.REMOVAL: SupportsRemoval,
    Capability.CHANGES: SupportsChanges,
    Capability.EDITS: SupportsEdits,
    Capability.BELONGING: SupportsBelonging,
    Capability.COORDINATION: SupportsCoordination,
}
"""What a backend has that declares a capability."""

# Whatever a run's only store does not keep is lost, and nobody would notice.
_PRIMARY_NEEDS = {
    Capability.READ: "the records of a run cannot be read back",
    Capability.IDEMPOTENT: "records that are sent again after a lost reply are duplicated",
    Capability.GENERATIONS: "findings of analyze() cannot be stored",
}


def check_capabilities(definition: BackendDefinition, backend: object) -> Backend:
    """Compare what a definition declares with what was opened, and return the backend.

    Raises:
        BackendContractError: A declared capability is not there, or one is
            there that was not declared.
    """

    def refuse(reason: str) -> BackendContractError:
        return BackendContractError(
            f"backend {definition.name!r} {reason}", backend=definition.name
        )

    if not isinstance(backend, Backend):
        raise refuse(f"opened {type(backend).__name__}, which has no write() and close()")
    declared = frozenset(definition.capabilities)
    for capability, protocol in PROTOCOLS.items():
        if capability in declared and not isinstance(backend, protocol):
            raise refuse(f"declares {capability} but does not implement {protocol.__name__}")
        if capability not in declared and isinstance(backend, protocol):
            raise refuse(f"implements {protocol.__name__} but does not declare {capability}")
    if Capability.GENERATIONS in declared and Capability.PRIMARY not in declared:
        raise refuse(
            "declares generations without primary, but Quark reads analyzer outputs from "
            "primary stores only. Remove generations"
        )
    missing = sorted(_PRIMARY_NEEDS.keys() - declared)
    if Capability.PRIMARY in declared and missing:
        reasons = "; ".join(_PRIMARY_NEEDS[each] for each in missing)
        raise refuse(
            f"declares primary without {', '.join(missing)}: {reasons}. Implement it, or remove "
            "primary and use the backend as a mirror"
        )
    return backend
