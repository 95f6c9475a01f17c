"""The page as an application: addresses, answers, limits."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import pkgutil
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
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
# The code of runs is kept by provenance, without which the page has no such addresses.
_SOURCES = "quark.page.routes.code_sources"
_FOREVER = "public, max-age=31536000, immutable"

# Where its module needs a feature that may be missing: its name, as `pkgutil` resolves it.
Answer = Callable[..., Any] | str
Change = Callable[["PageEditor", str, bytes, str], dict[str, Any]]


class PageApplication:
    """What the handlers share.

    Args:
        source: What is looked at.
        analyzer: Computes analyses that are not stored.
        editor: Changes runs; None where nobody may.
    """

    def __init__(
        self,
        source: PageSource,
        analyzer: RunAnalyzer,
        editor: PageEditor | None = None,
    ) -> None:
        self.source = source
        self.static = load_installed_files()
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
            return _say_busy("too many requests at once")
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
            return _say(403, "this server cannot edit runs: it runs without --allow-edit")
        if visitor is None or not visitor.may_edit:
            return _say(403, "your API key cannot edit runs: this requires the scope 'write'")
        try:
            async with asyncio.timeout(_WAIT_S):
                body = await _read_body(request)
        except TimeoutError:
            return _say(408, "the body did not come in time")
        if body is None:
            return _say(413, f"the body has more than {_MOST_BODY} bytes")
        editor = self.editor

        def act(request: Request) -> dict[str, Any]:
            (subject,) = request.path_params.values()
            changed = handler(editor, subject, body, visitor.by)
            self.source.forget()
            self.sweeps.forget()
            return changed

        return await self.answer(request, act)

    def _call(self, handler: Answer, request: Request) -> Response:
        """What a handler answers to a request, also where it fails."""
        pairs = parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        try:
            self.source.catch_up()
            given = {
                "source": self.source,
                "desk": self.desk,
                "changes": self.changes,
                "parameters": Parameters(pairs),
                "visitor": request.scope.get(VISITOR),
                "request": request,
                **request.path_params,
            }
            answer = pkgutil.resolve_name(handler) if isinstance(handler, str) else handler
            wanted = inspect.signature(answer).parameters
            found = answer(**{name: given[name] for name in wanted})
            return _send(found) or Response(status_code=204)
        except (RunNotFoundError, ArtifactNotFoundError, NoSuchSweep) as error:
            return _say(404, str(error))
        except SchemaValidationError as error:
            return _say(400, str(error))
        except StoreUnavailableError as error:
            return _say_busy(str(error))
        except QuarkError as error:
            return _say(409, str(error))
        except ModuleNotFoundError as error:
            return _say(404, f"{error.name} is required but not installed")
        except Exception:  # noqa: BLE001 - a page is answered whatever happens
            _log.exception("%s could not be answered", request.url.path)
            return _say(500, "this is a bug in Quark. The terminal shows the error")

    def _find_turns(self, session: bytes) -> asyncio.Semaphore:
        turns = self._turns.pop(session, None) or asyncio.Semaphore(_AT_ONCE)
        self._turns[session] = turns
        while len(self._turns) > _MOST_SESSIONS:
            del self._turns[next(iter(self._turns))]
        return turns


def make_app(
    source: PageSource,
    *,
    base: str = "",
    analyzer: RunAnalyzer | None = None,
    editor: PageEditor | None = None,
) -> Starlette:
    """The application, without its guard.

    Args:
        source: What is looked at.
        base: Path that every address begins with, such as `/quark`, or "".
        analyzer: Computes analyses that are not stored; by default a process of its own.
        editor: Changes runs; None where nobody may.
    """
    page = PageApplication(source, analyzer or AnalysisProcess(source), editor)

    @asynccontextmanager
    async def live(_: Starlette) -> AsyncIterator[None]:
        page.desk.prepare()
        yield
        page.desk.close()
        page.tables.close()

    routes = [
        Route(f"{base}{path}", _bind(page.answer, handler))
        for path, handler in _list_answers(page).items()
    ]
    routes += [
        Route(f"{base}{path}", _bind(page.change, handler), methods=["POST"])
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


def _bind(act: Callable[[Request, Any], Awaitable[Response]], handler: Answer) -> Any:
    async def endpoint(request: Request) -> Response:
        return await act(request, handler)

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
        return _say(404, "the file does not exist")
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
    return _say(404, "the address does not exist")


def _say(status: int, message: str) -> Response:
    media_type, body = make_error(status, message)
    return Response(body, status_code=status, media_type=media_type.decode())


def _say_busy(message: str) -> Response:
    response = _say(503, f"{message}. Try again in a moment")
    response.headers["retry-after"] = str(_RETRY_S)
    return response


def _drop_result(work: asyncio.Future[Response]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.debug("an unused answer failed: %r", error)


def _send(found: Any) -> Response | None:
    """What a function has answered: JSON values, a pack, or None where there is nothing new."""
    if found is None or isinstance(found, Response):
        return found
    if isinstance(found, bytes):
        return Response(found, media_type=PACK_TYPE)
    return Response(encode_json(found), media_type="application/json")


def _tell_about(source: PageSource) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return tell_about(source, __version__, now)


def _tell_session(visitor: Visitor) -> dict[str, Any]:
    return {**visitor.said, "may_edit": visitor.may_edit, "csrf": visitor.csrf}


def _send_payload(
    source: PageSource, run_id: str, sha256: str, request: Request, parameters: Parameters
) -> Response:
    """A payload, which may be anybody's: it is looked at in a sandbox, or saved."""
    payload = open_payload(source, run_id, sha256)
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


