"""SIGKILL at random points of saves: every listed checkpoint is whole, nothing acknowledged is lost, and what was cut off is swept away."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twinkle_server import Store
from twinkle_server._checkpoints import Checkpoints
from twinkle_server._folders import Folders
from twinkle_server.store import Checkpoint, Run

# Saves one checkpoint after another, and says so after each.
SAVER = """
import sys
from pathlib import Path
from twinkle_server import Store
from twinkle_server._checkpoints import Checkpoints
from twinkle_server._folders import Folders
from twinkle_server.store import Run

root, first = Path(sys.argv[1]), int(sys.argv[2])
store = Store(f"sqlite:///{root / 'server.db'}")
checkpoints = Checkpoints(store, Folders(root), quota_bytes=1 << 40)
run = store.get(Run, "run-1")

def fill(folder):
    (folder / "adapter").mkdir()
    for name in "ab":
        with (folder / "adapter" / name).open("wb") as file:
            for _ in range(16):
                file.write(name.encode() * 16384)

print("ready", flush=True)
for number in range(first, first + 10_000):
    checkpoints.add(run, "weights", f"c{number}", fill, "source")
    print(number, flush=True)
"""


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_after_a_kill_in_a_save_every_listed_checkpoint_is_whole_and_none_is_missing(kills: int, tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'server.db'}")
    now = time.time()
    store.add(Run(id="run-1", tenant="alice", base_model="m", adapter="a", lora={}, created_at=now, used_at=now))
    folders = Folders(tmp_path)
    checkpoints = Checkpoints(store, folders, quota_bytes=1 << 40)
    chance = random.Random(kills)
    acknowledged: set[str] = set()
    cut_off = 0
    for kill in range(kills):
        command = [sys.executable, "-c", SAVER, str(tmp_path), str(kill * 10_000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saver:
            assert saver.stdout is not None
            assert saver.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0.0, 0.15))
            saver.kill()
            acknowledged |= {f"c{line.strip()}" for line in saver.stdout}
        listed = store.page(Checkpoint, limit=10**6)[0]
        assert acknowledged <= {each.name for each in listed}
        for each in listed:
            assert checkpoints.folders.verify(each.folder, each.digest)
        cut_off += len(folders.sweep(store.known_folders))
        assert {path.name for path in (tmp_path / "whole").iterdir()} == {each.folder for each in listed}
        assert list((tmp_path / "unfinished").iterdir()) == []
    assert acknowledged, "nothing was ever saved"
    assert cut_off or kills < 10, "no kill fell into a save"
    store.close()
