"""The drawing that the documentation shows is the one that the example makes."""

from __future__ import annotations

import sys

from commands import ROOT, run_process

EXAMPLE = str(ROOT / "examples" / "topology.py")


def test_the_drawing_in_the_documentation_is_current(tmp_path):
    done = run_process([sys.executable, EXAMPLE, "--svg", str(tmp_path / "topology.svg")], cwd=tmp_path, timeout_s=60)
    assert done.status == 0, done.output
    made, shown = (path.read_text(encoding="utf-8") for path in (tmp_path / "topology.svg", ROOT / "docs" / "images" / "topology.svg"))
    assert made == shown, "run: .venv/bin/python examples/topology.py --svg docs/images/topology.svg"


def test_the_example_prints_plain_text(tmp_path):
    done = run_process([sys.executable, EXAMPLE], cwd=tmp_path, timeout_s=60)
    assert done.status == 0, done.output
    assert "group sampler: 8 cuda devices, 4 workers" in done.output
    assert "the way of a batch" in done.output
