"""Checkpoints in and out, as tar streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from twinkle_client import types as wire

from .._errors import Conflict, TooLarge
from .._paths import check_name, parse_checkpoint_id
from .._service import Service
from .._transfer import check_adapter, extract_adapter, tar_of
from ..http._auth import Caller, get_service, request_id
from ..http._json import StrictRoute
from ._control import CheckpointId, RunId, checkpoint_of

transfer_router = APIRouter(route_class=StrictRoute, tags=["control"])
_TAR = "application/x-tar"


@transfer_router.get(
    "/download/{run_id}/{checkpoint_id:path}",
    response_class=StreamingResponse,
    responses={200: {"content": {_TAR: {"schema": {"type": "string", "format": "binary"}}}, "description": "adapter/, state/, manifest.json"}},
)
async def download_checkpoint(request: Request, caller: Caller, run_id: RunId, checkpoint_id: CheckpointId) -> StreamingResponse:
    """A checkpoint as a tar: the adapter in peft's format, the training state, and a manifest with checksums."""
    service = get_service(request)
    uri = parse_checkpoint_id(run_id, checkpoint_id)
    checkpoint, _ = await service.io(service.checkpoints.find, caller.tenant, uri, may_be_public=True)
    await service.io(service.folders.verify, checkpoint.folder, checkpoint.digest)
    await service.io(service.audit, caller, "download_checkpoint", str(uri), request_id(request))
    files = await service.io(service.folders.files, checkpoint.folder)
    headers = {"Content-Disposition": f'attachment; filename="{checkpoint.name}.tar"'}
    return StreamingResponse(tar_of(files), media_type=_TAR, headers=headers)


@transfer_router.post(
    "/training_runs/{run_id}/upload",
    openapi_extra={"requestBody": {"required": True, "content": {_TAR: {"schema": {"type": "string", "format": "binary"}}}}},
)
async def upload_checkpoint(
    request: Request, caller: Caller, run_id: RunId, name: Annotated[str, Query(max_length=128)], sampler: bool = False
) -> wire.Checkpoint:
    """Makes a checkpoint, to load and to sample from, of a tar with adapter/adapter_config.json and adapter/adapter_model.safetensors."""
    service = get_service(request)
    run = await service.io(service.runs.own, caller, run_id)
    check_name(name)
    kind = "sampler_weights" if sampler else "weights"
    if await service.io(service.store.find_checkpoint, run.id, kind, name) is not None:
        raise Conflict(f"there is a checkpoint {kind}/{name} of this run already")
    limit = service.config.limits.upload_bytes
    with service.folders.scratch() as archive:
        await _receive(service, request.stream(), archive)

        def fill(folder: FilePath) -> None:
            extract_adapter(archive, folder, limit_bytes=limit)
            check_adapter(folder, run)

        await service.io(service.audit, caller, "upload_checkpoint", f"{run.id}/{kind}/{name}", request_id(request))
        checkpoint = await service.io(service.checkpoints.add, run, kind, name, fill)
    return checkpoint_of(checkpoint, run)


async def _receive(service: Service, chunks: AsyncIterator[bytes], target: FilePath) -> None:
    size, limit = 0, service.config.limits.upload_bytes
    with target.open("wb") as file:
        async for chunk in chunks:
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"a checkpoint has at most {limit} bytes")
            await service.io(file.write, chunk)
