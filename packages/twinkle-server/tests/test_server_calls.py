"""Queues and futures: order, fairness, deduplication, and what a restart leaves. Handlers are real; they just do little."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from twinkle_server import ApiError, Principal, Service
from twinkle_server.engine import Context, Reply, Work, reply_of
from twinkle_server.store import Future, Run

ALICE = Principal(tenant="alice", key_id="1", scopes=frozenset({"use"}))
BOB = Principal(tenant="bob", key_id="2", scopes=frozenset({"use"}))


class Recorder:
    """A queue whose calls write down that they ran; each may be held back."""

    def __init__(self, service: Service, *, admits: Callable[[Work], bool] = lambda work: True, concurrency: int = 1) -> None:
        self.service = service
        self.ran: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        service.calls.make_queue("model:m", concurrency=concurrency, admits=admits)
        service.calls.register("record", decode=lambda payload: payload.decode(), run=self._run)

    def _run(self, context: Context, value: str) -> Reply:
        self.gate.wait(20)
        self.ran.append(value)
        if value == "fail":
            raise ValueError("an internal detail")
        if value == "exit":
            sys.exit("a library ends the process")
        return Reply(body=value.encode(), media_type="text/plain")

    async def submit(self, who: Principal, value: str, **options: Any) -> Future:
        return await self.service.calls.submit(who, "record", value.encode(), queue="model:m", **options)


def run_of(service: Service, tenant: str, run_id: str) -> Run:
    now = time.time()
    return service.store.add(Run(id=run_id, tenant=tenant, base_model="m", adapter=f"adapter-{run_id}", lora={}, created_at=now, used_at=now))


def in_service(service: Service, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await service.start()
        try:
            await asyncio.wait_for(body(), 60)
        finally:
            await service.stop()

    asyncio.run(whole())


def test_numbered_calls_of_a_run_run_in_their_order_whatever_order_they_come_in(make_service: Callable[[], Service]) -> None:
    service = make_service()
    recorder = Recorder(service)

    async def body() -> None:
        run = run_of(service, "alice", "r")
        futures = [await recorder.submit(ALICE, str(seq), run=run, seq=seq) for seq in (3, 2, 4)]
        await asyncio.sleep(0.1)
        assert recorder.ran == []
        assert (await service.calls.wait(ALICE, futures[0].id)).status == "queued"
        futures.append(await recorder.submit(ALICE, "1", run=run, seq=1))
        done = [await service.calls.wait(ALICE, future.id, 10) for future in futures]
        assert [each.result for each in done] == [b"3", b"2", b"4", b"1"]
        assert recorder.ran == ["1", "2", "3", "4"]
        late = await recorder.submit(ALICE, "again", run=run, seq=2)
        with pytest.raises(ApiError, match="has run") as caught:
            reply_of(await service.calls.wait(ALICE, late.id, 10))
        assert caught.value.status == 409

    in_service(service, body)


def test_a_tenant_with_many_calls_does_not_delay_another(make_service: Callable[[], Service]) -> None:
    service = make_service()
    recorder = Recorder(service)

    async def body() -> None:
        recorder.gate.clear()
        futures = [await recorder.submit(ALICE, f"a{index}", durable=index % 2 == 0) for index in range(20)]
        futures += [await recorder.submit(BOB, f"b{index}") for index in range(3)]
        recorder.gate.set()
        await service.calls.wait(BOB, futures[-1].id, 20)
        await service.calls.wait(ALICE, futures[18].id, 20)
        # Alice's first ran already; of the next six, three are Bob's.
        assert {f"b{index}" for index in range(3)} <= set(recorder.ran[1:8])
        assert [each for each in recorder.ran if each.startswith("a")] == [f"a{index}" for index in range(len(recorder.ran) - 3)]

    in_service(service, body)


def test_the_same_name_gives_the_same_future_and_another_payload_is_a_conflict(make_service: Callable[[], Service]) -> None:
    service = make_service()
    recorder = Recorder(service)

    async def body() -> None:
        first, second = await asyncio.gather(recorder.submit(ALICE, "x", dedup="k"), recorder.submit(ALICE, "x", dedup="k"))
        assert first.id == second.id
        await service.calls.wait(ALICE, first.id, 10)
        assert (await recorder.submit(ALICE, "x", dedup="k")).id == first.id
        assert recorder.ran == ["x"]
        with pytest.raises(ApiError, match="another request"):
            await recorder.submit(ALICE, "y", dedup="k")
        other = await recorder.submit(BOB, "x", dedup="k")
        assert other.id != first.id
        with pytest.raises(ApiError, match="no such future"):
            await service.calls.wait(BOB, first.id)

    in_service(service, body)


def test_an_error_is_told_without_internals_and_the_queue_goes_on(make_service: Callable[[], Service]) -> None:
    service = make_service()
    recorder = Recorder(service)

    async def body() -> None:
        failed = await recorder.submit(ALICE, "fail")
        after = await recorder.submit(ALICE, "after")
        assert (await service.calls.wait(ALICE, after.id, 10)).result == b"after"
        outcome = await service.calls.wait(ALICE, failed.id, 10)
        assert (outcome.status, outcome.error_status) == ("failed", 500)
        assert "internal detail" not in (outcome.error or "")

    in_service(service, body)


def test_a_full_queue_is_busy_for_that_tenant_only(make_service: Callable[[], Service]) -> None:
    service = make_service()
    recorder = Recorder(service)
    service.calls.queue("model:m")._max_calls = 3

    async def body() -> None:
        recorder.gate.clear()
        for _ in range(3):
            await recorder.submit(ALICE, "a")
        await asyncio.sleep(0.1)  # one runs, two wait
        await recorder.submit(ALICE, "a")
        with pytest.raises(ApiError) as caught:
            await recorder.submit(ALICE, "a")
        assert caught.value.status == 429
        await recorder.submit(BOB, "b")
        recorder.gate.set()

    in_service(service, body)


def test_calls_that_wait_in_vain_end(make_service: Callable[[], Service]) -> None:
    service = make_service()
    recorder = Recorder(service, admits=lambda work: work.future.tenant == "alice")
    queue = service.calls.queue("model:m")
    queue._gap_s = queue._capacity_s = 0.1

    async def body() -> None:
        gap = await recorder.submit(ALICE, "2", run=run_of(service, "alice", "r"), seq=2)
        full = await recorder.submit(BOB, "b")
        await asyncio.sleep(0.2)
        await service.calls.expire()
        outcomes = [await service.calls.wait(ALICE, gap.id), await service.calls.wait(BOB, full.id)]
        assert [each.error_status for each in outcomes] == [409, 429]
        assert recorder.ran == []

    in_service(service, body)


def test_after_a_kill_running_calls_are_lost_and_waiting_ones_run(make_service: Callable[[], Service]) -> None:
    """The state that a kill leaves is made by the store itself: nothing of the first server's end is run."""
    killed = make_service()
    run = run_of(killed, "alice", "r")
    now = time.time()
    rows = [
        Future(id=name, tenant="alice", queue="model:m", kind="record", run_id=run_id, seq=seq, payload=name.encode(), created_at=now)
        for name, run_id, seq in [("ran", "r", 1), ("waits", "r", 2), ("gone", None, None), ("other", None, None)]
    ]
    rows[2] = replace(rows[2], queue="model:gone")
    for row in rows:
        killed.store.add_future(row)
    killed.store.begin_future("ran")
    killed.store.change(Run, run.id, next_seq=2)
    killed.store.change(Run, run_of(killed, "alice", "dirty").id, dirty=True)
    killed.store.close()

    service = make_service()
    recorder = Recorder(service)

    async def body() -> None:
        outcomes = {name: await service.calls.wait(ALICE, name, 10) for name in ("ran", "waits", "gone", "other")}
        assert {name: each.status for name, each in outcomes.items()} == {"ran": "failed", "waits": "done", "gone": "failed", "other": "done"}
        assert "not repeated" in (outcomes["ran"].error or "")
        assert sorted(recorder.ran) == ["other", "waits"]
        assert service.runs.own(ALICE, "dirty").corrupted
        assert not service.runs.own(ALICE, "r").corrupted

    in_service(service, body)
    again = make_service()
    Recorder(again)

    async def fetch_again() -> None:
        assert (await again.calls.wait(ALICE, "waits")).result == b"waits"

    in_service(again, fetch_again)


def test_a_second_server_over_the_same_folder_is_refused(make_service: Callable[[], Service]) -> None:
    first, second = make_service(), make_service()

    async def body() -> None:
        await first.start()
        with pytest.raises(Exception, match="another server"):
            await second.start()
        await first.stop()

    asyncio.run(body())


def test_a_queue_outlives_calls_that_would_end_the_process_and_faults_around_calls(
    make_service: Callable[[], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service()
    recorder = Recorder(service)

    async def body() -> None:
        ended = [await recorder.submit(ALICE, value) for value in ("exit", "after")]
        assert [(await service.calls.wait(ALICE, future.id, 20)).status for future in ended] == ["failed", "done"]

        def broken(*args: Any, **options: Any) -> None:
            raise RuntimeError("the metrics are broken")

        with monkeypatch.context() as patch:
            patch.setattr(service.metrics, "call", broken)
            with pytest.raises(ApiError, match="failed on the server"):
                await service.calls.call(ALICE, "record", b"faulty", queue="model:m")
        reply = await service.calls.call(ALICE, "record", b"fine", queue="model:m")
        assert reply.body == b"fine"

    in_service(service, body)
