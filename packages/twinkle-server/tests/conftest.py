"""Servers for the tests: in this process without models, and as a process with one small model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from twinkle_server import ServerConfig, Service, Store, create_key, parse_config

MODEL = "tiny/qwen3"


class ServerProcess:
    """`twinkle-server launch` over a data folder; it can be killed and started again. Keys of alice, bob and an admin."""

    def __init__(self, folder: Path, models: list[dict[str, Any]], **settings: Any) -> None:
        self.folder = folder
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.config = {"port": self.port, "data_dir": str(folder / "data"), "models": models, **settings}
        self._file = folder / "server.yaml"
        self._file.write_text(yaml.safe_dump(self.config))
        store = Store(parse_config(self.config).url)
        self.keys = {name: create_key(store, name, scopes=("use", "admin") if name == "admin" else ("use",))[1] for name in ("alice", "bob", "admin")}
        store.close()
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "server.log"

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, who: str = "alice", **options: Any) -> httpx.Client:
        """An HTTP client of a tenant."""
        return httpx.Client(
            base_url=f"{self.url}/api/v1", headers={"Authorization": f"Bearer {self.keys[who]}"}, timeout=60, trust_env=False, **options
        )

    def start(self, timeout_s: float = 200) -> None:
        """Starts it and waits until it is ready."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "twinkle_server.cli", "launch", "-c", str(self._file)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.folder)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-5000:]
            try:
                if httpx.get(f"{self.url}/api/v1/twinkle/healthz/deep", trust_env=False, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready after {timeout_s} s: {self.log.read_text()[-5000:]}")

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends it: SIGKILL as a crash does, SIGTERM as one who stops it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(60)


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    """Of a server without models."""
    return parse_config({"data_dir": str(tmp_path / "data")})


@pytest.fixture
def make_service(config: ServerConfig) -> Callable[[], Service]:
    """Makes services over one data folder."""
    return lambda: Service(config)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3 with random weights."""
    from twinkle_train.testing import tiny_qwen3

    return tiny_qwen3(
        tmp_path_factory.mktemp("model") / "tiny", hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )


@pytest.fixture(scope="session")
def model_settings(tiny_model: Path) -> dict[str, Any]:
    """The configuration of that model, with a sampler; two adapters in memory at a time."""
    return {
        "name": MODEL,
        "path": str(tiny_model),
        "max_loras": 2,
        "max_length": 256,
        "max_rank": 16,
        "sampler": {"backend": "transformers", "max_loras": 2},
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_settings: dict[str, Any]) -> Iterator[ServerProcess]:
    """A running server with the small model, for the tests of a module."""
    running = ServerProcess(tmp_path_factory.mktemp("server"), [model_settings], limits={"step_idle_s": 1})
    try:
        running.start()
        yield running
    finally:
        running.end()


@pytest.fixture
def model_name() -> str:
    """The small model's."""
    return MODEL


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers with the arguments of `ServerProcess`; they end with the test."""
    started: list[ServerProcess] = []

    def start(folder: Path, models: list[dict[str, Any]], **settings: Any) -> ServerProcess:
        started.append(ServerProcess(folder, models, **settings))
        started[-1].start(400)
        return started[-1]

    yield start
    for server in started:
        server.end(signal.SIGTERM)
