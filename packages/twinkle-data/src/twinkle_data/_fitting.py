"""What becomes of sequences that are longer than a pack."""

from typing import Any, Literal, get_args

from ._checks import check_whole
from ._errors import DatasetError, FormatError, SequenceTooLongError
from ._formats import InputFeature
from ._packed import cut
from ._skipped import Skipped
from ._wording import a_kind

TooLong = Literal["error", "drop", "left", "right", "split"]


class Fitting:
    """Makes sequences fit a pack of `max_length` tokens.

    Args:
        max_length: the most tokens.
        too_long: what becomes of a longer sequence. 'error' raises, 'drop' leaves it out, 'left' and 'right' cut tokens away on that side,
            'split' makes several of it (the first token of each is not trained on: what precedes it is in another one).

    Raises:
        DatasetError: a `max_length` below 1, or an unknown strategy.
    """

    def __init__(self, max_length: int, too_long: TooLong) -> None:
        check_whole("max_length", max_length, 1)
        if too_long not in get_args(TooLong):
            raise DatasetError(f"too_long is {too_long!r}; it must be one of {', '.join(map(repr, get_args(TooLong)))}")
        self.max_length, self.too_long = max_length, too_long

    def lengths(self, length: int, name: object) -> list[int]:
        """The lengths of what a sequence of this length becomes.

        Raises:
            SequenceTooLongError: it is too long, and the strategy is 'error'. The message names the row.
        """
        limit = self.max_length
        if length <= limit:
            return [length]
        if self.too_long == "error":
            raise SequenceTooLongError(
                f"{name} has {length} tokens, a pack at most {limit}: raise max_length, or set too_long to 'left', 'right', 'split' or 'drop'"
            )
        if self.too_long == "split":
            return [limit] * (length // limit) + [length % limit] * (length % limit > 0)
        return [] if self.too_long == "drop" else [limit]

    def dropped(self, length: int, name: object) -> Skipped:
        """What is to be counted of a sequence that became nothing."""
        return Skipped(count=1, reasons=(f"{name} has {length} tokens, a pack at most {self.max_length}",))

    def piece(self, feature: InputFeature, index: int) -> InputFeature:
        """What a sequence becomes: its only piece, or the one of this index of several."""
        limit, length = self.max_length, len(feature)
        if length <= limit:
            return feature
        if self.too_long == "left":
            return cut(feature, slice(length - limit, length))
        return cut(feature, slice(index * limit, min(length, (index + 1) * limit)))


def checked_feature(feature: Any, name: object) -> InputFeature:
    """The row if it is a sequence.

    Raises:
        FormatError: it is none. The message names the row and says what to do.
    """
    if not isinstance(feature, InputFeature):
        if isinstance(feature, tuple) and all(isinstance(side, InputFeature) for side in feature):
            raise FormatError(
                f"{name} is a pair of features (chosen, rejected), and packing takes them one by one: pack [f for pair in rows for f in pair]"
            )
        raise FormatError(f"{name} is {a_kind(feature)}, and packing needs InputFeatures: encode the dataset with a Template first")
    return feature
