"""The control endpoints, over HTTP in this process: keys, tenants, hostile requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from twinkle_server import ServerConfig, Service, create_app, create_key, parse_config
from twinkle_server.store import Key, Run

Body = Callable[[httpx.AsyncClient, Service, dict[str, str]], Awaitable[None]]


@asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[tuple[httpx.AsyncClient, Service, dict[str, str]]]:
    service = Service(config)
    keys = {name: create_key(service.store, name)[1] for name in ("alice", "bob")}
    keys["admin"] = create_key(service.store, "root", scopes=("use", "admin"))[1]
    app = create_app(config, service)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://local/api/v1/twinkle", headers=_as(keys["alice"])) as client,
    ):
        yield client, service, keys


def _as(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def run_with(config: ServerConfig, body: Body) -> None:
    async def whole() -> None:
        async with serving(config) as (client, service, keys):
            await asyncio.wait_for(body(client, service, keys), 60)

    asyncio.run(whole())


def test_only_a_live_key_is_let_in_under_any_of_the_headers(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, str]) -> None:
        key = keys["alice"]
        expired = create_key(service.store, "alice", ttl_s=-1)[1]
        revoked, revoked_text = create_key(service.store, "alice")
        service.store.revoke_key(revoked.id)
        unscoped = service.store.add(replace(service.store.live_keys()[0], id="0" * 12, scopes=[]))
        for headers in (_as(key), {"Authorization": key}, {"Twinkle-Authorization": f"Bearer {key}"}, {"X-API-Key": key}):
            assert (await client.get("/capacity_info", headers={"Authorization": "", **headers})).status_code == 200, headers
        wrong = [key[:-1] + ("0" if key[-1] != "0" else "1"), key.upper(), expired, revoked_text, "tml-", "anything", "", "\x7f" * 3000]
        for text in wrong:
            answer = await client.get("/capacity_info", headers={"Authorization": f"Bearer {text}"})
            assert answer.status_code == 401, text
            assert answer.headers["x-request-id"]
            assert answer.json()["detail"].startswith("no valid API key")
        text = f"tml-{unscoped.id}-{key.rpartition('-')[2]}"
        assert (await client.get("/capacity_info", headers=_as(text))).status_code in (401, 403)
        assert (await client.get("/healthz", headers={"Authorization": ""})).status_code == 200

    run_with(config, body)


def test_a_revocation_takes_effect_within_two_seconds(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, str]) -> None:
        assert (await client.get("/capacity_info")).status_code == 200
        (key,) = [each for each in service.store.live_keys() if each.tenant == "alice"]
        service.store.revoke_key(key.id)
        service.keys._seen[key.id] = (key, time.monotonic() - 0.001)  # as two seconds later
        assert (await client.get("/capacity_info")).status_code == 401
        assert service.store.get(Key, key.id)

    run_with(config, body)


def test_sessions_beat_end_and_survive_a_restart(config: ServerConfig) -> None:
    session: dict[str, Any] = {}

    async def first(client: httpx.AsyncClient, service: Service, keys: dict[str, str]) -> None:
        session.update((await client.post("/create_session", json={"metadata": {"user": "a\u0000b"}})).json())
        assert (await client.post("/session_heartbeat", json=session)).json() == {"status": "ok"}
        assert (await client.post("/session_heartbeat", json=session, headers=_as(keys["bob"]))).status_code == 404
        assert (await client.post("/session_heartbeat", json={"session_id": "ses-none"})).status_code == 404

    async def second(client: httpx.AsyncClient, service: Service, keys: dict[str, str]) -> None:
        alice = create_key(service.store, "alice")[1]
        assert (await client.post("/session_heartbeat", json=session, headers=_as(alice))).status_code == 200
        service.sessions._seen[session["session_id"]] = time.monotonic() - config.retention.session_s - 1
        await service.sessions.round()
        assert (await client.post("/session_heartbeat", json=session, headers=_as(alice))).status_code == 404

    run_with(config, first)
    run_with(config, second)


def test_a_session_lives_by_its_heartbeats_and_not_by_its_age(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, str]) -> None:
        session = (await client.post("/create_session", json={})).json()
        service.store.change(type(service.store.live_sessions()[0]), session["session_id"], created_at=0.0, seen_at=0.0)
        await service.sessions.round()
        assert (await client.post("/session_heartbeat", json=session)).status_code == 200

    run_with(config, body)


def test_capacity_is_known_before_anything_was_asked_for(tmp_path: Any) -> None:
    models = [{"name": "a", "path": str(tmp_path / "nothing"), "max_loras": 3}]
    config = parse_config({"data_dir": str(tmp_path / "data"), "models": models})
    assert Service(config).capacity == (3, 0)


def test_other_tenants_runs_are_listed_for_an_admin_only(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, str]) -> None:
        now = time.time()
        for tenant in ("alice", "bob"):
            service.store.add(Run(id=f"run-{tenant}", tenant=tenant, base_model="m", adapter=tenant, lora={}, created_at=now, used_at=now))

        async def listed(key: str, **query: Any) -> Any:
            answer = await client.get("/training_runs", params=query, headers=_as(keys[key]))
            return [run["training_run_id"] for run in answer.json()["training_runs"]] if answer.status_code == 200 else answer.status_code

        assert await listed("alice") == ["run-alice"]
        assert await listed("alice", all_users=True) == 403
        assert await listed("admin") == []
        assert await listed("admin", all_users=True) == ["run-bob", "run-alice"]
        assert await listed("admin", all_users=True, limit=1, offset=1) == ["run-alice"]
        assert (await client.get("/training_runs/run-bob")).status_code == 404
        assert (await client.get("/training_runs/run-bob/checkpoints")).status_code == 404

    run_with(config, body)


TRAVERSALS = [
    "..",
    "../x",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e",
    "a/../../b",
    "/etc/passwd",
    "a\x00b",
    "weights",
    "weights/",
    "weights/..",
    "weights/%2e%2e",
]
HOSTILE_BODIES = [
    b"",
    b"{",
    b"[" * 100_000,
    b'{"metadata":' + b'{"a":' * 50_000,
    b'{"metadata":{"a":NaN}}',
    b'{"metadata":{"a":"\\ud800"}}',
    b"\xff\xfe",
    b"null",
    b"[]",
    b'{"metadata":[]}',
    b'{"metadata":{},"metadata2":1}',
]


@pytest.mark.parametrize("index", range(len(HOSTILE_BODIES)))
def test_hostile_bodies_are_refused_with_a_reason(index: int, config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, str]) -> None:
        answer = await client.post("/create_session", content=HOSTILE_BODIES[index], headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422)
        assert answer.json()["detail"]
        assert answer.status_code == 422 or "the body is no JSON: " in answer.json()["detail"]
        assert len(answer.content) < 5_000

    run_with(config, body)


def test_no_id_leaves_its_place(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, str]) -> None:
        for text in TRAVERSALS:
            quoted = quote(text, safe="")  # or httpx would resolve the dots itself
            for method, path in [
                ("GET", f"/training_runs/{quoted}"),
                ("GET", f"/training_runs/{quoted}/checkpoints"),
                ("GET", f"/checkpoint_path/{quoted}/weights/a"),
                ("GET", f"/checkpoint_path/run-a/{quoted}"),
                ("DELETE", f"/training_runs/run-a/checkpoints/{quoted}"),
            ]:
                answer = await client.request(method, path)
                assert answer.status_code in (404, 405, 422, 307), (method, path, answer.text)
            answer = await client.post("/weights_info", json={"twinkle_path": f"twinkle://{text}/weights/{text}"})
            assert answer.status_code in (404, 422)

    run_with(config, body)


def test_a_body_that_is_too_large_or_too_slow_is_refused(tmp_path: Any) -> None:
    config = parse_config({"data_dir": str(tmp_path), "limits": {"body_bytes": 2048, "body_timeout_s": 0.2}})

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(1)
        yield b"}"

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1024

    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, str]) -> None:
        headers = {"Content-Type": "application/json"}
        assert (await client.post("/create_session", content=b" " * 4096, headers=headers)).status_code == 413
        assert (await client.post("/create_session", content=endless(), headers=headers)).status_code == 413
        assert (await client.post("/create_session", content=slow(), headers=headers)).status_code == 408

    run_with(config, body)


def test_a_key_beyond_its_rate_is_asked_to_wait(tmp_path: Any) -> None:
    config = parse_config({"data_dir": str(tmp_path), "limits": {"requests_per_s": 1, "request_burst": 3, "failed_logins_per_minute": 2}})

    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, str]) -> None:
        statuses = [(await client.get("/capacity_info")).status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        refused = await client.get("/capacity_info")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/capacity_info", headers=_as(keys["bob"]))).status_code == 200
        statuses = [(await client.get("/capacity_info", headers=_as("tml-wrong"))).status_code for _ in range(4)]
        assert statuses == [401, 401, 429, 429]

    run_with(config, body)


def test_the_clients_request_id_is_kept_when_it_is_one(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, str]) -> None:
        for given, kept in [("my-id.1", True), ("x" * 500, False), ("a b", False)]:
            answer = await client.get("/healthz", headers={"X-Request-Id": given})
            assert (answer.headers["x-request-id"] == given) is kept

    run_with(config, body)
