"""A small server that speaks the service's REST surface from memory, over real HTTP, and fails when it is told to."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from twinkle_client import types as t

KEY = "a-key"


class Service:
    """What the server knows and did. `faults` of a path's last part are taken one a request: a status, 'break' (the answer is cut off), or 'slow'."""

    def __init__(self) -> None:
        self.sessions: dict[str, Any] = {}
        self.beats: list[float] = []
        self.done: list[tuple[str, dict[str, Any]]] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.faults: dict[str, list[Any]] = defaultdict(list)
        self.answers: dict[str, Any] = {}
        self.futures: dict[str, dict[str, Any]] = {}
        self.as_futures = False
        self.numbers = itertools.count()
        self.checkpoints: list[t.Checkpoint] = []
        self.runs: list[t.TrainingRun] = []
        self.rows: dict[str, Any] = {}

    def of(self, verb: str) -> list[dict[str, Any]]:
        return [body for name, body in self.done if name == verb]


def make_app(service: Service) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def door(request: Request, call_next: Any) -> Response:
        service.requests.append((request.method, request.url.path, dict(request.headers)))
        last = request.url.path.rsplit("/", 1)[-1]
        fault = service.faults[last].pop(0) if service.faults[last] else None
        if isinstance(fault, tuple) and isinstance(fault[1], bytes):
            return Response(fault[1], fault[0])  # of another program
        if isinstance(fault, tuple):
            return JSONResponse({"detail": fault[1]}, fault[0], {"X-Request-Id": request.headers["x-request-id"], **fault[2]})
        if fault == "slow":
            await asyncio.sleep(1.0)
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"detail": "no such key"}, 401, {"X-Request-Id": request.headers.get("x-request-id", "")})
        key = request.headers.get("idempotency-key")
        if key in service.answers:
            return JSONResponse(service.answers[key])
        response = await call_next(request)
        response.headers["X-Request-Id"] = request.headers.get("x-request-id", "")
        if fault == "break":  # the work is done, the answer is lost

            async def cut() -> AsyncIterator[bytes]:
                yield b"{"
                raise ConnectionError("cut off")

            return StreamingResponse(cut(), headers={"Content-Length": "1000"})
        return response

    prefix = "/api/v1/twinkle"

    @app.get(prefix + "/healthz")
    async def healthz() -> t.Health:
        return t.Health(status="ok")

    @app.get(prefix + "/get_server_capabilities")
    async def capabilities() -> Any:
        return {"supported_models": [{"model_name": "org/tiny"}]}

    @app.get(prefix + "/capacity_info")
    async def capacity() -> t.CapacityInfo:
        return t.CapacityInfo(max_loras=4, used_loras=1, free_loras=3)

    @app.post(prefix + "/create_session")
    async def create_session(body: t.CreateSession) -> t.Session:
        session = f"session-{next(service.numbers)}"
        service.sessions[session] = body.metadata
        return t.Session(session_id=session)

    @app.post(prefix + "/session_heartbeat")
    async def heartbeat(body: t.SessionHeartbeat) -> t.HeartbeatAnswer:
        if body.session_id not in service.sessions:
            raise HTTPException(404, "no such session")
        service.beats.append(time.monotonic())
        return t.HeartbeatAnswer()

    @app.get(prefix + "/training_runs")
    async def runs(limit: int = 20, offset: int = 0, all_users: bool = False) -> t.TrainingRuns:
        if all_users:
            raise HTTPException(403, "the scope admin is needed")
        cursor = t.Cursor(limit=limit, offset=offset, total_count=len(service.runs))
        return t.TrainingRuns(training_runs=service.runs[offset : offset + limit], cursor=cursor)

    @app.get(prefix + "/training_runs/{run}")
    async def run(run: str) -> t.TrainingRun:
        return _one(service.runs, "training_run_id", run)

    @app.get(prefix + "/training_runs/{run}/checkpoints")
    async def checkpoints(run: str) -> t.Checkpoints:
        _one(service.runs, "training_run_id", run)
        return t.Checkpoints(checkpoints=[each for each in service.checkpoints if f"//{run}/" in each.twinkle_path])

    @app.get(prefix + "/training_runs/{run}/curve")
    async def curve(run: str, after: int) -> t.Curve:
        points = [{"number": number, "step": number, "time": 0, "loss": 1.0 / number} for number in range(after + 1, 4)]
        return t.Curve.model_validate({"points": points})

    @app.get(prefix + "/checkpoint_path/{run}/{checkpoint:path}")
    async def path(run: str, checkpoint: str) -> t.CheckpointPath:
        found = _one(service.checkpoints, "twinkle_path", f"twinkle://{run}/{checkpoint}")
        return t.CheckpointPath(path=f"/data/{run}/{checkpoint}", twinkle_path=found.twinkle_path)

    @app.delete(prefix + "/training_runs/{run}/checkpoints/{checkpoint:path}")
    async def delete(run: str, checkpoint: str) -> t.DeleteAnswer:
        service.checkpoints.remove(_one(service.checkpoints, "twinkle_path", f"twinkle://{run}/{checkpoint}"))
        return t.DeleteAnswer(success=True)

    @app.post(prefix + "/weights_info")
    async def weights(body: t.WeightsInfoRequest) -> t.WeightsInfo:
        parts = t.parse_twinkle_path(body.twinkle_path)
        run = _one(service.runs, "training_run_id", parts.run_id)
        return t.WeightsInfo(training_run_id=parts.run_id, base_model=run.base_model, model_owner=run.model_owner, lora_rank=run.lora_rank)

    @app.get(prefix + "/futures/{request_id}")
    async def future(request_id: str) -> Any:
        state = service.futures[request_id]
        state["polls"] = state.get("polls", 0) + 1
        return {**state, "status": state["end"] if state["polls"] > 1 else "running"}

    @app.post("/api/v1/{kind}/{name:path}/twinkle/{verb}")
    async def verb(kind: str, name: str, verb: str, request: Request) -> Any:
        return await _do(service, kind, name, verb, request)

    @app.post("/api/v1/processor/twinkle/{verb}")
    async def processor(verb: str, request: Request) -> Any:
        return await _do(service, "processor", "", verb, request)

    return app


