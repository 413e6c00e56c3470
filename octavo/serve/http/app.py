"""The FastAPI app: routes, errors in OpenAI's shape, and the engine that starts with it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from octavo import __version__
from octavo.errors import OctavoError
from octavo.serve.engine import Engine
from octavo.serve.engine_client import EngineClient
from octavo.serve.http import admin, chat, completions, status, tokens, weights
from octavo.serve.http.access_log import AccessLog
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.errors import ApiError, as_api_error
from octavo.serve.http.metrics import Metrics
from octavo.serve.http.schema_trials import SchemaTrials
from octavo.serve.http.service import Service, get_service
from octavo.serve.http.texts import Texts
from octavo.serve.http.weight_transactions import WeightTransactions

# a client that has gone reads no status; logs do
CLIENT_GONE = 499
# time that the engine's thread has to end when nothing is left to do but the step under way
JOIN_S = 10.0


def build_app(build_engine: Callable[[], Engine], config: ServerConfig) -> FastAPI:
    """A server's app; its lifespan starts the engine's thread and, at the end, drains it.

    Args:
        build_engine: called in the thread; until it returns, the app says that it is starting.
        config: names, keys, limits.
    Returns:
        The app; app.state.service is its Service.
    """
    metrics = Metrics(config.model_names[0])

    def build() -> Engine:
        built = build_engine()
        texts.prepare(built.tokenizer)
        return built

    engine = EngineClient(
        build,
        max_num_waiting=config.max_num_waiting,
        step_timeout_s=config.step_timeout_s,
        observe=metrics.observe,
    )
    metrics.watch(engine.loop)
    texts = Texts(lambda: engine.loop.engine.tokenizer)
    schemas = SchemaTrials(config, lambda: engine.loop.engine.grammars)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await schemas.close()
        await asyncio.to_thread(texts.close)
        engine.loop.drain()
        engine.loop.abort_all()  # run_server has drained before: what is left is out of time
        if engine.loop.is_built:
            await asyncio.to_thread(engine.loop.join, JOIN_S)

    # the usual documentation pages load scripts from other hosts
    app = FastAPI(title="octavo", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = Service(engine, config, metrics, schemas, texts)
    for module in (status, completions, chat, tokens):
        app.include_router(module.router)
    if config.admin_key is not None:
        app.state.weight_transactions = WeightTransactions(app.state.service)
        app.include_router(admin.router)
        app.include_router(weights.router)
    if config.access_log:
        app.add_middleware(AccessLog)
    for kind in (ApiError, OctavoError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer_error)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    refusal = as_api_error(error)
    if isinstance(error, HTTPException) and error.status_code == 404:
        path = request.url.path
        refusal = ApiError(404, f"there is no route {path[:100]}; /openapi.json lists those of this server")
    get_service(request).metrics.refused(refusal.status)
    return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)
