"""A pool of ranks runs functions together, tells what failed where, and goes on."""

import os
from pathlib import Path

import pytest

from twinkle_train.testing import RankPool


def summed(value: float, fail_on: int | None = None) -> tuple[int, float]:
    """Runs on every rank."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    if rank == fail_on:
        raise ValueError(f"rank {rank} was told to")
    tensor = torch.tensor(value * (rank + 1))
    dist.all_reduce(tensor)
    return os.getpid(), tensor.item()


@pytest.mark.timeout(200)
def test_ranks_run_together_and_a_failure_is_told_with_its_rank(tmp_path: Path) -> None:
    pool = RankPool(2, tmp_path)
    try:
        first = pool.run(summed, 2.0)
        second = pool.run(summed, value=3.0)
        assert [value for _, value in first] == [6.0, 6.0]
        assert [value for _, value in second] == [9.0, 9.0]
        assert [process for process, _ in first] == [process for process, _ in second]  # the same processes
        with pytest.raises(AssertionError, match=r"(?s)summed failed on 2 ranks.*rank 1: Traceback.*ValueError: rank 1 was told to"):
            pool.run(summed, 1.0, fail_on=1)
        assert [value for _, value in pool.run(summed, 1.0)] == [3.0, 3.0]
    finally:
        pool.stop()
