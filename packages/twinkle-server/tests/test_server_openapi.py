"""What is generated from the OpenAPI document: no operation answers with 5xx, or with a status that it does not document, and none lets a tenant
see another's objects."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from starlette.testclient import TestClient

from twinkle_server import Service, create_app, create_key, parse_config
from twinkle_server.engine import Reply
from twinkle_server.store import Checkpoint, Future, Run, Sampler, Session

DOCUMENT = "/api/v1/openapi.json"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Service, dict[str, str]]]:
    """A server without models, with objects of bob's, and keys of both."""
    config = parse_config(
        {
            "data_dir": str(tmp_path_factory.mktemp("data")),
            "limits": {"requests_per_s": 1e6, "request_burst": 10**6, "call_s": 2, "failed_logins_per_minute": 10**6},
        }
    )
    service = Service(config)
    keys = {name: create_key(service.store, name)[1] for name in ("alice", "bob")}
    now = time.time()
    service.store.add(Session(id="ses-bob", tenant="bob", metadata={"secret-of-bob": 1}, created_at=now, seen_at=now))
    for run_id in ("run-bob", "ses-bob:train:0"):
        run = Run(
            id=run_id, tenant="bob", session_id="ses-bob", base_model="m", adapter=f"x-{run_id}", lora={"r": 4}, name="x", created_at=now, used_at=now
        )
        service.store.add(run)
    written = service.folders.write(_secret)
    service.store.put_checkpoint(
        Checkpoint(
            run_id="run-bob",
            tenant="bob",
            kind="weights",
            name="x",
            folder=written.name,
            size_bytes=1,
            digest=written.digest,
            step=1,
            resumable=True,
            created_at=now,
        )
    )
    service.store.add(
        Sampler(id="smp-bob", tenant="bob", session_id="ses-bob", base_model="m", checkpoint="twinkle://run-bob/weights/x", created_at=now)
    )
    service.store.add_future(
        Future(id="fut-bob", tenant="bob", queue="model:m", kind="echo", result=b'"secret-of-bob"', status="done", created_at=now)
    )
    service.calls.register("echo", decode=bytes, run=lambda context, value: Reply(body=value))
    with TestClient(create_app(config, service), raise_server_exceptions=False) as client:
        yield client, service, keys


def _secret(folder: Path) -> None:
    (folder / "secret-of-bob").write_text("x")


OBJECTS = {
    "run_id": "run-bob",
    "training_run_id": "run-bob",
    "model_id": "ses-bob:train:0",
    "checkpoint_id": "weights/x",
    "session_id": "ses-bob",
    "future_id": "fut-bob",
    "request_id": "fut-bob",
    "sampling_session_id": "smp-bob",
    "sampler_id": "smp-bob",
    "twinkle_path": "twinkle://run-bob/weights/x",
    "tinker_path": "tinker://run-bob/weights/x",
    "path": "twinkle://run-bob/weights/x",
    "model_path": "tinker://run-bob/weights/x",
    "adapter_path": "twinkle://run-bob/weights/x",
    "adapter_name": "x",
    "processor_id": "prc-bob",
    "model": "m",
    "name": "n",
    "limit": 5,
}


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(method, path, operation) for path, methods in document["paths"].items() for method, operation in methods.items()]


