"""Tells of a setting that differs what gave it its value on either side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quark.analysis.explanation.differences import Difference, Findings
from quark_core.records import ConfigSnapshot


def name_origins(
    findings: Findings,
    before: Sequence[ConfigSnapshot | None],
    after: Sequence[ConfigSnapshot | None],
) -> Findings:
    """Say of each setting what gave it its value, as far as all runs of a side agree on it.

    Args:
        findings: What differs.
        before, after: Configurations of the runs of either side.
    """
    sides = [_label(before), _label(after)]
    if not any(sides):
        return findings
    found = tuple(
        _tell(each, *(side.get(each.place) for side in sides))
        if each.kind in ("config", "seed")
        else each
        for each in findings.found
    )
    return replace(findings, found=found)


def _label(configs: Sequence[ConfigSnapshot | None]) -> dict[str, str]:
    """Setting -> what gave it its value, where all of these say the same."""
    told = [
        {key: chain[0].label for key, chain in config.group_origins().items()} if config else {}
        for config in configs
    ]
    first = told[0] if told else {}
    return {
        key: label for key, label in first.items() if all(each.get(key) == label for each in told)
    }


def _tell(difference: Difference, before: str | None, after: str | None) -> Difference:
    if before is None and after is None:
        return difference
    if before == after:
        said = f"by {after} on both sides"
    else:
        said = f"by {after or 'nobody knows what'}, before by {before or 'nobody knows what'}"
    words = f"{difference.words}; set {said}" if difference.words else f"set {said}"
    return replace(difference, words=words)
