"""Errors of whole jobs: early, naming the fix, and leaving nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import ROOT, SMALL, run_process, twinkle

pytestmark = pytest.mark.timeout(300)


def test_a_group_larger_than_the_machine_is_refused_within_seconds(tmp_path):
    ranks = 100 * (os.cpu_count() or 1)
    start = time.monotonic()
    done = twinkle("grpo", *SMALL, "--actor.dp", str(ranks), "--prompts-per-step", str(ranks), "--run-dir", "run", cwd=tmp_path, timeout_s=60)
    assert done.status == 1
    assert "Traceback" not in done.output
    assert f"device group 'actor' needs {ranks} CPU processes, but only" in done.output
    # The start of a Python process that has to import torch is most of it; nothing was waited for.
    assert time.monotonic() - start < 30


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_ends_the_job_before_it_starts(tmp_path):
    script = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -m twinkle grpo --run-dir "$1/run"'
    done = run_process(["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable], cwd=tmp_path, timeout_s=60)
    if "unshare" in done.output:
        pytest.skip(done.output)
    assert done.status == 1
    assert "No space left on device" in done.output
    assert "--run-dir" in done.output
    assert "Traceback" not in done.output


MESH_LARGER_THAN_GROUP = """
import sys
import twinkle
from twinkle import DeviceGroup, DeviceMesh, MegatronModel
if __name__ == "__main__":
    with twinkle.initialize("ray", groups=[DeviceGroup(name="actor", ranks=1, device_type="cpu")]):
        MegatronModel("model", device_mesh=DeviceMesh.from_sizes(tp_size=2), remote_group="actor")
"""

MODEL_ABSENT = MESH_LARGER_THAN_GROUP.replace("tp_size=2", "tp_size=1").replace('"model"', '"no/such/model"')


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (MESH_LARGER_THAN_GROUP, ["2 ranks", "'actor' has 1 worker", "change the mesh's sizes or the group's ranks"]),
        (MODEL_ABSENT, ["no/such/model", "config.json"]),
    ],
    ids=["mesh larger than its group", "model path absent"],
)
def test_a_script_of_ones_own_gets_an_error_that_says_what_to_do(script, words, tmp_path):
    (tmp_path / "script.py").write_text(script)
    done = run_process([sys.executable, "script.py"], cwd=tmp_path, timeout_s=150)
    assert done.status == 1
    missing = [word for word in words if word not in done.output]
    assert not missing, done.output[-3000:]


def test_ctrl_c_ends_the_job_and_leaves_no_process_and_no_ray_session(tmp_path):
    sessions = tmp_path / "t"
    sessions.mkdir()
    environment = os.environ | {"TMPDIR": str(sessions), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "twinkle", "grpo", *SMALL, "--run-dir", "run"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Of a shell's background job, pytest among them, Ctrl-C is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    children: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "starting the actor" in line:
                break
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any("ray::" in " ".join(_command(child)) for child in children):
            time.sleep(0.5)
            children = psutil.Process(process.pid).children(recursive=True)
        assert children, "".join(lines)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output
        assert "interrupted" in output
        assert "Traceback" not in output
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, [_command(child) for child in alive]
        assert not [path for path in sessions.iterdir() if path.name.startswith(("tw-", "ray"))]
    finally:
        for child in children:
            if child.is_running():
                child.kill()
        process.kill()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_leaving_out_a_sync_fails_the_checks_that_a_sync_passes_and_a_step_ahead_is_weighted_for_it(tmp_path):
    """Negative control of the agreement between sampler and trainer; also the whole loop in local mode, and one that samples a step ahead."""
    done = run_process([sys.executable, str(Path(__file__).with_name("leave_out_a_sync.py"))], cwd=tmp_path, timeout_s=200)
    assert done.status == 0, done.output[-6000:]
    rows = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"sync"')]
    assert [row["sync"] for row in rows] == [True, True, False, True]
    for row in rows:
        if row["sync"]:
            assert row["logprob_gap"] <= 1e-4
            assert row["ratio_gap"] <= 2e-4
        else:
            assert row["logprob_gap"] > 1e-4
            assert row["ratio_gap"] > 2e-4
    first, *ahead, last = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"ahead"')]
    assert (first["behind"], first["next_batch"], last["next_batch"]) == (0, True, False)
    assert max(abs(weight - 1) for weight in first["importance"]) <= 2e-4
    assert 0 < first["checked"] <= 1e-4
    for row in (*ahead, last):
        assert row["checked"] == first["checked"]  # later tokens are of other weights than those that train on them
        assert (row["behind"], row["spread"]) == (1, 1)  # one version older, all of one version
        assert row["logprob_gap"] > 1e-4
        assert row["ratio_gap"] <= 2e-4  # of the loss, which begins at the trainer's own
        smallest, mean, largest = row["importance"]
        assert smallest < 1 - 1e-4 < 1 + 1e-4 < largest <= 2.0
        assert abs(mean - 1) < 0.2


def test_the_readme_shows_the_example_script_as_it_is():
    assert (ROOT / "examples" / "grpo.py").read_text().strip() in (ROOT / "README.md").read_text()