async def _do(service: Service, kind: str, name: str, verb: str, request: Request) -> Any:
    body = await request.json()
    if kind != "processor" and name != "org/tiny":
        raise HTTPException(404, f"no model {name!r} here")
    service.done.append((verb, body))
    if verb == "sample_stream":
        chunks = [t.SampleChunk(index=0, tokens=[1], text="a"), t.SampleChunk(index=0, response=_response())]
        lines = "".join(chunk.model_dump_json() + "\n" for chunk in chunks)
        return StreamingResponse(iter([lines[:20], lines[20:]]), media_type="application/x-ndjson")
    answer = _answer(service, verb, body)
    service.answers[request.headers["idempotency-key"]] = answer
    if service.as_futures and kind == "model":
        request_id = f"future-{next(service.numbers)}"
        state = {"request_id": request_id, "status": "queued", "end": "done", "result": answer["result"] if set(answer) == {"result"} else answer}
        if verb == "step":
            state |= {"end": "lost", "error": "the server stopped", "error_status": 500, "result": None}
        if verb == "backward":
            state |= {"end": "failed", "error": "call calculate_loss first", "error_status": 409, "result": None}
        service.futures[request_id] = state
        return JSONResponse({"request_id": request_id, "status": "queued"}, 202)
    return answer


def _answer(service: Service, verb: str, body: dict[str, Any]) -> Any:
    if verb == "save":
        return {"twinkle_path": f"twinkle://run-1/{body['checkpoint_type']}/{body.get('name') or 'auto-1'}", "checkpoint_dir": "/data"}
    if verb == "sample":
        return {"samples": [json.loads(t.Samples(samples=[_response()]).model_dump_json())["samples"][0] for _ in body["inputs"]]}
    if verb == "create" and "class_type" in body:
        identity = f"object-{next(service.numbers)}"
        service.rows[identity] = iter(body.get("source") or service.rows.get("rows", []))
        service.rows[identity + "-all"] = body.get("source")
        if "dataset" in body:
            rows, size = service.rows[body["dataset"]["processor_id"] + "-all"], body["batch_size"]
            service.rows[identity + "-all"] = [rows[i : i + size] for i in range(0, len(rows), size)]
            service.rows[identity] = iter(service.rows[identity + "-all"])
            if body.get("num_epochs", 1) is None:
                service.rows[identity + "-all"] = None
        return {"processor_id": identity}
    if verb == "call":
        return _call(service, body)
    results = {
        "add_adapter_to_model": {"adapter_name": body.get("adapter_name"), "training_run_id": "run-1"},
        "forward_backward": {"loss": 0.5, "loss_weight": 3.0, "logprobs": [[0.0, -1.0]], "metrics": {"x": 1.0}},
        "clip_grad_and_step": "NaN",
        "lr_step": 1e-3,
        "calculate_metric": {"loss": 0.5, "grad_norm": "Infinity"},
        "resume_from_checkpoint": {"step": 3},
        "get_state_dict": {"w": {"dtype": "F32", "shape": [1], "data": "AACAPw=="}},
    }
    return {"result": results.get(verb)}


def _call(service: Service, body: dict[str, Any]) -> Any:
    if body["function"] == "__len__" and service.rows[body["processor_id"] + "-all"] is None:
        raise HTTPException(422, "the loader has no end (num_epochs=None), so it has no length")
    if body["function"] == "__len__":
        return {"result": len(service.rows[body["processor_id"] + "-all"])}
    if body["function"] == "__getitem__":
        return {"result": service.rows[body["processor_id"] + "-all"][body["index"]]}
    if body["function"] == "__next__":
        batch = next(service.rows[body["processor_id"]], None)
        if batch is None:
            raise HTTPException(410, "the loader has no more batches")
        return {"result": batch}
    return {"result": None}


def _response() -> t.SampleResponse:
    feature = t.InputFeature(input_ids=[5, 1], completion_mask=[False, True])
    sequence = t.SampledSequence(tokens=[1], logprobs=[-0.1], stop_reason="stop", decoded="a", new_input_feature=feature)
    return t.SampleResponse(sequences=[sequence], prompt_token_ids=[5])


def _one(found: list[Any], name: str, value: str) -> Any:
    for each in found:
        if getattr(each, name) == value:
            return each
    raise HTTPException(404, f"no {value!r}")


class RunningServer:
    """The app on a port of this machine; `stop` and `start` it as often as needed."""

    def __init__(self) -> None:
        self.service = Service()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        config = uvicorn.Config(make_app(self.service), host="127.0.0.1", port=self.port, log_level="critical", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        end = time.monotonic() + 20
        while not self._server.started:
            assert time.monotonic() < end, "the test's server does not start"
            assert self._thread.is_alive()
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)


@pytest.fixture(scope="session")
def running() -> Iterator[RunningServer]:
    server = RunningServer()
    yield server
    server.stop()


@pytest.fixture
def server(running: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """The server with a new memory; the environment names it and its key."""
    vars(running.service).update(vars(Service()))
    monkeypatch.setenv("TWINKLE_SERVER_URL", running.url)
    monkeypatch.setenv("TWINKLE_SERVER_TOKEN", KEY)
    yield running
    from twinkle_client._registry import close_all

    close_all()
