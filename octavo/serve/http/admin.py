"""The /admin routes, for those who run the server; they exist where an admin key is set."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field

from octavo.errors import RequestError
from octavo.serve.http.body import body_of, openapi_of
from octavo.serve.http.errors import ApiError
from octavo.serve.http.schema import Body
from octavo.serve.http.service import ServiceOf, require_admin_key
from octavo.weights.kv_scales import server as kv_scales

router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin_key)])


class FallBackRequest(Body):
    """POST /admin/kv_scales/fall_back."""

    layers: list[int] = Field(min_length=1)


@router.post("/sleep")
async def sleep(service: ServiceOf) -> dict[str, str]:
    """Refuse new requests, finish the admitted ones, then give the KV cache's memory back; the weights stay."""
    await asyncio.wrap_future(service.engine.loop.sleep())
    return {"status": service.state}


@router.post("/wake")
async def wake(service: ServiceOf) -> dict[str, str]:
    """Serve again after /admin/sleep."""
    await asyncio.wrap_future(service.engine.loop.wake())
    return {"status": service.state}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(service: ServiceOf) -> dict[str, str]:
    """Forget all cached prompts; running requests go on."""
    await asyncio.wrap_future(service.engine.loop.run(lambda engine: engine.reset_prefix_cache()))
    return {"status": service.state}


@router.get("/kv_scales")
async def describe_kv_scales(service: ServiceOf) -> dict[str, Any]:
    """The KV cache's scales, for which weights they were made, and what they clipped and flushed so far."""
    return await asyncio.wrap_future(service.engine.loop.run(kv_scales.describe))


@router.post("/kv_scales/fall_back", openapi_extra=openapi_of(FallBackRequest))
async def fall_back(
    service: ServiceOf, body: Annotated[FallBackRequest, Depends(body_of(FallBackRequest))]
) -> dict[str, Any]:
    """Keep layers' caches in high precision from now on."""
    service.ready_engine()  # a cache that sleeps cannot be laid out
    try:
        return await asyncio.wrap_future(
            service.engine.loop.run(lambda engine: kv_scales.fall_back(engine, body.layers))
        )
    except RequestError as error:
        raise ApiError(409, str(error), code="requests_running") from error
