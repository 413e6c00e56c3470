"""The /admin routes that give a running server new weights: from its disk, or uploaded in buckets."""

import asyncio
from typing import Annotated, Any, Literal

import torch
from fastapi import APIRouter, Depends, Request
from pydantic import Field, StringConstraints

from octavo.serve.http.body import body_of, openapi_of
from octavo.serve.http.errors import ApiError
from octavo.serve.http.schema import Body
from octavo.serve.http.service import ServiceOf, require_admin_key
from octavo.serve.http.weight_transactions import WeightTransactions
from octavo.weights.kv_scales.handover import check_stamp
from octavo.weights.manifest import TensorSpec
from octavo.weights.update import RunningPolicy
from octavo.weights.wire import Upload

# bytes that are gathered before they are worked on
_PART_BYTES = 4 << 20

router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin_key)])
Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-fA-F]{64}$")]
Version = Annotated[int, Field(ge=0, le=2**63 - 1)]


async def _transactions(request: Request) -> WeightTransactions:
    transactions: WeightTransactions = request.app.state.weight_transactions
    return transactions


Transactions = Annotated[WeightTransactions, Depends(_transactions)]


class TensorFields(Body):
    """A tensor of a manifest: torch's name of its dtype, its shape, the SHA-256 of its bytes."""

    dtype: Literal["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    shape: list[Annotated[int, Field(ge=0, le=2**40)]] = Field(max_length=4)
    sha256: Sha256


class PathRequest(Body):
    """POST /admin/update_weights."""

    path: str = Field(min_length=1)
    running: RunningPolicy = "wait"
    checksums: dict[str, Sha256] | None = None
    partial: list[str] = []
    replace: bool = False
    commit: bool = True


class BeginRequest(Body):
    """POST /admin/weight_update; the versions are the sender's own: see kv_scales.check_stamp."""

    tensors: dict[str, TensorFields] = Field(min_length=1)
    partial: list[str] = []
    replace: bool = False
    weight_version: Version | None = None
    kv_scales_version: Version | None = None


class CommitRequest(Body):
    """POST /admin/weight_update/{id}/commit; keep_old: see WeightTransactions.commit."""

    running: RunningPolicy = "wait"
    keep_old: bool = False


@router.post("/update_weights", openapi_extra=openapi_of(PathRequest))
async def update_weights(
    transactions: Transactions, body: Annotated[PathRequest, Depends(body_of(PathRequest))]
) -> dict[str, Any]:
    """Take over a checkpoint from the folder of --weights-dir; without commit it is staged, and has an id."""
    if not body.commit:
        staged = await transactions.stage_from(body.path, body.checksums, body.partial, replace=body.replace)
        return {"id": staged.id}
    version = await transactions.update_from(
        body.path, body.running, body.checksums, body.partial, replace=body.replace
    )
    return {"weight_version": version}


@router.post("/weight_update", openapi_extra=openapi_of(BeginRequest))
async def begin(
    service: ServiceOf, transactions: Transactions, body: Annotated[BeginRequest, Depends(body_of(BeginRequest))]
) -> dict[str, Any]:
    """Begin an upload: every tensor that will come, in the order in which their bytes will."""
    manifest = {
        name: TensorSpec(getattr(torch, tensor.dtype), tuple(tensor.shape), tensor.sha256)
        for name, tensor in body.tensors.items()
    }
    check_stamp(
        service.engine.loop.engine.model,
        manifest,
        is_partial=bool(body.partial),
        weight_version=body.weight_version,
        kv_scales_version=body.kv_scales_version,
    )
    transaction = await transactions.begin(manifest, body.partial, replace=body.replace)
    assert transaction.upload is not None, "it has begun"
    config = service.config
    limits = {"max_bucket_bytes": config.max_bucket_bytes, "expires_after_s": config.update_timeout_s}
    return {"id": transaction.id, **transaction.upload.progress, **limits}


@router.get("/weight_update/{transaction_id}")
async def progress(transactions: Transactions, transaction_id: str) -> dict[str, Any]:
    """How many bytes have come: the offset of the next ones."""
    upload = transactions.get(transaction_id).upload
    return {"id": transaction_id, **(upload.progress if upload else {})}


@router.post("/weight_update/{transaction_id}/bytes")
async def upload_bytes(
    request: Request, service: ServiceOf, transactions: Transactions, transaction_id: str
) -> dict[str, Any]:
    """Take the next bytes of the tensors, a bucket of any size up to the limit; ?offset= says where it begins."""
    config = service.config
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/octet-stream":
        raise ApiError(415, "the content type must be application/octet-stream")
    offset = request.query_params.get("offset", "")
    if not (offset.isascii() and offset.isdecimal() and len(offset) < 20):
        raise ApiError(
            400, f"offset must be the number of bytes sent so far, got {offset!r}", "offset", "invalid_value"
        )

    async def read(upload: Upload) -> None:
        await _read_bucket(request, upload, config.max_bucket_bytes, config.body_timeout_s)

    return (await transactions.feed(transaction_id, int(offset), read)).progress


@router.post("/weight_update/{transaction_id}/commit", openapi_extra=openapi_of(CommitRequest))
async def commit(
    transactions: Transactions, transaction_id: str, body: Annotated[CommitRequest, Depends(body_of(CommitRequest))]
) -> dict[str, Any]:
    """Put the uploaded weights in the place of the live ones."""
    return {"weight_version": await transactions.commit(transaction_id, body.running, keep_old=body.keep_old)}


@router.post("/weight_update/{transaction_id}/verify")
async def verify(transactions: Transactions, transaction_id: str) -> dict[str, Any]:
    """Check an upload before it is committed: it is whole, and fits the model."""
    await transactions.verify(transaction_id)
    return {"id": transaction_id, "status": "verified"}


@router.delete("/weight_update/{transaction_id}")
async def abort(transactions: Transactions, transaction_id: str) -> dict[str, Any]:
    """Drop an upload; the live weights stay as they are."""
    transactions.abort(transaction_id)
    return {"id": transaction_id, "status": "aborted"}


async def _read_bucket(request: Request, upload: Upload, limit: int, timeout_s: float) -> None:
    """Feed a body to an upload as it comes; what was fed stays, whatever becomes of the rest."""
    limit = min(limit, upload.num_bytes - upload.num_received)
    too_large = ApiError(413, f"a bucket may have {limit} bytes here, and this one has more", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    parts, size = bytearray(), 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                part = await anext(stream, None)
        except TimeoutError:
            raise ApiError(408, f"nothing more of the body came for {timeout_s:g} s") from None
        size += len(part or b"")
        if size > limit:
            raise too_large
        parts += part or b""
        if parts and (part is None or len(parts) >= _PART_BYTES):
            await asyncio.to_thread(upload.feed, bytes(parts))
            parts.clear()
        if part is None:
            return
