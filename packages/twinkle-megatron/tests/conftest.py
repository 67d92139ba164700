"""Pools of rank processes, tiny checkpoints, a batch, and what the reference trainer makes of it."""

import contextlib
import importlib.util
import inspect
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Two libraries of threads on two cores slow each other down, and sums of one thread are in one order.
os.environ["OMP_NUM_THREADS"] = "1"

_RANK_SCRIPT = Path(__file__).with_name("megatron_rank.py")
_START_TIMEOUT_S = 150.0


class RanksFailed(AssertionError):
    """A job failed or hung; the message has every rank's traceback."""


class RankPool:
    """Processes that form one gloo group and run a function of a test file together, as often as asked."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[queue.Queue[tuple[bool, Any]]] = []
        self._starts = 0
        self._used = False

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0, **kwargs: Any) -> list[Any]:
        """What `function(*args, **kwargs)` returns on each rank, in order of rank. The function is found by its name in its file."""
        if not self._processes:
            self._start()
        deadline = time.monotonic() + timeout_s + (0 if self._used else _START_TIMEOUT_S)
        job = pickle.dumps((inspect.getfile(function), function.__name__, args, kwargs))
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(job)
            process.stdin.flush()
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.world_size and time.monotonic() < deadline:
            for rank in range(self.world_size):
                if rank not in answers:
                    with contextlib.suppress(queue.Empty):
                        answers[rank] = self._answers[rank].get(timeout=0.02)
                        if not answers[rank][0]:  # its peers may wait for it in a collective: not for long
                            deadline = min(deadline, time.monotonic() + 5)
        self._used = True
        if len(answers) == self.world_size and all(fine for fine, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.world_size)]
        self.stop()
        reports = [
            f"rank {rank}: " + (str(answers[rank][1]) if rank in answers else f"no answer in time\n{self._log(rank)}")
            for rank in range(self.world_size)
        ]
        raise RanksFailed(f"{function.__name__} failed on {self.world_size} ranks\n" + "\n".join(reports))

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._answers = [], []

    def _start(self) -> None:
        self._starts += 1
        self._used = False
        store = self._folder / f"store-{self._starts}"
        for rank in range(self.world_size):
            with (self._folder / f"rank-{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-W", "ignore", str(_RANK_SCRIPT), str(rank), str(self.world_size), str(store), "120"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            answers: queue.Queue[tuple[bool, Any]] = queue.Queue()
            threading.Thread(target=_read, args=(process, answers), daemon=True).start()
            self._processes.append(process)
            self._answers.append(answers)

    def _log(self, rank: int) -> str:
        return (self._folder / f"rank-{rank}.log").read_text(errors="replace")[-4000:]


def _read(process: subprocess.Popen[bytes], answers: "queue.Queue[tuple[bool, Any]]") -> None:
    assert process.stdout is not None
    while True:
        try:
            answers.put(pickle.load(process.stdout))
        except (EOFError, pickle.UnpicklingError):
            if process.wait():
                answers.put((False, f"the process ended with exit code {process.returncode}"))
            return


_pools: list[RankPool] = []


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The ranks end with this folder's tests: the threads of their process groups cost processor time also when nothing is done."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        for pool in _pools:
            pool.stop()


def _pool(world_size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(world_size, tmp_path_factory.mktemp(f"ranks{world_size}"))
    _pools.append(pool)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(1, tmp_path_factory)


@pytest.fixture(scope="session")
def pools(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> Callable[[int], RankPool]:
    """A function from a number of ranks (1, 2 or 4) to a pool of them; processes start when they are first used."""
    return {1: one_rank, 2: two_ranks, 4: four_ranks}.__getitem__


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(2, tmp_path_factory)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _pool(4, tmp_path_factory)


_SIZES = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_SHARED: dict[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_mtp_layers": 0}
_MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "sliding_window": None, "head_dim": 16},
    "deepseek_v3": {
        **_SHARED,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe": {**_SHARED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.3},
}


def _tiny_moe(folder: Path, family: str, sizes: dict[str, Any]) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **_SIZES | _MOE[family] | sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                # Norms of exactly one, biases of exactly zero and routers that are nearly undecided would hide faults.
                if name.endswith("e_score_correction_bias"):
                    tensor.copy_(torch.randn_like(tensor) * 0.1)
                elif name.endswith("gate.weight"):
                    tensor.copy_(torch.randn_like(tensor) * 0.3)
                elif tensor.dim() == 1 and "inv_freq" not in name:
                    tensor.add_(torch.randn_like(tensor), alpha=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a tiny checkpoint once: checkpoint('qwen3', tie_word_embeddings=False, ...), the families with experts too."""
    from twinkle_train import testing

    made: dict[str, Path] = {}

    def make(family: str, **sizes: Any) -> Path:
        key = f"{family}-{sorted(sizes.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = _tiny_moe(folder, family, sizes) if family in _MOE else getattr(testing, f"tiny_{family}")(folder, **sizes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def plain() -> Any:
    """The module megatron_plain."""
    spec = importlib.util.spec_from_file_location("megatron_plain", Path(__file__).with_name("megatron_plain.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def features() -> list[Any]:
    """Seven rows of different lengths: prompts untrained, some tokens weighted, temperatures that differ."""
    from twinkle_data import InputFeature

    random = np.random.default_rng(7)
    rows: list[Any] = []
    for length in (9, 14, 5, 12, 21, 7, 8):
        input_ids = random.integers(3, 250, length)
        labels = np.where(np.arange(length) < 3, -100, input_ids)
        weights = random.uniform(0.5, 1.5, length).astype(np.float32)
        rows.append(InputFeature(input_ids=input_ids, labels=labels, loss_weights=weights, temperature=float(random.uniform(0.7, 1.3))))
    return rows
