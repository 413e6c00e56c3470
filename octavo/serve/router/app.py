"""The router's app: what it says of itself, the routes that address all replicas, and the proxy for all others."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from octavo.errors import OctavoError
from octavo.serve.http.access_log import AccessLog
from octavo.serve.http.app import CLIENT_GONE
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.errors import UNAVAILABLE_RETRY_S, ApiError, as_api_error
from octavo.serve.http.metrics import CONTENT_TYPE
from octavo.serve.router.admin import Admin
from octavo.serve.router.admin_routes import add_admin_routes
from octavo.serve.router.fleet import Fleet
from octavo.serve.router.metrics import RouterMetrics
from octavo.serve.router.proxy import REPLICA_LOST, Proxy


def build_router_app(fleet: Fleet, config: ServerConfig) -> FastAPI:
    """The app; its lifespan starts the replicas and ends what is left of them.

    Args:
        fleet: not started.
        config: of the single server that it stands for.
    """
    metrics = RouterMetrics(fleet)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        fleet.start()
        yield
        await fleet.close()

    async def answer_error(_: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        refusal = as_api_error(error)
        if refusal.code != REPLICA_LOST:  # which has a counter of its own
            metrics.refused[refusal.status] += 1
        return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "draining" if fleet.is_draining else "alive", "requests_in_flight": fleet.num_in_flight}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        states = {str(replica.index): replica.status for replica in fleet.replicas}
        retry = {} if fleet.is_ready else {"Retry-After": str(UNAVAILABLE_RETRY_S)}
        status = "draining" if fleet.is_draining else "serving" if fleet.is_ready else "unavailable"
        return JSONResponse({"status": status, "replicas": states}, 200 if fleet.is_ready else 503, headers=retry)

    @app.get("/metrics")
    async def render_metrics() -> Response:
        return Response(await metrics.render(), media_type=CONTENT_TYPE)

    if config.admin_key is not None:
        add_admin_routes(app, Admin(fleet, config))
    app.mount("/", Proxy(fleet, config))
    if config.access_log:
        app.add_middleware(AccessLog)
    for kind in (ApiError, OctavoError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer_error)
    return app
