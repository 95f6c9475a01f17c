"""Finds the installed backends, and keeps a reason for each plugin that was left out."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from quark_core import hookspecs
from quark_core.backend import API_VERSION, BackendDefinition
from quark_core.errors import BackendContractError, UnknownBackendError

__all__ = ["BackendRegistry", "LeftOut", "default_registry"]

_log = logging.getLogger("quark")
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")

# Backends that an extra brings: what to say when one is asked for and absent.
_EXTRAS = {"mlflow": "mlflow", "tensorboard": "tensorboard", "wandb": "wandb"}
# Backends that are always there, unless an installation is broken.
_OWN = frozenset({"embedded", "csv", "service", "quark", "http", "https"})


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
        """Load every entry point of the group `quark.backends`."""
        registry = cls()
        if points is None:
            points = entry_points(group=hookspecs.ENTRY_POINT_GROUP)
        for point in sorted(points, key=lambda p: (not p.value.startswith("quark_backends"), p)):
            origin = point.dist.name if point.dist is not None else point.value
            try:
                plugin = point.load()
            except BaseException as error:  # a plugin may even call sys.exit while it is imported
                if isinstance(error, KeyboardInterrupt):
                    raise
                registry._leave_out(point.name, origin, f"import failed: {_describe(error)}")
                continue
            registry.register(plugin, name=point.name, origin=origin)
        return registry

    def register(self, plugin: Any, *, name: str, origin: str = "this process") -> None:
        """Add one plugin and the backends that it declares; a broken one is left out."""
        try:
            registered = self._manager.register(plugin, name=name)
            if registered is None:
                raise ValueError("it is blocked or registered already")
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
                self._add(definition, origin)
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
                    f"backend {name!r} of {left_out.origin} cannot be used: {left_out.reason}",
                    backend=name,
                )
        extra = _EXTRAS.get(name)
        hint = f'; install it with: pip install "quark-tracker[{extra}]"' if extra else ""
        if name in _OWN:
            hint = "; it belongs to Quark, which is not whole here: install quark-tracker again"
        raise UnknownBackendError(
            f"backends: there is no backend {name!r} (installed: {', '.join(self.names)}){hint}",
            backend=name,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the usable backends, sorted."""
        return tuple(sorted(self._definitions))

    @property
    def definitions(self) -> tuple[BackendDefinition, ...]:
        """The usable backends, sorted by name."""
        return tuple(self._definitions[name] for name in self.names)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The plugins that cannot be used, each with its reason."""
        return tuple(self._left_out)

    def origin(self, name: str) -> str:
        """Distribution that a usable backend came from."""
        return self._origins[name]

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call a notice hook of every plugin; one that raises is logged and passed over."""
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            wanted = {name: arguments[name] for name in implementation.argnames}
            try:
                implementation.function(**wanted)
            except (Exception, SystemExit):  # noqa: BLE001 - a plugin must not end a session
                _log.exception("plugin %s failed in %s", implementation.plugin_name, hook)

    def _add(self, definition: BackendDefinition, origin: str) -> None:
        self._definitions[definition.name] = definition
        self._origins[definition.name] = origin
        for scheme in definition.schemes:
            self._schemes.setdefault(scheme, definition.name)

    def _refusal(self, definition: object) -> str | None:
        if not isinstance(definition, BackendDefinition):
            return f"it declared a {type(definition).__name__}, not a BackendDefinition"
        if not isinstance(definition.name, str) or not _NAME.fullmatch(definition.name):
            return f"its name {definition.name!r} is not a lowercase word that one could type"
        for field in ("schemes", "capabilities"):
            value = getattr(definition, field)
            if not isinstance(value, Iterable) or isinstance(value, str):
                return f"its {field} are {value!r}, not a collection"
        if definition.api_version != API_VERSION:
            return (
                f"it speaks version {definition.api_version} of the backend contract; "
                f"this Quark speaks {API_VERSION}"
            )
        if definition.name in self._definitions:
            return f"the name is taken by {self._origins[definition.name]}"
        return None

    def _leave_out(self, name: str, origin: str, reason: str) -> None:
        self._left_out.append(LeftOut(name, origin, reason))
        warnings.warn(
            f"Quark left out the backend plugin {name!r} of {origin}: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_default: BackendRegistry | None = None


def default_registry() -> BackendRegistry:
    """The registry of the installed plugins, found once a process."""
    global _default
    if _default is None:
        _default = BackendRegistry.discover()
    return _default
