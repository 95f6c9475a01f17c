"""The table of the service's routes."""

from __future__ import annotations

from typing import Any

from quark_backends.service.belonging import BelongingRequest, GroupList
from quark_backends.service.protocol import (
    JSON,
    MSGPACK,
    ROWS,
    Acknowledged,
    ChangesReply,
    ChangesRequest,
    CollectReply,
    CollectRequest,
    CurvesReply,
    CurvesRequest,
    DamagedList,
    EditRequest,
    GenerationReply,
    GenerationRequest,
    GridReply,
    HeadsReply,
    IngestRequest,
    KeyInfo,
    KeyList,
    KeyRequest,
    NamesReply,
    NewKey,
    PageReply,
    PageRequest,
    PayloadReply,
    ReadRequest,
    RecordList,
    RotateRequest,
    RunIds,
    RunList,
    SearchRequest,
    SeriesReply,
    StopReply,
    StopRunRequest,
    SummaryList,
    UsageList,
    UsageReply,
    WireBatches,
    WorkspaceReply,
)
from quark_backends.service.server import server_routes
from quark_backends.service.server.config import ANY_SCOPE
from quark_backends.service.server.coordination_routes import COORDINATION_ROUTES
from quark_backends.service.server.http.call import Parameter, ServiceRoute
from quark_backends.service.server.ingest import routes as ingest_routes
from quark_backends.service.server.ingest import run_routes as control_routes
from quark_backends.service.server.ingest.run_routes import (
    HeartbeatRequest,
    LogRequest,
    StartRequest,
    StatusRequest,
    TagRequest,
)
from quark_backends.service.server.workspaces import (
    edit_routes,
    following_routes,
    key_routes,
    payload_routes,
    read_routes,
    removal_routes,
)

__all__ = ["ROUTES"]

_BOTH = (JSON, MSGPACK)
_BYTES = ("application/octet-stream",)
_TEXT: dict[str, Any] = {"type": "string", "maxLength": 512}
_NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0}
_FLAG: dict[str, Any] = {"type": "boolean"}

