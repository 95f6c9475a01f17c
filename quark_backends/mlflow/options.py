"""The options of the MLflow mirror, as they stand behind `?` in its URI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quark_backends.mlflow.errors import unusable
from quark_core.api import SOURCES_OPTION

_NUMBERS = ("layers", "max_params", "max_payload_mb")
_TEXTS = ("experiment",)
_CHOICES = {
    "on_deleted": ("new", "restore"),
    "quark": ("minimal", "full"),
    "sample_ids": ("hashed", "plain"),
    SOURCES_OPTION: ("0", "1"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user has asked for.

    Attributes:
        experiment: Name of the experiment, or None for that of the run's project.
        restore: Whether a deleted run or experiment is taken back.
        hash_sample_ids: Whether ids of samples are hashed.
        layers: How many layers, and parameters, of a step become curves.
        max_params: How many params the server takes, or None for any number.
        keeps_all: Whether MLflow gets all that Quark knows, and not only what it has a place for.
        keeps_sources: Whether it gets the code that the run is made of.
        max_payload_bytes: Larger payloads of artifacts are left out; None for no limit.
    """

    experiment: str | None = None
    restore: bool = False
    hash_sample_ids: bool = True
    layers: int = 20
    max_params: int | None = None
    max_payload_bytes: int | None = None
    keeps_all: bool = False
    keeps_sources: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Options:
        """Read them.

        Raises:
            BackendUnusable: An unknown option, or a bad value.
        """
        known = sorted((*_NUMBERS, *_CHOICES, *_TEXTS))
        for name, text in options.items():
            if name not in known:
                raise unusable(
                    f"the MLflow mirror has no option {name!r}; it has {', '.join(known)}"
                )
            if name in _NUMBERS and not (text.isascii() and text.isdecimal()):
                raise unusable(f"{name} must be a number, got {text!r}")
            if name in _CHOICES and text not in _CHOICES[name]:
                raise unusable(f"{name} must be {' or '.join(_CHOICES[name])}, got {text!r}")
        numbers = {name: int(options[name]) for name in _NUMBERS if name in options}
        size_mb = numbers.get("max_payload_mb")
        return cls(
            experiment=options.get("experiment", "").strip() or None,
            restore=options.get("on_deleted") == "restore",
            hash_sample_ids=options.get("sample_ids") != "plain",
            keeps_all=options.get("quark") == "full",
            keeps_sources=options.get(SOURCES_OPTION) == "1",
            layers=numbers.get("layers", 20),
            max_params=numbers.get("max_params"),
            max_payload_bytes=None if size_mb is None else size_mb * 1024 * 1024,
        )
