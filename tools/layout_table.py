"""The tables of measured differences in packages/twinkle-megatron/README.md, from a run of its tests.

    ./dev test packages/twinkle-megatron/tests -m "full or not full" -k "equals_plain" --junitxml=run.xml
    python3 tools/layout_table.py run.xml

Each cell has the largest differences of loss, gradients, norm, and weights after SGD and AdamW.
"""

from __future__ import annotations

import ast
import re
import sys
import xml.etree.ElementTree as ET

TESTS = {"test_a_layout_equals_plain_torch": "the model", "test_an_adapter_equals_plain_peft": "an adapter"}
COLUMNS = ("loss", "gradients", "norm", "sgd", "adam")

Cell = dict[str, float]


def read(path: str) -> dict[str, dict[str, dict[str, Cell]]]:
    """What was measured: test, layout, kind of model."""
    found: dict[str, dict[str, dict[str, Cell]]] = {title: {} for title in TESTS.values()}
    for case in ET.parse(path).iter("testcase"):
        match = re.fullmatch(r"(\w+)\[(.+) (\w+)\]", case.get("name", ""))
        measured = [each.get("value", "") for each in case.iter("property") if each.get("name") == "differences"]
        if match and match[1] in TESTS and measured:
            found[TESTS[match[1]]].setdefault(match[2], {})[match[3]] = ast.literal_eval(measured[0])
    return found


def cell(measured: Cell | None) -> str:
    """The differences with one digit; a dash for what was not measured."""
    if measured is None:
        return "-"
    return " ".join(f"{measured[name]:.0e}".replace("e-0", "e-") if name in measured else "-" for name in COLUMNS)


def largest(cells: list[Cell]) -> Cell:
    """The largest difference of each kind."""
    return {name: max(each[name] for each in cells if name in each) for name in COLUMNS}


def main() -> None:
    model, adapter = read(sys.argv[1]).values()
    print("| layout | dense | experts | adapter on dense | adapter on experts |\n|---|---|---|---|---|")
    for layout in {**model, **adapter}:
        cells = [rows.get(layout, {}).get(kind) for rows in (model, adapter) for kind in ("dense", "moe")]
        if any(cells):
            print(f"| {layout} | {' | '.join(cell(each) for each in cells)} |")
    print("\n| model | layouts | the largest |\n|---|---|---|")
    for title, rows in (("", model), (", adapter", adapter)):
        kinds = [kind for measured in rows.values() for kind in measured if kind not in ("dense", "moe")]
        for kind in dict.fromkeys(kinds):
            layouts = {layout: measured[kind] for layout, measured in rows.items() if kind in measured}
            print(f"| {kind}{title} | {', '.join(layouts)} | {cell(largest(list(layouts.values())))} |")


if __name__ == "__main__":
    main()
