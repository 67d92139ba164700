"""What is seen of a server: metrics, logs with request ids, spans, and the page's own routes; over HTTP in this process."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from twinkle_server import ServerConfig, Service, create_app, create_key
from twinkle_server._logging import configure_logging, log_context
from twinkle_server._tracing import Tracing
from twinkle_server.engine._calls import Reply
from twinkle_server.engine._queue import CallQueue

pytestmark = pytest.mark.timeout(60)
Body = Callable[[httpx.AsyncClient, Service, dict[str, dict[str, str]]], Awaitable[None]]


def run_with(config: ServerConfig, body: Body, prepare: Callable[[Service], None] = lambda service: None) -> None:
    async def whole() -> None:
        service = Service(config)
        prepare(service)
        keys = {name: {"Authorization": f"Bearer {create_key(service.store, name, scopes=scopes)[1]}"} for name, scopes in SCOPES.items()}
        app = create_app(config, service)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://local") as client:
            await asyncio.wait_for(body(client, service, keys), 50)

    asyncio.run(whole())


SCOPES = {"alice": ("use",), "root": ("use", "admin")}
API = "/api/v1/twinkle"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The process's log, as lines of JSON."""
    root, stream = logging.getLogger(), io.StringIO()
    before, level = list(root.handlers), root.level
    configure_logging("info", "json", stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def with_calls(service: Service) -> None:
    """A queue whose calls double a number, or fail."""

    def double(context: Any, value: bytes) -> Reply:
        logging.getLogger("test").info("doubling")
        return Reply(body=str(2 * int(value)).encode())

    service.calls.register("test.double", decode=bytes, run=double)
    service.calls.add_queue(CallQueue("model:test", service.calls._execute))


def numbers(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()) if sample.name != "x")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_requests_and_calls_and_are_for_admins(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, dict[str, str]]) -> None:
        alice = keys["alice"]
        for _ in range(3):
            assert (await client.get(f"{API}/capacity_info", headers=alice)).status_code == 200
        assert (await client.get(f"{API}/training_runs/made-up-by-a-caller", headers=alice)).status_code == 404
        assert (await client.get("/no/such/path-of-a-caller")).status_code == 404
        assert (await client.post(f"{API}/create_session", json={}, headers=alice)).status_code == 200
        principal = service.keys.check(alice["Authorization"].removeprefix("Bearer "))
        assert principal is not None
        assert (await service.calls.call(principal, "test.double", b"21", queue="model:test")).body == b"42"
        with pytest.raises(Exception, match="log has the reason"):
            await service.calls.call(principal, "test.double", b"no number", queue="model:test")
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=alice)).status_code == 403
        root = keys["root"]
        answer = await client.get("/metrics", headers=root)
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = numbers(answer.text)
        assert found["twinkle_http_requests_total", "GET", f"{API}/capacity_info", "200"] == 3
        assert found["twinkle_http_requests_total", "GET", API + "/training_runs/{run_id}", "404"] == 1
        assert found["twinkle_http_request_seconds_count", f"{API}/capacity_info"] == 3
        assert found["twinkle_calls_total", "test.double", "model:test", "done"] == 1
        assert found["twinkle_calls_total", "test.double", "model:test", "failed"] == 1
        assert found["twinkle_call_seconds_count", "test.double", "model:test"] == 2
        assert found["twinkle_queue_waiting", "model:test"] == 0
        assert found["twinkle_sessions",] == 1
        assert found["twinkle_ready", "database"] == 1
        # A caller cannot make new labels.
        assert "made-up" not in answer.text
        assert "path-of-a-caller" not in answer.text

    run_with(config, body, with_calls)


def test_log_lines_are_json_and_know_their_request(config: ServerConfig, log: io.StringIO) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, dict[str, str]]) -> None:
        alice = keys["alice"]
        await client.get(f"{API}/capacity_info", headers={**alice, "X-Request-Id": "mine-1"})
        principal = service.keys.check(alice["Authorization"].removeprefix("Bearer "))
        assert principal is not None
        await service.calls.call(principal, "test.double", b"1", queue="model:test", request_id="mine-2")
        with pytest.raises(Exception, match="log has the reason"):
            await service.calls.call(principal, "test.double", b"x", queue="model:test", request_id="mine-3")

    run_with(config, body, with_calls)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    (asked,) = (line for line in lines if line.get("request_id") == "mine-1")
    assert asked | {"method": "GET", "status": 200, "tenant": "alice", "path": f"{API}/capacity_info", "level": "info"} == asked
    assert asked["ms"] >= 0
    assert [line["message"] for line in lines if line.get("request_id") == "mine-2"] == ["doubling"]
    (failed,) = (line for line in lines if line.get("request_id") == "mine-3" and line["level"] == "error")
    assert "invalid literal for int" in failed["traceback"]
    assert "tml-" not in log.getvalue(), "a key is in the log"


