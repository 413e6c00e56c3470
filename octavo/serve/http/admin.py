"""The /admin routes, for those who run the server; they exist where an admin key is set."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends

from octavo.serve.engine import Engine
from octavo.serve.http.service import Service, get_service, require_admin_key

router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin_key)])
ServiceOf = Annotated[Service, Depends(get_service)]


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
    await asyncio.wrap_future(service.engine.loop.run(Engine.forget_prefixes))
    return {"status": service.state}
