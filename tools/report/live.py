"""``--serve PORT``: a page of a run that goes on, on 127.0.0.1 alone, of the files that the run writes anyway.

It is a process of its own that only reads, so that nothing which happens to it reaches the run. It draws when a file
has changed and a browser asks, and takes a small share of one core for that.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tools.launch.network import port_problem
from tools.report.page import document, duration, live_body
from tools.report.run_data import latest_samples, read_run
from verl.utils.net_utils import LOOPBACK

SHARE = 0.05  # of one core: the most that drawing takes
MOST = 16  # connections at a time
CONNECTION_S = 30.0  # the longest that one lasts
WAITING = "Waiting for the first step."
POLICY = "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; base-uri 'none'"
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}
_SHOWN = ("metrics.jsonl", "restarts.jsonl", "changes.jsonl", "val_generations", "reward_ledger")


class LiveRun:
    """What a page shows of a run directory; it is safe to be asked by several threads."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._lock = threading.Lock()
        self._key, self._body, self._problem = "", "", ""
        self._not_before = 0.0

    def state(self, known: str | None = None) -> dict[str, str]:
        """``status``: a line; ``key``: of what is shown; ``body``: its HTML, unless ``known`` is that key."""
        with self._lock:
            stamps = [_stamp(self.run_dir / name) for name in _SHOWN]
            key, (written_ns, size) = hashlib.sha256(repr(stamps).encode()).hexdigest(), stamps[0]
            if size and key != self._key and time.monotonic() >= self._not_before:
                self._draw(key)
            age = duration(max(0.0, time.time() - written_ns / 1e9))
            status = self._problem or f"The last step was written {age} ago. This page looks for more by itself."
            found = {"status": status if size else WAITING, "key": self._key}
            return found if known == self._key else found | {"body": self._body}

    def _draw(self, key: str) -> None:
        started = time.process_time()
        try:
            self._body = live_body(read_run(self.run_dir), *latest_samples(self.run_dir))
            self._key, self._problem = key, ""
        except (ValueError, OSError) as error:  # a file is damaged, or goes away under the reader
            self._problem = str(error)
        self._not_before = time.monotonic() + (time.process_time() - started) / SHARE


def _stamp(path: Path) -> tuple[int, int]:
    """What changes when a file does, or when one is written into a folder: its time in ns, and size; else zeros."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


class _TimedProtocol(H11Protocol):
    """A connection that ends in time, however slowly its client writes or reads."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(CONNECTION_S, transport.abort)


def app(run_dir: Path) -> Starlette:
    """The page of a run, its script and its state.

    A name of another site may lead to this machine, and its pages must not read this one: such a Host is refused.
    """
    live = LiveRun(run_dir)

    def page(request: Request) -> Response:
        state = live.state()
        body = (
            f'<p id="status" class="muted small">{html.escape(state["status"])}</p><div id="run" '
            f'data-key="{state["key"]}">{state.get("body", "")}</div><script src="live.js"></script>'
        )
        return HTMLResponse(document(f"{run_dir.name}: live", body, POLICY), headers=HEADERS)

    def script(request: Request) -> Response:
        return FileResponse(Path(__file__).with_name("live.js"), headers=HEADERS)

    def state(request: Request) -> Response:
        return JSONResponse(live.state(request.query_params.get("known")), headers=HEADERS)

    routes = [Route("/", page), Route("/live.js", script), Route("/state.json", state)]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"], www_redirect=False)
    return Starlette(routes=routes, middleware=[hosts])


def server(run_dir: Path, port: int) -> uvicorn.Server:
    """Not started yet; it says nothing of a request, because whoever sends many would fill a disk."""
    config = uvicorn.Config(
        app(run_dir), LOOPBACK, port, http=_TimedProtocol, log_level="error", limit_concurrency=MOST
    )
    config.timeout_graceful_shutdown = 1
    return uvicorn.Server(config)


def serve(run_dir: Path, port: int) -> None:
    """Serve the live page until this process is stopped; ValueError when ``port`` is in use."""
    if (problem := port_problem("--serve", port)) is not None:
        raise ValueError(problem)
    os.nice(10)  # the run goes first
    print(f"http://{LOOPBACK}:{port}/ shows {run_dir}; Ctrl-C ends it", flush=True)
    with suppress(KeyboardInterrupt):
        server(run_dir, port).run()
