"""docs/megatron-errors.md has every message that is raised on purpose, and none that is not."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import twinkle_train

PACKAGE = Path(__file__).parents[1] / "src" / "twinkle_megatron"
# The writers of checkpoints raise this package's CheckpointError.
SHARED = [
    Path(twinkle_train.__file__).with_name(name) for name in ("_adapter_files.py", "_checkpoint_writer.py", "_hf_checkpoint.py", "_torch_dist.py")
]
DOCUMENT = Path(__file__).parents[3] / "docs" / "megatron-errors.md"
_RAISED = re.compile(r"(Layout|Platform|Rule|ModelNotFound|UnsupportedModel|Checkpoint|Config|Input|CallOrder|Import)Error|(self\._)?error_type")
# What stands for a value in a message.
_VALUE = "\0"


def _text(node: ast.AST) -> str | None:
    """The text of a (formatted) string, with a mark where a value goes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else _VALUE for part in node.values)
    return None


def _nodes(files: Iterable[Path]) -> Iterator[tuple[Path, ast.AST]]:
    return ((file, node) for file in files for node in ast.walk(ast.parse(file.read_text())))


def _texts() -> Iterator[str]:
    """All texts of this package and of twinkle-train, which says some of its messages."""
    files = [*PACKAGE.rglob("*.py"), *Path(twinkle_train.__file__).parent.glob("*.py")]
    return (text for _, node in _nodes(files) if (text := _text(node)) is not None)


def _raised() -> Iterator[tuple[str, str]]:
    """The messages that are raised as this package's errors, with their places."""
    for file, node in _nodes([*sorted(PACKAGE.rglob("*.py")), *SHARED]):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _RAISED.fullmatch(ast.unparse(node.exc.func)) and node.exc.args:
            text = _text(node.exc.args[0])
            if text is not None:
                yield f"{file.name}:{node.lineno}", text


def _documented() -> list[str]:
    """The first cells of the tables, as they are written."""
    return [cell for line in DOCUMENT.read_text().splitlines() if (cell := _first_cell(line))]


def _first_cell(line: str) -> str:
    found = re.match(r"\| `(.*?)` \|", line)
    return found.group(1) if found and not found.group(1).endswith("Error") else ""


def _is(message: str, text: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in message.split("...")), text, re.DOTALL) is not None


if not DOCUMENT.is_file():
    pytest.skip("the package is tested alone, without the repository's docs", allow_module_level=True)


@pytest.mark.parametrize("message", _documented())
def test_a_documented_message_is_in_the_sources(message: str) -> None:
    assert any(_is(message, text) for text in _texts()), f"no message of the package reads {message!r}"


def test_every_message_that_is_raised_is_documented() -> None:
    documented = _documented()
    assert len(documented) > 60
    # The most general of them, which fits too much.
    documented.remove(".../...: ...")
    missing = [(place, text) for place, text in _raised() if text != f"{_VALUE}/{_VALUE}: {_VALUE}" and text.strip(f"{_VALUE}: ")]
    missing = [(place, text.replace(_VALUE, "...")) for place, text in missing if not any(_is(message, text) for message in documented)]
    assert not missing, "\n".join(f"{place}: {text}" for place, text in missing)
