"""run.json and config.json of the CSV mirror."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec

from quark_backends.mirroring.belonging import change_belonging
from quark_backends.mirroring.saved_state import replace_file
from quark_core.api import (
    ConfigSnapshot,
    EnvironmentSnapshot,
    LifecycleRecord,
    ProcessIdentity,
    ProjectRecord,
    RunEnding,
    RunRecord,
    StoredRun,
    find_loss,
    format_time,
    renew_process,
)

_RUN = "run.json"
_CONFIG = "config.json"


class RunFile:
    """A run's state as JSON files that are replaced whole.

    Args:
        folder: The run's folder in the mirror.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def apply(self, record: LifecycleRecord) -> None:
        """Apply one lifecycle record; applying it twice changes nothing more."""
        known = self._load()
        data: dict[str, Any] = dict(record.data or {})
        if record.action == "start":
            if known and record.attempt < known["attempt"]:
                return
            created_us = known["created_us"] if known else record.time_us
            tags = known["tags"] if known else sorted(set(data["run"]["tags"]))
            from_steps = known.get("from_steps", {})
            if data.get("from_step") is not None:
                from_steps = {**from_steps, str(record.attempt): data["from_step"]}
            known = {
                **{name: known[name] for name in ("groups", "fields") if name in known},
                **data["run"],
                "id": record.run_id,
                "writer": record.writer_id,
                "project": data["project"],
                "process": data["process"],
                "tags": tags,
                "status": "running",
                "attempt": record.attempt,
                "created_us": created_us,
                "ended_us": None,
                "exit_code": None,
                "ending": None,
                "environment": known.get("environment"),
                "from_steps": from_steps,
            }
        elif not known:
            return
        elif record.action == "tag":
            known["tags"] = sorted({*known["tags"], data["tag"]})
        elif record.action in ("group", "fields", "edit"):
            known.update(change_belonging(known, record))
        elif record.attempt != known["attempt"]:
            return
        elif record.action == "heartbeat" and known.get("writer") != record.writer_id:
            return  # of a process that joined, and may have read what is no longer so
        elif record.action == "heartbeat":
            known["process"] = renew_process(known["process"], data)
        elif record.action == "status":
            known["status"] = data["status"]
            known["ended_us"] = record.time_us
            known["exit_code"] = data.get("exit_code")
            known["ending"] = data.get("ending")
        elif record.action == "environment":
            known["environment"] = data
        elif record.action == "config":
            self._save(_CONFIG, data)
        if record.action != "heartbeat":
            known["updated_us"] = record.time_us
        known["heartbeat_us"] = time.time_ns() // 1000
        self._save(_RUN, known)

    def load_from_steps(self) -> dict[int, int]:
        """Attempt -> the step that it was resumed from."""
        from_steps = self._load().get("from_steps", {})
        return {int(attempt): step for attempt, step in from_steps.items()}

    def load(self) -> StoredRun | None:
        """The run, or None where there is none."""
        known = self._load()
        if not known:
            return None
        project = known["project"]
        loss = find_loss(
            known["status"],
            msgspec.convert(known["process"], ProcessIdentity),
            known["heartbeat_us"],
        )
        created_at, updated_at = format_time(known["created_us"]), format_time(known["updated_us"])
        config, environment = self._load(_CONFIG), known["environment"]
        return StoredRun(
            project=ProjectRecord(
                project["id"], project["name"], project["root_path"], created_at, updated_at
            ),
            run=RunRecord(
                id=known["id"],
                project_id=project["id"],
                project_name=project["name"],
                status=known["status"],
                parent_run_id=known["parent_run_id"],
                lineage_root_run_id=known["lineage_root_run_id"],
                resume_count=known["attempt"],
                run_path=known["run_path"],
                git_commit=known["git_commit"],
                strict_mode=known["strict_mode"],
                tags=tuple(known["tags"]),
                attempt=known["attempt"],
                name=known["name"],
                notes=known["notes"],
                created_at=created_at,
                updated_at=updated_at,
                ended_at=None if known["ended_us"] is None else format_time(known["ended_us"]),
                groups=tuple(known.get("groups") or ()),
            ),
            state=known["status"] if loss is None else "lost",
            config=ConfigSnapshot.from_data(config) if config else None,
            environment=EnvironmentSnapshot.from_data(environment) if environment else None,
            heartbeat_at=format_time(known["heartbeat_us"]),
            lost_reason=None if loss is None else loss.message,
            exit_code=known.get("exit_code"),
            ending=loss or RunEnding.from_data(known.get("ending")),
            fields=known.get("fields") or {},
        )

    def _load(self, name: str = _RUN) -> dict[str, Any]:
        try:
            loaded: dict[str, Any] = json.loads((self._folder / name).read_text("utf-8"))
        except FileNotFoundError:
            return {}
        return loaded

    def _save(self, name: str, data: dict[str, Any]) -> None:
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        replace_file(self._folder / name, text.encode(), is_synced=True)
