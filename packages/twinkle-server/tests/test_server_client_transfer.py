"""Checkpoints between a client and a server that cuts connections: downloads go on where they were, everything is checked, uploads arrive whole."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from twinkle_client import (
    AsyncTwinkleClient,
    Conflict,
    DamagedCheckpoint,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    TwinkleClient,
    Unreachable,
)
from twinkle_server import Service, create_app, create_key, parse_config
from twinkle_server.store import Run

pytestmark = pytest.mark.timeout(60)
CONFIG = {"r": 4, "lora_alpha": 8, "peft_type": "LORA"}


class Cutting:
    """An application around another: answers of downloads are cut off after so many bytes, while there are cuts left; bodies of uploads, and
    answers to uploads that have arrived, while there are lost_bodies and lost_answers."""

    def __init__(self, app: Any) -> None:
        self.app, self.cuts, self.after, self.ranges = app, 0, 0, list[str]()
        self.damage = False
        self.lost_bodies = self.lost_answers = self.uploads = 0

    async def upload(self, scope: Any, receive: Any, send: Any) -> None:
        self.uploads += 1
        if self.lost_bodies:
            self.lost_bodies -= 1
            await receive()
            await self.cut_off(send)

        async def losing(message: Any) -> None:
            if self.lost_answers:
                self.lost_answers -= 1
                await self.cut_off(send)
            await send(message)

        await self.app(scope, receive, losing)

    @staticmethod
    async def cut_off(send: Any) -> None:
        """Begins an answer, and closes the connection."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        raise ConnectionError("cut off")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/upload"):
            await self.upload(scope, receive, send)
            return
        if scope["type"] != "http" or "/download/" not in scope["path"]:
            await self.app(scope, receive, send)
            return
        self.ranges.append(dict(scope["headers"]).get(b"range", b"").decode())
        sent = 0

        async def cutting(message: Any) -> None:
            nonlocal sent
            if message["type"] == "http.response.body" and self.cuts:
                room = self.after - sent
                if len(message.get("body", b"")) > room:
                    self.cuts -= 1
                    await send({"type": "http.response.body", "body": message["body"][:room], "more_body": True})
                    raise ConnectionError("cut off")
                sent += len(message.get("body", b""))
            if message["type"] == "http.response.body" and self.damage:
                message = message | {"body": message.get("body", b"").replace(b"\x07" * 100, b"\x08" * 100)}
            await send(message)

        await self.app(scope, receive, cutting)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Cutting, Service, dict[str, Any]]]:
    """A server without models, with a run of alice's, and the arguments of her client and bob's."""
    config = parse_config({"data_dir": str(tmp_path / "data"), "limits": {"checkpoint_bytes": 3_000_000}})
    service = Service(config)
    now = time.time()
    service.store.add(
        Run(id="run-1", tenant="alice", base_model="m", adapter="a", lora={"r": 4, "lora_alpha": 8}, name="a", created_at=now, used_at=now)
    )
    app = Cutting(create_app(config, service))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
        assert thread.is_alive()
    named = {name: {"base_url": f"http://127.0.0.1:{port}", "api_key": create_key(service.store, name)[1]} for name in ("alice", "bob")}
    yield app, service, named
    server.should_exit = True
    thread.join(20)


