"""What attackers and bad luck do to a server: repeated and abandoned requests, jumps of the clock, full disks, deletions in the middle of things."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from twinkle_server import ApiError, Principal, ServerConfig, Service, create_app, create_key, parse_config
from twinkle_server._config import ModelConfig, SamplerConfig
from twinkle_server.engine import Context, Reply, SamplerBackend
from twinkle_server.store import Checkpoint, Future, Run, Session

pytestmark = pytest.mark.timeout(60)
Keys = dict[str, str]
ALICE, BOB = (Principal(tenant=name, key_id=name, scopes=frozenset({"use"})) for name in ("alice", "bob"))


def _as(key: str) -> Keys:
    return {"Authorization": f"Bearer {key}"}


def run_with(config: ServerConfig, body: Callable[[httpx.AsyncClient, Service, Keys], Awaitable[None]]) -> None:
    async def whole() -> None:
        service = Service(config)
        keys = {name: create_key(service.store, name)[1] for name in ("alice", "bob")}
        keys["admin"] = create_key(service.store, "root", scopes=("use", "admin"))[1]
        app = create_app(config, service)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://local/api/v1/twinkle", headers=_as(keys["alice"]))
        async with app.router.lifespan_context(app), client:
            await asyncio.wait_for(body(client, service, keys), 30)

    asyncio.run(whole())


def in_service(service: Service, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await service.start()
        try:
            await asyncio.wait_for(body(), 30)
        finally:
            await service.stop()

    asyncio.run(whole())


class Recorder:
    """A queue whose calls write down that they ran, once the gate is open."""

    def __init__(self, service: Service) -> None:
        self._service, self.ran, self.gate = service, list[str](), threading.Event()
        self.gate.set()
        service.calls.make_queue("model:m", concurrency=1)
        service.calls.register("record", decode=lambda payload: payload.decode(), run=self._run)

    def _run(self, context: Context, value: str) -> Reply:
        self.gate.wait(20)
        self.ran.append(value)
        return Reply(body=value.encode(), media_type="text/plain")

    async def submit(self, who: Principal, value: str, **options: Any) -> Future:
        return await self._service.calls.submit(who, "record", value.encode(), queue="model:m", **options)


def a_run(service: Service, run_id: str = "run-1", **fields: Any) -> Run:
    now = time.time()
    fields = {"tenant": "alice", "base_model": "m", "adapter": f"a-{run_id}", "lora": {"r": 4, "lora_alpha": 8}, **fields}
    return service.store.add(Run(id=run_id, created_at=now, used_at=now, **fields))


def _write(path: Path) -> None:
    path.write_text("x")


def a_checkpoint(service: Service, run: Run, name: str = "x", **fields: Any) -> Checkpoint:
    written = service.folders.write(lambda folder: _write(folder / "file"))
    fields = {"kind": "weights", "size_bytes": 1, "step": 1, "resumable": False, "created_at": time.time(), **fields}
    checkpoint = Checkpoint(run_id=run.id, tenant=run.tenant, name=name, folder=written.name, digest=written.digest, **fields)
    service.store.put_checkpoint(checkpoint)
    return checkpoint


# Repeated requests.


def test_a_session_is_made_once_for_one_idempotency_key(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        headers = {"Idempotency-Key": "k"}
        answers = await asyncio.gather(*(client.post("/create_session", json={}, headers=headers) for _ in range(4)))
        answers.append(await client.post("/create_session", json={}, headers=headers))
        assert len({answer.json()["session_id"] for answer in answers}) == 1
        other = await client.post("/create_session", json={}, headers=headers | _as(keys["bob"]))
        assert other.json()["session_id"] != answers[0].json()["session_id"]
        assert service.sessions.count == len(service.store.live_sessions()) == 2

    run_with(config, body)


def test_an_iterators_end_is_told_again_where_the_request_is_repeated(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        made = {"processor_type": "dataloader", "class_type": "DataLoader", "batch_size": 1, "dataset": [{"input_ids": [1]}, {"input_ids": [2]}]}
        url = "http://local/api/v1/processor/twinkle"
        loader = (await client.post(f"{url}/create", json=made)).json()["processor_id"]

        async def following(key: str) -> Any:
            answer = await client.post(f"{url}/call", json={"processor_id": loader, "function": "__next__"}, headers={"Idempotency-Key": key})
            return answer.json()["result"][0]["input_ids"] if answer.status_code == 200 else answer.status_code

        assert [await following(key) for key in ("a", "b", "a", "b", "c", "c", "d")] == [[1], [2], [1], [2], 410, 410, [1]]

    run_with(config, body)


def test_an_adapter_that_could_not_be_made_leaves_no_run_however_often_it_is_asked_for(tmp_path: Path) -> None:
    config = parse_config({"data_dir": str(tmp_path / "data"), "models": [{"name": "m", "path": str(tmp_path / "nothing")}]})

    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        for key in ("a", "a", "b"):
            answer = await client.post(
                "http://local/api/v1/model/m/twinkle/add_adapter_to_model",
                json={"adapter_name": "x", "config": {"r": 4}},
                headers={"Idempotency-Key": key},
            )
            assert answer.status_code == 503, answer.text
            assert (await client.get("/training_runs")).json()["training_runs"] == []

    run_with(config, body)


# Keys and bodies.


def test_nothing_of_a_body_is_read_before_the_key_was_checked(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        pulled = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal pulled
            for _ in range(1000):
                pulled += 1
                yield b" " * 10_000

        for path in ("/create_session", "/training_runs/run-1/upload?name=a", "/nowhere"):
            answer = await client.post(path, content=endless(), headers={"Authorization": "Bearer none"})
            assert (answer.status_code, pulled) == (401, 0)
            assert answer.json()["detail"].startswith("no valid API key")
            assert answer.headers["www-authenticate"] == "Bearer"

    run_with(config, body)


def test_wrong_keys_from_an_address_do_not_lock_out_a_key_that_was_seen(tmp_path: Path) -> None:
    config = parse_config({"data_dir": str(tmp_path), "limits": {"failed_logins_per_minute": 3}})

    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        assert (await client.get("/capacity_info")).status_code == 200
        statuses = [(await client.get("/capacity_info", headers=_as("wrong"))).status_code for _ in range(5)]
        assert statuses == [401, 401, 401, 429, 429]
        (known,) = [key for key in service.store.live_keys() if key.tenant == "alice"]
        service.keys._seen[known.id] = (known, time.monotonic() - 1)  # as some seconds later
        assert (await client.get("/capacity_info")).status_code == 200
        assert (await client.get("/capacity_info", headers=_as(keys["alice"][:-4] + "0000"))).status_code == 429

    run_with(config, body)


def test_a_path_writes_no_lines_of_its_own_into_the_log(config: ServerConfig, caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        with caplog.at_level(logging.INFO, "twinkle_server.requests"):
            assert (await client.get("http://local/x%0A2030-01-01%20INFO%20all%20is%20well%1b[2J")).status_code == 404
        (message,) = [record.getMessage() for record in caplog.records if record.name == "twinkle_server.requests"]
        assert message.isprintable()
        assert "all is well" in message

    run_with(config, body)


# Clocks.


def test_a_jump_of_the_clock_ends_no_session_and_lets_go_of_no_dataset(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        session = (await client.post("/create_session", json={})).json()
        made = {"processor_type": "dataset", "class_type": "Dataset", "source": [{"input_ids": [1]}]}
        url = "http://local/api/v1/processor/twinkle"
        held = (await client.post(f"{url}/create", json=made)).json()["processor_id"]
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 30 * 24 * 3600)
        await service.sessions.round()
        service.processors.expire(config.retention.processor_s)
        assert (await client.post("/session_heartbeat", json=session)).status_code == 200
        assert (await client.post(f"{url}/call", json={"processor_id": held, "function": "__len__"})).json() == {"result": 1}

    run_with(config, body)


def test_a_session_that_beats_while_others_are_being_ended_lives(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        sessions = [(await client.post("/create_session", json={})).json() for _ in range(2)]
        for name in list(service.sessions._seen):
            service.sessions._seen[name] -= config.retention.session_s + 1
        change = service.store.change

        def slow(kind: Any, key: str, **values: Any) -> None:
            time.sleep(0.3)
            change(kind, key, **values)

        service.store.change = slow  # pyright: ignore[reportAttributeAccessIssue]
        ending = asyncio.create_task(service.sessions.round())
        await asyncio.sleep(0.1)
        beaten = await client.post("/session_heartbeat", json=sessions[1])
        await ending
        assert beaten.status_code == 200
        assert (await client.post("/session_heartbeat", json=sessions[0])).status_code == 404
        assert (await client.post("/session_heartbeat", json=sessions[1])).status_code == 200
        stored = service.store.get(Session, sessions[1]["session_id"])
        assert stored is not None
        assert stored.ended_at is None

    run_with(config, body)


def test_requests_keep_a_session_alive_as_heartbeats_do(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        session = (await client.post("/create_session", json={})).json()["session_id"]
        service.sessions._seen[session] -= config.retention.session_s + 1
        # Refused for another reason: there is no such model's sampler to name weights to.
        asked = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "none"}
        assert (await client.post("http://local/api/v1/create_sampling_session", json=asked)).status_code == 404
        await service.sessions.round()
        assert (await client.post("/session_heartbeat", json={"session_id": session})).status_code == 200

    run_with(config, body)


# Calls.


def test_an_outcome_that_cannot_be_stored_is_told_and_stored_later(make_service: Callable[[], Service]) -> None:
    service = make_service()
    recorder = Recorder(service)

    async def body() -> None:
        finish, failures = service.store.finish_future, 2

        def failing(*arguments: Any, **values: Any) -> None:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise sqlite3.OperationalError("database or disk is full")
            finish(*arguments, **values)

        service.store.finish_future = failing  # pyright: ignore[reportAttributeAccessIssue]
        future = await recorder.submit(ALICE, "x", dedup="k")
        assert (await service.calls.wait(ALICE, future.id, 10)).result == b"x"
        assert (await service.calls.wait(ALICE, future.id)).result == b"x"
        with pytest.raises(ApiError, match="no such future"):
            await service.calls.wait(BOB, future.id)
        assert (await recorder.submit(ALICE, "x", dedup="k")).id == future.id
        await service.calls.expire()  # fails once more
        await service.calls.expire()
        stored = service.store.get(Future, future.id)
        assert stored is not None
        assert (stored.status, stored.result) == ("done", b"x")
        assert (await service.calls.wait(ALICE, future.id)).result == b"x"
        assert recorder.ran == ["x"]

    in_service(service, body)


def test_a_call_that_nobody_waits_for_any_more_does_not_run(make_service: Callable[[], Service]) -> None:
    service = make_service()
    recorder = Recorder(service)

    async def body() -> None:
        recorder.gate.clear()
        calls = [
            asyncio.create_task(service.calls.call(ALICE, "record", name.encode(), queue="model:m", dedup="kept" if name == "c" else None))
            for name in "abcd"
        ]
        while service.calls.queue("model:m").length < 3:  # the stored one comes in last
            await asyncio.sleep(0.02)
        for call in (calls[0], calls[1], calls[2]):  # the first runs; the third is stored, and can be asked for again
            call.cancel()
        await asyncio.sleep(0.1)
        recorder.gate.set()
        assert (await calls[3]).body == b"d"
        while len(recorder.ran) < 3:
            await asyncio.sleep(0.02)
        assert sorted(recorder.ran) == ["a", "c", "d"]
        assert service.calls.queue("model:m").length == 0

    in_service(service, body)


class Died(Exception):
    """By its name what twinkle-remote raises."""


Died.__name__ = "WorkerDiedError"


def test_a_sampler_whose_workers_died_is_loaded_again(config: ServerConfig, make_service: Callable[[], Service]) -> None:
    service, built = make_service(), []

    class Engine:
        def __init__(self) -> None:
            self.adapters: list[str] = []
            built.append(self)

        def load_adapter(self, name: str, path: str) -> None:
            self.adapters.append(name)

        def sample(self, inputs: list[Any], params: Any, num_samples: Any, adapter: str) -> list[Any]:
            if len(built) == 1 and len(self.adapters) == 2:
                raise Died("gone")
            assert adapter in self.adapters
            return inputs

    model = ModelConfig(name="m", path="x", sampler=SamplerConfig())
    assert model.sampler is not None
    backend = SamplerBackend(model, model.sampler, service.folders, build=lambda *_: Engine())
    backend.start()
    checkpoints = [a_checkpoint(service, a_run(service, f"run-{number}")) for number in range(2)]
    assert backend.sample(["a"], checkpoint=checkpoints[0]) == ["a"]
    with pytest.raises(Died):
        backend.sample(["b"], checkpoint=checkpoints[1])
    assert backend.sample(["c"], checkpoint=checkpoints[0]) == ["c"]
    assert len(built) == 2
    service.store.close()


# Files.


def test_a_server_on_a_full_disk_stops_whole(config: ServerConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    service = Service(config)

    def full(*arguments: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def body() -> None:
        monkeypatch.setattr(service.store, "touch_sessions", full)

    in_service(service, body)
    assert "writing down when sessions were last seen failed while the server stopped" in caplog.text
    in_service(Service(config), lambda: asyncio.sleep(0))  # the folder is free again


def test_a_full_disk_is_told_as_that_and_nothing_is_listed(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        run = a_run(service)

        def fill(folder: Path) -> None:
            (folder / "adapter").mkdir()
            with Path("/dev/full").open("wb", buffering=0) as full:
                full.write(b"x")

        with pytest.raises(ApiError, match="disk is full") as caught:
            await service.io(service.checkpoints.add, run, "weights", "a", fill, "source")
        assert caught.value.status == 507
        assert service.checkpoints.of_run(run) == []
        assert not list((config.data_dir / "unfinished").iterdir())
        assert not list((config.data_dir / "whole").iterdir())

    run_with(config, body)


def test_a_checkpoint_deleted_while_it_is_being_read_is_not_there_and_not_damaged(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        run = a_run(service)
        checkpoint = a_checkpoint(service, run)
        verify = service.folders.verify

        def deleted_before(name: str, digest: str) -> Path:
            service.checkpoints.delete(checkpoint)
            return verify(name, digest)

        service.folders.verify = deleted_before  # pyright: ignore[reportAttributeAccessIssue]
        answer = await client.get("/download/run-1/weights/x")
        assert (answer.status_code, "no checkpoint" in answer.text) == (404, True)
        # Files that are damaged are another thing.
        service.folders.verify = verify  # pyright: ignore[reportAttributeAccessIssue]
        damaged = a_checkpoint(service, run)
        (service.folders.path(damaged.folder) / "file").write_text("y")
        assert (await client.get("/download/run-1/weights/x")).status_code == 500

    run_with(config, body)


def test_work_on_files_does_not_hold_up_the_control_endpoints(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        a_checkpoint(service, a_run(service))
        verify, gate = service.folders.verify, threading.Event()

        def slow(name: str, digest: str) -> Path:
            gate.wait(20)
            return verify(name, digest)

        service.folders.verify = slow  # pyright: ignore[reportAttributeAccessIssue]
        downloads = [asyncio.create_task(client.get("/download/run-1/weights/x")) for _ in range(16)]
        try:
            await asyncio.sleep(0.2)
            assert (await asyncio.wait_for(client.get("/training_runs"), 5)).status_code == 200
        finally:
            gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*downloads)} == {200}

    run_with(config, body)


def test_an_upload_that_stalls_or_is_beyond_the_quota_is_ended(tmp_path: Path) -> None:
    config = parse_config({"data_dir": str(tmp_path), "limits": {"body_timeout_s": 0.3, "checkpoint_bytes": 100_000}})

    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        a_run(service)
        pulled = 0

        async def stalling() -> AsyncIterator[bytes]:
            yield b"x" * 1000
            await asyncio.sleep(20)

        async def endless() -> AsyncIterator[bytes]:
            nonlocal pulled
            while True:
                pulled += 1
                yield b"x" * 10_000

        stalled = await asyncio.wait_for(client.post("/training_runs/run-1/upload?name=a", content=stalling()), 5)
        assert stalled.status_code == 408, stalled.text
        large = await asyncio.wait_for(client.post("/training_runs/run-1/upload?name=a", content=endless()), 5)
        assert (large.status_code, pulled < 20) == (429, True), large.text
        assert not list((tmp_path / "unfinished").iterdir())

    run_with(config, body)


def test_a_run_that_has_ended_leaves_no_state_behind(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        parked = service.folders.write(lambda folder: _write(folder / "state"))
        a_run(service, parked=parked.name)
        kept = a_checkpoint(service, a_run(service, "run-2"))
        assert (await client.delete("/training_runs/run-1", headers=_as(keys["bob"]))).status_code == 404
        assert (await client.delete("/training_runs/run-1", headers=_as(keys["admin"]))).status_code == 404
        assert (await client.delete("/training_runs/run-1")).json()["success"] is True
        assert (await client.delete("/training_runs/run-1")).status_code == 404
        assert [run["training_run_id"] for run in (await client.get("/training_runs")).json()["training_runs"]] == ["run-2"]
        assert not service.folders.path(parked.name).exists()
        # Checkpoints outlive their run.
        assert (await client.delete("/training_runs/run-2")).status_code == 200
        assert service.folders.path(kept.folder).exists()
        assert (await client.post("/weights_info", json={"twinkle_path": "twinkle://run-2/weights/x"})).status_code == 200

    run_with(config, body)


def test_the_newest_checkpoint_is_the_newest_that_has_not_expired(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        run = a_run(service)
        a_checkpoint(service, run, "kept")
        a_checkpoint(service, run, "over", expires_at=time.time() - 1)
        shown = (await client.get("/training_runs/run-1")).json()
        assert shown["last_checkpoint"]["checkpoint_id"] == "weights/kept"

    run_with(config, body)


def test_a_tenant_cannot_have_more_datasets_than_its_number_by_asking_at_once(tmp_path: Path) -> None:
    config = parse_config({"data_dir": str(tmp_path), "limits": {"processors": 2}})

    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        dataset = service.processors._dataset

        def slow(tenant: str, options: dict[str, Any]) -> Any:
            time.sleep(0.05)
            return dataset(tenant, options)

        service.processors._dataset = slow  # pyright: ignore[reportAttributeAccessIssue]
        made = {"processor_type": "dataset", "class_type": "Dataset", "source": [{"input_ids": [1]}]}
        answers = await asyncio.gather(*(client.post("http://local/api/v1/processor/twinkle/create", json=made) for _ in range(6)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429, 429]

    run_with(config, body)


def test_a_revoked_key_waits_for_nothing_more(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: Keys) -> None:
        key, text = create_key(service.store, "alice")
        assert (await client.get("/capacity_info", headers=_as(text))).status_code == 200
        service.store.revoke_key(key.id)
        service.keys._seen.clear()
        assert (await client.post("/create_session", json={}, headers=_as(text))).status_code == 401

    run_with(config, body)
