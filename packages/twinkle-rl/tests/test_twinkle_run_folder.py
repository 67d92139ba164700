import json
import os
import subprocess
import sys

import pytest

from twinkle import RunFolderError
from twinkle.run import RunFolder, write_curves

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small or read-only file system needs root")

WRITE = """
import sys
from pathlib import Path
from twinkle import RunFolderError
from twinkle.run import RunFolder
try:
    RunFolder(Path(sys.argv[1]) / 'run').append_line('metrics.jsonl', {'text': 'x' * 10})
    print('written')
except RunFolderError as error:
    print(error)
"""

WRITE_TENSORS = """
import sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from twinkle import RunFolderError
from twinkle.run import RunFolder
try:
    with RunFolder(Path(sys.argv[1]) / 'run').writing('model.safetensors') as path:
        save_file({'a': np.zeros(2 << 20)}, path)
    print('written')
except RunFolderError as error:
    print(error)
"""


def _write_on(tmp_path, options: str, code: str = WRITE) -> str:
    """Try a run folder on a file system of its own, mounted where only this child sees it."""
    script = f'mount -t tmpfs -o {options} tmpfs "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, code], capture_output=True, text=True, timeout=60, check=False
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    return done.stdout.strip() + done.stderr


@needs_root
def test_a_full_disk_is_told_with_the_room_left_and_the_fix(tmp_path):
    message = _write_on(tmp_path, "size=64k")
    assert "No space left on device" in message
    assert "MiB free there" in message
    assert "--run-dir" in message


@needs_root
def test_a_disk_that_fills_while_tensors_are_written_is_told_the_same_way(tmp_path):
    message = _write_on(tmp_path, "size=4m", WRITE_TENSORS)
    assert "No space left on device" in message
    assert "--run-dir" in message
    assert "Traceback" not in message


@needs_root
def test_a_read_only_disk_is_told_with_the_fix(tmp_path):
    message = _write_on(tmp_path, "size=8m,ro")
    assert "Read-only file system" in message
    assert "--run-dir" in message


@needs_root
def test_a_disk_with_room_is_written(tmp_path):
    assert _write_on(tmp_path, "size=8m") == "written"


def test_a_folder_that_holds_something_is_refused_and_kept(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(RunFolderError, match="not empty"):
        RunFolder(tmp_path)
    assert (tmp_path / "summary.json").read_text() == "{}"


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="--run-dir"):
        RunFolder(tmp_path / "file" / "run")


def test_a_late_worker_is_not_taken_for_a_full_disk(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(TimeoutError, match="rank 1 still runs"), folder.writing("checkpoint"):
        raise TimeoutError("rank 1 still runs")
    with pytest.raises(RunFolderError, match="--run-dir"), folder.writing("checkpoint"):
        raise OSError(28, "No space left on device")


def test_default_folders_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [RunFolder.default("grpo") for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3


def test_json_is_written_whole_and_lines_are_appended(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.write_json("summary.json", {"a": 1})
    folder.append_line("metrics.jsonl", {"step": 1})
    folder.append_line("metrics.jsonl", {"step": 2})
    assert json.loads((folder.path / "summary.json").read_text()) == {"a": 1}
    assert [json.loads(line)["step"] for line in (folder.path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert sorted(path.name for path in folder.path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_a_reopened_folder_drops_what_comes_after_a_step_and_a_line_that_was_cut_off(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for step in (0, 1, 2, 3):
        folder.append_line("metrics.jsonl", {"step": step})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    again = RunFolder.reopen(tmp_path / "run")
    assert again.cut_lines("metrics.jsonl", 2) == [{"step": 0}, {"step": 1}, {"step": 2}]
    again.append_line("metrics.jsonl", {"step": 3})
    assert again.cut_lines("metrics.jsonl", 9)[-1] == {"step": 3}
    assert again.cut_lines("rollouts.jsonl", 9) == []
    with pytest.raises(RunFolderError, match="is not there"):
        RunFolder.reopen(tmp_path / "absent")


MEASURES_ITS_CHILD = """
import subprocess, sys
from twinkle.run import PeakMemory

with PeakMemory(interval_s=0.05) as memory:
    alone = memory.sample()
    code = "x = bytearray(200 << 20); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline().strip() == "ready"
    both = memory.sample()
    child.kill()
    child.communicate()
    after = memory.sample()
print(both - alone, after - alone, memory.peak_bytes - alone)
"""


def test_peak_memory_counts_child_processes():
    # In a process of its own: pytest's has other children, whose memory changes meanwhile.
    done = subprocess.run([sys.executable, "-c", MEASURES_ITS_CHILD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    with_child, without, peak = (int(number) >> 20 for number in done.stdout.split())
    assert with_child > 190
    assert without < 50
    assert peak >= with_child


def test_curves_are_a_png(tmp_path):
    rows = [{"step": step, "reward": 0.1 * step, "kl": 0.0, "sync_s": 0.1, "sample_s": 0.2, "reward_s": 0.0, "train_s": 0.3} for step in range(1, 6)]
    write_curves(tmp_path / "curves.png", rows, [{"step": 0, "sampled": 0.4, "greedy": 0.5}, {"step": 5, "sampled": 0.5, "greedy": 0.6}])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
