"""URIs of checkpoints, and the names that clients may give. None of them becomes a path."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

from ._errors import Invalid
from .store import CheckpointKind

KINDS = ("weights", "sampler_weights")
_RUN = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_URI = re.compile(rf"(?P<scheme>twinkle|tinker)://(?P<run>{_RUN})/(?P<kind>weights|sampler_weights)/(?P<name>{_NAME})")
_LABEL = re.compile(r"[^\x00-\x1f\x7f]{0,200}")


@dataclass(frozen=True)
class CheckpointUri:
    """`twinkle://RUN/weights/NAME` or `twinkle://RUN/sampler_weights/NAME`, taken apart."""

    run_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"twinkle://{self.run_id}/{self.kind}/{self.name}"


def parse_uri(text: str, scheme: str = "twinkle") -> CheckpointUri:
    """The parts of a checkpoint's URI; Invalid for anything else. scheme: 'twinkle' or 'tinker'."""
    found = _URI.fullmatch(text)
    if found is None or found["scheme"] != scheme:
        raise Invalid(f"{text[:200]!r} is no checkpoint: {scheme}://RUN/weights/NAME or {scheme}://RUN/sampler_weights/NAME")
    return CheckpointUri(found["run"], cast(CheckpointKind, found["kind"]), found["name"])


def parse_checkpoint_id(run_id: str, checkpoint_id: str) -> CheckpointUri:
    """`weights/NAME` or `sampler_weights/NAME` of a run; Invalid for anything else."""
    return parse_uri(f"twinkle://{run_id}/{checkpoint_id}")


def check_name(name: str) -> str:
    """A checkpoint's name: letters, digits, '.', '_', '-', a letter or digit first; Invalid otherwise."""
    if re.fullmatch(_NAME, name) is None:
        raise Invalid(f"a checkpoint's name is up to 128 letters, digits, '.', '_' and '-', a letter or digit first, not {name[:200]!r}")
    return name


def check_label(text: str, what: str) -> str:
    """A line of text to show: up to 200 characters, none of control; Invalid otherwise."""
    if _LABEL.fullmatch(text) is None or any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise Invalid(f"{what} is a line of up to 200 characters")
    return text
