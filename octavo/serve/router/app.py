"""The router's app: what it says of itself, the routes that address all replicas, and the proxy for all others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from octavo.errors import OctavoError
from octavo.serve.http.access_log import AccessLog
from octavo.serve.http.app import CLIENT_GONE
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.errors import UNAVAILABLE_RETRY_S, ApiError, as_api_error
from octavo.serve.http.metrics import CONTENT_TYPE
from octavo.serve.http.service import check_key
from octavo.serve.router import upstream
from octavo.serve.router.fleet import Fleet
from octavo.serve.router.metrics import RouterMetrics
from octavo.serve.router.proxy import Proxy
from octavo.serve.router.replica import Replica

# time for what an admin route asks of a replica
ADMIN_S = 60.0


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
        metrics.refused[refusal.status] += 1
        return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "draining" if fleet.is_draining else "alive", "requests_in_flight": fleet.num_in_flight}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        states = {str(replica.index): replica.state for replica in fleet.replicas}
        retry = {} if fleet.is_ready else {"Retry-After": str(UNAVAILABLE_RETRY_S)}
        status = "draining" if fleet.is_draining else "serving" if fleet.is_ready else "unavailable"
        return JSONResponse({"status": status, "replicas": states}, 200 if fleet.is_ready else 503, headers=retry)

    @app.get("/metrics")
    async def render_metrics() -> Response:
        return Response(await metrics.render(), media_type=CONTENT_TYPE)

    if config.admin_key is not None:
        _add_admin_routes(app, fleet, config.admin_key)
    app.mount("/", Proxy(fleet, config))
    if config.access_log:
        app.add_middleware(AccessLog)
    for kind in (ApiError, OctavoError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer_error)
    return app


def _add_admin_routes(app: FastAPI, fleet: Fleet, admin_key: str) -> None:
    @app.post("/admin/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> dict[str, str]:
        check_key(request, (admin_key,))
        replicas = [replica for replica in fleet.replicas if replica.is_ready]  # others begin with an empty one
        key = [(b"authorization", f"Bearer {admin_key}".encode())]
        order = upstream.Request(b"POST", b"/admin/reset_prefix_cache", key)
        for replica in replicas:
            fleet.balance.forget(replica.index)
        await asyncio.gather(*[_ask(replica, order) for replica in replicas])
        return {"status": "serving" if fleet.is_ready else "unavailable"}

    @app.api_route("/admin/{path:path}", methods=["GET", "POST", "DELETE"])
    async def refuse(request: Request, path: str) -> None:
        check_key(request, (admin_key,))
        raise ApiError(
            501,
            f"/admin/{path} addresses one engine, and a replica that starts again would not know of it; start one "
            "octavo serve a GPU without --data-parallel-size, and send it to each of them",
            code="not_with_replicas",
        )


async def _ask(replica: Replica, order: upstream.Request) -> None:
    """Let a replica do something.

    Raises:
        ApiError: 502, which names the replica that did not.
    """
    try:
        status, body = await upstream.fetch(replica.port, order, ADMIN_S)
    except (upstream.UnreachableError, upstream.LostReplicaError, OSError) as error:
        raise ApiError(502, f"replica {replica.index}: {error}; send it again", code="replica_lost") from error
    if status != 200:
        text = body.decode(errors="replace")
        raise ApiError(502, f"replica {replica.index} answered {status}: {text:.200}", code="replica_refused")
