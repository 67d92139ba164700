"""TwinkleClient and its twin against a server over HTTP: what the documentation shows, errors, retries, heartbeats, several clients and threads."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import twinkle_client
from twinkle_client import AsyncTwinkleClient, ClientError, types
from twinkle_client.manager import TwinkleClient

RUN = types.TrainingRun(training_run_id="run-1", base_model="org/tiny", model_owner="alice", lora_rank=8)


def checkpoint(name: str, kind: str = "weights", minutes: int = 0) -> types.Checkpoint:
    return types.Checkpoint.model_validate(
        {
            "checkpoint_id": f"{kind}/{name}",
            "checkpoint_type": kind,
            "time": datetime(2030, 1, 1, tzinfo=UTC) + timedelta(minutes=minutes),
            "size_bytes": 10,
            "twinkle_path": f"twinkle://run-1/{kind}/{name}",
        }
    )


def until(holds: Callable[[], Any], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.01)


def test_what_the_documentation_shows(server: Any) -> None:
    server.service.runs = [RUN, RUN.model_copy(update={"training_run_id": "run-2", "base_model": "other"})]
    server.service.checkpoints = [checkpoint("b", minutes=2), checkpoint("a"), checkpoint("c", "sampler_weights", minutes=3)]
    client = TwinkleClient(
        base_url=server.url,
        api_key="a-key",
        route_prefix="/twinkle",
        session_heartbeat_interval=10,
        session_metadata={"user": "alice"},
    )
    assert client.health_check() is True
    assert [model.model_name for model in client.get_server_capabilities().supported_models] == ["org/tiny"]
    assert [run.training_run_id for run in client.list_training_runs(limit=20, offset=0)] == ["run-1", "run-2"]
    runs, cursor = client.list_training_runs_with_cursor(limit=1)
    assert (len(runs), cursor.total_count) == (1, 2)
    assert client.get_training_run(run_id="run-1") == RUN
    assert [run.training_run_id for run in client.find_training_run_by_model("org/tiny")] == ["run-1"]
    assert [point.loss for point in client.get_training_curve("run-1", after=1)] == [1 / 2, 1 / 3]
    assert len(client.list_checkpoints(run_id="run-1")) == 3
    parsed = client.get_checkpoint_path("run-1", "weights/a")
    assert (parsed.path, parsed.twinkle_path) == ("/data/run-1/weights/a", "twinkle://run-1/weights/a")
    assert client.get_latest_checkpoint_path("run-1") == "twinkle://run-1/weights/b"
    assert client.delete_checkpoint("run-1", "weights/b") is True
    assert client.get_latest_checkpoint_path("run-1") == "twinkle://run-1/weights/a"
    capacity = client.get_capacity_info()
    assert (capacity.max_loras, capacity.used_loras, capacity.free_loras) == (4, 1, 3)
    info = client.get_weights_info("twinkle://run-1/weights/a")
    assert (info.base_model, info.is_lora, info.lora_rank) == ("org/tiny", True, 8)
    assert list(server.service.sessions.values()) == [{"user": "alice"}]
    client.close()
    client.close()
    with pytest.raises(twinkle_client.ConfigError, match="closed"):
        client.get_capacity_info()


def test_the_environment_names_server_and_key_and_a_with_block_closes(server: Any) -> None:
    with TwinkleClient() as client:
        assert client.health_check()
        headers = server.service.requests[-1][2]
        assert headers["authorization"] == "Bearer a-key"
        assert headers["x-twinkle-session-id"] == client.session_id
        assert headers["x-request-id"]
        assert "a-key" not in repr(client) + repr(client.connection.settings)
    assert not [thread for thread in threading.enumerate() if thread.name == "twinkle-heartbeat"]


@pytest.mark.parametrize(
    ("status", "kind", "standard"),
    [
        (400, "InvalidRequest", ValueError),
        (401, "Unauthorized", PermissionError),
        (403, "Unauthorized", PermissionError),
        (404, "NotFound", LookupError),
        (409, "Conflict", RuntimeError),
        (410, "Exhausted", RuntimeError),
        (413, "InvalidRequest", ValueError),
        (422, "InvalidRequest", ValueError),
        (429, "QuotaExceeded", RuntimeError),
        (500, "ServerFailed", RuntimeError),
        (503, "ServerFailed", RuntimeError),
        (507, "QuotaExceeded", RuntimeError),
    ],
)
def test_each_status_is_an_error_of_its_own_with_message_and_request_id(server: Any, status: int, kind: str, standard: type[Exception]) -> None:
    client = TwinkleClient(max_retries=0)
    server.service.faults["capacity_info"] = [(status, "what was wrong", {"Retry-After": "7"})]
    with pytest.raises(getattr(twinkle_client, kind), match="what was wrong") as caught:
        client.get_capacity_info()
    assert isinstance(caught.value, standard)
    assert isinstance(caught.value, ClientError)
    assert caught.value.status == status
    assert caught.value.retry_after_s == 7.0
    assert caught.value.request_id == server.service.requests[-1][2]["x-request-id"]
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.request_id) == (type(caught.value), str(caught.value), caught.value.request_id)


def test_problems_of_arguments_are_told_one_by_one(server: Any) -> None:
    client = TwinkleClient()
    server.service.faults["capacity_info"] = [(422, [{"loc": ["body", "lr"], "msg": "too small", "type": "x"}], {})]
    with pytest.raises(twinkle_client.InvalidRequest, match=r"body\.lr: too small"):
        client.get_capacity_info()


def test_nothing_listens(server: Any) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(twinkle_client.Unreachable, match="is the server running") as caught:
            TwinkleClient(f"http://127.0.0.1:{held.getsockname()[1]}", max_retries=1)
    assert isinstance(caught.value, ConnectionError)


@pytest.mark.parametrize("answer", [(404, "Not Found", {}), (405, "Method Not Allowed", {}), (404, b"404 page not found")])
def test_another_program_answers(server: Any, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "twinkle_client")
    client = TwinkleClient(session_heartbeat_interval=0.05)
    server.service.faults["session_heartbeat"] = [answer]
    until(lambda: "answers again" in caplog.text)  # a proxy without a server behind it: the session is not lost
    assert not client.is_session_lost
    server.service.faults["capacity_info"] = [answer]
    with pytest.raises(twinkle_client.Unreachable, match=r"GET http://.*/capacity_info: .*; is the service there\? \(base_url") as caught:
        client.get_capacity_info()
    assert caught.value.status == answer[0]


def test_an_answer_that_is_none_of_the_services_is_an_error_of_this_package(server: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "twinkle_client")
    client = TwinkleClient(session_heartbeat_interval=0.05)
    server.service.faults["session_heartbeat"] = [(200, b"Log in to this network")]
    until(lambda: "answers again" in caplog.text)
    server.service.faults["capacity_info"] = [(200, b"Log in to this network")]
    with pytest.raises(twinkle_client.ServerFailed, match=r"cannot be read .*is the service there"):
        client.get_capacity_info()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    server.service.faults["upload"] = [(200, b"Log in to this network")]
    with pytest.raises(twinkle_client.ServerFailed, match=r"cannot be read .*is the service there"):
        client.upload_checkpoint("run-1", "name", tmp_path)


def test_a_wrong_key_is_told_at_once_and_leaves_no_client_behind(server: Any) -> None:
    with pytest.raises(twinkle_client.Unauthorized, match="TWINKLE_SERVER_TOKEN"):
        TwinkleClient(api_key="another")
    assert len(server.service.requests) == 1
    with pytest.raises(twinkle_client.ConfigError, match="make one first"):
        twinkle_client.latest_client()


@pytest.mark.parametrize(
    "arguments",
    [
        {"base_url": "localhost:8000"},
        {"base_url": "http://user:secret@host"},
        {"base_url": "ftp://host"},
        {"api_key": "two words"},
        {"api_key": "line\nfeed"},
        {"session_heartbeat_interval": 0},
        {"timeout_s": 0},
        {"max_retries": -1},
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(server: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(twinkle_client.ConfigError) as caught:
        TwinkleClient(**arguments)
    assert "secret" not in str(caught.value)
    assert not server.service.requests


@pytest.mark.parametrize(("run", "identity"), [("..", "weights/a"), ("run-1", "weights/.."), ("", "weights/a"), ("run-1", "weights//a")])
def test_an_id_cannot_name_another_path(server: Any, run: str, identity: str) -> None:
    client = TwinkleClient()
    before = len(server.service.requests)
    with pytest.raises(twinkle_client.ConfigError, match="no name or id"):
        client.delete_checkpoint(run, identity)
    assert len(server.service.requests) == before


def test_a_question_is_asked_again_with_pauses(server: Any) -> None:
    client = TwinkleClient()
    server.service.faults["capacity_info"] = [(503, "starting", {}), "break", (429, "slowly", {"Retry-After": "0.3"})]
    begin = time.monotonic()
    assert client.get_capacity_info().free_loras == 3
    assert time.monotonic() - begin > 0.1 + 0.2 + 0.3
    assert len({headers["x-request-id"] for _, path, headers in server.service.requests if path.endswith("capacity_info")}) == 1


def test_a_deletion_is_not_repeated(server: Any) -> None:
    server.service.checkpoints = [checkpoint("a")]
    client = TwinkleClient()
    server.service.faults["a"] = ["break"]
    with pytest.raises(twinkle_client.Unreachable, match="the connection broke"):
        client.delete_checkpoint("run-1", "weights/a")
    assert [method for method, _, _ in server.service.requests].count("DELETE") == 1


def test_a_slow_server_is_a_timeout(server: Any) -> None:
    client = TwinkleClient(timeout_s=0.3)
    server.service.faults["capacity_info"] = ["slow", "slow"]
    with pytest.raises(twinkle_client.DeadlineExceeded, match=r"no answer within 0\.3 s") as caught:
        client.get_capacity_info()
    assert isinstance(caught.value, TimeoutError)


def test_health_is_false_and_no_error_without_a_healthy_server(server: Any) -> None:
    client = TwinkleClient(max_retries=0)
    server.service.faults["healthz"] = [(503, "not ready", {})]
    assert client.health_check() is False


def test_heartbeats_survive_a_restart_and_tell(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "twinkle_client")
    client = TwinkleClient(session_heartbeat_interval=0.05, max_retries=0)
    until(lambda: len(server.service.beats) >= 2)
    server.stop()
    until(lambda: "no heartbeat" in caplog.text)
    server.start()
    until(lambda: "answers again" in caplog.text)
    assert not client.is_session_lost
    assert caplog.text.count("no heartbeat") == 1
    before = len(server.service.beats)
    until(lambda: len(server.service.beats) > before)


def test_a_lost_session_is_told_and_can_be_renewed(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = TwinkleClient(session_heartbeat_interval=0.05)
    model = twinkle_client.TransformersModel("org/tiny")
    first = client.session_id
    server.service.sessions.clear()
    until(lambda: client.is_session_lost)
    assert "does not know the session" in caplog.text
    with pytest.raises(twinkle_client.SessionLost, match="renew_session"):
        model.step(adapter_name="a")
    assert client.get_capacity_info()
    assert client.renew_session() != first
    model.step(adapter_name="a")
    before = len(server.service.beats)
    until(lambda: len(server.service.beats) > before)


def test_several_clients_and_the_latest_is_the_default(server: Any) -> None:
    first, second = TwinkleClient(), TwinkleClient()
    assert twinkle_client.latest_client() is second
    assert twinkle_client.Model("org/tiny").client is second
    assert twinkle_client.Model("org/tiny", client=first).client is first
    assert server.service.requests[-1][2]["x-twinkle-session-id"] == first.session_id
    second.close()
    assert twinkle_client.latest_client() is first


def test_many_threads_share_a_client(server: Any) -> None:
    client = TwinkleClient()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            for _ in range(20):
                assert client.get_capacity_info().max_loras == 4
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert len({headers["x-request-id"] for _, _, headers in server.service.requests}) == len(server.service.requests) == 161


def test_the_end_of_the_process_closes_the_client(server: Any) -> None:
    code = "from twinkle_client.manager import TwinkleClient; client = TwinkleClient(); print(client.health_check())"
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "True", "")


def test_importing_is_cheap() -> None:
    code = (
        "import time, sys; begin = time.process_time()\n"
        "from twinkle_client.manager import TwinkleClient\n"
        "heavy = ('torch', 'ray', 'peft', 'numpy', 'pandas', 'httpx', 'pydantic')\n"
        "print(time.process_time() - begin, [name for name in heavy if name in sys.modules])"
    )
    seconds, heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout.split(" ", 1)
    assert heavy.strip() == "[]"
    assert float(seconds) <= 0.35
    code = "import twinkle_client as c, sys; [getattr(c, n) for n in c.__all__]; print('numpy' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout == "False False\n"


def test_the_asynchronous_twin_does_the_same(server: Any) -> None:
    server.service.runs, server.service.checkpoints = [RUN], [checkpoint("a")]

    async def use() -> None:
        async with AsyncTwinkleClient(session_heartbeat_interval=0.05, session_metadata={"user": "bob"}) as client:
            assert await client.health_check()
            capacities = await asyncio.gather(*(client.get_capacity_info() for _ in range(20)))
            assert all(each.free_loras == 3 for each in capacities)
            assert await client.find_training_run_by_model("org/tiny") == [RUN]
            assert await client.get_latest_checkpoint_path("run-1") == "twinkle://run-1/weights/a"
            server.service.faults["capacity_info"] = [(503, "starting", {}), "break"]
            assert (await client.get_capacity_info()).max_loras == 4
            with pytest.raises(twinkle_client.NotFound):
                await client.get_training_run("run-9")
            while len(server.service.beats) < 2:
                await asyncio.sleep(0.02)
            server.service.sessions.clear()
            while not client.is_session_lost:
                await asyncio.sleep(0.02)
            await client.renew_session()
            assert not client.is_session_lost
        with pytest.raises(twinkle_client.ConfigError, match="closed"):
            await client.get_capacity_info()

    asyncio.run(asyncio.wait_for(use(), 30))


@pytest.mark.parametrize(
    ("waiting", "asynchronous"),
    [
        (TwinkleClient, AsyncTwinkleClient),
        (twinkle_client.Model, twinkle_client.AsyncModel),
        (twinkle_client.Sampler, twinkle_client.AsyncSampler),
    ],
)
def test_twins_have_the_same_methods_with_the_same_arguments(waiting: type, asynchronous: type) -> None:
    own_start = {"create", "start"}

    def methods(kind: type) -> dict[str, Any]:
        found = {name: list(inspect.signature(value).parameters.values()) for name, value in vars(kind).items() if inspect.isfunction(value)}
        return {name: parameters for name, parameters in found.items() if not name.startswith("_") and name not in own_start}

    assert methods(waiting) == methods(asynchronous)
    assert len(methods(waiting)) >= 5
