"""The five backends, by name."""

from __future__ import annotations

from quark_backends.tensorboard import plugin as tensorboard_plugin
from quark_backends.wandb import plugin as wandb_plugin
from quark_core.backends.registry import default_registry


def list_backends(uri: str) -> list[str]:
    """The four mirrors beside the embedded store, made known where an old install does not.

    Args:
        uri: MLflow's.
    """
    known = default_registry()._definitions
    for plugin in (tensorboard_plugin, wandb_plugin):
        for definition in plugin.quark_register_backends():
            known.setdefault(definition.name, definition)
    return [f"mlflow+{uri}", "wandb:?mode=offline", "csv", "tensorboard"]
