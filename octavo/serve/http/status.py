"""GET /health, /ready, /metrics, /version, /v1/models and the page: what the server is and how it fares."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse, JSONResponse, Response

from octavo import __version__
from octavo.serve.engine.request import Phase
from octavo.serve.http.errors import UNAVAILABLE_RETRY_S, ApiError
from octavo.serve.http.metrics import CONTENT_TYPE
from octavo.serve.http.service import Service, ServiceOf, require_api_key

# kept: a FileResponse takes four turns of a thread each time, which hundreds of requests at once make dear
PAGE = Path(__file__).with_name("page.html").read_bytes()

router = APIRouter()


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """A page to try a prompt on."""
    policy = "default-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": policy})


@router.get("/health")
async def health(service: ServiceOf) -> JSONResponse:
    """200 while the server lives, starting and draining included; 503 once the engine failed or hangs."""
    loop = service.engine.loop
    content = {"status": service.state, "step_age_s": round(loop.step_age_s, 3), "sequences_open": loop.num_open}
    if loop.error is not None:
        content["error"] = str(loop.error)
    return JSONResponse(content, 200 if service.is_healthy else 503)


@router.get("/ready")
async def ready(service: ServiceOf) -> JSONResponse:
    """200 while it takes requests."""
    has_failed = service.engine.loop.phase is Phase.FAILED
    retry = {} if service.is_ready or has_failed else {"Retry-After": str(UNAVAILABLE_RETRY_S)}
    return JSONResponse({"status": service.state}, 200 if service.is_ready else 503, headers=retry)


@router.get("/metrics")
async def metrics(service: ServiceOf) -> Response:
    """Prometheus text."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


@router.get("/version")
async def version() -> dict[str, str]:
    """octavo's version."""
    return {"version": __version__}


@router.get("/v1/models", dependencies=[Depends(require_api_key)])
async def models(service: ServiceOf) -> dict[str, Any]:
    """The model's names."""
    return {"object": "list", "data": [_card(service, name) for name in service.config.model_names]}


@router.get("/v1/models/{name:path}", dependencies=[Depends(require_api_key)])
async def model(service: ServiceOf, name: str) -> dict[str, Any]:
    """One name."""
    if name not in service.config.model_names:
        raise ApiError(404, f"the model {name!r} is not served here", "model", "model_not_found")
    return _card(service, name)


def _card(service: Service, name: str) -> dict[str, Any]:
    loop = service.engine.loop
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "root": service.config.model_names[0],
        "max_model_len": loop.engine.max_model_len if loop.is_built else None,
    }
