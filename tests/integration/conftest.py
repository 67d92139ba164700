import os
from pathlib import Path

import pytest
from commands import SMALL, twinkle
from filelock import FileLock

# 60 warm-up steps reach a few percent: what is tested is the job's way, not that it learns (that is tools/bench/grpo_learns.py).
WARM = ["--warmup.min-steps", "40", "--warmup.target-accuracy", "0.0001", "--warmup.max-steps", "400"]

STATES = ["--checkpoint-every", "4", "--checkpoint-keep", "3"]


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory) -> Path:
    """The folder of a small `twinkle grpo` run of 10 steps, recorded, with training checkpoints after steps 4, 8 and 10.

    Processes of pytest that run at the same time share one.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "recorded-grpo"
    shared.mkdir(exist_ok=True)
    ended, failure = shared / "ended", shared / "failure"
    with FileLock(shared / "lock", timeout=600):
        if not ended.exists() and not failure.exists():
            done = twinkle("grpo", *SMALL, *WARM, "--steps", "10", "--record", *STATES, "--run-dir", "run", cwd=shared, timeout_s=400)
            (failure if done.status else ended).write_text(done.output)
    assert not failure.exists(), failure.read_text()[-6000:]
    return shared / "run"
