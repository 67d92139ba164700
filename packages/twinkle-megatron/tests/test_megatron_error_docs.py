"""docs/megatron-errors.md has every message that is raised on purpose, and none that is not."""

from pathlib import Path

import pytest

from twinkle_train.testing.error_docs import documented_messages, undocumented_messages, unknown_messages

PACKAGE = Path(__file__).parents[1] / "src" / "twinkle_megatron"
DOCUMENT = Path(__file__).parents[3] / "docs" / "megatron-errors.md"

if not DOCUMENT.is_file():
    pytest.skip("the package is tested alone, without the repository's docs", allow_module_level=True)


def test_every_documented_message_is_in_the_sources() -> None:
    assert len(documented_messages(DOCUMENT)) > 60
    assert unknown_messages(DOCUMENT, PACKAGE) == []


def test_every_message_that_is_raised_is_documented() -> None:
    missing = undocumented_messages(DOCUMENT, PACKAGE, too_general=[".../...: ..."])
    assert not missing, "\n".join(missing)
