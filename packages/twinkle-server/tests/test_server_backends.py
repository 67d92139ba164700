"""The server on its other backends, and on workers of Ray in device groups: each with a server of its own, from training to a restart."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from conftest import ServerProcess

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

ROWS = [{"input_ids": [5, 6, 7, 8, 9, 10]}, {"input_ids": [11, 12, 13, 5]}]
ENGINE = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "block_size": 32, "dtype": "float32"}
VLLM: dict[str, Any] = {"backend": "vllm", "options": {"engine_args": ENGINE}}
TORCH: dict[str, Any] = {"backend": "transformers"}


def ray(**ranks: int) -> dict[str, Any]:
    """A runtime of Ray with groups of CPU ranks."""
    return {"mode": "ray", "groups": [{"name": name, "ranks": count, "device_type": "cpu"} for name, count in ranks.items()]}


ON_RAY = ray(trainers=2, samplers=1)
MESH = {"dp_size": 2, "device_type": "cpu"}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "megatron": ({"backend": "megatron", "sampler": TORCH}, {}),
    "vllm": ({"sampler": VLLM}, {}),
    "transformers on ray": ({"group": "trainers", "mesh": MESH, "sampler": {**TORCH, "group": "samplers"}}, {"runtime": ON_RAY}),
    "megatron and vllm on ray": (
        {"backend": "megatron", "group": "trainers", "mesh": {"tp_size": 2, "device_type": "cpu"}, "sampler": {**VLLM, "group": "samplers"}},
        {"runtime": ON_RAY},
    ),
}


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, with heads of a size that every engine takes."""
    from twinkle_train.testing import tiny_qwen3

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    return tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny", **sizes, max_position_embeddings=128)


class Adapter:
    """A session of alice's with one adapter."""

    def __init__(self, server: ServerProcess, name: str) -> None:
        self.http = server.client()
        self.http.timeout = httpx.Timeout(300)
        self.name = name
        self.http.headers["X-Twinkle-Session-Id"] = self.http.post("/twinkle/create_session", json={}).json()["session_id"]
        self.run = self.post("add_adapter_to_model", config={"r": 4, "lora_alpha": 8})["training_run_id"]
        self.post("set_loss", loss="cross_entropy")
        self.post("set_optimizer", name="adamw", lr=2e-2)

    def post(self, verb: str, kind: str = "model", **arguments: Any) -> Any:
        named = {"adapter_name": self.name} if kind == "model" else {}
        answer = self.http.post(f"/{kind}/tiny/twinkle/{verb}", json={**named, **arguments})
        assert answer.status_code == 200, (verb, answer.text)
        return answer.json().get("result", answer.json())

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        for _ in range(steps):
            losses.append(self.post("forward_backward", inputs=ROWS)["loss"])
            self.post("clip_grad_and_step", max_grad_norm=1.0)
        return losses


@pytest.mark.parametrize("which", SETTINGS)
def test_a_backend_trains_saves_samples_parks_and_survives_a_restart(which: str, larger_model: Path, tmp_path: Path, start_server: Any) -> None:
    model, settings = SETTINGS[which]
    server = start_server(
        tmp_path,
        [{"name": "tiny", "path": str(larger_model), "max_loras": 1, "max_length": 64, "max_rank": 16, **model}],
        retention={"session_s": 3600},  # nobody sends heartbeats here, and models may take long to load
        **settings,
    )
    first = Adapter(server, "first")
    losses = first.train(8)
    assert losses[-1] < losses[0] * 0.9, losses
    expected = first.post("forward_only", inputs=[ROWS[0], ROWS[0]])["logprobs"][0]
    saved = first.post("save", name="after")["twinkle_path"]

    # Another adapter takes the only place in memory; the first comes back as it was.
    second = Adapter(server, "second")
    assert second.train(1)[0] == pytest.approx(losses[0], abs=1e-4)
    assert first.post("forward_only", inputs=[ROWS[0], ROWS[0]])["logprobs"][0] == expected

    def scored(path: str | None) -> list[float]:
        asked = {"inputs": [ROWS[0]["input_ids"]], "sampling_params": {"max_tokens": 1, "prompt_logprobs": True, "seed": 1}}
        return first.post("sample", "sampler", **asked, **({} if path is None else {"adapter_path": path}))["samples"][0]["prompt_logprobs"]

    assert scored(saved) == pytest.approx(expected, abs=2e-3)
    assert max(abs(a - b) for a, b in zip(scored(None), expected, strict=True)) > 1e-2

    body = {"inputs": [[5, 6, 7]], "sampling_params": {"max_tokens": 24, "temperature": 0.0}, "adapter_path": saved}
    whole = first.post("sample", "sampler", **body)["samples"][0]["sequences"][0]
    with first.http.stream("POST", "/sampler/tiny/twinkle/sample_stream", json=body) as answer:
        lines = [httpx.Response(200, text=line).json() for line in answer.iter_lines() if line]
    assert [token for line in lines for token in line.get("tokens", [])] == whole["tokens"]
    # More than one line of tokens, unless the engine is faster than the server asks it, or the completion ends at once.
    assert len([line for line in lines if line.get("tokens")]) > 1 or "vllm" in which or len(whole["tokens"]) < 3
    assert "".join(line.get("text", "") for line in lines) == whole["decoded"]
    assert lines[-1]["response"]["sequences"][0]["tokens"] == whole["tokens"]

    server.end(signal.SIGTERM)
    server.start()
    assert first.post("forward_only", inputs=[ROWS[0], ROWS[0]])["logprobs"][0] == expected
    assert first.train(1)[0] < losses[0]
    assert first.post("resume_from_checkpoint", path=saved) == {}
    assert first.post("forward_only", inputs=[ROWS[0], ROWS[0]])["logprobs"][0] == expected
    assert first.http.delete(f"/twinkle/training_runs/{first.run}").json()["success"]
