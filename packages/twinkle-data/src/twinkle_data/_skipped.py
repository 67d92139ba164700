"""How many rows were left out because they failed, and why the first ones did."""

import logging
from dataclasses import dataclass

from ._wording import in_rows

_logger = logging.getLogger("twinkle_data")
_MOST_REASONS = 5


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Rows that `on_error='skip'`, a template's `truncation='drop'` or packing's `too_long='drop'` left out.

    Args:
        count: how many.
        reasons: what went wrong with the first five, each with the row's index and source line.
    """

    count: int = 0
    reasons: tuple[str, ...] = ()

    def __add__(self, other: "Skipped") -> "Skipped":
        """Both together."""
        return Skipped(count=self.count + other.count, reasons=(self.reasons + other.reasons)[:_MOST_REASONS])

    def __str__(self) -> str:
        """A line, and one more for each reason."""
        return "\n  ".join(
            [
                f"{in_rows(self.count)} {'was' if self.count == 1 else 'were'} skipped" + (", the first because:" if self.reasons else ""),
                *self.reasons,
            ]
        )


class LeftOut(tuple[()]):
    """What stands in the place of a row that is left out for a reason: nothing. reason: the row's name and why."""

    reason: str

    def __new__(cls, reason: str) -> "LeftOut":
        self = super().__new__(cls)
        self.reason = reason
        return self


def left_out(given: object) -> Skipped:
    """What is to be counted of what stands in a row's place."""
    return Skipped(count=1, reasons=(given.reason,)) if isinstance(given, LeftOut) else Skipped()


def warn_of_skipped(skipped: Skipped) -> None:
    """One warning on the logger 'twinkle_data' when there were any."""
    if skipped.count:
        _logger.warning("%s", skipped)
