"""Type hints survive the decorators: pyright, strict, on a file of right uses and on one of wrong uses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright")

USES = Path(__file__).with_name("remote_typed_uses.py")
WRONG = {
    "model.forward([1], time=2)": "reportCallIssue",
    'model.forward(["a"])': "reportArgumentType",
    "model.forward(3)": "reportArgumentType",
    "model.loss(model.forward([1]))": "reportArgumentType",
    "model.loss([1.0]).ready()": "reportAttributeAccessIssue",
    "model.forward([1])[0].upper()": "reportAttributeAccessIssue",
    'Model("scale")': "reportArgumentType",
    'tr.remote_function(collect="max")': "reportCallIssue",
}


@pytest.mark.timeout(300)
def test_parameters_and_results_survive_and_wrong_uses_are_reported(tmp_path):
    wrong = tmp_path / "wrong.py"
    definitions = USES.read_text().partition("\ndef uses(")[0]
    lines = "".join(f"    {line}\n" for line in WRONG)
    wrong.write_text(f"{definitions}\ndef wrong(model: Model) -> None:\n{lines}")
    first = wrong.read_text().count("\n") - len(WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(USES), str(wrong)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env=os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [(Path(one["file"]).name, one["range"]["start"]["line"] - first, one.get("rule")) for one in found if one["severity"] == "error"]
    assert [one for one in found if Path(one["file"]) == USES] == []
    assert {(line, rule) for name, line, rule in errors if name == "wrong.py"} >= set(enumerate(WRONG.values())), found
