"""The protocol's routes over HTTP in this process, without a model: sessions, what is refused, and what is nobody's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from tinker.proto import tinker_public_pb2 as theirs

from twinkle_server import ServerConfig, Service, create_app, create_key

Body = Callable[[httpx.AsyncClient, dict[str, dict[str, str]]], Awaitable[None]]


def run_with(config: ServerConfig, body: Body) -> None:
    async def whole() -> None:
        service = Service(config)
        headers = {name: {"X-API-Key": create_key(service.store, name)[1]} for name in ("ann", "bob")}
        app = create_app(config, service)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://local/api/v1", headers=headers["ann"]) as client,
        ):
            await asyncio.wait_for(body(client, headers), 60)

    asyncio.run(whole())


def test_a_session_begins_beats_ends_and_is_listed(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, headers: dict[str, dict[str, str]]) -> None:
        flags = (await client.post("/client/config", json={"sdk_version": "0.38.0"})).json()
        assert flags["custom_loss_server_side"] is False
        assert flags["sample_max_concurrent_requests"] == config.limits.queued_calls
        assert (await client.post("/client/dynamic_config", json={})).json() == {}
        given = {"tags": ["a"], "user_metadata": {"who": "ann", "n": 3}, "sdk_version": "0.38.0", "type": "create_session", "of_a_later_sdk": 1}
        session = (await client.post("/create_session", json=given)).json()["session_id"]
        assert (await client.post("/session_heartbeat", json={"session_id": session})).status_code == 200
        assert (await client.get("/sessions")).json() == {"sessions": [session]}
        found = (await client.get(f"/sessions/{session}")).json()
        assert found == {"training_run_ids": [], "sampler_ids": [], "user_metadata": {"who": "ann", "n": "3"}, "display_name": None}
        assert (await client.post("/telemetry", json={"events": [{"any": ["thing"]}], "session_id": session})).json() == {"status": "accepted"}
        assert (await client.get("/sessions", headers=headers["bob"])).json() == {"sessions": []}
        for answer in (
            await client.get(f"/sessions/{session}", headers=headers["bob"]),
            await client.post("/session_heartbeat", json={"session_id": session}, headers=headers["bob"]),
            await client.post(f"/sessions/{session}/finish", json={}, headers=headers["bob"]),
        ):
            assert answer.status_code == 404
        for _ in range(2):
            assert (await client.post(f"/sessions/{session}/finish", json={"reason": {"type": "success"}})).status_code == 200
        assert (await client.post("/session_heartbeat", json={"session_id": session})).status_code == 410, "the SDK would beat for ever"

    run_with(config, body)


def test_only_health_needs_no_key(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, headers: dict[str, dict[str, str]]) -> None:
        paths = (await client.get("/openapi.json")).json()["paths"]
        mine = {path: verbs for path, verbs in paths.items() if any("tinker" in verb.get("tags", ()) for verb in verbs.values())}
        assert len(mine) > 25
        for path, verbs in mine.items():
            for verb in verbs:
                address = path.removeprefix("/api/v1").replace("{", "").replace("}", "")
                answer = await client.request(verb, address, headers={"X-API-Key": "tml-nobodys"}, content=b"{}")
                assert answer.status_code == (200 if address == "/healthz" else 401), (verb, path)

    run_with(config, body)


def _request(model_id: str, seq_id: int) -> bytes:
    return theirs.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy").SerializeToString()


WRONG: list[tuple[str, Any, int]] = [
    ("/forward_backward", b"\xff\xff\xff", 400),
    ("/forward_backward", _request("", 1), 400),
    ("/forward_backward", _request("m", 0), 400),
    ("/forward_backward", _request("ses-none:train:0", 1), 404),
    ("/forward_backward", _request("../../etc", 1), 404),
    ("/optim_step", {"model_id": "ses-none:train:0", "seq_id": 1}, 404),
    ("/optim_step", {"model_id": "ses-none:train:0", "seq_id": 0}, 422),
    ("/optim_step", {"model_id": "ses-none:train:0", "seq_id": 1 << 40}, 422),
    ("/optim_step", b'{"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": NaN}}', 400),
    ("/get_info", {"model_id": "ses-none:train:0"}, 404),
    ("/unload_model", {"model_id": "ses-none:train:0"}, 404),
    ("/create_model", {"session_id": "SESSION", "model_seq_id": 0, "base_model": "no/such"}, 404),
    ("/create_model", {"session_id": "ses-none", "model_seq_id": 0, "base_model": "no/such"}, 404),
    ("/create_model", {"session_id": "SESSION", "model_seq_id": -1, "base_model": "no/such"}, 422),
    ("/create_model", {"session_id": "SESSION", "model_seq_id": 0, "base_model": "x", "optimizer_config": {"type": "dimuon"}}, 400),
    (
        "/create_model",
        {"session_id": "SESSION", "model_seq_id": 0, "base_model": "x", "lora_config": {"rank": 8, "train_mlp": False, "train_attn": False}},
        400,
    ),
    ("/load_weights", {"path": "tinker://r/weights/n", "optimizer": True}, 400),
    ("/load_weights", {"path": "tinker://r/weights/n", "optimizer": True, "session_id": "SESSION", "model_seq_id": 0}, 404),
    ("/load_weights", {"path": "twinkle://r/weights/n", "optimizer": True, "session_id": "SESSION", "model_seq_id": 0}, 422),
    ("/load_weights", {"path": "tinker://r/weights/../n", "optimizer": True, "session_id": "SESSION", "model_seq_id": 0}, 422),
    ("/create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 0}, 400),
    ("/create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 0, "base_model": "no/such"}, 404),
    ("/create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 0, "model_path": "tinker://r/x/n"}, 422),
    ("/asample", {"sampling_session_id": "none", "seq_id": 0, "prompt": {"chunks": []}}, 404),
    ("/retrieve_future", {"request_id": "fut-none"}, 404),
    ("/weights_info", {"tinker_path": "tinker://r/weights/n"}, 404),
    ("/weights_info", {"tinker_path": "tinker://r/weights/%2e%2e"}, 422),
]


def test_what_is_wrong_or_not_there_is_told_at_once(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, headers: dict[str, dict[str, str]]) -> None:
        session = (await client.post("/create_session", json={"tags": []})).json()["session_id"]
        for path, content, status in WRONG:
            if isinstance(content, bytes):
                answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
            else:
                answer = await client.post(path, json={name: session if value == "SESSION" else value for name, value in content.items()})
            assert answer.status_code == status, (path, content, answer.text)
            assert answer.json()["detail"], "the SDK reads an empty body as a fault of the network"

    run_with(config, body)


def test_checkpoint_routes_take_ids_with_a_slash_and_nothing_else(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, headers: dict[str, dict[str, str]]) -> None:
        base = "/training_runs/ses-none:train:0/checkpoints"
        for verb, rest, status in (
            ("DELETE", "/weights/n", 404),
            ("DELETE", "/weights/n/publish", 404),
            ("POST", "/weights/n/publish", 404),
            ("PUT", "/weights/n/ttl", 404),
            ("DELETE", "/weights", 422),
            ("DELETE", "/weights/..", 404),
            ("DELETE", "/weights/%2e%2e%2f%2e%2e", 422),
            ("DELETE", "/external_weights/n", 422),
        ):
            answer = await client.request(verb, base + rest, json={} if verb == "PUT" else None)
            assert answer.status_code in (status, 405 if ".." in rest else status), (verb, rest, answer.text)
        assert (await client.get("/training_runs")).json() == {"training_runs": [], "cursor": {"offset": 0, "limit": 20, "total_count": 0}}
        assert (await client.get("/checkpoints")).json()["checkpoints"] == []

    run_with(config, body)