_READS = (
    ServiceRoute(
        method="GET",
        path="/v1/workspace",
        handler=server_routes.describe_workspace,
        summary="Whom the key lets in, and what the server takes.",
        scope=ANY_SCOPE,
        reply=WorkspaceReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/runs",
        handler=read_routes.list_runs,
        summary="One page of the workspace's runs, newest first.",
        scope="read",
        reply=RunList,
        parameters=(
            Parameter(name="project", schema=_TEXT, summary="Only runs of this project."),
            Parameter(name="store", schema=_TEXT, summary="Only runs of this project store."),
            Parameter(name="limit", schema=_NUMBER, summary="Runs of the page."),
            Parameter(name="after", schema=_TEXT, summary="`next` of the page before."),
        ),
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/search",
        handler=read_routes.search_runs,
        summary="The runs that an expression is true of.",
        scope="read",
        request=SearchRequest,
        reply=SummaryList,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/page",
        handler=read_routes.search_page,
        summary="One page of the runs that an expression is true of, with chosen columns.",
        scope="read",
        request=PageRequest,
        reply=PageReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/names",
        handler=read_routes.list_names,
        summary="Metrics, configuration keys and tags that runs have.",
        scope="read",
        reply=NamesReply,
        parameters=(
            Parameter(name="project", schema=_TEXT, summary="Only of runs of this project."),
            Parameter(name="store", schema=_TEXT, summary="Only of runs of this project store."),
            Parameter(name="text", schema=_TEXT, summary="Only those that have this in them."),
            Parameter(name="limit", schema=_NUMBER, summary="Of each sort so many at most."),
        ),
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/runs/{run_id}",
        handler=read_routes.load_run,
        summary="One run.",
        scope="read",
        reply=dict[str, Any],
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/runs/{run_id}/summary",
        handler=read_routes.summarize_run,
        summary="One run with its metrics summed up.",
        scope="read",
        reply=dict[str, Any],
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/{run_id}/records/{kind}/read",
        handler=read_routes.read_records,
        summary="Records of one kind that fit a query, as rows or as JSON.",
        scope="read",
        request=ReadRequest,
        reply=RecordList,
        media=(*_BOTH, ROWS),
    ),
    ServiceRoute(
        method="GET",
        path="/v1/runs/{run_id}/series",
        handler=read_routes.read_series,
        summary="One metric as a curve, reduced to a number of points.",
        scope="read",
        reply=SeriesReply,
        parameters=(
            Parameter(name="key", schema=_TEXT, summary="The metric.", required=True),
            Parameter(name="max_points", schema=_NUMBER, summary="Entries at most; all else."),
            Parameter(name="rank", schema=_NUMBER, summary="Of this rank; across all else."),
            Parameter(
                name="all_attempts",
                schema=_FLAG,
                summary="With points that a later attempt has hidden.",
            ),
        ),
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/{run_id}/curves",
        handler=following_routes.read_curves,
        summary="Several metrics within a window, of one moment, with its cursor.",
        scope="read",
        request=CurvesRequest,
        reply=CurvesReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/runs/{run_id}/heads",
        handler=following_routes.read_heads,
        summary="How far a run has come.",
        scope="read",
        reply=HeadsReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/{run_id}/changes",
        handler=following_routes.read_changes,
        summary="What came into a run since a cursor.",
        scope="read",
        request=ChangesRequest,
        reply=ChangesReply,
        media=_BOTH,
        notes="Where more has come than is given, `more` is true, and the new cursor goes on.",
    ),
    ServiceRoute(
        method="GET",
        path="/v1/runs/{run_id}/grid",
        handler=read_routes.read_grid,
        summary="A figure of layers, parameters or telemetry over steps: of each cell the maximum.",
        scope="read",
        reply=GridReply,
        parameters=(
            Parameter(
                name="kind", schema=_TEXT, summary="layer, parameter or telemetry.", required=True
            ),
            Parameter(name="field", schema=_TEXT, summary="A number of it.", required=True),
            Parameter(name="summary_type", schema=_TEXT, summary="activation or gradient."),
            Parameter(name="by", schema=_TEXT, summary="name or rank: what the rows are."),
            Parameter(name="under", schema=_TEXT, summary="Only what lies in this module."),
            Parameter(name="low", schema=_NUMBER, summary="First step."),
            Parameter(name="high", schema=_NUMBER, summary="Last step."),
            Parameter(name="rank", schema=_NUMBER, summary="Of this rank; of all else."),
            Parameter(name="bins", schema=_NUMBER, summary="Columns at most."),
            Parameter(name="rows", schema=_NUMBER, summary="Rows at most."),
            Parameter(
                name="all_attempts",
                schema=_FLAG,
                summary="With what a later attempt has hidden.",
            ),
        ),
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/runs/{run_id}/writers/{writer_id}/batches",
        handler=read_routes.read_batches,
        summary="A writer's batches as they came.",
        scope="read",
        reply=WireBatches,
        parameters=(
            Parameter(name="start", schema=_NUMBER, summary="Number of the first of them."),
            Parameter(name="limit", schema=_NUMBER, summary="How many at most."),
        ),
        media=_BOTH,
        notes="There may be fewer than the limit although more follow.",
    ),
    ServiceRoute(
        method="GET",
        path="/v1/runs/{run_id}/outputs/{kind}",
        handler=read_routes.read_outputs,
        summary="Outputs of analyzers, as rows or as JSON.",
        scope="read",
        reply=RecordList,
        parameters=(
            Parameter(name="analyzer", schema=_TEXT, summary="Only those of this analyzer."),
        ),
        media=(*_BOTH, ROWS),
    ),
)

_WRITES = (
    ServiceRoute(
        method="POST",
        path="/v1/runs/{run_id}/batches",
        handler=ingest_routes.ingest,
        summary="Store batches, all of them or none; answered once they are committed.",
        scope="ingest",
        request=IngestRequest,
        reply=Acknowledged,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/{run_id}/generations",
        handler=ingest_routes.write_generation,
        summary="Keep the outputs of one analysis, visible all at once.",
        scope="ingest",
        request=GenerationRequest,
        reply=GenerationReply,
        media=_BOTH,
    ),
)

