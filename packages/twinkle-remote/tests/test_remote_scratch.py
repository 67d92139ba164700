"""Temporary folders go with their process, however it ends, and nobody else's are touched."""

import gc
import shutil
import signal
import subprocess
import sys

import pytest

from twinkle_remote import ScratchFolder
from twinkle_remote._scratch import _OWNER

SCRIPT = """
import os, sys, time
from twinkle_remote import ScratchFolder
folder = ScratchFolder("twinkle-test-", sys.argv[1])
(folder.path / "file").write_text("content")
if os.fork() == 0:
    sys.exit()  # with this process's copy of the folder
os.wait()
assert (folder.path / "file").exists()
print("ready", flush=True)
if sys.argv[2:]:
    time.sleep(100)
"""


def start(parent, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(parent), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a background job's children ignore
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_folder_goes_when_it_is_removed_or_nobody_holds_it(tmp_path):
    first, second = (ScratchFolder("twinkle-test-", tmp_path) for _ in range(2))
    path = second.path
    assert path.parent == tmp_path
    first.remove()
    first.remove()
    assert list(tmp_path.iterdir()) == [path]
    del second
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", [None, signal.SIGINT])
def test_a_folder_goes_with_its_process(tmp_path, end):
    process = start(tmp_path, *([] if end is None else ["wait"]))
    if end is not None:
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(end)
    process.wait(30)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_and_that_of_others_stays(tmp_path):
    living, killed = start(tmp_path, "wait"), start(tmp_path, "wait")
    try:
        killed.kill()
        killed.wait(30)
        left = {int((folder / _OWNER).read_text().split()[0]): folder for folder in tmp_path.iterdir()}
        assert set(left) == {living.pid, killed.pid}
        others = [tmp_path / name for name in ("twinkle-test-without-owner", "twinkle-test-of-elsewhere", "other-prefix")]
        for folder in others:
            folder.mkdir()
        (others[1] / _OWNER).write_text(f"{killed.pid} 1 another-machine/pid:[1]")
        shutil.copy(left[killed.pid] / _OWNER, others[2] / _OWNER)
        mine = ScratchFolder("twinkle-test-", tmp_path)
        assert set(tmp_path.iterdir()) == {mine.path, left[living.pid], *others}
    finally:
        living.kill()
        living.wait()
