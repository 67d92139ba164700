"""Checkpoints in and out, as tar streams."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from twinkle_client import types as wire

from .._errors import BadRequest, Busy, Conflict, Invalid, TooLarge, TooSlow
from .._paths import parse_checkpoint_id
from .._service import Service
from .._transfer import check_adapter, extract_adapter, tar_of, tar_size
from ..http._auth import Caller, get_service, request_id
from ..http._json import StrictRoute
from ..store import Checkpoint
from ._control import CheckpointId, RunId, checkpoint_of

transfer_router = APIRouter(route_class=StrictRoute, tags=["control"])
_TAR = "application/x-tar"
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")
_OVERHEAD_BYTES = 64 << 10  # of an archive, beside what is kept of it
_RANGE = re.compile(r"bytes=(\d{1,18})-")


@transfer_router.get(
    "/download/{run_id}/{checkpoint_id:path}",
    response_class=StreamingResponse,
    responses={
        200: {"content": {_TAR: {"schema": {"type": "string", "format": "binary"}}}, "description": "adapter/, state/, manifest.json"},
        206: {"content": {_TAR: {"schema": {"type": "string", "format": "binary"}}}, "description": "The rest of it, from the byte that Range names"},
        416: {"model": wire.ErrorBody, "description": "Range begins behind the end"},
    },
)
async def download_checkpoint(request: Request, caller: Caller, run_id: RunId, checkpoint_id: CheckpointId) -> StreamingResponse:
    """A checkpoint as a tar: the adapter in peft's format, the training state, and a manifest with the SHA-256 of each file.

    The ETag is the SHA-256 of the manifest. `Range: bytes=N-` (with If-Range and the ETag) goes on where a download broke off.
    """
    service = get_service(request)
    uri = parse_checkpoint_id(run_id, checkpoint_id)
    checkpoint, _ = await service.io(service.checkpoints.find, caller.tenant, uri, may_be_public=True)
    etag = f'"{checkpoint.digest}"'
    asked = _RANGE.fullmatch(request.headers.get("range", ""))
    begin = int(asked[1]) if asked and request.headers.get("if-range", etag) == etag else 0
    if not begin:  # who goes on checks the whole against the manifest
        await service.file_io(service.checkpoints.read, checkpoint)
    await service.io(service.audit, caller, "download_checkpoint", str(uri), request_id(request))
    files = await service.file_io(service.folders.files, checkpoint.folder)
    size = tar_size(files)
    headers = {
        "Content-Disposition": f'attachment; filename="{checkpoint.name}.tar"',
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Content-Length": str(max(size - begin, 0)),
    }
    if begin >= size:
        raise HTTPException(416, f"the archive has {size} bytes", {"Content-Range": f"bytes */{size}"})
    if begin:
        headers["Content-Range"] = f"bytes {begin}-{size - 1}/{size}"
    return StreamingResponse(tar_of(files, begin), 206 if begin else 200, media_type=_TAR, headers=headers)


@transfer_router.post(
    "/training_runs/{run_id}/upload",
    openapi_extra={"requestBody": {"required": True, "content": {_TAR: {"schema": {"type": "string", "format": "binary"}}}}},
)
async def upload_checkpoint(
    request: Request, caller: Caller, run_id: RunId, name: Annotated[str, Query(max_length=128)], sampler: bool = False
) -> wire.Checkpoint:
    """Makes a checkpoint, to load and to sample from, of a tar with adapter/adapter_config.json and adapter/adapter_model.safetensors.

    With `Content-Digest: sha-256=:BASE64:` (RFC 9530) nothing is kept of a body that has another SHA-256, and a body that is sent again, since the
    answer was lost, is answered with the checkpoint that the first one made.
    """
    service = get_service(request)
    run = await service.io(service.runs.own, caller, run_id)
    kind = "sampler_weights" if sampler else "weights"
    limit, wanted = service.config.limits.upload_bytes, _wanted_digest(request)

    async def made_before() -> Checkpoint | None:
        return await service.file_io(service.checkpoints.added, run, kind, name, None if wanted is None else wanted.hex())

    if (before := await made_before()) is not None:
        return checkpoint_of(before, run)
    with service.folders.scratch() as archive:
        digest = await _receive(service, caller.tenant, request.stream(), archive)
        if wanted is not None and digest != wanted:
            raise Invalid("the body is not what Content-Digest says: it was damaged on its way, or is another one")

        def fill(folder: FilePath) -> None:
            extract_adapter(archive, folder, limit_bytes=limit)
            check_adapter(folder, run)

        await service.io(service.audit, caller, "upload_checkpoint", f"{run.id}/{kind}/{name}", request_id(request))
        try:
            checkpoint = await service.file_io(service.checkpoints.add, run, kind, name, fill, digest.hex())
        except Conflict:  # the same body, whose client has left, may have come to its end meanwhile
            if (checkpoint := await made_before()) is None:
                raise
    return checkpoint_of(checkpoint, run)


def _wanted_digest(request: Request) -> bytes | None:
    """The SHA-256 in Content-Digest (RFC 9530), None without one; Invalid when there is another."""
    given = request.headers.get("content-digest")
    if given is None:
        return None
    found = _DIGEST.fullmatch(given.strip())
    if found is None:
        raise Invalid("Content-Digest is sha-256=:BASE64: here")
    return base64.b64decode(found[1])


async def _receive(service: Service, tenant: str, chunks: AsyncIterator[bytes], target: FilePath) -> bytes:
    """Writes a body to a file, as far as the tenant's quota reaches; returns its SHA-256. What other uploads of the tenant hold counts."""
    limits, receiving = service.config.limits, service.receiving
    room = await service.io(service.checkpoints.room_bytes, tenant)
    digest, size = hashlib.sha256(), 0
    try:
        with target.open("wb") as file:
            while True:
                try:
                    chunk = await asyncio.wait_for(anext(chunks, b""), limits.body_timeout_s)
                except TimeoutError:
                    raise TooSlow(f"nothing of the body arrived for {limits.body_timeout_s:g} s") from None
                except ClientDisconnect:
                    raise BadRequest("the body ended early") from None
                if not chunk:
                    return digest.digest()
                size += len(chunk)
                receiving[tenant] += len(chunk)
                if size > limits.upload_bytes:
                    raise TooLarge(f"a checkpoint has at most {limits.upload_bytes} bytes")
                if receiving[tenant] > room + _OVERHEAD_BYTES:
                    raise Busy(f"your quota leaves room for {room} bytes: delete some checkpoints")
                digest.update(chunk)
                await service.file_io(file.write, chunk)
    finally:
        receiving[tenant] -= size
        if not receiving[tenant]:
            del receiving[tenant]
