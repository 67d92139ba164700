"""The service: a served forward_backward beside the call in process, control requests under training, 1,000 sessions, eight tenants' adapters.

The server is a process of its own on the CPU with one small model, written for the occasion; both sides of a comparison alternate in one run.
`--only` names parts: overhead, control, sessions, rotation.
"""

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import yaml
from paired import pairs

from twinkle_client import InputFeature, LoraConfig, Model, TwinkleClient

MODEL = "bench"
PARTS = ("overhead", "control", "sessions", "rotation")
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16}


class Server:
    """`twinkle-server launch` on a free port, with keys of eight tenants."""

    def __init__(self, folder: Path, model: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self._file = f"http://127.0.0.1:{self.port}", folder / "server.yaml"
        settings = {
            "port": self.port,
            "data_dir": str(folder / "data"),
            "log_level": "warning",
            "models": [{"name": MODEL, "path": str(model), "max_loras": 8, "max_length": 4096}],
            # One key asks for all of a bench.
            "limits": {"requests_per_s": 1_000_000, "request_burst": 1_000_000, "sessions": 10_000},
        }
        self._file.write_text(yaml.safe_dump(settings))
        self.keys = [self._run("keys", "create", f"tenant{number}").strip() for number in range(8)]
        self.log = folder / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self._command("launch"), stdout=log, stderr=log)
        end = time.monotonic() + 300
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(self.log.read_text())
            time.sleep(0.2)

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "twinkle_server.cli", *words, "-c", str(self._file)]

    def _run(self, *words: str) -> str:
        return subprocess.run(self._command(*words), check=True, capture_output=True, text=True).stdout

    def _is_ready(self) -> bool:
        import httpx

        try:
            return httpx.get(f"{self.url}/api/v1/twinkle/healthz/deep", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def rss_bytes(self) -> int:
        """The memory of the server's process."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS"))

    def cpu_s(self) -> float:
        """The processor time of the server's process, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class Connection:
    """A kept HTTP connection that costs the asking side next to nothing: prepared bytes out, a head and a body in."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> "Connection":
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def ask(self, request: bytes) -> bytes:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(head.decode())
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


def request(method: str, path: str, key: str, body: str = "") -> bytes:
    """A request's bytes."""
    head = f"{method} /api/v1/twinkle{path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def percentile(values: list[float], share: float) -> float:
    """The value below which that share lies."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def batch(rows: int, tokens: int) -> list[InputFeature]:
    """Rows whose every token is trained on."""
    return [InputFeature(input_ids=[(7 * row + 3 * position) % 200 + 5 for position in range(tokens)]) for row in range(rows)]


def set_up(model: Any, adapter: str) -> None:
    """A loss and an optimizer."""
    model.set_loss("cross_entropy", adapter_name=adapter)
    model.set_optimizer("adamw", lr=1e-4, adapter_name=adapter)


def overhead(server: Server, folder: Path, rounds: int) -> None:
    """A served call beside the same call in process."""
    import twinkle_data
    from twinkle_train import LoraConfig as LocalLoraConfig
    from twinkle_transformers import TransformersModel

    local: Any = TransformersModel(str(folder / "model"))
    local.add_adapter_to_model("a", LocalLoraConfig(**LORA))
    set_up(local, "a")
    with TwinkleClient(server.url, server.keys[0]):
        served = Model(MODEL)
        served.add_adapter_to_model("overhead", LoraConfig(**LORA))
        set_up(served, "overhead")
        for name, (rows, tokens), count in (("small", (2, 32), rounds), ("large", (16, 512), max(rounds // 20, 5))):
            sent = batch(rows, tokens)
            own = [twinkle_data.InputFeature(input_ids=row.input_ids) for row in sent]

            def raw(own: Any = own) -> None:
                local.forward_backward(own, adapter_name="a")
                local.zero_grad(adapter_name="a")

            def ours(sent: Any = sent) -> None:
                served.forward_backward(sent, adapter_name="overhead")

            def pause() -> None:  # gradients accumulate; dropping them is not part of what is measured
                served.zero_grad(adapter_name="overhead")

            raw_s, ours_s, ratio, cpu_s = _paired(raw, ours, pause, count, server)
            print(
                f"forward_backward, {name} ({rows} rows of {tokens} tokens): in process {raw_s * 1e3:.1f} ms, served {ours_s * 1e3:.1f} ms, "
                f"+{(ours_s - raw_s) * 1e3:.1f} ms p50, ratio {ratio:.2f} (median of {count} pairs); processor time of client and server "
                f"{cpu_s[1] * 1e3:.1f} ms a call, in process {cpu_s[0] * 1e3:.1f} ms",
                flush=True,
            )


def _paired(
    raw: Callable[[], Any], ours: Callable[[], Any], after: Callable[[], Any], count: int, server: Server
) -> tuple[float, float, float, tuple[float, float]]:
    """Medians of both, the median of their ratios, and the processor time of each call, which other processes on the machine do not change."""
    times: list[tuple[float, float]] = []
    cpu_s = [0.0, 0.0]
    for index in range(count + 3):
        seconds = {}
        for which, call in ((0, raw), (1, ours)) if index % 2 else ((1, ours), (0, raw)):
            begin, cpu_begin = time.perf_counter(), time.process_time() + server.cpu_s()
            call()
            seconds[which] = time.perf_counter() - begin
            if index >= 3:
                cpu_s[which] += time.process_time() + server.cpu_s() - cpu_begin
        after()
        if index >= 3:
            times.append((seconds[0], seconds[1]))
    raw_s, ours_s = (statistics.median(column) for column in zip(*times, strict=True))
    return raw_s, ours_s, statistics.median(b / a for a, b in times), (cpu_s[0] / count, cpu_s[1] / count)


def control(server: Server, seconds: float) -> None:
    """Control requests as fast as the server answers them, while it trains."""
    stop = threading.Event()
    steps = 0

    def train() -> None:
        nonlocal steps
        with TwinkleClient(server.url, server.keys[0]) as client:
            model = Model(MODEL, client=client)
            model.add_adapter_to_model("control", LoraConfig(**LORA))
            set_up(model, "control")
            rows = batch(4, 256)
            while not stop.is_set():
                model.forward_backward(rows, adapter_name="control")
                model.clip_grad_and_step(adapter_name="control")
                steps += 1

    async def load(duration_s: float, connections: int) -> list[float]:
        session = request("POST", "/create_session", server.keys[1], "{}")
        opened = [await Connection(server.port).open() for _ in range(connections)]
        made = (await opened[0].ask(session)).decode().split('"')[3]
        asked = [
            request("GET", "/capacity_info", server.keys[1]),
            request("POST", "/session_heartbeat", server.keys[1], f'{{"session_id":"{made}"}}'),
            request("GET", "/training_runs?limit=20", server.keys[1]),
            request("GET", "/get_server_capabilities", server.keys[1]),
        ]
        taken: list[float] = []
        end = time.perf_counter() + duration_s

        async def one(connection: Connection, first: int) -> None:
            number = first
            while time.perf_counter() < end:
                begin = time.perf_counter()
                await connection.ask(asked[number % len(asked)])
                taken.append(time.perf_counter() - begin)
                number += 1

        await asyncio.gather(*(one(connection, number) for number, connection in enumerate(opened)))
        for connection in opened:
            connection.close()
        return taken

    for training in (False, True):
        thread = threading.Thread(target=train)
        if training:
            thread.start()
            while steps < 2:
                if not thread.is_alive():
                    raise RuntimeError("the training beside the load has ended")
                time.sleep(0.05)
        before, busy_s = steps, server.cpu_s()
        taken = asyncio.run(load(seconds, 8))
        busy_s = server.cpu_s() - busy_s
        if training:
            stop.set()
            thread.join()
        print(
            f"control requests, {'while a step runs' if training else 'idle'}: {len(taken) / seconds:.0f} requests/s over 8 connections, "
            f"p50 {percentile(taken, 0.5) * 1e3:.1f} ms, p99 {percentile(taken, 0.99) * 1e3:.1f} ms; "
            f"the server used {busy_s / seconds:.2f} cores, {steps - before} steps",
            flush=True,
        )


def sessions(server: Server, seconds: float, count: int = 1000, interval_s: float = 10.0) -> None:
    """Many live sessions, each heartbeating at the client's default interval."""

    async def live() -> tuple[list[float], list[int]]:
        opened = [await Connection(server.port).open() for _ in range(50)]
        lock = [asyncio.Lock() for _ in opened]
        key = server.keys[2]
        names: list[str] = []
        for number in range(count):
            names.append((await opened[number % 50].ask(request("POST", "/create_session", key, "{}"))).decode().split('"')[3])
        taken: list[float] = []
        memory: list[int] = []
        begin = time.perf_counter()

        async def beat(number: int) -> None:
            body = request("POST", "/session_heartbeat", key, f'{{"session_id":"{names[number]}"}}')
            await asyncio.sleep(interval_s * number / count)
            while time.perf_counter() - begin < seconds:
                due = time.perf_counter()
                async with lock[number % 50]:
                    await opened[number % 50].ask(body)
                taken.append(time.perf_counter() - due)
                await asyncio.sleep(interval_s)

        async def watch() -> None:
            while time.perf_counter() - begin < seconds:
                memory.append(server.rss_bytes())
                await asyncio.sleep(seconds / 20)

        await asyncio.gather(watch(), *(beat(number) for number in range(count)))
        for connection in opened:
            connection.close()
        return taken, memory

    taken, memory = asyncio.run(live())
    print(
        f"{count} live sessions, a heartbeat each {interval_s:g} s, for {seconds:g} s: {len(taken)} heartbeats, "
        f"p50 {percentile(taken, 0.5) * 1e3:.1f} ms, p99 {percentile(taken, 0.99) * 1e3:.1f} ms; "
        f"memory {memory[1] / 2**20:.0f} -> {memory[-1] / 2**20:.0f} MiB",
        flush=True,
    )


def rotation(server: Server, steps: int) -> None:
    """Eight tenants' adapters in turn beside one tenant with the same total work."""
    clients = [TwinkleClient(server.url, key) for key in server.keys]
    models = [Model(MODEL, client=client) for client in clients]
    rows = batch(8, 128)
    for model in models:
        model.add_adapter_to_model("rotation", LoraConfig(**LORA))
        set_up(model, "rotation")

    def train(model: Model, count: int) -> None:
        for _ in range(count):
            model.forward_backward(rows, adapter_name="rotation")
            model.clip_grad_and_step(adapter_name="rotation")

    def one() -> None:
        train(models[0], 8 * steps)

    def eight() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda model: train(model, steps), models))

    one_s, eight_s, ratio = pairs(one, eight, 3, warm_up=1)
    for client in clients:
        client.close()
    print(
        f"eight adapters in rotation, {steps} steps each (8 rows of 128 tokens): {eight_s:.1f} s, one with {8 * steps} steps: {one_s:.1f} s; "
        f"throughput {1 / ratio:.2f} of one tenant's (median of 3 pairs)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=200, help="pairs of small calls")
    parser.add_argument("--seconds", type=float, default=15.0, help="of load")
    parser.add_argument("--steps", type=int, default=4, help="of each tenant")
    arguments = parser.parse_args()
    from twinkle_train.testing import tiny_qwen3

    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as name:
        folder = Path(name)
        tiny_qwen3(folder / "model", hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2)
        server = Server(folder, folder / "model")
        try:
            if "overhead" in arguments.only:
                overhead(server, folder, arguments.rounds)
            if "control" in arguments.only:
                control(server, arguments.seconds)
            if "sessions" in arguments.only:
                sessions(server, 2 * arguments.seconds)
            if "rotation" in arguments.only:
                rotation(server, arguments.steps)
        finally:
            server.close()


if __name__ == "__main__":
    main()