_IDEMPOTENT = (
    Parameter(
        name="Idempotency-Key",
        schema={"type": "string", "maxLength": 200},
        summary="Names the request: sent again with the same name, it does nothing more.",
        place="header",
    ),
)


def _control(path: str, handler: Any, request: Any, summary: str) -> ServiceRoute:
    return ServiceRoute(
        method="POST",
        path=f"/v1/runs/{{run_id}}/{path}",
        handler=handler,
        summary=summary,
        scope="ingest",
        request=request,
        reply=Acknowledged,
        parameters=_IDEMPOTENT,
        media=_BOTH,
    )


_CONTROL = (
    ServiceRoute(
        method="POST",
        path="/v1/runs",
        handler=control_routes.start_run,
        summary="Start a run.",
        scope="ingest",
        request=StartRequest,
        reply=dict[str, Any],
        parameters=_IDEMPOTENT,
        media=_BOTH,
        status=201,
    ),
    _control("tags", control_routes.add_tags, TagRequest, "Add tags to a run."),
    _control("logs", control_routes.add_log, LogRequest, "Add a log line to a run."),
    _control("status", control_routes.set_status, StatusRequest, "End a run."),
    _control("heartbeat", control_routes.beat, HeartbeatRequest, "Say that a run lives."),
)

_EDITS = (
    ServiceRoute(
        method="POST",
        path="/v1/runs/{run_id}/edit",
        handler=edit_routes.edit_run,
        summary="Change the name, notes and tags of a run, archive it or take it back from there.",
        scope="write",
        request=EditRequest,
        reply=dict[str, Any],
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/{run_id}/stop",
        handler=edit_routes.request_stop,
        summary="Ask the newest attempt of a run to stop; answers with the request that stands.",
        scope="write",
        request=StopRunRequest,
        reply=StopReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/runs/{run_id}/stop",
        handler=edit_routes.find_stop,
        summary="The request to stop that stands for the newest attempt of a run, or null.",
        scope=ANY_SCOPE,
        reply=StopReply,
        media=_BOTH,
    ),
)

_OF_STORE = Parameter(name="store", schema=_TEXT, summary="Only of runs of this project store.")
_BELONGING = (
    ServiceRoute(
        method="GET",
        path="/v1/groups",
        handler=edit_routes.list_groups,
        summary="The groups that runs are in, or that are described.",
        scope="read",
        reply=GroupList,
        parameters=(
            Parameter(name="project", schema=_TEXT, summary="Only those of this project."),
            _OF_STORE,
        ),
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/groups",
        handler=edit_routes.update_group,
        summary="Change the description, fields and tags of a group.",
        scope="write",
        request=BelongingRequest,
        reply=dict[str, Any],
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/project",
        handler=edit_routes.load_project,
        summary="What is known of a project.",
        scope="read",
        reply=dict[str, Any],
        parameters=(
            Parameter(name="project", schema=_TEXT, summary="Its name.", required=True),
            _OF_STORE,
        ),
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/project",
        handler=edit_routes.update_project,
        summary="Change the description, fields and tags of a project.",
        scope="write",
        request=BelongingRequest,
        reply=dict[str, Any],
        media=_BOTH,
    ),
)

