"""Serves the tools of `quark mcp` over standard input and output."""

from __future__ import annotations

import logging
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from quark.cli.mcp_tools import DATA_NOTE, TOOLS, Workbench
from quark.cli.terminal import find_styled
from quark_core.errors import QuarkError
from quark_core.system.terminal_text import clean_text
from quark_core.version import __version__

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

_log = logging.getLogger("quark")

_AT_ONCE = 4
_INSTRUCTIONS = (
    "Quark tracks the training of neural networks. These tools read runs and change nothing. "
    f"{DATA_NOTE} `left_out` in a reply lists the parts that were omitted."
)


def serve_stdio(bench: Workbench) -> None:
    """Serve until standard input ends.

    Args:
        bench: What is read from.
    """
    # A read that waits for input cannot be interrupted, and there is nothing to lose.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The protocol's lines are JSON, in which nothing steers a terminal.
    sys.stdout = find_styled(sys.stdout)
    try:
        anyio.run(_serve, bench)
    finally:
        bench.close()


async def _serve(bench: Workbench) -> None:
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def list_tools(
        _context: ServerRequestContext[Any], _params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        hints = ToolAnnotations(
            read_only_hint=True,
            destructive_hint=False,
            idempotent_hint=True,
            open_world_hint=False,
        )
        tools = [
            Tool(
                name=tool.name,
                description=tool.description,
                input_schema=tool.schema,
                annotations=hints,
            )
            for tool in TOOLS.values()
        ]
        return ListToolsResult(tools=tools)

    async def call_tool(
        _context: ServerRequestContext[Any], params: CallToolRequestParams
    ) -> CallToolResult:
        answer = partial(answer_call, bench, params.name, params.arguments)
        text, is_error = await anyio.to_thread.run_sync(answer, limiter=limiter)
        return CallToolResult(content=[TextContent(text=text)], is_error=is_error)

    server: Server[Any] = Server(
        "quark",
        version=__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


def answer_call(bench: Workbench, name: str, arguments: Any) -> tuple[str, bool]:
    """The text of a reply, and whether it says what went wrong.

    Args:
        bench: What is read from.
        name: The tool.
        arguments: What it was given, unchecked.
    """
    tool = TOOLS.get(name)
    if tool is None:
        return f"unknown tool {name!r:.80}. Tools: {', '.join(TOOLS)}.", True
    try:
        checked = msgspec.convert(arguments or {}, tool.arguments)
    except msgspec.ValidationError as error:
        takes = ", ".join(tool.schema["properties"])
        return clean_text(f"arguments: {error}. {name} takes {takes}."), True
    try:
        return tool.answer(bench, **msgspec.structs.asdict(checked)), False
    except QuarkError as error:
        return clean_text(str(error)), True
    except Exception as error:  # noqa: BLE001 - a plugin's backend or rule may raise anything
        _log.exception("tool %s failed", name)
        said = f"{type(error).__name__}: {error}"[:500]
        return clean_text(f"internal error in {name}: {said}"), True
