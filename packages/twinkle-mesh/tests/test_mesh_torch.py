import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_the_torch_mesh_has_our_groups_in_four_real_processes(tmp_path: Path) -> None:
    script = Path(__file__).parent / "mesh_torch_ranks.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-1", "rank-2", "rank-3"]
