"""The part of the service's table of routes that is about sweeps, trials, logs and comparing."""

from __future__ import annotations

from typing import Any

from quark_backends.service.coordination import (
    AddTrialsRequest,
    AppendRequest,
    ClaimRequest,
    CompareBelongingRequest,
    CompareReply,
    CompareRequest,
    EntryList,
    OpenSweepRequest,
    SettleRequest,
    SweepList,
    SweepStateRequest,
    TrialList,
    TrialReply,
)
from quark_backends.service.protocol import JSON, MSGPACK
from quark_backends.service.server.config import ANY_SCOPE
from quark_backends.service.server.http.call import Parameter, ServiceRoute
from quark_backends.service.server.workspaces import sweep_routes
from quark_core.backends.coordination import AppendedEntries

_BOTH = (JSON, MSGPACK)
_TEXT: dict[str, Any] = {"type": "string", "maxLength": 512}
_NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0}

_START = Parameter(name="start", schema=_NUMBER, summary="Number of the first of them.")
_LIMIT = Parameter(name="limit", schema=_NUMBER, summary="How many at most.")
_CUT = "There may be fewer than the limit although more follow: `next` says so."

COORDINATION_ROUTES: tuple[ServiceRoute, ...] = (
    ServiceRoute(
        method="GET",
        path="/v1/sweeps",
        handler=sweep_routes.list_sweeps,
        summary="The sweeps that there are, newest first.",
        scope="read",
        reply=SweepList,
        parameters=(Parameter(name="project", schema=_TEXT, summary="Only of this project."),),
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/sweeps",
        handler=sweep_routes.open_sweep,
        summary="The sweep of a name, which is made where there is none.",
        scope="ingest",
        request=OpenSweepRequest,
        reply=dict[str, Any],
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/sweeps/{sweep_id}",
        handler=sweep_routes.load_sweep,
        summary="One sweep, with how many of its trials are in which state.",
        scope=ANY_SCOPE,
        reply=dict[str, Any],
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/sweeps/{sweep_id}/state",
        handler=sweep_routes.update_sweep,
        summary="Pause, go on with or cancel a sweep.",
        scope="write",
        request=SweepStateRequest,
        reply=dict[str, Any],
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/sweeps/{sweep_id}/trials",
        handler=sweep_routes.list_trials,
        summary="Trials of a sweep, by their number.",
        scope=ANY_SCOPE,
        reply=TrialList,
        parameters=(_START, _LIMIT),
        media=_BOTH,
        notes=_CUT,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/sweeps/{sweep_id}/trials",
        handler=sweep_routes.add_trials,
        summary="Add trials, all of them or none; of several who add under one key, the first.",
        scope="ingest",
        request=AddTrialsRequest,
        reply=TrialList,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/sweeps/{sweep_id}/claim",
        handler=sweep_routes.claim_trial,
        summary="A trial that nobody else holds, or null where there is none to have now.",
        scope="ingest",
        request=ClaimRequest,
        reply=TrialReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/sweeps/{sweep_id}/settle",
        handler=sweep_routes.settle_trial,
        summary="Say what became of a trial, or that it is held still.",
        scope="ingest",
        request=SettleRequest,
        reply=TrialReply,
        media=_BOTH,
        notes="Answers with the trial as it is then: see whether it has your token.",
    ),
    ServiceRoute(
        method="GET",
        path="/v1/entries",
        handler=sweep_routes.read_entries,
        summary="Entries of a log, in their order.",
        scope=ANY_SCOPE,
        reply=EntryList,
        parameters=(
            Parameter(name="log", schema=_TEXT, summary="The log.", required=True),
            _START,
            _LIMIT,
        ),
        media=_BOTH,
        notes=_CUT,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/entries",
        handler=sweep_routes.append_entries,
        summary="Append entries to a log, all of them or none, one after the other.",
        scope="ingest",
        request=AppendRequest,
        reply=AppendedEntries,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/{run_id}/compare_and_set",
        handler=sweep_routes.compare_and_set,
        summary="Set a field of a run if it has the value that is expected.",
        scope="ingest",
        request=CompareRequest,
        reply=CompareReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/groups/compare_and_set",
        handler=sweep_routes.compare_and_set_group,
        summary="Set a field of a group if it has the value that is expected.",
        scope="write",
        request=CompareBelongingRequest,
        reply=CompareReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/project/compare_and_set",
        handler=sweep_routes.compare_and_set_project,
        summary="Set a field of a project if it has the value that is expected.",
        scope="write",
        request=CompareBelongingRequest,
        reply=CompareReply,
        media=_BOTH,
    ),
)
