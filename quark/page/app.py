"""The page as an application: addresses, answers, limits."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from quark.page.auth import SANDBOX_POLICY, VISITOR, Visitor, make_error
from quark.page.pack import PACK_TYPE, encode_json
from quark.page.routes.analyses import AnalysisDesk
from quark.page.routes.code_sources import (
    describe_source_diffs,
    list_sources,
    tell_source,
    tell_source_diff,
)
from quark.page.routes.comparisons import ComparisonDesk, describe_sides, pack_group_curves
from quark.page.routes.curves import ChangeDesk, pack_series, pack_sparks
from quark.page.routes.edits import ask_to_stop, change_run, change_sweep
from quark.page.routes.findings import pack_evidence
from quark.page.routes.measurements import GridDesk, describe_batches, pack_module, pack_system
from quark.page.routes.parameters import Parameters
from quark.page.routes.records import (
    AUDIO,
    IMAGES,
    VIDEO,
    Payload,
    defuse_html,
    iterate_payload,
    list_artifacts,
    list_console,
    list_events,
    list_images,
    open_payload,
    read_range,
    tell_lineage,
)
from quark.page.routes.run_analysis import AnalysisProcess
from quark.page.routes.run_details import read_view, tell_analysis, tell_run
from quark.page.routes.runs import list_names, list_rows, list_standings, tell_about
from quark.page.routes.samples import list_samples, tell_sample
from quark.page.routes.sweeps import NoSuchSweep, SweepDesk
from quark.page.routes.tables import TableDesk, read_text
from quark.page.static_files import StaticFiles, load_installed_files
from quark_core.errors import (
    ArtifactNotFoundError,
    QuarkError,
    RunNotFoundError,
    SchemaValidationError,
    StoreUnavailableError,
)
from quark_core.version import __version__

if TYPE_CHECKING:
    from quark.page.routes.edits import PageEditor
    from quark.page.routes.page_source import PageSource
    from quark.page.routes.run_analysis import RunAnalyzer

_log = logging.getLogger("quark")

_ANSWER_S = 10.0
_WAIT_S = 10.0
_AT_ONCE = 4
_THREADS = 16
_RETRY_S = 2
_MOST_SESSIONS = 64
_MOST_BODY = 2**20
_MOST_PAGE_BYTES = 8 * 2**20
# Of the list, as its page asks.
_LISTED = 200
_PLAIN_ID = re.compile(r"[A-Za-z0-9._-]+")
_PLAIN_SIDE = re.compile(r"[A-Za-z0-9._,-]+")
_SIDES = ("run", "side", "group")
_FOREVER = "public, max-age=31536000, immutable"

Answer = Callable[["PageApplication", Request, Parameters], Response | None]
Change = Callable[["PageEditor", str, bytes, str], dict[str, Any]]


class PageApplication:
    """What the handlers share.

    Args:
        source: What is looked at.
        static: The page's files.
        analyzer: Computes analyses that are not stored.
        editor: Changes runs; None where nobody may.
    """

    def __init__(
        self,
        source: PageSource,
        static: StaticFiles,
        analyzer: RunAnalyzer,
        editor: PageEditor | None = None,
    ) -> None:
        self.source = source
        self.static = static
        self.editor = editor
        self.desk = AnalysisDesk(source, analyzer)
        self.comparisons = ComparisonDesk(source, self.desk)
        self.changes = ChangeDesk(source, self.desk)
        self.grids = GridDesk(source, self.desk)
        self.tables = TableDesk(source)
        self.sweeps = SweepDesk(source)
        self._threads = CapacityLimiter(_THREADS)
        self._turns: dict[bytes, asyncio.Semaphore] = {}

    async def answer(self, request: Request, handler: Answer) -> Response:
        """Have a handler answer on a thread, in its turn, within the time that there is."""
        visitor: Visitor | None = request.scope.get(VISITOR)
        turns = self._find_turns(b"" if visitor is None else visitor.session)
        try:
            async with asyncio.timeout(_WAIT_S):
                await turns.acquire()
        except TimeoutError:
            return _say_busy("too much is asked for at once")
        work = asyncio.ensure_future(
            to_thread.run_sync(
                functools.partial(self._call, handler, request), limiter=self._threads
            )
        )
        # A thread cannot be stopped: it keeps its turn until it is done.
        work.add_done_callback(lambda _: turns.release())
        try:
            return await asyncio.wait_for(asyncio.shield(work), _ANSWER_S)
        except TimeoutError:
            work.add_done_callback(_drop_result)
            return _say_busy(f"no answer within {_ANSWER_S:.0f} s")

    async def change(self, request: Request, handler: Change) -> Response:
        """Have a handler change something, once its body is there; refused to who may not."""
        visitor: Visitor | None = request.scope.get(VISITOR)
        if self.editor is None:
            return _say(403, "this server changes no run: it was started without --allow-edit")
        if visitor is None or not visitor.may_edit:
            return _say(403, "your key may not change runs: that takes the scope write")
        try:
            async with asyncio.timeout(_WAIT_S):
                body = await _read_body(request)
        except TimeoutError:
            return _say(408, "the body did not come in time")
        if body is None:
            return _say(413, f"the body has more than {_MOST_BODY} bytes")
        editor = self.editor

        def act(page: PageApplication, request: Request, _: Parameters) -> Response:
            (subject,) = request.path_params.values()
            changed = handler(editor, subject, body, visitor.by)
            page.source.forget()
            page.sweeps.forget()
            return _send_json(changed)

        return await self.answer(request, act)

    def _call(self, handler: Answer, request: Request) -> Response:
        pairs = parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        try:
            self.source.catch_up()
            return handler(self, request, Parameters(pairs)) or Response(status_code=204)
        except (RunNotFoundError, ArtifactNotFoundError, NoSuchSweep) as error:
            return _say(404, str(error))
        except SchemaValidationError as error:
            return _say(400, str(error))
        except StoreUnavailableError as error:
            return _say_busy(str(error))
        except QuarkError as error:
            return _say(409, str(error))
        except Exception:  # noqa: BLE001 - a page is answered whatever happens
            _log.exception("%s could not be answered", request.url.path)
            return _say(500, "this is a mistake of Quark's; the terminal shows it")

    def _find_turns(self, session: bytes) -> asyncio.Semaphore:
        turns = self._turns.pop(session, None) or asyncio.Semaphore(_AT_ONCE)
        self._turns[session] = turns
        while len(self._turns) > _MOST_SESSIONS:
            del self._turns[next(iter(self._turns))]
        return turns


def make_app(
    source: PageSource,
    *,
    static: StaticFiles | None = None,
    base: str = "",
    analyzer: RunAnalyzer | None = None,
    editor: PageEditor | None = None,
) -> Starlette:
    """The application, without its guard.

    Args:
        source: What is looked at.
        static: The page's files; by default those that come with Quark.
        base: Path that every address begins with, such as `/quark`, or "".
        analyzer: Computes analyses that are not stored; by default a process of its own.
        editor: Changes runs; None where nobody may.
    """
    page = PageApplication(
        source, static or load_installed_files(), analyzer or AnalysisProcess(source), editor
    )

    @asynccontextmanager
    async def live(_: Starlette) -> AsyncIterator[None]:
        page.desk.prepare()
        yield
        page.desk.close()
        page.tables.close()

    routes = [Route(f"{base}{path}", _bind(page, handler)) for path, handler in _ANSWERS.items()]
    routes += [
        Route(f"{base}{path}", _bind_change(page, handler), methods=["POST"])
        for path, handler in _CHANGES.items()
    ]
    routes += [
        Route(f"{base}/static/{{version}}/{{path:path}}", functools.partial(_send_static, page)),
        Route(f"{base}/", functools.partial(_send_page, page, 0)),
        Route(f"{base}/compare", functools.partial(_send_page, page, 0)),
        Route(f"{base}/sweeps", functools.partial(_send_page, page, 0)),
        Route(f"{base}/sweep/{{sweep_id}}", functools.partial(_send_page, page, 1)),
        Route(f"{base}/run/{{run_id}}", functools.partial(_send_page, page, 1)),
        Route(f"{base}/run/{{run_id}}/layers", functools.partial(_send_page, page, 2)),
    ]
    if base:
        routes.append(Route(base, _send_home))
    app = Starlette(routes=routes, lifespan=live, exception_handlers={404: _say_nothing_there})
    app.state.page = page
    # An address that is nearly one would be sent on to wherever `Host` says.
    app.router.redirect_slashes = False
    return app


def _bind(page: PageApplication, handler: Answer) -> Any:
    async def endpoint(request: Request) -> Response:
        return await page.answer(request, handler)

    return endpoint


def _bind_change(page: PageApplication, handler: Change) -> Any:
    async def endpoint(request: Request) -> Response:
        return await page.change(request, handler)

    return endpoint


async def _read_body(request: Request) -> bytes | None:
    """The body; None where it is larger than any that the page sends."""
    parts, size_bytes = [], 0
    async for part in request.stream():
        size_bytes += len(part)
        if size_bytes > _MOST_BODY:
            return None
        parts.append(part)
    return b"".join(parts)


async def _send_static(page: PageApplication, request: Request) -> Response:
    return send_static(page.static, **request.path_params)


def send_static(static: StaticFiles, version: str, path: str) -> Response:
    """One of the page's files, to be kept for ever; 404 for any other."""
    found = static.files.get(path)
    if found is None or version != static.version:
        return _say(404, "there is no such file")
    media_type, content = found
    return Response(content, media_type=media_type, headers={"cache-control": _FOREVER})