def _list_answers(page: PageApplication) -> dict[str, Answer]:
    """Address -> what answers it, with the arguments that its parameters are named after."""
    return {
        "/api/about": _tell_about,
        "/api/session": _tell_session,
        "/api/runs": list_rows,
        "/api/standings": list_standings,
        "/api/names": list_names,
        "/api/sparks": pack_sparks,
        "/api/compare": describe_sides,
        "/api/compare/verdict": page.comparisons.tell,
        "/api/compare/why": page.comparisons.explain,
        "/api/compare/sources": f"{_SOURCES}:describe_source_diffs",
        "/api/compare/source": f"{_SOURCES}:tell_source_diff",
        "/api/compare/curves": pack_group_curves,
        "/api/sweeps": page.sweeps.list_all,
        "/api/sweeps/{sweep_id}": page.sweeps.tell,
        "/api/sweeps/{sweep_id}/verdict": page.sweeps.judge,
        "/api/sweeps/{sweep_id}/importances": page.sweeps.weigh,
        "/api/runs/{run_id}": tell_run,
        "/api/runs/{run_id}/analysis": tell_analysis,
        "/api/runs/{run_id}/series": pack_series,
        "/api/runs/{run_id}/changes": page.changes.pack,
        "/api/runs/{run_id}/grid": page.grids.pack,
        "/api/runs/{run_id}/module": pack_module,
        "/api/runs/{run_id}/evidence": pack_evidence,
        "/api/runs/{run_id}/events": list_events,
        "/api/runs/{run_id}/console": list_console,
        "/api/runs/{run_id}/sources": f"{_SOURCES}:list_sources",
        "/api/runs/{run_id}/source": f"{_SOURCES}:tell_source",
        "/api/runs/{run_id}/artifacts": list_artifacts,
        "/api/runs/{run_id}/images": list_images,
        "/api/runs/{run_id}/table": page.tables.tell,
        "/api/runs/{run_id}/text": read_text,
        "/api/runs/{run_id}/batches": describe_batches,
        "/api/runs/{run_id}/lineage": tell_lineage,
        "/api/runs/{run_id}/system": pack_system,
        "/api/runs/{run_id}/samples": list_samples,
        "/api/runs/{run_id}/sample": tell_sample,
        "/api/runs/{run_id}/views/{name}": read_view,
        "/artifacts/{run_id}/{sha256}": _send_payload,
    }


_CHANGES: dict[str, Change] = {
    "/api/runs/{run_id}/edit": change_run,
    "/api/runs/{run_id}/stop": ask_to_stop,
    "/api/sweeps/{sweep_id}/state": change_sweep,
}