def body_of(document: dict[str, Any], operation: dict[str, Any]) -> dict[str, Any] | None:
    """A body that names bob's objects wherever the document has a field for one."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if content is None:
        return None
    schema = document["components"]["schemas"].get(content.get("$ref", "").rpartition("/")[2], content)
    body = {name: OBJECTS[name] for name in schema.get("properties", {}) if name in OBJECTS}
    fillers = {"inputs": [{"input_ids": [1]}], "config": {}, "seq_id": 1, "num_samples": 1, "loss": "cross_entropy", "metric": "loss"}
    for name in schema.get("required", []):
        body.setdefault(name, fillers.get(name, "x"))
    return body


def test_no_operation_shows_or_changes_what_is_another_tenants(served: tuple[TestClient, Service, dict[str, str]]) -> None:
    client, service, keys = served
    before = snapshot(service)
    document = client.get(DOCUMENT).json()
    asked = 0
    for method, path, operation in operations(document):
        url = path
        for name in [part["name"] for part in operation.get("parameters", []) if part["in"] == "path"]:
            assert name in OBJECTS or name in ("upload_id", "cid"), f"{method} {path}: say in OBJECTS which of bob's objects {name} names"
            url = url.replace(f"{{{name}}}", str(OBJECTS.get(name, "weights/x" if name == "cid" else "none")))
        query = {part["name"]: OBJECTS[part["name"]] for part in operation.get("parameters", []) if part["in"] == "query" and part["name"] in OBJECTS}
        for session in ({}, {"X-Twinkle-Session-Id": "ses-bob"}):
            headers = {"Authorization": f"Bearer {keys['alice']}", "X-API-Key": keys["alice"], **session}
            answer = client.request(method, url, params=query, json=body_of(document, operation), headers=headers)
            asked += 1
            assert answer.status_code < 500 or answer.status_code == 503, (method, url, answer.text)
            assert "secret-of-bob" not in answer.text, (method, url)
            assert '"bob"' not in answer.text, (method, url, answer.text)
            if any(f"{{{name}}}" in path for name in ("run_id", "session_id", "future_id", "request_id", "sampler_id", "training_run_id")):
                assert answer.status_code >= 400, (method, url, answer.text)
    assert asked > 100
    assert snapshot(service) == before


def test_every_operation_but_health_and_the_page_needs_a_key(served: tuple[TestClient, Service, dict[str, str]]) -> None:
    client, _, _ = served
    document = client.get(DOCUMENT).json()
    open_ones = set()
    for method, path, operation in operations(document):
        url = path
        for part in operation.get("parameters", []):
            url = url.replace(f"{{{part['name']}}}", "x")
        if client.request(method, url, json=body_of(document, operation)).status_code != 401:
            open_ones.add(path)
    assert {path for path in open_ones if "healthz" not in path} <= {"/", "/page/{name}", "/metrics"}, open_ones


def snapshot(service: Service) -> str:
    kinds: tuple[Any, ...] = (Session, Run, Checkpoint, Sampler, Future)
    kept = [service.store.page(kind, tenant="bob", limit=1000)[0] for kind in kinds]
    folders = sorted(str(path) for path in Path(service.config.data_dir, "whole").rglob("*"))
    return json.dumps([[repr(each) for each in records] for records in kept] + [folders])


@pytest.mark.parametrize("examples", [2, pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(3000)])])
def test_generated_requests_get_documented_answers(served: tuple[TestClient, Service, dict[str, str]], examples: int) -> None:
    client, _, keys = served
    schema = schemathesis.openapi.from_dict(client.get(DOCUMENT).json()).exclude(path_regex="/upload$|^/api/v1/forward_backward$")  # no JSON
    failures: list[str] = []
    count = 0
    results: Any = schema.get_all_operations()
    for result in results:
        found, sent = answers_of(result.ok(), client, keys["alice"], examples)
        failures += found
        count += sent
    assert count >= 60
    assert not failures, "\n".join(failures[:20])


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_generated_requests_to_a_model_that_is_there_get_documented_answers(model_settings: dict[str, Any], tmp_path: Path) -> None:
    """The verbs with a model, a sampler and an adapter that can be trained, whatever else is in the body."""
    config = parse_config(
        {
            "data_dir": str(tmp_path / "data"),
            "models": [model_settings],
            "limits": {"requests_per_s": 1e6, "request_burst": 10**6, "call_s": 60, "processors": 10**4, "runs": 10**4},
        }
    )
    service = Service(config)
    _, key = create_key(service.store, "alice")
    model = model_settings["name"]
    with TestClient(create_app(config, service), raise_server_exceptions=False, headers={"X-API-Key": key}) as client:

        def post(verb: str, **body: Any) -> None:
            answer = client.post(f"/api/v1/model/{model}/twinkle/{verb}", json={"adapter_name": "mine", **body})
            assert answer.status_code == 200, answer.text

        post("create")
        post("add_adapter_to_model", config={"r": 2})
        post("save", name="first")
        assert client.post(f"/api/v1/sampler/{model}/twinkle/create", json={}).status_code == 200

        def aim(case: Any) -> None:
            if "model" in (case.path_parameters or {}):
                case.path_parameters["model"] = model
            if isinstance(case.body, dict):
                case.body |= {name: value for name, value in (("adapter_name", "mine"), ("path", "first")) if name in case.body or name != "path"}
                case.body |= {"model": model} if "messages" in case.body else {}

        schema = schemathesis.openapi.from_dict(client.get(DOCUMENT).json()).include(path_regex="^/api/v1/(model|sampler|processor|chat)/")
        failures: list[str] = []
        done = 0
        results: Any = schema.get_all_operations()
        for result in results:
            operation = result.ok()
            if operation.path.endswith("/twinkle/add_adapter_to_model"):
                continue  # the name is taken
            for verb, body in (("set_loss", {"loss": "cross_entropy"}), ("set_optimizer", {"lr": 1e-3}), ("load", {"path": "first"})):
                post(verb, **body)
            found, sent = answers_of(operation, client, key, 20, aim)
            failures += found
            done += sent
        assert done >= 300
        assert not failures, "\n".join(failures[:20])


def answers_of(operation: Any, client: TestClient, key: str, examples: int, aim: Callable[[Any], None] = lambda case: None) -> tuple[list[str], int]:
    """What is wrong with the answers to generated requests of an operation, and how many were sent. aim: changes a request."""
    documented = {int(status) for status in operation.definition.raw.get("responses", {}) if status.isdigit()} | {405, 307}
    failures: list[str] = []
    count = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        nonlocal count
        count += 1
        aim(case)
        request = case.as_transport_kwargs(base_url="http://testserver")
        request["headers"] = {**dict(request.get("headers") or {}), "Authorization": "", "X-API-Key": key}
        request.pop("cookies", None)
        try:
            answer = client.request(**request)
        except (httpx.InvalidURL, UnicodeEncodeError):
            return  # cannot be sent at all
        if (answer.status_code >= 500 and answer.status_code != 503) or answer.status_code not in documented:
            failures.append(f"{operation.method} {operation.path}: {answer.status_code} {answer.text[:300]} {request.get('json')!r:.300}")

    send()
    return failures, count
