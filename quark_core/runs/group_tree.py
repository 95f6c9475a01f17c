"""The groups that runs are in, as a tree: what lies in a group lies in those above it too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quark_core.backends.contract import StoredRun

__all__ = ["GroupNode", "make_group_tree"]


@dataclass(slots=True)
class GroupNode:
    """A group of a project, whether runs are in it or only in groups below it.

    Attributes:
        project: Name of the project.
        path: The group's path.
        runs: The runs in it and below it, each once, newest first.
        own: How many of them are in it itself.
        description: What was said of it, or None.
        fields, tags: Likewise.
    """

    project: str
    path: str
    runs: list[StoredRun] = field(default_factory=list)
    own: int = 0
    description: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    @property
    def depth(self) -> int:
        """How many groups it lies in."""
        return self.path.count("/")

    @property
    def newest_at(self) -> str | None:
        """When the newest of its runs was started, or None without any."""
        return self.runs[0].run.created_at if self.runs else None

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {
            "project": self.project,
            "path": self.path,
            "runs": len(self.runs),
            "own_runs": self.own,
            "running": sum(run.state == "running" for run in self.runs),
            "newest_at": self.newest_at,
            "newest_run": self.runs[0].run.id if self.runs else None,
            "description": self.description,
            "fields": dict(self.fields),
            "tags": list(self.tags),
        }


def make_group_tree(
    runs: Iterable[StoredRun], described: Iterable[tuple[str, str]] = ()
) -> list[GroupNode]:
    """The groups of some runs, by project and path, each before what lies in it.

    Args:
        runs: The runs, newest first.
        described: Project and path of groups that are there without a run.
    """
    nodes: dict[tuple[str, str], GroupNode] = {}

    def reach(project: str, path: str) -> GroupNode:
        return nodes.setdefault((project, path), GroupNode(project, path))

    for run in runs:
        project = run.project.name
        for path in dict.fromkeys(up for each in run.run.groups for up in _list_up(each)):
            reach(project, path).runs.append(run)
        for path in run.run.groups:
            reach(project, path).own += 1
    for project, path in described:
        for up in _list_up(path):
            reach(project, up)
    return sorted(nodes.values(), key=lambda node: (node.project, node.path.split("/")))


def _list_up(path: str) -> Iterator[str]:
    """A path and those that it lies in, the outermost first."""
    parts = path.split("/")
    for end in range(1, len(parts) + 1):
        yield "/".join(parts[:end])
