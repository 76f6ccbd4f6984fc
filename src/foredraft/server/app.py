"""The ASGI application: routes, and the start and end of a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import foredraft
from foredraft.llm import LLM
from foredraft.server.answers import TokenTexts
from foredraft.server.capture import Capture
from foredraft.server.config import ServeConfig
from foredraft.server.errors import ApiError, bug, invalid, unreadable
from foredraft.server.gate import Gate
from foredraft.server.grammar import GrammarMaker
from foredraft.server.metrics import Metrics
from foredraft.server.prompts import Preparer
from foredraft.server.schemas import ChatRequest, CompletionRequest
from foredraft.server.service import Service
from foredraft.server.worker import Worker

PAGE = Path(__file__).with_name("page")
_ERROR = {
    "description": "An error",
    "content": {
        "application/json": {
            "schema": {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
        }
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {code: _ERROR for code in (400, 401, 404, 408, 413, 429, 503, 504)}


def make_service(llm: LLM, config: ServeConfig) -> Service:
    """Return the service of a loaded model; its engine starts with the application."""
    target = llm.engine.target
    metrics = Metrics(config.model_name)
    grammars = GrammarMaker(llm.tokenizer, target.vocab_size, target.eos_ids)
    preparer = Preparer(llm.tokenizer, grammars, max_len=llm.max_len, max_tokens=config.max_tokens)
    capture = Capture(config.capture, metrics) if config.capture is not None else None
    worker = Worker(llm.engine, metrics)
    return Service(config, worker, preparer, TokenTexts(llm.tokenizer), metrics, capture)


def create_app(service: Service, *, draft: str = "none") -> ASGIApp:
    """Return the application around a service."""
    config = service.config

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="foredraft", version=foredraft.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    _handle_errors(app)
    _add_routes(app, service, draft)
    gate = Gate(app, config, service.metrics)
    if not config.cors_origins:
        return gate
    # Around everything, so that a browser may read what the gate refuses, too.
    return CORSMiddleware(
        gate,
        allow_origins=config.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
    )


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> JSONResponse:
        return invalid(error).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        cause = error.__cause__  # of what FastAPI could not read
        if isinstance(cause, UnicodeDecodeError):
            return unreadable(f"byte {cause.start} is not of UTF-8").response()
        if isinstance(cause, RecursionError):
            return unreadable("it is nested too deeply").response()
        if isinstance(cause, ValueError):
            return unreadable("a number has too many digits").response()
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> JSONResponse:
        return bug().response()


def _add_routes(app: FastAPI, service: Service, draft: str) -> None:
    name = service.config.model_name
    model = {"id": name, "object": "model", "created": 0, "owned_by": "foredraft", "draft": draft}

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.answer(request, body)

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.answer(request, body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", responses={404: _ERROR})
    async def one_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: _ERROR})
    async def health() -> Response:
        if service.draining or service.worker.failure or not service.worker.alive:
            raise ApiError(503, service.worker.failure or "the server is shutting down")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    app.mount("/page", StaticFiles(directory=PAGE))


class Server(uvicorn.Server):
    """A uvicorn server that lets running answers finish, or ends them cleanly, before it closes."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: Any = None) -> None:
        """Drain, then close."""
        for server in self.servers:
            server.close()  # take no new connections meanwhile
        await self._service.drain(self._service.config.grace_s)
        await super().shutdown(sockets)


def make_server(app: ASGIApp, service: Service, *, host: str = "127.0.0.1", port: int = 0) -> Server:
    """Return a server that is ready to run."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=30,
    )
    return Server(config, service)
