"""The service end to end, on CPU: a server process with a small model, and the client that trains, samples, is killed under, resumes and deletes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import twinkle_client
import twinkle_data
from twinkle_client import LoraConfig, TransformersModel, TwinkleClient, vLLMSampler
from twinkle_train.testing import tiny_qwen3

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]


class ServerProcess:
    """`twinkle-server launch -c FILE`, with a tenant's key."""

    def __init__(self, folder: Path, model: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.file = folder / "server.yaml"
        self.log = folder / "server.log"
        self.file.write_text(yaml.safe_dump({"port": self.port, "data_dir": str(folder / "data"), "models": [model]}))
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        made = subprocess.run(self._command("keys", "create", "alice"), env=self.environment, capture_output=True, text=True, timeout=100, check=True)
        self.key = made.stdout.strip()
        try:
            self.start()
        except BaseException:
            self.process.kill()
            raise

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "twinkle_server.cli", *words, "-c", str(self.file)]

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self._command("launch"), env=self.environment, stdout=log, stderr=log)
        end = time.monotonic() + 240
        while not self._is_ready():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.5)

    def _is_ready(self) -> bool:
        import httpx

        try:
            return httpx.get(f"{self.url}/api/v1/twinkle/healthz/deep", trust_env=False, timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("service")
    tiny_qwen3(folder / "model", hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1)
    model = {"name": "tiny", "path": str(folder / "model"), "max_length": 64, "max_loras": 8, "sampler": {"backend": "transformers"}}
    running = ServerProcess(folder, model)
    yield running
    running.stop()


def test_a_lora_is_trained_saved_sampled_killed_resumed_and_deleted(server: ServerProcess) -> None:
    with TwinkleClient(server.url, server.key, session_heartbeat_interval=0.2, session_metadata={"user": "alice"}) as client:
        assert [model.model_name for model in client.get_server_capabilities().supported_models] == ["tiny"]
        model = TransformersModel("tiny")
        run_id = model.add_adapter_to_model("mine", LoraConfig(r=8, lora_alpha=32), save_dir="arithmetic").training_run_id
        model.set_loss("cross_entropy", adapter_name="mine")
        model.set_optimizer("adam", lr=1e-2, adapter_name="mine")
        row = twinkle_client.InputFeature(input_ids=[5, 6, 7, 8, 9, 10], labels=[-100, -100, 7, 8, 9, 10])
        losses = []
        for _ in range(20):
            losses.append(model.forward_backward([row, row], adapter_name="mine").loss)
            model.clip_grad_and_step(1.0, adapter_name="mine")
        assert losses[-1] < losses[0] / 2, losses
        assert client.get_capacity_info().used_loras == 1
        assert client.get_training_run(run_id).lora_rank == 8
        curve = client.get_training_curve(run_id)
        assert [point.loss for point in curve if point.loss is not None] == pytest.approx(losses)

        saved = model.save("first", adapter_name="mine", user_state={"position": 7})
        assert client.get_latest_checkpoint_path(run_id) == saved.twinkle_path
        assert client.get_weights_info(saved.twinkle_path).base_model == "tiny"
        weights = model.save("for-sampling", adapter_name="mine", checkpoint_type="sampler_weights")
        sampler = vLLMSampler("tiny")
        greedy = {"max_tokens": 4, "temperature": 0.0}
        (trained,) = sampler.sample([[5, 6]], greedy, adapter_path=weights.twinkle_path)
        (base,) = sampler.sample([[5, 6]], greedy)
        # It sampled with the trained adapter: its log-probabilities are the trainer's, and not the base model's.
        (sequence,) = trained.raise_for_error().sequences
        scored = model.forward_only([sequence.new_input_feature], adapter_name="mine").logprobs
        untrained = model.forward_only([sequence.new_input_feature]).logprobs
        assert scored is not None
        assert untrained is not None
        size = len(sequence.tokens)
        assert sequence.logprobs == pytest.approx(scored[0][-size:], abs=1e-3)
        assert sequence.logprobs != pytest.approx(untrained[0][-size:], abs=0.1)
        assert base.raise_for_error().sequences[0].tokens != sequence.tokens

        # What follows the checkpoint, to compare with after the server was killed.
        after = [model.forward_backward([row], adapter_name="mine").loss]
        model.clip_grad_and_step(1.0, adapter_name="mine")
        after.append(model.forward_backward([row], adapter_name="mine").loss)
        session = client.session_id
        server.kill()
        server.start()
        time.sleep(1.0)
        assert (client.session_id, client.is_session_lost) == (session, False)
        with pytest.raises(twinkle_client.Conflict, match="lost"):
            model.forward_backward([row], adapter_name="mine")
        assert model.resume_from_checkpoint(saved.twinkle_path, adapter_name="mine") == {"position": 7}
        again = [model.forward_backward([row], adapter_name="mine").loss]
        model.clip_grad_and_step(1.0, adapter_name="mine")
        again.append(model.forward_backward([row], adapter_name="mine").loss)
        assert again == after

        assert {each.checkpoint_id for each in client.list_checkpoints(run_id)} == {"weights/first", "sampler_weights/for-sampling"}
        assert client.delete_checkpoint(run_id, "weights/first") is True
        assert [each.checkpoint_id for each in client.list_checkpoints(run_id)] == ["sampler_weights/for-sampling"]
        with pytest.raises(twinkle_client.NotFound):
            client.get_checkpoint_path(run_id, "weights/first")


def test_conversations_are_encoded_by_the_servers_template_and_streams_come_token_by_token(server: ServerProcess) -> None:
    with TwinkleClient(server.url, server.key):
        model, sampler = TransformersModel("tiny"), vLLMSampler("tiny")
        model.add_adapter_to_model("talk", LoraConfig(r=2))
        model.set_template("tiny", adapter_name="talk")
        model.set_loss("cross_entropy", adapter_name="talk")
        conversation = twinkle_data.Trajectory(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        output = model.forward_backward([conversation], adapter_name="talk")
        assert output.loss is not None
        assert output.loss_weight >= 1
        chunks = list(sampler.sample_stream([[5, 6]], {"max_tokens": 3, "temperature": 0.0}))
        response = chunks[-1].response
        assert response is not None
        assert [token for chunk in chunks for token in chunk.tokens] == response.sequences[0].tokens


def test_errors_of_the_server_are_the_clients(server: ServerProcess) -> None:
    with TwinkleClient(server.url, server.key) as client:
        with pytest.raises(twinkle_client.NotFound, match="other") as caught:
            TransformersModel("other")
        assert caught.value.request_id
        model = TransformersModel("tiny")
        with pytest.raises(twinkle_client.NotFound, match="add_adapter_to_model"):
            model.set_loss("cross_entropy", adapter_name="nobody")
        model.add_adapter_to_model("errors", LoraConfig(r=2))
        with pytest.raises(twinkle_client.InvalidRequest, match="no_such_loss"):
            model.set_loss("no_such_loss", adapter_name="errors")
        with pytest.raises(twinkle_client.Conflict):
            model.forward_backward([{"input_ids": [1, 2]}], adapter_name="errors")
        with pytest.raises(twinkle_client.Unauthorized):
            client.list_training_runs(all_users=True)
        with pytest.raises(twinkle_client.Unauthorized):
            TwinkleClient(server.url, re.sub("[0-9a-f]{8}$", "00000000", server.key))


CONFIGURATIONS = {path.name: path for path in sorted((ROOT / "examples" / "service").glob("*.yaml"))}
CONFIGURATIONS["README.md"] = ROOT / "packages" / "twinkle-server" / "README.md"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_check_config_finds_nothing_wrong_with_the_documented_configurations(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from twinkle_server.cli import main

    text = CONFIGURATIONS[name].read_text()
    if name == "README.md":
        (text,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    # Their folders are those of a server: absolute ones are put under this test's, relative ones are as they are written.
    text = re.sub(r"(?<=: )/(?=models/|srv/)", f"{tmp_path}/", text)
    for model in yaml.safe_load(text)["models"]:
        folder = tmp_path / model["path"]
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    (tmp_path / "server.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["check-config", "-c", "server.yaml"]) == 0
    assert main(["print-config", "-c", "server.yaml"]) == 0


EXAMPLES = [pytest.param(path.name, marks=[] if path.name == "sft.py" else pytest.mark.full) for path in (ROOT / "examples" / "service").glob("*.py")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_service_examples_run(server: ServerProcess, name: str) -> None:
    environment = {
        **server.environment,
        "TWINKLE_SERVER_URL": server.url,
        "TWINKLE_SERVER_TOKEN": server.key,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": server.key,
        "TINKER_TELEMETRY": "0",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, str(ROOT / "examples" / "service" / name), "--model", "tiny", "--steps", "3"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "step 2" in ended.stdout
    assert "checkpoint" in ended.stdout or "twinkle://" in ended.stdout or "tinker://" in ended.stdout


@pytest.mark.full
def test_the_commands_and_scripts_of_the_documents_run_as_they_are_written(tmp_path: Path) -> None:
    """`twinkle-server launch` without a file, both examples without arguments, and the client's README, with the variables that it prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "TINKER_TELEMETRY": "0"}
    command = [sys.executable, "-m", "twinkle_server.cli", "launch", "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env={**environment, "TMPDIR": str(tmp_path)}, text=True)
    try:
        assert server.stdout is not None
        told = next((line for line in server.stdout if "TWINKLE_SERVER_URL=" in line), "")
        assert told, (tmp_path / "log").read_text()
        given = dict(word.split("=", 1) for word in told.split()[1:])
        environment |= given | {"TINKER_BASE_URL": given["TWINKLE_SERVER_URL"], "TINKER_API_KEY": given["TWINKLE_SERVER_TOKEN"]}
        readme = (ROOT / "packages" / "twinkle-client" / "README.md").read_text()
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
        (block,) = [block for language, block in blocks if not language and "TwinkleClient(" in block]
        (tmp_path / "readme.py").write_text(block)
        for script, expected in [
            (ROOT / "examples" / "service" / "sft.py", "step 30"),
            (ROOT / "examples" / "service" / "tinker_loop.py", "saved tinker://"),
            (tmp_path / "readme.py", "twinkle://"),
        ]:
            ended = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200)
            assert ended.returncode == 0, ended.stderr
            assert expected in ended.stdout
    finally:
        server.terminate()
        server.wait(60)
