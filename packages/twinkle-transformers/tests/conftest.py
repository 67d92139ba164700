"""Pools of rank processes, tiny checkpoints, rows, and what plain PyTorch makes of them."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Two libraries of threads on two cores slow each other down, and sums of one thread are in one order.
os.environ["OMP_NUM_THREADS"] = "1"

_pools: list[Any] = []


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The ranks end with this folder's tests: the threads of their process groups cost processor time also when nothing is done."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        for pool in _pools:
            pool.stop()


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Any]]:
    """A function from a number of ranks to a pool of them; processes start when they are first used."""
    from twinkle_train.testing import RankPool

    made: dict[int, Any] = {}

    def pool(world_size: int) -> Any:
        if world_size not in made:
            made[world_size] = RankPool(world_size, tmp_path_factory.mktemp(f"ranks{world_size}"))
            _pools.append(made[world_size])
        return made[world_size]

    yield pool
    for each in made.values():
        each.stop()


@pytest.fixture(scope="session")
def two_ranks(pools: Callable[[int], Any]) -> Any:
    return pools(2)


def _neighbour(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a tiny checkpoint once: checkpoint('qwen3', num_hidden_layers=4)."""
    zoo = _neighbour("transformers_zoo")
    made: dict[str, Path] = {}

    def make(family: str, **sizes: Any) -> Path:
        key = f"{family}-{sorted(sizes.items())}"
        if key not in made:
            made[key] = zoo.make(tmp_path_factory.mktemp(family), family, **sizes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def expected(checkpoint: Callable[..., Path], features: list[Any]) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """A function from a family (and sizes) to its checkpoint and what plain PyTorch makes of each of the features alone."""
    plain = _neighbour("transformers_plain")
    known: dict[Path, dict[str, Any]] = {}

    def of(family: str, **sizes: Any) -> tuple[Path, dict[str, Any]]:
        path = checkpoint(family, **sizes)
        if path not in known:
            known[path] = plain.plain(path, features)
        return path, known[path]

    return of


@pytest.fixture(scope="session")
def plain() -> Callable[..., dict[str, Any]]:
    """What plain PyTorch makes of any rows of a checkpoint: plain(path, rows)."""
    return _neighbour("transformers_plain").plain


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
