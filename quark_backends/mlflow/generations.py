"""Which generation of each analyzer's outputs the tags of the MLflow run show: the newest."""

from __future__ import annotations

import re

from quark_backends.mlflow.lifecycle import Lifecycle
from quark_backends.mlflow.run import MirroredRun
from quark_core.delivery.generation_journal import split_generation

__all__ = ["ShownGenerations"]

_ALERT_TAG = "quark.alert."
# Early in the tag's JSON, whose end may have been cut off.
_WRITER = re.compile(r'"writer_id": "([^"\\]*)"')


class ShownGenerations:
    """Keeps the tag `quark.generation.<analyzer>`, and no tags of older generations.

    Journals of one run may be delivered in any order, and by several machines.

    Args:
        run: The MLflow run.
        lifecycle: Sets its tags.
    """

    def __init__(self, run: MirroredRun, lifecycle: Lifecycle) -> None:
        self._run = run
        self._lifecycle = lifecycle

    def take_up(self, writer_id: str) -> bool:
        """Whether tags are to show what this writer found: none that is newer was here.

        Alerts that only older generations of the analyzer have lose their tags.
        A writer that is no generation is always shown.
        """
        found = split_generation(writer_id)
        if found is None:
            return True
        analyzer, number = found
        tags = self._run.load().tags
        name = f"quark.generation.{analyzer}"
        known = tags.get(name, "")
        shown = int(known) if known.isascii() and known.isdigit() else 0
        if number < shown:
            return False
        if number > shown:
            self._lifecycle.drop_tags(
                key
                for key, text in tags.items()
                if key.startswith(_ALERT_TAG) and _is_older(text, analyzer, number)
            )
            self._lifecycle.set_named_tags({name: str(number)})
        return True


def _is_older(text: str, analyzer: str, number: int) -> bool:
    match = _WRITER.search(text)
    found = None if match is None else split_generation(match[1])
    return found is not None and found[0] == analyzer and found[1] < number
