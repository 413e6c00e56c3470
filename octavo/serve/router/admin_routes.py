"""The router's /admin routes."""

import dataclasses
import json
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic_core import from_json

from octavo.serve.http.body import check_json, parse_body, read_bytes
from octavo.serve.http.errors import ApiError
from octavo.serve.http.weights import CommitRequest, PathRequest
from octavo.serve.router.admin import Admin
from octavo.serve.router.updates import FleetUpdates


def add_admin_routes(app: FastAPI, admin: Admin) -> None:
    """Those of a single server, but for what is of one engine alone."""
    updates = FleetUpdates(admin)

    @app.post("/admin/sleep")
    async def sleep(request: Request) -> dict[str, str]:
        admin.check(request)
        await admin.sleep()
        return {"status": "asleep"}

    @app.post("/admin/wake")
    async def wake(request: Request) -> dict[str, str]:
        admin.check(request)
        await admin.wake()
        return {"status": "serving"}

    @app.post("/admin/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> dict[str, str]:
        admin.check(request)
        await admin.reset_prefix_cache()
        return {"status": "serving" if admin.fleet.is_ready else "unavailable"}

    @app.post("/admin/update_weights")
    async def update_weights(request: Request) -> Response:
        body = parse_body(PathRequest, await _read(admin, request))
        fields = body.model_dump(exclude_unset=True)
        begun = await updates.begin("/admin/update_weights", fields | {"commit": False})
        if begun.status_code != 200 or not body.commit:
            return begun
        return await updates.commit(json.loads(bytes(begun.body))["id"], body.running)

    @app.post("/admin/weight_update")
    async def begin(request: Request) -> Response:
        return await updates.begin("/admin/weight_update", _fields(await _read(admin, request)))

    @app.get("/admin/weight_update/{update_id}")
    async def progress(request: Request, update_id: str) -> Response:
        admin.check(request)
        return await updates.ask(update_id, "GET")

    @app.delete("/admin/weight_update/{update_id}")
    async def abort(request: Request, update_id: str) -> dict[str, str]:
        admin.check(request)
        await updates.abort(update_id)
        return {"id": update_id, "status": "aborted"}

    @app.post("/admin/weight_update/{update_id}/bytes")
    async def upload_bytes(request: Request, update_id: str) -> Response:
        admin.check(request)
        size, timeout_s = admin.config.max_bucket_bytes, admin.config.update_timeout_s
        limits = dataclasses.replace(admin.config, max_body_bytes=size, body_timeout_s=timeout_s)
        data = await read_bytes(request, limits)
        what = f"/bytes?offset={quote(request.query_params.get('offset', ''))}"
        return await updates.ask(update_id, "POST", what, data, request.headers.get("content-type", ""))

    @app.post("/admin/weight_update/{update_id}/verify")
    async def verify(request: Request, update_id: str) -> Response:
        admin.check(request)
        return await updates.ask(update_id, "POST", "/verify")

    @app.post("/admin/weight_update/{update_id}/commit")
    async def commit(request: Request, update_id: str) -> Response:
        body = parse_body(CommitRequest, await _read(admin, request))
        if body.keep_old:
            text = "keep_old is not for a router's commit; send running alone"
            raise ApiError(400, text, "keep_old", "unknown_field")
        return await updates.commit(update_id, body.running)

    @app.api_route("/admin/{path:path}", methods=["GET", "POST", "DELETE"])
    async def refuse(request: Request, path: str) -> None:
        admin.check(request)
        raise ApiError(
            501,
            f"/admin/{path} addresses one engine, and a replica that starts again would not know of it; start one "
            "octavo serve a GPU without --data-parallel-size, and send it to each of them",
            code="not_with_replicas",
        )


async def _read(admin: Admin, request: Request) -> bytes:
    """The JSON of a request with the admin key; {} where it has no body."""
    admin.check(request)
    body = await read_bytes(request, admin.config)
    if body:
        check_json(request)
    return body or b"{}"


def _fields(raw: bytes) -> dict[str, Any]:
    """The fields of a manifest, which may be long: replicas check them."""
    try:
        fields = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return fields
