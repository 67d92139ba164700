"""What every trainer must do alike when something ends in the middle: trainers' own tests call these."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .._errors import CallOrderError

__all__ = ["check_refused", "half_checkpoint", "interrupted"]


def half_checkpoint(source: Path, target: Path) -> None:
    """A copy of a training checkpoint of one rank whose tensors are cut in the middle, and without checksums, by which that would be found out before
    anything is read."""
    shutil.copytree(source, target)
    data = target / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    info = target / "checkpoint.json"
    info.write_text(json.dumps(json.loads(info.read_text(encoding="utf-8")) | {"checksums": {}}), encoding="utf-8")


def interrupted(owner: Any, method: str, call: Callable[[], Any]) -> None:
    """Makes a call, in which Ctrl-C comes when a method is called; AssertionError where that is not."""
    with patch.object(owner, method, side_effect=KeyboardInterrupt):
        try:
            call()
        except KeyboardInterrupt:
            return
    raise AssertionError(f"the call did not come to {method}")


def check_refused(
    trainer: Any, rows: Sequence[Any], folder: Path, words: str, names: Iterable[str], more: Iterable[Callable[[str], Any]] = ()
) -> None:
    """A trainer whose weights are a mixture neither computes with them nor gives them away.

    folder: that must not come into being. words: a regular expression that is found in the error. names: of the adapters, '' for the base model,
    whose weights they are. more: calls of that trainer alone, given such a name.
    """
    calls: list[Callable[[str], Any]] = [
        lambda name: trainer.forward_backward(rows, adapter_name=name),
        lambda name: trainer.forward_only(rows, adapter_name=name).get(),
        lambda name: trainer.save(folder, adapter_name=name),
        lambda name: trainer.save_checkpoint(folder),
        lambda name: trainer.export_weights(adapter_name=name),
        lambda name: trainer.get_state_dict(adapter_name=name),
        *more,
    ]
    for name in names:
        trainer.zero_grad(adapter_name=name)
        for number, call in enumerate(calls):
            try:
                call(name)
            except CallOrderError as error:
                if not re.search(words, str(error)):
                    raise AssertionError(f"call {number} of {name!r}: {words!r} is not in {error}") from error
            else:
                raise AssertionError(f"call {number} of {name!r} was not refused")
    if folder.exists():
        raise AssertionError(f"{folder} was written")
