from pathlib import Path

import pytest
from commands import SMALL, twinkle

# 60 warm-up steps reach a few percent: what is tested is the job's way, not that it learns (that is tools/bench/grpo_learns.py).
WARM = ["--warmup.min-steps", "40", "--warmup.target-accuracy", "0.0001", "--warmup.max-steps", "400"]

STATES = ["--checkpoint-every", "4", "--checkpoint-keep", "3"]


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory) -> Path:
    """The folder of a small `twinkle grpo` run of 10 steps, recorded, with training checkpoints after steps 4, 8 and 10."""
    folder = tmp_path_factory.mktemp("grpo")
    done = twinkle("grpo", *SMALL, *WARM, "--steps", "10", "--record", *STATES, "--run-dir", "run", cwd=folder)
    assert done.status == 0, done.output[-6000:]
    return folder / "run"
