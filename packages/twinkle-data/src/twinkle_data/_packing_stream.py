"""Packing a stream, window by window."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ._bins import pack_lengths
from ._checks import check_counts, check_state, check_whole, is_count
from ._errors import LoaderStateError
from ._fitting import Fitting, TooLong, checked_feature
from ._formats import InputFeature
from ._packed import PackedFeature
from ._row_streams import RowStream, as_stream
from ._skipped import Skipped, warn_of_skipped

# A sequence that finds no partners goes out in a pack that is not full after so many windows, so that none waits for ever, and resuming
# reads no further back.
_MAX_WINDOWS = 8
_BEGINNING = {"window": 0, "first_row": 0, "first_state": None, "next_row": 0, "waiting": [], "given": 0}


@dataclass(frozen=True)
class _Sequence:
    """One sequence of the window. row: its row's number in the stream; before: the stream's state before that row; piece: which part of the
    row it is; window: the one that it came with."""

    row: int
    before: Any
    piece: int
    window: int
    feature: InputFeature


class IterablePackingDataset:
    """The rows of an encoded stream, packed as they come: an iterable of `PackedFeature`s of at most `max_length` tokens.

    A window of sequences is packed by best-fit decreasing; the fullest packs are given out, in a random order, and the sequences of the
    others stay for the next window, so that more than 99.8 % is filled. Packs depend on the rows and the settings alone.

    Each iteration begins anew; `iterate(state)` goes on where another one stood, and reads what was in the window then once more.

    Args:
        dataset: rows that are `InputFeature`s, one after another: a stream (`RowStream`), a sequence (read by index), another iterable, or a
            function that returns one. It must give the same rows each time.
        max_length: the most tokens of a pack.
        window: the sequences that are packed together.
        too_long: what becomes of a longer row; as in `PackingDataset`.
        seed: of the order of packs.

    Raises:
        DatasetError: wrong settings, a source that can be read only once.
        SequenceTooLongError, FormatError: while iterating; they name the row.
    """

    def __init__(
        self,
        dataset: "RowStream | Sequence[Any] | Iterable[Any] | Callable[[], Iterable[Any]]",
        max_length: int,
        *,
        window: int = 1000,
        too_long: TooLong = "error",
        seed: int = 0,
    ) -> None:
        check_whole("window", window, 1)
        check_whole("seed", seed, 0)
        self._source, self._fitting, self._window, self._seed = as_stream(dataset), Fitting(max_length, too_long), window, seed
        self._skipped = Skipped()

    @property
    def skipped(self) -> Skipped:
        """What `too_long='drop'` has left out so far, in the latest pass; a pass that reaches the end tells it in a warning."""
        return self._skipped

    def __iter__(self) -> Iterator[PackedFeature]:
        """The packs from the first on."""
        return (pack for pack, _ in self.iterate())

    def iterate(self, state: Any = None) -> Iterator[tuple[PackedFeature, Any]]:
        """Each pack with a state, plain JSON without any row's content: `iterate(state)` gives the packs behind that one.

        Raises:
            LoaderStateError: a state of a stream with other settings.
        """
        settings = {"max_length": self._fitting.max_length, "window_size": self._window, "too_long": self._fitting.too_long, "seed": self._seed}
        if state is None:
            return self._packs(_BEGINNING, settings)
        check_state(state, _BEGINNING, settings)
        check_counts(state, ("window", "first_row", "next_row", "given"))
        if not isinstance(state["waiting"], list) or not all(isinstance(x, list) and len(x) == 3 and all(map(is_count, x)) for x in state["waiting"]):
            raise LoaderStateError(f"the saved state of the packed stream is damaged: waiting is {state['waiting']!r:.200}")
        self._source.iterate(state["first_state"])  # it refuses a state that is not its own
        return self._packs(state, settings)

    def _packs(self, start: dict[str, Any], settings: dict[str, Any]) -> Iterator[tuple[PackedFeature, Any]]:
        number, given = start["window"], start["given"]
        waiting = {(row, piece): window for row, piece, window in start["waiting"]}
        sequences = self._sequences(start["first_row"], start["first_state"])
        held, ahead = _again(sequences, waiting, start["next_row"])
        while held or ahead:
            first = [*held, *ahead][0]
            position = {
                "window": number,
                "first_row": first.row,
                "first_state": first.before,
                "next_row": ahead[0].row if ahead else held[-1].row + 1,
                "waiting": [[sequence.row, sequence.piece, sequence.window] for sequence in held],
                **settings,
            }
            held += [replace(sequence, window=number) for sequence in ahead]
            ahead = []
            for sequence in sequences:
                if len(held) >= self._window and sequence.piece == 0:
                    ahead = [sequence]
                    break
                held.append(replace(sequence, window=number))
            packs, held = self._pack(held, number, not ahead)
            for index, pack in enumerate(packs[given:], start=given + 1):
                yield PackedFeature(features=[sequence.feature for sequence in pack]), {**position, "given": index}
            number, given = number + 1, 0

    def _sequences(self, first_row: int, first_state: Any) -> Iterator[_Sequence]:
        before, self._skipped = first_state, Skipped()
        for row, (content, after) in enumerate(self._source.iterate(first_state), start=first_row):
            feature = checked_feature(content, f"row {row}")
            lengths = self._fitting.lengths(len(feature), f"row {row}")
            if not lengths:
                self._skipped += self._fitting.dropped(len(feature), f"row {row}")
            for piece in range(len(lengths)):
                yield _Sequence(row, before, piece, 0, self._fitting.piece(feature, piece))
            before = after
        warn_of_skipped(self._skipped)

    def _pack(self, held: list[_Sequence], number: int, all_of_them: bool) -> tuple[list[list[_Sequence]], list[_Sequence]]:
        """The packs to give out, in their order, and the sequences that stay."""
        lengths = np.array([len(sequence.feature) for sequence in held])
        packs = pack_lengths(lengths, self._fitting.max_length)
        fullest = np.argsort(-packs.sums(lengths), kind="stable").tolist()
        chosen: list[int] = []
        staying = len(held)
        for index in fullest:
            overdue = any(number - held[i].window >= _MAX_WINDOWS - 1 for i in packs[index].tolist())
            if all_of_them or overdue or not chosen or staying > self._window // 2:
                chosen.append(index)
                staying -= len(packs[index])
        order = np.random.default_rng([self._seed, number]).permutation(len(chosen)).tolist()
        out = [[held[i] for i in packs[chosen[k]].tolist()] for k in order]
        gone = {i for index in chosen for i in packs[index].tolist()}
        return out, [sequence for i, sequence in enumerate(held) if i not in gone]


def _again(sequences: Iterator[_Sequence], waiting: dict[tuple[int, int], int], next_row: int) -> tuple[list[_Sequence], list[_Sequence]]:
    """What waited at a saved position, read again, without the rows between that did not; and the first sequence from `next_row` on, if any."""
    found: list[_Sequence] = []
    for sequence in sequences:
        if sequence.row >= next_row:
            return found, [sequence]
        if (window := waiting.get((sequence.row, sequence.piece))) is not None:
            found.append(replace(sequence, window=window))
    return found, []
