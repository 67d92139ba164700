"""Checkpoints in and out as tar streams: a round trip, and archives that want something else."""

from __future__ import annotations

import asyncio
import io
import json
import struct
import tarfile
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from twinkle_server import ServerConfig, Service, create_app, create_key
from twinkle_server.store import Run

CONFIG = json.dumps({"r": 4, "lora_alpha": 8, "peft_type": "LORA"}).encode()


def safetensors(name: str = "base_model.model.q_proj.lora_A.weight", data: bytes = b"\0" * 16) -> bytes:
    header = json.dumps({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def tar(*members: tuple[str, bytes], edit: Callable[[tarfile.TarInfo], None] = lambda entry: None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            edit(entry)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def whole(*more: tuple[str, bytes]) -> bytes:
    return tar(("adapter/adapter_config.json", CONFIG), ("adapter/adapter_model.safetensors", safetensors()), *more)


def link(entry: tarfile.TarInfo) -> None:
    entry.type, entry.linkname, entry.size = tarfile.SYMTYPE, "/etc/passwd", 0


def sparse(entry: tarfile.TarInfo) -> None:
    entry.type = tarfile.GNUTYPE_SPARSE


def device(entry: tarfile.TarInfo) -> None:
    entry.type, entry.size = tarfile.CHRTYPE, 0


HOSTILE = {
    "nothing": b"",
    "no tar": b"x" * 5000,
    "cut off": whole()[:1200],
    "upward": whole(("../../evil", b"x")),
    "absolute": whole(("/etc/cron.d/evil", b"x")),
    "pickle": whole(("adapter/adapter_model.bin", b"x")),
    "twice": whole(("adapter/adapter_config.json", CONFIG)),
    "link": tar(("adapter/adapter_config.json", b""), edit=link),
    "device": tar(("adapter/adapter_config.json", b""), edit=device),
    "sparse": tar(("adapter/adapter_config.json", CONFIG), ("adapter/adapter_model.safetensors", b"x"), edit=sparse),
    "other shape": tar(
        ("adapter/adapter_config.json", CONFIG), ("adapter/adapter_model.safetensors", safetensors().replace(b'"shape": [4]', b'"shape": [5]'))
    ),
    "weights missing": tar(("adapter/adapter_config.json", CONFIG)),
    "other rank": tar(("adapter/adapter_config.json", b'{"r": 8, "lora_alpha": 8}'), ("adapter/adapter_model.safetensors", safetensors())),
    "no configuration": tar(("adapter/adapter_config.json", b"[" * 3000), ("adapter/adapter_model.safetensors", safetensors())),
    "a pickle by another name": tar(("adapter/adapter_config.json", CONFIG), ("adapter/adapter_model.safetensors", b"\x80\x04\x95" + b"x" * 100)),
    "header too long": tar(("adapter/adapter_config.json", CONFIG), ("adapter/adapter_model.safetensors", struct.pack("<Q", 1 << 60) + b"{}")),
    "not of an adapter": tar(("adapter/adapter_config.json", CONFIG), ("adapter/adapter_model.safetensors", safetensors("model.embed.weight"))),
}


def serve(config: ServerConfig, body: Callable[[httpx.AsyncClient, httpx.AsyncClient, Service], Any]) -> None:
    async def run() -> None:
        service = Service(config)
        keys = [create_key(service.store, name)[1] for name in ("alice", "bob")]
        now = time.time()
        service.store.add(Run(id="run-1", tenant="alice", base_model="m", adapter="a", lora={"r": 4, "lora_alpha": 8}, created_at=now, used_at=now))
        app = create_app(config, service)
        clients = [
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x/api/v1/twinkle", headers={"X-API-Key": key}) for key in keys
        ]
        async with app.router.lifespan_context(app), clients[0], clients[1]:
            await asyncio.wait_for(body(clients[0], clients[1], service), 60)

    asyncio.run(run())


def test_what_is_uploaded_comes_back_and_only_to_its_tenant(config: ServerConfig) -> None:
    async def body(alice: httpx.AsyncClient, bob: httpx.AsyncClient, service: Service) -> None:
        made = await alice.post("/training_runs/run-1/upload", params={"name": "up"}, content=whole(("state/x.pt", b"never kept")))
        assert made.status_code == 200, made.text
        assert made.json()["twinkle_path"] == "twinkle://run-1/weights/up"
        again = await alice.post("/training_runs/run-1/upload", params={"name": "up"}, content=whole())
        assert again.status_code == 409
        back = await alice.get("/download/run-1/weights/up")
        with tarfile.open(fileobj=io.BytesIO(back.content)) as archive:
            assert sorted(archive.getnames()) == ["adapter/adapter_config.json", "adapter/adapter_model.safetensors", "manifest.json"]
            content = archive.extractfile("adapter/adapter_model.safetensors")
            assert content is not None
            assert content.read() == safetensors()
        assert (await alice.post("/training_runs/run-1/upload", params={"name": "two"}, content=back.content)).status_code == 200
        assert (await bob.get("/download/run-1/weights/up")).status_code == 404
        assert (await bob.post("/training_runs/run-1/upload", params={"name": "his"}, content=whole())).status_code == 404
        assert {entry.action for entry in service.store.audit_entries()} == {"upload_checkpoint", "download_checkpoint"}

    serve(config, body)


def test_archives_that_want_something_else_are_refused_and_leave_nothing(config: ServerConfig) -> None:
    async def body(alice: httpx.AsyncClient, bob: httpx.AsyncClient, service: Service) -> None:
        for what, content in HOSTILE.items():
            answer = await alice.post("/training_runs/run-1/upload", params={"name": "bad"}, content=content)
            assert answer.status_code == 422, (what, answer.text)
        listed = await alice.get("/training_runs/run-1/checkpoints")
        assert listed.json()["checkpoints"] == []
        for folder in ("whole", "unfinished"):
            assert list((config.data_dir / folder).iterdir()) == []

    serve(config, body)


def test_an_upload_beyond_the_limits_is_refused(config: ServerConfig) -> None:
    small = config.model_copy(update={"limits": config.limits.model_copy(update={"upload_bytes": 4096, "checkpoint_bytes": 100_000})})

    async def body(alice: httpx.AsyncClient, bob: httpx.AsyncClient, service: Service) -> None:
        answer = await alice.post("/training_runs/run-1/upload", params={"name": "big"}, content=whole())
        assert answer.status_code == 413

    serve(small, body)
    poor = config.model_copy(update={"limits": config.limits.model_copy(update={"checkpoint_bytes": 10})})

    async def quota(alice: httpx.AsyncClient, bob: httpx.AsyncClient, service: Service) -> None:
        answer = await alice.post("/training_runs/run-1/upload", params={"name": "big"}, content=whole())
        assert answer.status_code == 429

    poor = poor.model_copy(update={"data_dir": config.data_dir.parent / "other"})
    serve(poor, quota)


@pytest.mark.parametrize("name", ["../up", "a/b", "", "." * 3, "x" * 129])
def test_names_of_uploads_are_names(name: str, config: ServerConfig) -> None:
    async def body(alice: httpx.AsyncClient, bob: httpx.AsyncClient, service: Service) -> None:
        answer = await alice.post("/training_runs/run-1/upload", params={"name": name}, content=whole())
        assert answer.status_code == 422

    serve(config, body)