async def _send_page(page: PageApplication, depth: int, request: Request) -> Response:
    content = page.static.render(depth, _find_first(request))
    return Response(content, media_type="text/html; charset=utf-8")


def _find_first(request: Request) -> str | None:
    """What the page at this address asks for first, below its root."""
    run_id = request.path_params.get("run_id")
    if run_id is not None:
        return f"api/runs/{run_id}" if _PLAIN_ID.fullmatch(run_id) else None
    sweep_id = request.path_params.get("sweep_id")
    if sweep_id is not None:
        return f"api/sweeps/{sweep_id}" if _PLAIN_ID.fullmatch(sweep_id) else None
    if request.url.path.endswith("/compare"):
        return _find_sides(request.scope["query_string"].decode("latin-1"))
    is_list = request.url.path.endswith("/") and not request.scope["query_string"]
    return f"api/runs?limit={_LISTED}" if is_list else None


def _find_sides(query: str) -> str | None:
    """What a comparison asks for, letter by letter; None where that is not sure."""
    pairs = parse_qsl(query)
    named = [pair for name in _SIDES for pair in pairs if pair[0] == name]
    if not named or not all(_PLAIN_SIDE.fullmatch(value) for _, value in named):
        return None
    return f"api/compare?{urlencode(named)}"


async def _send_home(request: Request) -> Response:
    return RedirectResponse(f"{request.url.path.rpartition('/')[2]}/", status_code=303)


