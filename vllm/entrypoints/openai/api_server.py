"""An engine behind OpenAI's HTTP interface: `vllm serve DIR`, python -m vllm.entrypoints.openai.api_server --model DIR.

One process with three threads: the event loop that serves clients, the engine's thread, and one for the tokenizer.
`serve_in_background` serves the engine of another program.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from vllm import __version__
from vllm.entrypoints.llm import LLM
from vllm.entrypoints.openai.cli_args import ServerArgs, parse_args
from vllm.entrypoints.openai.errors import ApiError, add_error_handlers
from vllm.entrypoints.openai.limits import RequestLimits, http_protocol
from vllm.entrypoints.openai.metrics import ServerMetrics
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.entrypoints.openai.request_log import FieldLog, RequestLog
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat
from vllm.entrypoints.openai.serving_completion import OpenAIServingCompletion
from vllm.entrypoints.openai.serving_tokenization import OpenAIServingTokenization
from vllm.entrypoints.sampling_defaults import sampling_defaults
from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 2**17
END_TIMEOUT_S = 120.0  # beyond the limits of the shutdown's own parts


def build_app(engine: AsyncLLM, args: ServerArgs) -> FastAPI:
    """The routes over an engine, which starts and ends with the app."""
    config, metrics, created = engine.llm.config, ServerMetrics(), int(time.time())
    defaults = sampling_defaults(config.model.model, args.generation_config, args.override_generation_config)
    if str(defaults):
        logger.info("sampling of requests that do not say: %s (--generation-config vllm leaves it out)", defaults)
    completion = OpenAIServingCompletion(engine, args, metrics, defaults)
    chat = OpenAIServingChat(engine, args, metrics, defaults)
    tokenization, fields = OpenAIServingTokenization(chat), FieldLog()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            engine.start()
        except Exception as error:
            app.state.start_error = error  # uvicorn ends with a status alone
            raise
        try:
            yield
        finally:  # also when uvicorn cannot listen
            await engine.shutdown()
            completion.close()
            chat.close()

    app = FastAPI(title="vllm", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.start_error = None
    add_error_handlers(app)
    app.add_middleware(
        RequestLimits,
        max_body_bytes=args.max_body_bytes,
        timeout_s=args.request_timeout,
        api_key=args.api_key,
        metrics=metrics,
    )
    if not args.disable_log_requests:
        app.add_middleware(RequestLog)
    root, limit = config.model.model, config.model.max_model_len
    card = {"object": "model", "created": created, "owned_by": "vllm", "root": root, "max_model_len": limit}
    cards = {name: {"id": name, **card} for name in completion.model_names}

    @app.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        fields.add(body, request.scope)
        return await completion.create_completion(body, request)

    @app.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        fields.add(body, request.scope)
        return await chat.create_chat_completion(body, request)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": list(cards.values())}

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> dict[str, Any]:
        completion.check_model(model)
        return cards[model]

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
        fields.add(body, request.scope)
        return await tokenization.create_tokenize(body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
        fields.add(body, request.scope)
        return await tokenization.create_detokenize(body)

    _add_state_routes(app, engine, metrics, completion.model_names[0])
    return app


def _add_state_routes(app: FastAPI, engine: AsyncLLM, metrics: ServerMetrics, model_name: str) -> None:
    """What a load balancer and a monitor ask for."""

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/health")
    async def health() -> Response:
        if not engine.is_running:
            raise ApiError(503, "the engine does not run", code="engine_unavailable")
        if (problem := engine.llm.core.model_problem) is not None:
            raise ApiError(503, problem, code="non_finite_logits")
        return Response()

    @app.get("/metrics")
    async def show_metrics() -> Response:
        gauges, counters = _engine_numbers(engine)
        return PlainTextResponse(metrics.text(model_name, gauges, counters), media_type="text/plain; version=0.0.4")


def _engine_numbers(engine: AsyncLLM) -> tuple[dict[str, float], dict[str, float]]:
    """(gauges, counters) of the engine as it is now."""
    scheduler = engine.llm.core.scheduler
    pool = scheduler.kv.pool
    gauges: dict[str, float] = {
        "gpu_cache_usage_perc": 1 - pool.num_free_blocks / pool.num_blocks,
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": len(scheduler.waiting),
        "num_unfinished_samples": engine.num_unfinished_samples,
    }
    counters: dict[str, float] = {
        "num_preemptions_total": scheduler.num_preemptions,
        "requests_aborted_total": engine.num_aborted,
    }
    if scheduler.speculation is not None:
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        counts = zip(names, scheduler.speculation.counts, strict=True)
        counters |= {f"spec_decode_{name}_total": count for name, count in counts}
    return gauges, counters


class ApiServer:
    """A bound port and the uvicorn server that will listen on it."""

    def __init__(self, llm: LLM, args: ServerArgs, listener: socket.socket) -> None:
        self.engine = AsyncLLM(llm, args.max_queue_size, self._end_with_engine)
        self.listener, self.has_failed, self.app = listener, False, build_app(self.engine, args)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(
                self.app,
                http=http_protocol(args.request_timeout),
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                log_level=args.uvicorn_log_level,
                access_log=False,  # RequestLog has a line for each request
                server_header=False,
                limit_concurrency=args.max_connections,
                timeout_graceful_shutdown=max(1, round(args.shutdown_timeout)),
            )
        )

    def run(self) -> None:
        """Serve until a signal, or `uvicorn.should_exit`; RuntimeError or OSError when it cannot start."""
        try:
            self.uvicorn.run(sockets=[self.listener])
        except SystemExit as error:
            cause = self.app.state.start_error
            raise RuntimeError(f"the server cannot start: {cause or f'uvicorn has status {error.code}'}") from cause

    @contextmanager
    def in_background(self, start_timeout_s: float) -> Iterator[None]:
        """Serve in a thread until the end of the block; what keeps it from starting in time is raised here."""
        ended: Future[None] = Future()
        thread = threading.Thread(target=lambda: _into(ended, self.run), name="api-server", daemon=True)
        thread.start()
        deadline = time.monotonic() + start_timeout_s
        try:
            while not self.uvicorn.started:
                if ended.done():
                    ended.result()
                    raise RuntimeError("the server ended before it served")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the server did not start within {start_timeout_s:g} s")
                time.sleep(0.01)
            yield
        finally:
            self.uvicorn.should_exit = True
            thread.join(END_TIMEOUT_S)
            if thread.is_alive():
                logger.error("the server's thread has not ended within %g s", END_TIMEOUT_S)

    def paused(self, drain_s: float = 30.0) -> AbstractContextManager[None]:
        """Return AsyncLLM.paused: exclusive use of the engine, while clients wait."""
        return self.engine.paused(drain_s)

    def _end_with_engine(self) -> None:
        self.has_failed = True
        self.uvicorn.should_exit = True


def _into(result: Future[None], call: Callable[[], None]) -> None:
    try:
        call()
    except BaseException as error:  # who waits for the result gets it
        result.set_exception(error)
    else:
        result.set_result(None)


@contextmanager
def serve_in_background(llm: LLM, args: ServerArgs, start_timeout_s: float = 60.0) -> Iterator[ApiServer]:
    """Serve an engine of this process until the end of the block; use the engine itself only within `paused`.

    A server that cannot start raises its cause: ValueError, OSError, RuntimeError; TimeoutError after the limit.
    """
    problems = args.problems()
    if problems:
        raise ValueError("the server cannot start: " + "; ".join(problems))
    with bind(args.host, args.port) as listener:
        server = ApiServer(llm, args, listener)
        with server.in_background(start_timeout_s):
            yield server


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet; OSError when the address cannot be bound."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(error.errno, f"--host {host} is not an address of this machine: {error.strerror}") from error
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        # Connections inherit this bound of unread response bytes; Linux's default is MiBs.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from error
    return listener


def main(argv: Sequence[str] | None = None, prog: str = "python -m vllm.entrypoints.openai.api_server") -> int:
    """Serve a checkpoint until SIGTERM or SIGINT; 1 when the engine has failed, 2 when it cannot start as asked."""
    server_args, engine_args, notes = parse_args(argv, prog)
    logging.basicConfig(
        level=server_args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if notes:
        logger.info("taken without effect:\n  %s", "\n  ".join(notes))
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(bind(server_args.host, server_args.port))
            if not Path(engine_args.model).is_dir():
                raise ValueError(
                    f"MODEL={engine_args.model} is not a directory: give one in Hugging Face form; "
                    "python -m tools.download NAME --to DIR fetches it"
                )
            llm = LLM(**vars(engine_args))
            server = ApiServer(llm, server_args, listener)
            listener.listen()  # from here on clients that connect wait for the app to start instead of being refused
        except (OSError, ValueError) as error:
            logger.debug("the server cannot start", exc_info=True)
            text = error.strerror if isinstance(error, OSError) and error.filename is None else None
            print(f"{prog}: error: {text or error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:  # while the model loads
            return 130
        logger.info("serving %s on %s", engine_args.model, server.url)
        for name in (signal.SIGTERM, signal.SIGINT):  # uvicorn handles them, and raises them again at its end
            signal.signal(name, lambda *_: None)
        try:
            server.run()
        except (OSError, RuntimeError) as error:
            logger.debug("the server cannot start", exc_info=True)
            print(f"{prog}: error: {error}", file=sys.stderr)
            return 2
    if not (server.engine.is_running or server.has_failed):  # otherwise its thread ends with the process
        llm.shutdown()
    return int(server.has_failed)


if __name__ == "__main__":
    sys.exit(main())
