"""One request: its route, its body within limits, and the threads and shares of its workspace."""

from __future__ import annotations

import asyncio
import math
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request

from quark_backends.service.protocol import (
    ENCODINGS,
    JSON,
    MSGPACK,
    RUN_ID,
    ErrorCode,
)
from quark_backends.service.server.config import Limits, Principal
from quark_backends.service.server.responses import ServiceFailure

if TYPE_CHECKING:
    pass

P = ParamSpec("P")
T = TypeVar("T")

_READERS = 8
_WRITERS = 8
_FILES = 8
_KEYS = 2
_UPKEEP = 2
_BUDGET_WAIT_S = 10.0
_BUDGET_RETRY_S = 2.0
# Of what is left by others, one may have so much: there is always some for the next.
_MOST = 0.75
_PLACE_RETRY_S = 1.0


class WorkThreads:
    """The threads of one process: each kind of work has its own, so that none starves another."""

    def __init__(self) -> None:
        self._pools = {
            name: ThreadPoolExecutor(count, thread_name_prefix=f"quark-{name}")
            for name, count in (
                ("read", _READERS),
                ("write", _WRITERS),
                ("file", _FILES),
                ("key", _KEYS),
                ("upkeep", _UPKEEP),
            )
        }

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that reads a store."""
        return await self._run("read", partial(call, *args, **kwargs))

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that writes to a store, or decodes what will be written."""
        return await self._run("write", partial(call, *args, **kwargs))

    async def file(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that reads or writes a payload."""
        return await self._run("file", partial(call, *args, **kwargs))

    async def key(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that looks up a key."""
        return await self._run("key", partial(call, *args, **kwargs))

    async def upkeep(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that measures or removes runs, and takes its time."""
        return await self._run("upkeep", partial(call, *args, **kwargs))

    def close(self) -> None:
        """Wait for what is running, and end the threads."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)

    async def _run(self, name: str, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools[name], call)


class FairBudget:
    """Lends out so much of something, no owner more than a share of it; of one event loop.

    First come, first served, but for owners who have their share: those wait for
    themselves only.

    Args:
        size: All that there is.
        share: What one owner may have at once. What needs more gets all of it.
        busy: What whoever waits too long is told.
    """

    def __init__(self, size: int, share: int, busy: str) -> None:
        self._free = size
        self._share = share
        self._busy = busy
        self._held: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}

    @asynccontextmanager
    async def hold(self, owner: str, amount: int) -> AsyncIterator[None]:
        """Hold some of it, once it is free.

        Raises:
            ServiceFailure: It does not become free in time.
        """
        await self.take(owner, amount)
        try:
            yield
        finally:
            self.give_back(owner, amount)

    async def take(self, owner: str, amount: int) -> None:
        """Have some of it, once it is free, until it is given back.

        Raises:
            ServiceFailure: It does not become free in time.
        """
        wanted = min(amount, self._share)
        if not self._waiting and wanted <= min(self._free, self._share - self._held[owner]):
            self._lend(owner, wanted)
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = owner, wanted
        self._let_in()
        if not future.done():
            await self._wait(future, owner, wanted)

    def give_back(self, owner: str, amount: int) -> None:
        """Give back what was taken."""
        wanted = min(amount, self._share)
        self._free += wanted
        self._held[owner] -= wanted
        if not self._held[owner]:
            del self._held[owner]
        self._let_in()

    def _lend(self, owner: str, amount: int) -> None:
        self._free -= amount
        self._held[owner] += amount

    async def _wait(self, future: asyncio.Future[None], owner: str, wanted: int) -> None:
        try:
            async with asyncio.timeout(_BUDGET_WAIT_S):
                await future
        except BaseException as error:
            if self._waiting.pop(future, None) is None:
                self.give_back(owner, wanted)
            else:
                self._let_in()
            if isinstance(error, TimeoutError):
                raise ServiceFailure(
                    ErrorCode.UNAVAILABLE, self._busy, retry_after_s=_BUDGET_RETRY_S
                ) from None
            raise

    def _let_in(self) -> None:
        if not self._waiting:
            return
        served = set()
        for future, (owner, wanted) in list(self._waiting.items()):
            if owner in served or self._held[owner] + wanted > self._share:
                # Whoever came after it waits behind it, but for its own things only.
                served.add(owner)
                continue
            if wanted > self._free:
                return
            del self._waiting[future]
            self._lend(owner, wanted)
            if not future.done():
                future.set_result(None)


class FairPlaces:
    """Counts what each of many has at once, and leaves some for others; of one event loop.

    Args:
        count: All that there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: Counter[str] = Counter()

    @contextmanager
    def take(self, owner: str, in_use: int) -> Iterator[None]:
        """Have one.

        Args:
            owner: Who has it.
            in_use: How many are in use, this one and those that nobody counts among them.

        Raises:
            ServiceFailure: The owner has three quarters of what others leave.
        """
        mine = self._taken[owner] + 1
        others = in_use - mine
        if mine > math.ceil(_MOST * (self._count - others)):
            raise ServiceFailure(
                ErrorCode.RATE_LIMITED,
                "the workspace has reached its limit of simultaneous requests",
                retry_after_s=_PLACE_RETRY_S,
            )
        self._taken[owner] = mine
        try:
            yield
        finally:
            self._taken[owner] -= 1
            if not self._taken[owner]:
                del self._taken[owner]


if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


_JSON_NAMES = (JSON, "text/json")
_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
# A window is memory before anything is decompressed.
_WINDOW_LOG_MAX = 27
# Deflate makes no more than this out of one byte.
_GZIP_RATIO = 1040
# What the connection's buffer may hold anyway.
_FREE_BYTES = 64 * 1024
_ARRIVAL_RETRY_S = 1.0
_COUNTED_BYTES = 4 * 2**20
_PIECE_BYTES = 2**20
SMALL_BYTES = 64 * 1024
"""Up to here a body is decompressed and decoded where it came in: a thread would take longer."""

# Of values that are kept as they are each may become 72 bytes of memory: of 3 bytes of JSON, or
# of a single one of msgpack.
_MOST_JSON_VALUES = 2_000_000
_MOST_PACKED_BYTES = 2 * 2**20


class RequestBody:
    """A body that was read and decompressed, not yet decoded.

    Attributes:
        data: Its bytes.
        media: JSON or msgpack.
    """

    __slots__ = ("data", "media")

    def __init__(self, data: bytes, media: str) -> None:
        self.data = data
        self.media = media

    def decode_values(self, kind: type[T]) -> T:
        """As `decode`, of a struct that keeps values as they are, whatever they become.

        Raises:
            ServiceFailure: As `decode`, or it holds more values than fit into memory.
        """
        data = self.data
        if self.media == MSGPACK:
            if len(data) > _MOST_PACKED_BYTES:
                raise ServiceFailure(
                    ErrorCode.TOO_LARGE,
                    f"this route accepts {_MOST_PACKED_BYTES} bytes of msgpack. Send JSON instead",
                )
        elif sum(map(data.count, (b",", b"[", b"{"))) > _MOST_JSON_VALUES:
            raise ServiceFailure(
                ErrorCode.TOO_LARGE, f"the body has more than {_MOST_JSON_VALUES} values. Split it"
            )
        return self.decode(kind)

    def decode(self, kind: type[T]) -> T:
        """The struct that the body is.

        Raises:
            ServiceFailure: It is none: malformed, or with a field that does not fit.
        """
        try:
            if self.media == MSGPACK:
                return msgspec.msgpack.decode(self.data, type=kind)
            return msgspec.json.decode(self.data, type=kind)
        except msgspec.ValidationError as error:
            raise refuse_invalid(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServiceFailure(
                ErrorCode.MALFORMED, f"the body is not valid {_name(self.media)}: {error}"
            ) from None
        except RecursionError:
            raise ServiceFailure(ErrorCode.MALFORMED, "the body is nested too deeply") from None


def refuse_invalid(error: msgspec.ValidationError) -> ServiceFailure:
    """The refusal of a body with a field that does not fit, which it names."""
    message, _, place = str(error).partition(" - at `")
    field = place.rstrip("`").removeprefix("$").removeprefix(".")
    return ServiceFailure(ErrorCode.INVALID_ARGUMENT, message, field=field or None)


class BodyRoom:
    """What the bodies of requests may take in one process; of one event loop.

    Bodies that arrive and bodies that are worked on have half of the memory each: what
    is here waits for the store, and never for a client. Of either a workspace gets half.
    What batches become once they are opened has as much again.

    Args:
        limits: Of the server.
    """

    def __init__(self, limits: Limits) -> None:
        half = limits.memory_bytes // 2
        self.arriving = FairBudget(
            half, half // 2, "the server is reading its maximum number of large bodies"
        )
        self.working = FairBudget(
            half, half // 2, "the server is handling its maximum number of large requests"
        )
        self.opened = FairBudget(
            half, half // 2, "the server has reached its maximum number of open batches"
        )
        self._limit = limits.bodies_per_key
        self._by_key: Counter[str] = Counter()

    @contextmanager
    def arrive(self, key_id: str) -> Iterator[None]:
        """Around the reading of a body, however slowly it comes.

        Raises:
            ServiceFailure: As many of the key are arriving as may.
        """
        if self._by_key[key_id] >= self._limit:
            raise ServiceFailure(
                ErrorCode.RATE_LIMITED,
                f"{self._limit} bodies of the key {key_id} are already arriving (limit "
                "bodies_per_key of this server)",
                retry_after_s=_ARRIVAL_RETRY_S,
            )
        self._by_key[key_id] += 1
        try:
            yield
        finally:
            self._by_key[key_id] -= 1
            if not self._by_key[key_id]:
                del self._by_key[key_id]


@asynccontextmanager
async def hold_body(
    request: Request, limits: Limits, room: BodyRoom, principal: Principal, threads: WorkThreads
) -> AsyncIterator[RequestBody]:
    """The body of a request, whose memory counts until the context is left.

    It is read before anything is taken that others wait for: its first piece for
    nothing, and what is large in the workspace's own part of the memory.

    Raises:
        ServiceFailure: Too large, too slow, malformed, of a type or an encoding
            that is not taken, or one more than the key or the memory lets in.
    """
    media = _find_media(request)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ENCODINGS:
        raise ServiceFailure(
            ErrorCode.UNSUPPORTED,
            f"Content-Encoding must be {' or '.join(ENCODINGS)}, not {encoding!r:.60}",
            field="Content-Encoding",
        )
    declared = _find_length(request)
    if declared is not None and declared > limits.body_bytes:
        raise _too_large(limits.body_bytes, "body_bytes")
    owner = principal.workspace
    with room.arrive(principal.key_id):
        pieces = _Pieces(request, limits)
        is_whole = await pieces.read(_FREE_BYTES)
        size_bytes = limits.body_bytes if declared is None else declared
        async with nullcontext() if is_whole else room.arriving.hold(owner, size_bytes):
            if not is_whole:
                await pieces.read(limits.body_bytes + 1)
            data = pieces.join()
            decoded_bytes = 0
            if encoding != "identity":
                decoded_bytes = _bound_decoded(data, encoding, limits.decoded_bytes)
            held_bytes = len(data) + decoded_bytes
            await room.working.take(owner, held_bytes)
    try:
        if encoding != "identity":
            if decoded_bytes <= SMALL_BYTES:
                data = decode_content(data, encoding, limits.decoded_bytes)
            else:
                data = await threads.write(decode_content, data, encoding, limits.decoded_bytes)
        yield RequestBody(data, media)
    finally:
        room.working.give_back(owner, held_bytes)


def decode_content(data: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Decompress a body of one frame; no more than the limit is ever made of it.

    Raises:
        ServiceFailure: Damaged, of several frames, or larger than the limit.
    """
    try:
        if _bound_decoded(data, encoding, limit_bytes) > _COUNTED_BYTES:
            # Counted before it is kept: a bomb costs time, but no memory.
            _count(data, encoding, limit_bytes)
        opened = _open(encoding)
        decoded: bytes = opened.decompress(data, limit_bytes + 1)
    except (zstd.ZstdError, zlib.error, EOFError) as error:
        raise ServiceFailure(
            ErrorCode.MALFORMED, f"invalid {encoding} body: {error}", field="Content-Encoding"
        ) from None
    if len(decoded) > limit_bytes:
        raise _too_large(limit_bytes, "decoded_bytes")
    if not opened.eof or opened.unused_data:
        raise ServiceFailure(
            ErrorCode.MALFORMED,
            f"the body must be one whole {encoding} frame",
            field="Content-Encoding",
        )
    return decoded


def count_declared(frame: bytes) -> int | None:
    """How large a zstd frame says it is; None where it does not say, or is no one whole frame."""
    try:
        if zstd.get_frame_size(frame) != len(frame):
            return None
        size: int | None = zstd.get_frame_info(frame).decompressed_size
    except zstd.ZstdError:
        return None
    return size


def check_nesting(value: Any, limit: int, field: str) -> None:
    """Refuse what is nested deeper than the limit.

    Raises:
        ServiceFailure: It is.
    """
    level = [value]
    for _ in range(limit + 1):
        level = [
            item
            for outer in level
            if isinstance(outer, (dict, list, tuple))
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ServiceFailure(
        ErrorCode.INVALID_ARGUMENT, f"{field} is nested deeper than {limit} levels", field=field
    )


def check_numbers(value: Any, field: str) -> None:
    """Refuse integers that no database can hold.

    Raises:
        ServiceFailure: There is one.
    """
    waiting = [(field, value)]
    while waiting:
        place, each = waiting.pop()
        if isinstance(each, dict):
            waiting.extend((f"{place}.{key!s:.60}", inner) for key, inner in each.items())
        elif isinstance(each, list):
            waiting.extend((place, inner) for inner in each)
        elif isinstance(each, int) and not -(2**63) <= each < 2**63:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT, f"{place} is a number beyond 64 bits", field=place
            )


def _open(encoding: str) -> Any:
    """A decompressor of one frame."""
    if encoding == "gzip":
        return zlib.decompressobj(wbits=31)
    options: Any = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX}
    return zstd.ZstdDecompressor(options=options)