async def _say_nothing_there(*_: object) -> Response:
    return _say(404, "there is no such address")


def _say(status: int, message: str) -> Response:
    media_type, body = make_error(status, message)
    return Response(body, status_code=status, media_type=media_type.decode())


def _say_busy(message: str) -> Response:
    response = _say(503, f"{message}; ask again in a moment")
    response.headers["retry-after"] = str(_RETRY_S)
    return response


def _drop_result(work: asyncio.Future[Response]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.debug("an answer that nobody waited for failed: %r", error)


def _send_json(value: Any) -> Response:
    return Response(encode_json(value), media_type="application/json")


def _send_pack(pack: bytes | None) -> Response | None:
    return None if pack is None else Response(pack, media_type=PACK_TYPE)


def _about(page: PageApplication, _: Request, __: Parameters) -> Response:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return _send_json(tell_about(page.source, __version__, now))


def _session(_: PageApplication, request: Request, __: Parameters) -> Response:
    visitor: Visitor = request.scope[VISITOR]
    return _send_json({**visitor.said, "may_edit": visitor.may_edit, "csrf": visitor.csrf})


def _runs(page: PageApplication, _: Request, parameters: Parameters) -> Response:
    return _send_json(list_rows(page.source, parameters))


def _standings(page: PageApplication, _: Request, parameters: Parameters) -> Response:
    return _send_json(list_standings(page.source, page.desk, parameters))


def _names(page: PageApplication, _: Request, parameters: Parameters) -> Response:
    return _send_json(list_names(page.source, parameters))


def _sparks(page: PageApplication, _: Request, parameters: Parameters) -> Response | None:
    return _send_pack(pack_sparks(page.source, parameters))


def _run(page: PageApplication, request: Request, _: Parameters) -> Response:
    run_id = request.path_params["run_id"]
    return _send_json(tell_run(page.source, page.desk, page.changes, run_id))


def _analysis(page: PageApplication, request: Request, parameters: Parameters) -> Response | None:
    mark = parameters.get_text("mark")
    found = tell_analysis(page.source, page.desk, request.path_params["run_id"], mark)
    return None if found is None else _send_json(found)


def _series(page: PageApplication, request: Request, parameters: Parameters) -> Response | None:
    run_id = request.path_params["run_id"]
    return _send_pack(pack_series(page.source, page.desk, run_id, parameters))


def _changes(page: PageApplication, request: Request, parameters: Parameters) -> Response | None:
    run_id = request.path_params["run_id"]
    return _send_pack(page.changes.pack(run_id, parameters))


def _grid(page: PageApplication, request: Request, parameters: Parameters) -> Response | None:
    return _send_pack(page.grids.pack(request.path_params["run_id"], parameters))


def _module(page: PageApplication, request: Request, parameters: Parameters) -> Response | None:
    return _send_pack(pack_module(page.source, request.path_params["run_id"], parameters))


def _evidence(page: PageApplication, request: Request, parameters: Parameters) -> Response | None:
    return _send_pack(pack_evidence(page.source, request.path_params["run_id"], parameters))


def _sides(page: PageApplication, _: Request, parameters: Parameters) -> Response:
    return _send_json(describe_sides(page.source, page.desk, parameters))


def _verdict(page: PageApplication, _: Request, parameters: Parameters) -> Response:
    return _send_json(page.comparisons.tell(parameters))


def _explanation(page: PageApplication, _: Request, parameters: Parameters) -> Response:
    return _send_json(page.comparisons.explain(parameters))


def _source_diffs(page: PageApplication, _: Request, parameters: Parameters) -> Response:
    return _send_json(describe_source_diffs(page.source, parameters))


def _source_diff(page: PageApplication, _: Request, parameters: Parameters) -> Response:
    return _send_json(tell_source_diff(page.source, parameters))


def _group_curves(page: PageApplication, _: Request, parameters: Parameters) -> Response | None:
    return _send_pack(pack_group_curves(page.source, parameters))


def _sweeps(page: PageApplication, _: Request, parameters: Parameters) -> Response:
    return _send_json(page.sweeps.list_all(parameters))


def _sweep(page: PageApplication, request: Request, parameters: Parameters) -> Response | None:
    found = page.sweeps.tell(request.path_params["sweep_id"], parameters)
    return None if found is None else _send_json(found)


def _sweep_verdict(page: PageApplication, request: Request, _: Parameters) -> Response:
    return _send_json(page.sweeps.judge(request.path_params["sweep_id"]))


def _importances(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    return _send_json(page.sweeps.weigh(request.path_params["sweep_id"], parameters))


def _events(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    return _send_json(list_events(page.source, request.path_params["run_id"], parameters))


def _lineage(page: PageApplication, request: Request, _: Parameters) -> Response:
    return _send_json(tell_lineage(page.source, request.path_params["run_id"]))


def _console(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    return _send_json(list_console(page.source, request.path_params["run_id"], parameters))


def _sources(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    return _send_json(list_sources(page.source, request.path_params["run_id"], parameters))


def _source(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    return _send_json(tell_source(page.source, request.path_params["run_id"], parameters))


def _batches(page: PageApplication, request: Request, _: Parameters) -> Response:
    return _send_json(describe_batches(page.source, request.path_params["run_id"]))


def _system(page: PageApplication, request: Request, parameters: Parameters) -> Response | None:
    return _send_pack(pack_system(page.source, request.path_params["run_id"], parameters))


def _samples(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    return _send_json(list_samples(page.source, request.path_params["run_id"], parameters))


def _sample(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    return _send_json(tell_sample(page.source, request.path_params["run_id"], parameters))


def _view(page: PageApplication, request: Request, _: Parameters) -> Response:
    return _send_json(read_view(page.source, **request.path_params))


def _artifacts(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    return _send_json(list_artifacts(page.source, request.path_params["run_id"], parameters))


def _images(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    return _send_json(list_images(page.source, request.path_params["run_id"], parameters))


def _table(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    return _send_json(page.tables.tell(request.path_params["run_id"], parameters))


def _text(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    return _send_json(read_text(page.source, request.path_params["run_id"], parameters))


def _payload(page: PageApplication, request: Request, parameters: Parameters) -> Response:
    """A payload, which may be anybody's: it is looked at in a sandbox, or saved."""
    place = request.path_params
    payload = open_payload(page.source, place["run_id"], place["sha256"])
    try:
        return _serve_payload(request, parameters, payload)
    except BaseException:
        payload.close()
        raise


def _serve_payload(request: Request, parameters: Parameters, payload: Payload) -> Response:
    plain = payload.media_type.partition(";")[0]
    is_saved = parameters.get_flag("download")
    is_page = parameters.get_flag("page") and not is_saved and _is_page(payload, plain)
    saves = is_saved or not (is_page or plain in _SHOWN_TYPES)
    name = quote(payload.name, safe="")
    disposition = "attachment" if saves else "inline"
    headers = {
        "content-security-policy": SANDBOX_POLICY,
        "content-disposition": f"{disposition}; filename*=UTF-8''{name}",
        "cache-control": "private, no-store",
        "x-dns-prefetch-control": "off",
        "accept-ranges": "bytes",
    }
    if is_page:
        body = defuse_html(payload.file.read())
        payload.close()
        return Response(body, media_type="text/html; charset=utf-8", headers=headers)
    asked = read_range(request.headers.get("range"), payload.size_bytes)
    first, end = asked or (0, payload.size_bytes)
    headers["content-length"] = str(end - first)
    if asked is not None:
        headers["content-range"] = f"bytes {first}-{end - 1}/{payload.size_bytes}"
    media_type = f"{plain}; charset=utf-8" if plain.startswith("text/") else plain
    parts = iterate_payload(payload, first, end)
    status = 200 if asked is None else 206
    return _PayloadResponse(
        payload, parts, status_code=status, media_type=media_type, headers=headers
    )


def _is_page(payload: Payload, media_type: str) -> bool:
    """Whether a payload was logged as HTML, and may be shown as that."""
    is_text = media_type in ("text/html", "text/plain", "application/xml")
    return payload.artifact_type == "html" and is_text and payload.size_bytes <= _MOST_PAGE_BYTES


class _PayloadResponse(StreamingResponse):
    """Sends a payload, and gives up its file also where nobody takes it."""

    def __init__(self, payload: Payload, parts: Iterator[bytes], **settings: Any) -> None:
        super().__init__(parts, **settings)
        self._payload = payload

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._payload.close()


_SHOWN_TYPES = frozenset(
    {*IMAGES, *AUDIO, *VIDEO, "text/plain", "application/json"}  # what a browser shows by itself
)

_ANSWERS: dict[str, Answer] = {
    "/api/about": _about,
    "/api/session": _session,
    "/api/runs": _runs,
    "/api/standings": _standings,
    "/api/names": _names,
    "/api/sparks": _sparks,
    "/api/compare": _sides,
    "/api/compare/verdict": _verdict,
    "/api/compare/why": _explanation,
    "/api/compare/sources": _source_diffs,
    "/api/compare/source": _source_diff,
    "/api/compare/curves": _group_curves,
    "/api/sweeps": _sweeps,
    "/api/sweeps/{sweep_id}": _sweep,
    "/api/sweeps/{sweep_id}/verdict": _sweep_verdict,
    "/api/sweeps/{sweep_id}/importances": _importances,
    "/api/runs/{run_id}": _run,
    "/api/runs/{run_id}/analysis": _analysis,
    "/api/runs/{run_id}/series": _series,
    "/api/runs/{run_id}/changes": _changes,
    "/api/runs/{run_id}/grid": _grid,
    "/api/runs/{run_id}/module": _module,
    "/api/runs/{run_id}/evidence": _evidence,
    "/api/runs/{run_id}/events": _events,
    "/api/runs/{run_id}/console": _console,
    "/api/runs/{run_id}/sources": _sources,
    "/api/runs/{run_id}/source": _source,
    "/api/runs/{run_id}/artifacts": _artifacts,
    "/api/runs/{run_id}/images": _images,
    "/api/runs/{run_id}/table": _table,
    "/api/runs/{run_id}/text": _text,
    "/api/runs/{run_id}/batches": _batches,
    "/api/runs/{run_id}/lineage": _lineage,
    "/api/runs/{run_id}/system": _system,
    "/api/runs/{run_id}/samples": _samples,
    "/api/runs/{run_id}/sample": _sample,
    "/api/runs/{run_id}/views/{name}": _view,
    "/artifacts/{run_id}/{sha256}": _payload,
}

_CHANGES: dict[str, Change] = {
    "/api/runs/{run_id}/edit": change_run,
    "/api/runs/{run_id}/stop": ask_to_stop,
    "/api/sweeps/{sweep_id}/state": change_sweep,
}