def adapter(folder: Path, size: int = 1_000_000) -> Path:
    """An adapter in peft's format, of about that many bytes."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    header = json.dumps(
        {"base_model.model.q_proj.lora_A.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size // 4 * 4]}}
    ).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\7" * (size // 4 * 4))
    return folder


def test_an_adapter_goes_up_and_comes_down_over_connections_that_break(served: Any, tmp_path: Path) -> None:
    app, _, named = served
    folder = adapter(tmp_path / "adapter")
    with TwinkleClient(**named["alice"]) as alice, TwinkleClient(**named["bob"]) as bob:
        made = alice.upload_checkpoint("run-1", "up", folder)
        assert (made.twinkle_path, made.checkpoint_type) == ("twinkle://run-1/weights/up", "weights")
        assert alice.upload_checkpoint("run-1", "up", folder, "sampler_weights").checkpoint_id == "sampler_weights/up"
        with pytest.raises(Conflict):
            alice.upload_checkpoint("run-1", "up", adapter(tmp_path / "another", 5000))
        with pytest.raises(QuotaExceeded):
            alice.upload_checkpoint("run-1", "large", adapter(tmp_path / "large", 2_000_000))
        (tmp_path / "empty").mkdir()
        with pytest.raises(InvalidRequest, match=r"adapter_model\.safetensors"):
            alice.upload_checkpoint("run-1", "none", tmp_path / "empty")

        app.cuts, app.after = 3, 300_000
        down = alice.download_checkpoint("run-1", "weights/up", tmp_path / "down")
        assert app.cuts == 0
        assert [text.startswith("bytes=") for text in app.ranges] == [False, True, True, True]
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            assert (down / "adapter" / name).read_bytes() == (folder / name).read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("down")) == ["down"]
        with pytest.raises(Conflict, match="already"):
            alice.download_checkpoint("run-1", "weights/up", tmp_path / "down")
        with pytest.raises(NotFound):
            bob.download_checkpoint("run-1", "weights/up", tmp_path / "his")
        # What was downloaded can be uploaded as it is.
        assert alice.delete_checkpoint("run-1", "sampler_weights/up")
        assert alice.upload_checkpoint("run-1", "again", down).checkpoint_id == "weights/again"
        assert alice.end_training_run("run-1")
        assert alice.list_training_runs() == []
        assert [each.checkpoint_id for each in alice.list_checkpoints("run-1")] == ["weights/again", "weights/up"]


def test_a_download_goes_on_in_another_client_and_damage_is_seen(served: Any, tmp_path: Path) -> None:
    app, _, named = served
    folder = adapter(tmp_path / "adapter")

    async def whole() -> None:
        async with AsyncTwinkleClient(**named["alice"], max_retries=0) as alice:
            app.ranges.clear()
            await alice.download_checkpoint("run-1", "weights/up", tmp_path / "down")
            assert app.ranges[0].startswith("bytes=")
            # Of a checkpoint that is another one meanwhile nothing is mixed with the first.
            app.cuts, app.after = 9, 300_000
            with pytest.raises(Unreachable):
                await alice.download_checkpoint("run-1", "weights/up", tmp_path / "changed")
            assert await alice.delete_checkpoint("run-1", "weights/up")
            await alice.upload_checkpoint("run-1", "up", adapter(tmp_path / "other", 500_000))
            app.cuts = 0
            await alice.download_checkpoint("run-1", "weights/up", tmp_path / "changed")
            assert (tmp_path / "changed/adapter/adapter_model.safetensors").stat().st_size < 600_000

    with TwinkleClient(**named["alice"], max_retries=0) as alice:
        alice.upload_checkpoint("run-1", "up", folder)
        app.damage = True
        with pytest.raises(DamagedCheckpoint, match="not as the server wrote it"):
            alice.download_checkpoint("run-1", "weights/up", tmp_path / "damaged")
        assert not list(tmp_path.glob("damaged*"))
        app.damage, app.cuts, app.after = False, 1, 300_000
        with pytest.raises(Unreachable):
            alice.download_checkpoint("run-1", "weights/up", tmp_path / "down")
        assert not (tmp_path / "down").exists()
        assert (tmp_path / "down.part").stat().st_size > 0
    asyncio.run(whole())


@pytest.mark.parametrize("lost", ["lost_bodies", "lost_answers"])
def test_an_upload_that_broke_is_sent_again_and_makes_one_checkpoint(served: Any, tmp_path: Path, lost: str) -> None:
    app, service, named = served
    folder = adapter(tmp_path / "adapter")

    async def again() -> str:
        async with AsyncTwinkleClient(**named["alice"]) as alice:
            setattr(app, lost, 1)
            return (await alice.upload_checkpoint("run-1", "two", folder)).twinkle_path

    with TwinkleClient(**named["alice"]) as alice:
        setattr(app, lost, 2)
        made = alice.upload_checkpoint("run-1", "one", folder)
        assert (app.uploads, made.twinkle_path) == (3, "twinkle://run-1/weights/one")
        assert asyncio.run(again()) == "twinkle://run-1/weights/two"
        assert app.uploads == 5
        assert sorted(each.name for each in service.checkpoints.of_run(service.store.get(Run, "run-1"))) == ["one", "two"]
        # Something else under a name that is taken is not the same upload.
        with pytest.raises(Conflict):
            alice.upload_checkpoint("run-1", "one", adapter(tmp_path / "other", 5000))
    with TwinkleClient(**named["alice"], max_retries=0) as alice:
        setattr(app, lost, 1)
        with pytest.raises(Unreachable):
            alice.upload_checkpoint("run-1", "three", folder)


def test_a_body_that_is_not_what_its_digest_says_is_not_kept(served: Any, tmp_path: Path) -> None:
    import httpx

    from twinkle_client._archives import Parcel

    _, service, named = served
    parcel = Parcel(adapter(tmp_path / "adapter", 1000))
    body = b"".join(parcel)
    url = f"{named['alice']['base_url']}/api/v1/twinkle/training_runs/run-1/upload?name=a"
    damaged = body.replace(b"\7", b"\6")
    for content, digest, status in ((damaged, parcel.content_digest, 422), (body, "md5=:AAAA:", 422), (body, parcel.content_digest, 200)):
        headers = {"Content-Digest": digest, "X-API-Key": named["alice"]["api_key"]}
        answer = httpx.post(url, content=content, headers=headers, trust_env=False)
        assert answer.status_code == status, answer.text
    assert len(service.checkpoints.of_run(service.store.get(Run, "run-1"))) == 1
