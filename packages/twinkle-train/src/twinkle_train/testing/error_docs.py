"""Whether a page of the docs that lists a trainer's errors has every message that is raised on purpose, and none that is not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import twinkle_train

__all__ = ["documented_messages", "undocumented_messages", "unknown_messages"]

_PACKAGE = Path(twinkle_train.__file__).parent
# The writers of checkpoints raise the CheckpointError of the package that calls them.
_SHARED = tuple(_PACKAGE / name for name in ("_adapter_files.py", "_checkpoint_writer.py", "_hf_checkpoint.py", "_torch_dist.py"))
_RAISED = re.compile(r"(Layout|Platform|Rule|ModelNotFound|UnsupportedModel|Checkpoint|Config|Input|CallOrder|Import)Error|(self\._)?error_type")
# What stands for a value in a message.
_VALUE = "\0"


def documented_messages(document: Path) -> list[str]:
    """The first cells of the tables of a page, as they are written, with ``...`` for values."""
    return [cell for line in document.read_text().splitlines() if (cell := _first_cell(line))]


def unknown_messages(document: Path, package: Path) -> list[str]:
    """Those of the page that are no text of a package, nor of twinkle-train, which says some of its messages."""
    texts = {text for _, node in _nodes([*package.rglob("*.py"), *_PACKAGE.glob("*.py")]) if (text := _text(node)) is not None}
    return [message for message in documented_messages(document) if not any(map(_pattern(message).fullmatch, texts))]


def undocumented_messages(document: Path, package: Path, *, too_general: Iterable[str] = ()) -> list[str]:
    """Those that the package raises, or twinkle-train for it, and the page lacks, each behind its place. too_general: of the page, fit too much."""
    documented = [_pattern(message) for message in documented_messages(document) if message not in too_general]
    return [
        f"{place}: {text.replace(_VALUE, '...')}"
        for place, text in _raised([*sorted(package.rglob("*.py")), *_SHARED])
        if text.strip(f"{_VALUE}:/ ") and not any(pattern.fullmatch(text) for pattern in documented)
    ]


def _raised(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """The messages that are raised, with their places."""
    for file, node in _nodes(files):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _RAISED.fullmatch(ast.unparse(node.exc.func)) and node.exc.args:
            text = _text(node.exc.args[0])
            if text is not None:
                yield f"{file.name}:{node.lineno}", text


def _nodes(files: Iterable[Path]) -> Iterator[tuple[Path, ast.AST]]:
    return ((file, node) for file in files for node in ast.walk(ast.parse(file.read_text())))


def _text(node: ast.AST) -> str | None:
    """The text of a (formatted) string, with a mark where a value goes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else _VALUE for part in node.values)
    return None


def _first_cell(line: str) -> str:
    found = re.match(r"\| `(.*?)` \|", line)
    return found.group(1) if found and not found.group(1).endswith("Error") else ""


def _pattern(message: str) -> re.Pattern[str]:
    """What fits a message with any values."""
    return re.compile(".*".join(re.escape(part) for part in message.split("...")), re.DOTALL)