def _count(data: bytes, encoding: str, limit_bytes: int) -> None:
    """Refuse what would be larger than the limit, without keeping it."""
    opened = _open(encoding)
    size_bytes = 0
    while True:
        piece = opened.decompress(data, _PIECE_BYTES)
        size_bytes += len(piece)
        if size_bytes > limit_bytes:
            raise _too_large(limit_bytes, "decoded_bytes")
        # zlib hands back what it has not taken; zstd keeps it.
        data = opened.unconsumed_tail if encoding == "gzip" else b""
        if opened.eof or not piece:
            return


class _Pieces:
    """A body as it comes, within its time; what it waits for besides does not count."""

    def __init__(self, request: Request, limits: Limits) -> None:
        self._stream = request.stream()
        self._limits = limits
        self._left_s = limits.body_timeout_s
        self._size = 0
        self._pieces: list[bytes] = []

    async def read(self, size_bytes: int) -> bool:
        """Read on until so much is there; whether that is all.

        Raises:
            ServiceFailure: Too large or too slow.
        """
        limits = self._limits
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                while self._size < size_bytes:
                    piece = await anext(self._stream, None)
                    if piece is None:
                        return True
                    self._size += len(piece)
                    if self._size > limits.body_bytes:
                        raise _too_large(limits.body_bytes, "body_bytes")
                    self._pieces.append(piece)
        except TimeoutError:
            raise ServiceFailure(
                ErrorCode.TIMEOUT,
                f"the body did not arrive within {limits.body_timeout_s:g} s "
                "(limit body_timeout_s of this server)",
            ) from None
        self._left_s -= time.monotonic() - began_s
        return False

    def join(self) -> bytes:
        """What was read."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


def _bound_decoded(data: bytes, encoding: str, limit_bytes: int) -> int:
    """What the body may take at most once it is decompressed."""
    if encoding == "gzip":
        return min(limit_bytes, len(data) * _GZIP_RATIO)
    try:
        declared: int | None = zstd.get_frame_info(data).decompressed_size
    except zstd.ZstdError as error:
        raise ServiceFailure(
            ErrorCode.MALFORMED, f"the body is not valid zstd: {error}", field="Content-Encoding"
        ) from None
    if declared is None:
        return limit_bytes
    if declared > limit_bytes:
        raise _too_large(limit_bytes, "decoded_bytes")
    return int(declared)


def _find_media(request: Request) -> str:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given in _JSON_NAMES:
        return JSON
    if given in _MSGPACK_NAMES:
        return MSGPACK
    raise ServiceFailure(
        ErrorCode.UNSUPPORTED,
        f"Content-Type must be {JSON} or {MSGPACK}, not {given!r:.60}",
        field="Content-Type",
    )


def _find_length(request: Request) -> int | None:
    given = request.headers.get("content-length")
    return int(given) if given is not None and given.isascii() and given.isdigit() else None


def _too_large(limit: int, name: str) -> ServiceFailure:
    return ServiceFailure(
        ErrorCode.TOO_LARGE, f"the body has more than {limit} bytes (limit {name} of this server)"
    )


def _name(media: str) -> str:
    return "msgpack" if media == MSGPACK else "JSON"


def check_run_id(given: str, name: str = "run_id") -> str:
    """A text that may be the id of a run.

    Raises:
        ServiceFailure: It cannot be one.
    """
    if RUN_ID.fullmatch(given) is None:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"{name} must be 1 to 128 letters, digits, '.', '_' and '-', and must not start "
            f"with '.', got {given!r:.200}",
            field=name,
        )
    return given


def check_text(text: str, name: str) -> str:
    """A text that a database can hold.

    Raises:
        ServiceFailure: There is a NUL in it, or half of a surrogate pair.
    """
    is_whole = text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
    if "\x00" in text or not is_whole:
        raise ServiceFailure(ErrorCode.INVALID_ARGUMENT, f"{name} has invalid text", field=name)
    return text