_REMOVAL = (
    ServiceRoute(
        method="POST",
        path="/v1/runs/trash",
        handler=removal_routes.trash_runs,
        summary="Put runs into the trash, all or none: they are hidden, and nothing is gone.",
        scope="write",
        request=RunIds,
        reply=RunIds,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/restore",
        handler=removal_routes.restore_runs,
        summary="Take runs out of the trash, all or none.",
        scope="write",
        request=RunIds,
        reply=RunIds,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/usage",
        handler=removal_routes.measure_runs,
        summary="What runs take up.",
        scope="read",
        request=RunIds,
        reply=UsageList,
        media=_BOTH,
    ),
    ServiceRoute(
        method="DELETE",
        path="/v1/runs/{run_id}",
        handler=removal_routes.trash_run,
        summary="Put one run into the trash.",
        scope="write",
        reply=RunIds,
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/trash",
        handler=removal_routes.list_trash,
        summary="The runs in the trash, the newest there first.",
        scope="read",
        reply=UsageList,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/trash/collect",
        handler=removal_routes.collect_trash,
        summary="Remove what is in the trash for good.",
        scope="admin",
        request=CollectRequest,
        reply=CollectReply,
        media=_BOTH,
        notes="Works for a few seconds; where the reply is not done, the same request goes on.",
    ),
    ServiceRoute(
        method="GET",
        path="/v1/usage",
        handler=removal_routes.measure_workspace,
        summary="What the workspace and each of its runs take up.",
        scope="read",
        reply=UsageReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/damaged",
        handler=removal_routes.list_damaged,
        summary="Records that could not be read and were set aside.",
        scope="read",
        reply=DamagedList,
        media=_BOTH,
    ),
)

_KEYS = (
    ServiceRoute(
        method="GET",
        path="/v1/keys",
        handler=key_routes.list_keys,
        summary="The keys of the workspace, without their secrets.",
        scope="admin",
        reply=KeyList,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/keys",
        handler=key_routes.create_key,
        summary="Make a key for the workspace; only this reply tells all of it.",
        scope="admin",
        request=KeyRequest,
        reply=NewKey,
        media=_BOTH,
        status=201,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/keys/{key_id}/rotate",
        handler=key_routes.rotate,
        summary="Make a key like this one, which lives on for a time.",
        scope="admin",
        request=RotateRequest,
        reply=NewKey,
        media=_BOTH,
        status=201,
    ),
    ServiceRoute(
        method="DELETE",
        path="/v1/keys/{key_id}",
        handler=key_routes.revoke_key,
        summary="Revoke a key.",
        scope="admin",
        reply=KeyInfo,
        media=_BOTH,
    ),
)

_PAYLOADS = (
    ServiceRoute(
        method="PUT",
        path="/v1/runs/{run_id}/payloads/{sha256}",
        handler=payload_routes.put_payload,
        summary="Keep the payload of an artifact; 201 where it is new.",
        scope="ingest",
        request=bytes,
        reply=PayloadReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="HEAD",
        path="/v1/runs/{run_id}/payloads/{sha256}",
        handler=payload_routes.head_payload,
        summary="The size of a payload.",
        scope="read",
        media=_BYTES,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/runs/{run_id}/payloads/{sha256}",
        handler=payload_routes.get_payload,
        summary="A payload, or one range of it.",
        scope="read",
        reply=bytes,
        parameters=(
            Parameter(
                name="Range",
                schema={"type": "string"},
                summary="One range, such as bytes=0-99.",
                place="header",
            ),
        ),
        media=_BYTES,
    ),
)

_SERVER = (
    ServiceRoute(
        method="GET",
        path="/healthz",
        handler=server_routes.report_health,
        summary="The process serves.",
        scope=None,
        reply=server_routes.HealthReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/readyz",
        handler=server_routes.report_readiness,
        summary="The process takes work; 503 where it is about to end.",
        scope=None,
        reply=server_routes.HealthReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/metrics",
        handler=server_routes.show_metrics,
        summary="Figures for Prometheus, over all processes of the server.",
        scope=None,
        media=("text/plain",),
    ),
    ServiceRoute(
        method="GET",
        path="/openapi.json",
        handler=server_routes.describe_openapi,
        summary="This description for programs.",
        scope=None,
        media=(JSON,),
    ),
    ServiceRoute(
        method="GET",
        path="/docs",
        handler=server_routes.show_docs,
        summary="This description for people.",
        scope=None,
        media=("text/html",),
    ),
)

ROUTES: tuple[ServiceRoute, ...] = (
    *_READS,
    *_WRITES,
    *_CONTROL,
    *_PAYLOADS,
    *_EDITS,
    *_BELONGING,
    *COORDINATION_ROUTES,
    *_REMOVAL,
    *_KEYS,
    *_SERVER,
)
"""Every route. Where two paths fit, the first of the table is taken."""