def test_text_logs_carry_the_request_at_the_end_of_the_first_line() -> None:
    root, stream = logging.getLogger(), io.StringIO()
    before, level = list(root.handlers), root.level
    try:
        configure_logging("info", "text", stream)
        with log_context(request_id="abc"):
            logging.getLogger("x").info("one\ntwo")
        logging.getLogger("x").info("three")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    first, second, third = stream.getvalue().splitlines()
    assert first.endswith("one [abc]")
    assert second == "two"
    assert third.endswith("three")


def test_spans_of_requests_and_calls(config: ServerConfig) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def prepare(service: Service) -> None:
        with_calls(service)
        service.tracing = Tracing(False, provider)

    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, dict[str, str]]) -> None:
        alice = keys["alice"]
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await client.get(f"{API}/training_runs/run-1", headers={**alice, "traceparent": parent, "X-Request-Id": "mine"})
        principal = service.keys.check(alice["Authorization"].removeprefix("Bearer "))
        assert principal is not None
        with pytest.raises(Exception, match="log has the reason"):
            await service.calls.call(principal, "test.double", b"x", queue="model:test", request_id="mine-3")

    run_with(config, body, prepare)
    spans: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
    asked = spans[f"GET {API}/training_runs/{{run_id}}"]
    assert asked.parent.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert asked.attributes["http.response.status_code"] == 404
    assert asked.attributes["twinkle.request_id"] == "mine"
    failed = spans["test.double"]
    assert failed.attributes["twinkle.request_id"] == "mine-3"
    assert not failed.status.is_ok


def test_without_tracing_nothing_of_opentelemetry_is_loaded() -> None:
    code = (
        "import sys; from twinkle_server._tracing import Tracing\n"
        "with Tracing(False).call('x', {}) as span: print(span)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.split("\n")[:2] == ["None", "[]"]


def test_the_overview_is_the_callers_own(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, dict[str, str]]) -> None:
        alice, root = keys["alice"], keys["root"]
        made: Any = (await client.post(f"{API}/create_session", json={"metadata": {"user": "alice"}}, headers=alice)).json()
        seen = (await client.get(f"{API}/overview", headers=alice)).json()
        assert [(each["session_id"], each["metadata"]) for each in seen["sessions"]] == [(made["session_id"], {"user": "alice"})]
        assert seen["queues"] == [{"name": "model:test", "running": 0, "waiting": 0, "waiting_own": 0}]
        assert (await client.get(f"{API}/overview", headers=root)).json()["sessions"] == []
        assert (await client.get(f"{API}/overview")).status_code == 401
        assert (await client.get(f"{API}/training_runs/run-1/curve", headers=alice)).status_code == 404

    run_with(config, body, with_calls)


def test_the_page_and_its_files_are_served_with_a_strict_policy(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, dict[str, str]]) -> None:
        for path, kind in (("/", "text/html"), ("/page/app.js", "text/javascript"), ("/page/style.css", "text/css")):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert "http" not in answer.text.replace("http://www.w3.org/2000/svg", ""), "it asks someone else"
        for path in ("/page/index.html", "/page/..%2f_config.py", "/page/%2e%2e/_config.py"):
            assert (await client.get(path)).status_code in (404, 422), path

    run_with(config, body)


def test_the_page_asks_under_the_servers_prefix(config: ServerConfig) -> None:
    async def body(client: httpx.AsyncClient, service: Service, keys: dict[str, dict[str, str]]) -> None:
        assert 'data-prefix="/team/twinkle"' in (await client.get("/")).text
        assert (await client.get("/api/v1/team/twinkle/overview", headers=keys["alice"])).status_code == 200

    run_with(config.model_copy(update={"route_prefix": "/team/twinkle"}), body)
