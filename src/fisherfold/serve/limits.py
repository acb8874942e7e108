"""What stands between the world and the model: token, sizes, a queue, counts and log lines."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from prometheus_client import Counter, Histogram
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Paths that need no token: whether the service lives, what it offers, and the page, which asks
# for one.
OPEN = frozenset({"/", "/health", "/ready", "/page.js", "/page.css", "/openapi.json"})
# Bytes of a body that are read though the request is refused.
DRAINED = 1 << 24
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

REQUESTS = Counter("fisherfold_requests", "Requests by path and status.", ["path", "status"])
LATENCY = Histogram(
    "fisherfold_request_seconds", "Seconds of a request.", ["path"], buckets=BUCKETS
)
RELOADS = Counter("fisherfold_reloads", "Changes of the model folder by outcome.", ["outcome"])

logger = logging.getLogger("fisherfold.serve")


class JsonLines(logging.Formatter):
    """A line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        line = {"time": round(record.created, 3), "level": record.levelname.lower()}
        line["message"] = record.getMessage()
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_as_json() -> None:
    """Write the log of the service and of its server to standard error, a line of JSON each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("fisherfold.serve", "uvicorn", "uvicorn.error"):
        named = logging.getLogger(name)
        named.handlers = [handler]
        named.setLevel(logging.INFO)
        named.propagate = False


def refuse(status: int, detail: str, **headers: str) -> JSONResponse:
    """An answer that says what was wrong."""
    return JSONResponse({"detail": detail}, status, headers)


class Gate:
    """Middleware that admits requests by token, length and number, and counts and logs them.

    Args:
        app: the application behind it.
        paths: the known paths; others are counted as one.
        token: what callers must show, or None.
        body_limit: bytes of a body.
        queue_limit: requests at a time.
        time_limit: seconds in which a body must have come.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        paths: frozenset[str],
        token: str | None,
        body_limit: int,
        queue_limit: int,
        time_limit: float,
    ) -> None:
        self.app = app
        self.paths = paths
        self.token = token
        self.body_limit = body_limit
        self.queue_limit = queue_limit
        self.time_limit = time_limit
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit or refuse a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500
        held = True

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                release()  # before the caller, who has its answer, asks again
            await send(message)

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self.running -= 1

        self.running += 1
        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await self._drain(scope, receive)
                await refusal(scope, receive, send_counted)
            else:
                await self._admit(scope, receive, send_counted)
        finally:
            release()
            self._count(scope, status, time.perf_counter() - began)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await asyncio.wait_for(self._read(receive), self.time_limit)
        except asyncio.TimeoutError:
            detail = f"the body did not come within {self.time_limit:g} s"
            await refuse(408, detail, Connection="close")(scope, receive, send)
        except ConnectionError:
            return  # the caller has gone
        else:
            if body is None:
                await self._drain(scope, receive)
                await refuse(413, self._too_long())(scope, receive, send)
            else:
                await self.app(scope, _replay(body, receive), send)

    async def _drain(self, scope: Scope, receive: Receive) -> None:
        """Read on, within bounds: who is still sending when the connection ends sees no answer."""
        if _length(scope) > DRAINED:
            return

        async def drain() -> None:
            size = 0
            more = True
            while more and size <= DRAINED:
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(drain(), self.time_limit)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, or None if it is too long; chunks without a length are counted as they come."""
        parts = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError
            part = message.get("body", b"")
            size += len(part)
            if size > self.body_limit:
                return None
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        path = scope["path"]
        headers = dict(scope["headers"])
        if path not in OPEN:
            if not self._knows(headers.get(b"authorization", b"")):
                return refuse(
                    401,
                    "the token is missing or wrong: send the header 'Authorization: Bearer TOKEN'",
                    **{"WWW-Authenticate": "Bearer"},
                )
            if self.running > self.queue_limit and path != "/metrics":
                return refuse(
                    429,
                    f"{self.queue_limit} requests are under way already, try again later",
                    **{"Retry-After": "1"},
                )
        if _length(scope) > self.body_limit:
            return refuse(413, self._too_long())
        return None

    def _too_long(self) -> str:
        return f"a body may have at most {self.body_limit:,} bytes"

    def _knows(self, given: bytes) -> bool:
        if self.token is None:
            return True
        return secrets.compare_digest(given, f"Bearer {self.token}".encode())

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self.paths else "other"
        REQUESTS.labels(path, str(status)).inc()
        LATENCY.labels(path).observe(seconds)
        fields: dict[str, Any] = {
            "method": scope["method"],
            "path": path,
            "status": status,
            "ms": round(1000 * seconds, 2),
        }
        fields |= scope.get("state", {}).get("log", {})
        logger.info("request", extra={"fields": fields})


def _length(scope: Scope) -> int:
    """The length that a request announces; the HTTP server has checked that it is a number."""
    return int(dict(scope["headers"]).get(b"content-length", b"0"))


def _replay(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """A body that has been read, followed by what the connection says next."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
