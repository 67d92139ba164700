"""The verbs over HTTP on a real server process with a small real model: train, save, sample, restart, isolation. One server for all tests."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import pytest

if TYPE_CHECKING:
    from conftest import ServerProcess

pytestmark = pytest.mark.timeout(400)
ROWS = [{"input_ids": [5, 6, 7, 8, 9, 10]}, {"input_ids": [11, 12, 13, 5]}]


class Tenant:
    """A session of a tenant, with the verbs of one adapter."""

    def __init__(self, server: ServerProcess, model: str, who: str = "alice", adapter: str = "mine", **config: Any) -> None:
        self.http = server.client(who)
        self.model, self.adapter = model, adapter
        self.session = self.post_raw("/twinkle/create_session", {}).json()["session_id"]
        self.http.headers["X-Twinkle-Session-Id"] = self.session
        self.run = self.post("add_adapter_to_model", config={"r": 4, "lora_alpha": 8, **config}, save_dir="my runs/first")["training_run_id"]

    def post_raw(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.http.post(path, json=body, headers=headers)

    def try_post(self, verb: str, **arguments: Any) -> httpx.Response:
        return self.post_raw(f"/model/{self.model}/twinkle/{verb}", {"adapter_name": self.adapter, **arguments})

    def post(self, verb: str, **arguments: Any) -> Any:
        answer = self.try_post(verb, **arguments)
        assert answer.status_code == 200, (verb, answer.text)
        return answer.json().get("result", answer.json())

    def set_up(self, lr: float = 1e-2) -> Tenant:
        self.post("set_loss", loss="cross_entropy")
        self.post("set_optimizer", name="adamw", lr=lr)
        return self

    def train(self, steps: int = 1, rows: Any = ROWS) -> list[float]:
        losses: list[float] = []
        for _ in range(steps):
            losses.append(self.post("forward_backward", inputs=rows)["loss"])
            self.post("clip_grad_and_step", max_grad_norm=1.0)
        return losses

    def weights(self) -> dict[str, str]:
        return {name: tensor["data"] for name, tensor in self.post("get_state_dict").items()}


def test_training_lowers_the_loss_and_sampling_uses_the_weights(server: ServerProcess, model_name: str) -> None:
    alice = Tenant(server, model_name).set_up()
    losses = alice.train(12)
    assert losses[-1] < losses[0] * 0.8
    saved = alice.post("save", name="after")
    assert saved["twinkle_path"] == f"twinkle://{alice.run}/weights/after"
    run = alice.http.get(f"/twinkle/training_runs/{alice.run}").json()
    assert (run["save_dir"], run["lora_rank"], run["corrupted"]) == ("my runs/first", 4, False)
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/after"
    info = alice.post_raw("/twinkle/weights_info", {"twinkle_path": saved["twinkle_path"]}).json()
    assert (info["base_model"], info["lora_rank"]) == (model_name, 4)
    curve = alice.http.get(f"/twinkle/training_runs/{alice.run}/curve").json()["points"]
    assert [point["loss"] for point in curve if point["loss"] is not None] == pytest.approx(losses)

    # The trainer's and the sampler's log-probabilities of the same tokens agree; the base model's differ.
    tokens = ROWS[0]["input_ids"]
    trained = alice.post("forward_only", inputs=[ROWS[0]])["logprobs"][0]

    def prompt_logprobs(**which: str) -> list[float]:
        params = {"max_tokens": 1, "prompt_logprobs": True, "seed": 1}
        answer = alice.post_raw(f"/sampler/{quote(model_name, safe='')}/twinkle/sample", {"inputs": [tokens], "sampling_params": params, **which})
        assert answer.status_code == 200, answer.text
        return answer.json()["samples"][0]["prompt_logprobs"]

    assert prompt_logprobs(adapter_path=saved["twinkle_path"]) == pytest.approx(trained, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(prompt_logprobs(), trained, strict=True)) > 1e-2
    named = alice.post_raw(f"/sampler/{model_name}/twinkle/add_adapter_to_sampler", {"adapter_name": "x", "path": saved["twinkle_path"]})
    assert named.status_code == 200, named.text
    assert prompt_logprobs(adapter_name="x") == pytest.approx(trained, abs=1e-4)


def test_the_examples_of_the_openapi_document_run(server: ServerProcess, model_name: str) -> None:
    from twinkle_server.native._examples import EXAMPLES, MODEL, PROCESSOR, RUN, SESSION

    refused = {"model_apply_patch", "model_upload_to_hub", "sampler_apply_patch"}  # as their descriptions say
    with server.client() as http:
        paths = http.get("/openapi.json").json()["paths"]
        documented = {
            operation["operationId"]: (path.removeprefix("/api/v1"), operation["requestBody"]["content"]["application/json"]["example"])
            for path, methods in paths.items()
            for operation in methods.values()
            if "tinker" not in operation["tags"] and "application/json" in operation.get("requestBody", {}).get("content", {})
        }
        assert set(documented) == set(EXAMPLES), "every body has an example"
        known = {MODEL: model_name}
        for name in EXAMPLES:
            path, body = documented[name]
            text = json.dumps(body)
            for placeholder, value in known.items():
                text = text.replace(placeholder, value)
            answer = http.post(path.replace("{model}", model_name), content=text, headers={"Content-Type": "application/json"})
            assert answer.status_code == (422 if name in refused else 200), (name, answer.text)
            if name == "create_session":
                known[SESSION] = http.headers["X-Twinkle-Session-Id"] = answer.json()["session_id"]
            elif name == "model_add_adapter_to_model":
                known[RUN] = answer.json()["result"]["training_run_id"]
            elif name == "create_processor":
                known[PROCESSOR] = answer.json()["processor_id"]


def test_a_stream_of_samples_ends_with_each_prompts_response(server: ServerProcess, model_name: str) -> None:
    body = {"inputs": [[5, 6], [7], [10**6]], "sampling_params": {"max_tokens": 3, "seed": 3}}
    with server.client() as http, http.stream("POST", f"/sampler/{model_name}/twinkle/sample_stream", json=body) as answer:
        assert answer.status_code == 200
        lines = [httpx.Response(200, text=line).json() for line in answer.iter_lines() if line]
    whole = {line["index"]: line["response"] for line in lines if line.get("response")}
    assert sorted(whole) == [0, 1, 2]
    assert [len(whole[index]["sequences"]) for index in (0, 1, 2)] == [1, 1, 0]
    assert "vocabulary" in whole[2]["error"]["message"]


def test_tokens_stream_as_they_are_sampled_and_are_those_of_a_whole_answer(server: ServerProcess, model_name: str) -> None:
    body = {"inputs": [[5, 6, 7]], "sampling_params": {"max_tokens": 20, "min_tokens": 20, "seed": 3, "num_samples": 2}}
    with server.client() as http:
        whole = http.post(f"/sampler/{model_name}/twinkle/sample", json=body).json()["samples"][0]
        with http.stream("POST", f"/sampler/{model_name}/twinkle/sample_stream", json=body) as answer:
            lines = [httpx.Response(200, text=line).json() for line in answer.iter_lines() if line]
    assert len(lines) > 4  # in more pieces than there are sequences
    for number, sequence in enumerate(whole["sequences"]):
        mine = [line for line in lines if line.get("sequence") == number and "tokens" in line]
        assert [token for line in mine for token in line["tokens"]] == sequence["tokens"]
        assert [each for line in mine for each in line["logprobs"]] == pytest.approx(sequence["logprobs"])
        assert "".join(line["text"] for line in mine) == sequence["decoded"]
    assert lines[-1]["response"] == whole


def test_openais_client_chats(server: ServerProcess, model_name: str) -> None:
    openai = pytest.importorskip("openai")
    alice = Tenant(server, model_name, adapter="chat").set_up()
    alice.train(1)
    weights = alice.post("save", name="w", checkpoint_type="sampler_weights")["twinkle_path"]
    client = openai.OpenAI(base_url=f"{server.url}/api/v1", api_key=server.keys["alice"], max_retries=0, http_client=httpx.Client(trust_env=False))
    assert [model.id for model in client.models.list()] == [model_name]
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 12,
        "seed": 1,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    for name in (model_name, weights, weights.replace("twinkle", "tinker", 1)):
        whole = client.chat.completions.create(model=name, **asked)
        assert (whole.model, len(whole.choices), whole.choices[0].finish_reason in ("stop", "length")) == (name, 2, True)
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
        chunks = list(client.chat.completions.create(model=name, stream=True, stream_options={"include_usage": True}, **asked))
        assert chunks[-1].usage == whole.usage
        for choice in whole.choices:
            mine = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
            assert "".join(each.delta.content or "" for each in mine) == choice.message.content
            assert mine[-1].finish_reason == choice.finish_reason
    with pytest.raises(openai.NotFoundError, match="no sampler"):
        client.chat.completions.create(model="nothing", **asked)
    with pytest.raises(openai.UnprocessableEntityError, match="presence_penalty"):
        client.chat.completions.create(model=model_name, presence_penalty=1.0, **asked)
    with pytest.raises(openai.UnprocessableEntityError, match="vLLM"):
        client.chat.completions.create(model=model_name, response_format={"type": "json_object"}, stream=True, **asked)
    others = openai.OpenAI(base_url=f"{server.url}/api/v1", api_key=server.keys["bob"], max_retries=0, http_client=httpx.Client(trust_env=False))
    with pytest.raises(openai.NotFoundError):
        others.chat.completions.create(model=weights, **asked)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/api/v1", api_key="tml-none", http_client=httpx.Client(trust_env=False)).models.list()


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {10**6: 1.0}},
        {"top_logprobs": 10**6},
        {"stop_token_ids": [10**6], "min_tokens": 1},
        {"temperature": 1e-320},
        {"structured_output": {"json_object": True}},
    ],
)
def test_options_out_of_range_spoil_their_own_prompt_only(server: ServerProcess, model_name: str, params: dict[str, Any]) -> None:
    body = {"inputs": [[5, 6], [5, 6]], "sampling_params": [{"max_tokens": 2, **params}, {"max_tokens": 2}]}
    with server.client() as http:
        answer = http.post(f"/sampler/{model_name}/twinkle/sample", json=body)
    assert answer.status_code == 200, answer.text
    wrong, right = answer.json()["samples"]
    assert right["error"] is None
    assert right["sequences"]
    assert (wrong["error"] is None) == ("temperature" in params)


def test_a_run_trained_beside_others_and_parked_is_bit_identical_to_one_trained_alone(server: ServerProcess, model_name: str) -> None:
    alone = Tenant(server, model_name, adapter="alone").set_up()
    start = alone.post("save", name="start")["twinkle_path"]
    expected = alone.train(4)
    weights = alone.weights()

    again = Tenant(server, model_name, adapter="again").set_up()
    assert again.post("resume_from_checkpoint", path=start) == {}
    others = [Tenant(server, model_name, who="bob", adapter=f"other-{index}").set_up(lr=0.1) for index in range(3)]
    losses: list[float] = []
    for _ in range(4):  # with two places in memory, each of the four is parked in every round
        losses += again.train(1)
        for other in others:
            other.train(1, rows=[{"input_ids": [20, 21, 22]}])
    assert losses == expected
    assert again.weights() == weights
    assert others[0].weights() != weights
    capacity = again.http.get("/twinkle/capacity_info").json()
    assert capacity == {"max_loras": 2, "used_loras": 2, "free_loras": 0}


def test_an_adjusted_optimizer_stays_so_when_its_adapter_was_parked(server: ServerProcess, model_name: str) -> None:
    alice = Tenant(server, model_name, adapter="adjusted").set_up()
    assert alice.try_post("adjust_optimizer", lr=-1.0).status_code == 422
    alice.train(1)
    alice.post("adjust_optimizer", lr=0.0)
    before = alice.weights()
    for name in ("first", "second"):  # they take both places in memory
        Tenant(server, model_name, who="bob", adapter=f"beside-{name}").set_up().train(1)
    output = alice.post("forward_only", inputs=ROWS, top_k=3, micro_batch_tokens=8)
    assert [[len(tokens) for tokens in row] for row in output["top_tokens"]] == [[3] * 6, [3] * 4]
    alice.train(1)
    assert alice.weights() == before
    alice.post("adjust_optimizer", lr=1e-2)
    alice.train(1)
    assert alice.weights() != before


def test_an_idempotency_key_runs_a_call_once(server: ServerProcess, model_name: str) -> None:
    alice = Tenant(server, model_name, adapter="idempotent").set_up()
    path, body = f"/model/{model_name}/twinkle/forward_backward", {"adapter_name": "idempotent", "inputs": ROWS}
    first = alice.post_raw(path, body, **{"Idempotency-Key": "k1"})
    again = alice.post_raw(path, body, **{"Idempotency-Key": "k1"})
    assert first.status_code == again.status_code == 200
    assert first.content == again.content
    assert len(alice.http.get(f"/twinkle/training_runs/{alice.run}/curve").json()["points"]) == 1
    other = alice.post_raw(path, {**body, "inputs": ROWS[:1]}, **{"Idempotency-Key": "k1"})
    assert other.status_code == 409
    answer = alice.post_raw(path, body, Prefer="respond-async, wait=0")
    assert answer.status_code in (200, 202)
    if answer.status_code == 202:
        future = alice.http.get(f"/twinkle/futures/{answer.json()['request_id']}", params={"wait_s": 20}).json()
        assert future["status"] == "done"
        assert future["result"]["loss"] == first.json()["result"]["loss"]


def test_who_idles_in_the_middle_of_a_step_makes_way_and_is_told(server: ServerProcess, model_name: str) -> None:
    idle = [Tenant(server, model_name, adapter=f"idle-{index}").set_up() for index in range(2)]
    for each in idle:
        each.train(1)
        each.post("forward_backward", inputs=ROWS)
    other = Tenant(server, model_name, who="bob", adapter="waits").set_up()
    assert other.train(1)
    answers = [each.try_post("clip_grad_and_step") for each in reversed(idle)]
    # The one that was idle for longest made way; the other has its gradients still.
    assert [answer.status_code for answer in answers] == [200, 409]
    assert "dropped" in answers[1].json()["detail"]
    assert all(each.train(1) for each in idle)


def test_wrong_calls_are_told_what_is_wrong(server: ServerProcess, model_name: str) -> None:
    alice = Tenant(server, model_name, adapter="wrong")
    for verb, arguments, status in [
        ("forward_backward", {"inputs": ROWS}, 409),  # no loss yet
        ("set_loss", {"loss": "os.system"}, 422),
        ("set_loss", {"loss": "grpo", "epsilon": "x"}, 422),
        ("set_loss", {"loss": "grpo", "no": 1}, 422),
        ("set_optimizer", {"name": "exec"}, 422),
        ("apply_patch", {"patch": "twinkle.patch.Anything"}, 422),
        ("add_metric", {"metric": "builtins.eval"}, 422),
        ("set_template", {"template": "/etc"}, 422),
        ("set_processor", {"processor": "subprocess.Popen"}, 422),
        ("forward_only", {"inputs": [{"input_ids": [10**6]}]}, 422),
        ("forward_only", {"inputs": [{"input_ids": [1] * 300}]}, 422),
        ("forward_only", {"inputs": [{"input_ids": []}]}, 422),
        ("forward_only", {"inputs": []}, 422),
        ("save", {"name": "../up"}, 422),
        ("load", {"path": "/etc/passwd"}, 422),
        ("load", {"path": "twinkle://run-none/weights/x"}, 404),
        ("load", {"path": "none"}, 404),
        ("upload_to_hub", {"path": "x", "repo_id": "y"}, 422),
    ]:
        answer = alice.try_post(verb, **arguments)
        assert answer.status_code == status, (verb, arguments, answer.text)
    for config, status in [
        ({"r": 0}, 422),
        ({"r": 999}, 422),
        ({"target_modules": ["nothing"]}, 422),
        ({"modules_to_save": ["lm_head"]}, 422),
        ({"r": "4"}, 422),
    ]:
        body = {"adapter_name": "bad", "config": config}
        answer = alice.post_raw(f"/model/{model_name}/twinkle/add_adapter_to_model", body)
        assert answer.status_code == status, (config, answer.text)
    assert alice.post_raw("/model/none/twinkle/create", {}).status_code == 404
    assert alice.post_raw(f"/model/{model_name}/twinkle/step", {"adapter_name": ""}).status_code == 404
    again = alice.post_raw(f"/model/{model_name}/twinkle/add_adapter_to_model", {"adapter_name": "wrong", "config": {}})
    assert again.status_code == 409


def test_the_base_model_can_be_read_and_its_configuration_tells_nothing_of_others(server: ServerProcess, model_name: str) -> None:
    alice = Tenant(server, model_name, adapter="a")
    Tenant(server, model_name, who="bob", adapter="b")
    base = alice.post_raw(f"/model/{model_name}/twinkle/forward_only", {"inputs": ROWS})
    assert base.status_code == 200
    text = alice.try_post("get_train_configs").text
    assert "bob" not in text
    assert str(server.folder) not in text


def test_datasets_and_loaders_live_on_the_server(server: ServerProcess, model_name: str) -> None:
    with server.client() as alice, server.client("bob") as bob:

        def create(**body: Any) -> Any:
            return alice.post("/processor/twinkle/create", json=body)

        def call(http: httpx.Client = alice, **body: Any) -> httpx.Response:
            return http.post("/processor/twinkle/call", json=body)

        rows = [{"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "yes"}]} for n in range(5)]
        dataset = create(processor_type="dataset", class_type="Dataset", source=rows).json()["processor_id"]
        assert call(processor_id=dataset, function="__len__").json() == {"result": 5}
        loader = create(processor_type="dataloader", class_type="DataLoader", dataset={"processor_id": dataset}, batch_size=2).json()["processor_id"]
        batches = [call(processor_id=loader, function="__next__") for _ in range(3)]
        assert [each.status_code for each in batches] == [200, 200, 410]
        assert [row["messages"][0]["content"] for each in batches[:2] for row in each.json()["result"]] == ["0", "1", "2", "3"]
        assert call(processor_id=loader, function="__next__").status_code == 200
        template = create(processor_type="template", class_type="Template", tokenizer_or_path=model_name).json()["processor_id"]
        encoded = call(processor_id=template, function="encode", trajectory=rows[0]).json()["result"]
        assert len(encoded["input_ids"]) == len(encoded["labels"])
        for function in ("__class__", "map", "__reduce__", "state_dict"):
            assert call(processor_id=dataset, function=function).status_code == 422
        assert call(bob, processor_id=dataset, function="__len__").status_code == 404
        for body in [
            {"processor_type": "dataset", "class_type": "os.system", "source": rows},
            {"processor_type": "dataset", "class_type": "Dataset", "source": "/etc/passwd"},
            {"processor_type": "dataset", "class_type": "Dataset", "source": rows, "cache_dir": "elsewhere"},
            {"processor_type": "dataloader", "class_type": "DataLoader", "dataset": {"processor_id": dataset}, "batch_size": 2, "num_workers": 8},
            {"processor_type": "reward", "class_type": "Reward"},
        ]:
            assert create(**body).status_code in (404, 422), body


def test_a_health_check_does_not_wait_for_a_training_step(server: ServerProcess, model_name: str) -> None:
    alice = Tenant(server, model_name, adapter="busy").set_up()
    rows = [{"input_ids": list(range(5, 205))}] * 64
    stop = threading.Event()
    times: list[float] = []

    def ask() -> None:
        with server.client() as http:
            while not stop.is_set():
                begun = time.monotonic()
                assert http.get("/twinkle/healthz").status_code == 200
                assert http.get("/twinkle/capacity_info").status_code == 200
                times.append(time.monotonic() - begun)
                time.sleep(0.01)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        begun = time.monotonic()
        alice.train(2, rows=rows)
        took = time.monotonic() - begun
        stop.set()
        asking.result(30)
    assert took > 0.3, "the step is too short to tell"
    assert len(times) > 3
    assert sorted(times)[len(times) // 2] < took / 4


def test_a_kill_loses_only_what_was_in_memory_and_says_so(server: ServerProcess, model_name: str) -> None:
    alice = Tenant(server, model_name, adapter="killed").set_up()
    alice.train(2)
    saved = alice.post("save", name="two", user_state={"epoch": 1})["twinkle_path"]
    next_loss = alice.train(1)
    untouched = Tenant(server, model_name, who="bob", adapter="fresh").set_up()
    body = {"adapter_name": "killed", "inputs": ROWS * 200}
    answer = alice.post_raw(f"/model/{model_name}/twinkle/forward_backward", body, **{"Prefer": "respond-async, wait=0", "Idempotency-Key": "lost"})
    assert answer.status_code == 202, answer.text
    time.sleep(0.05)
    server.end(signal.SIGKILL)
    server.start()

    assert alice.post_raw("/twinkle/session_heartbeat", {"session_id": alice.session}).status_code == 200
    future = alice.http.get(f"/twinkle/futures/{answer.json()['request_id']}", params={"wait_s": 20}).json()
    assert future["status"] in ("lost", "failed"), future  # failed: it had not begun, and its run's state is lost
    repeated = alice.post_raw(f"/model/{model_name}/twinkle/forward_backward", body, **{"Idempotency-Key": "lost"})
    assert repeated.status_code in (409, 500)
    assert alice.http.get(f"/twinkle/training_runs/{alice.run}").json()["corrupted"]
    for refused in (alice.try_post("forward_backward", inputs=ROWS), alice.try_post("save", name="lost")):
        assert refused.status_code == 409
        assert "load or resume" in refused.json()["detail"]
    assert alice.post("resume_from_checkpoint", path=saved) == {"epoch": 1}
    assert alice.train(1) == next_loss
    assert not alice.http.get(f"/twinkle/training_runs/{alice.run}").json()["corrupted"]
    assert untouched.train(1)


@pytest.mark.full  # the same through the Tinker SDK is in the default run
def test_a_server_that_is_stopped_keeps_everything(server: ServerProcess, model_name: str) -> None:
    alice = Tenant(server, model_name, adapter="stopped").set_up()
    alice.train(2)
    alice.post("save", name="two")
    expected = alice.train(2)
    alice.post("resume_from_checkpoint", path="two")
    server.end(signal.SIGTERM)
    assert server.process is not None
    assert server.process.returncode in (0, -signal.SIGTERM)
    server.start()
    assert alice.train(2) == expected


def test_deleting_a_checkpoint_leaves_the_others(server: ServerProcess, model_name: str) -> None:
    alice = Tenant(server, model_name, adapter="deletes").set_up()
    for kind in ("weights", "sampler_weights"):
        for name in ("a", "b"):
            alice.post("save", name=name, checkpoint_type=kind)
    assert alice.try_post("save", name="a").status_code == 409
    base = f"/twinkle/training_runs/{alice.run}/checkpoints"
    for wrong in ("weights", "weights/", "none/a", "weights/c", "weights/a/b"):
        assert alice.http.delete(f"{base}/{wrong}").status_code in (404, 405, 422), wrong
    assert alice.http.delete(f"{base}/weights/a").json()["success"]
    left = [each["checkpoint_id"] for each in alice.http.get(base).json()["checkpoints"]]
    assert sorted(left) == ["sampler_weights/a", "sampler_weights/b", "weights/b"]
    alice.post("load", path="weights/b")
    alice.post("load", path="sampler_weights/a")
    assert alice.try_post("load", path="weights/a").status_code == 404
