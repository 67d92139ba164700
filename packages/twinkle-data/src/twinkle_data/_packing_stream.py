"""Packing a stream, window by window."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._bins import pack_lengths
from ._errors import DatasetError, LoaderStateError
from ._fitting import Fitting, TooLong, checked_feature
from ._formats import InputFeature
from ._packed import PackedFeature
from ._sampler import check_state
from ._streams import RowStream, check_source, rows_from

# A sequence that finds no partners goes out in a pack that is not full after so many windows, so that none waits for ever, and resuming
# reads no further back.
_MAX_WINDOWS = 8


@dataclass(frozen=True)
class _Sequence:
    """One sequence of the window: its row's number in the stream, which piece of it, and the window that it came with."""

    row: int
    piece: int
    window: int
    feature: InputFeature


class IterablePackingDataset:
    """The rows of an encoded stream, packed as they come: an iterable of `PackedFeature`s of at most `max_length` tokens.

    A window of sequences is packed by best-fit decreasing; the fullest packs are given out, in a random order, and the sequences of the
    others stay for the next window, so that more than 99.8 % is filled. Packs depend on the rows and the settings alone.

    `iter` begins at the first row, or, after `load_state_dict`, at the saved position.

    Args:
        dataset: rows that are `InputFeature`s, one after another: a `RowStream`, a sequence (read by index), another iterable, or a function that
            returns one. It must give the same rows each time.
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
        if window < 1:
            raise DatasetError(f"window is {window}; it must be at least 1")
        self._source, self._fitting, self._window, self._seed = dataset, Fitting(max_length, too_long), window, seed
        self._start = self._position = {"window": 0, "next_row": 0, "waiting": [], "given": 0}
        check_source(dataset)

    def __iter__(self) -> Iterator[PackedFeature]:
        """The packs, from the first or from the saved position on."""
        start, self._start = self._start, {"window": 0, "next_row": 0, "waiting": [], "given": 0}
        self._position = start
        return self._packs(start)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last pack that was given out: plain JSON, without any row's content."""
        return {**self._position, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up at a saved position: the next `iter` begins there. It reads what was in the window again, at most some thousand rows.

        Raises:
            LoaderStateError: a position that was saved under other settings.
        """
        check_state(state, self._position, self._settings())
        if min(state["window"], state["next_row"], state["given"]) < 0:
            raise LoaderStateError(f"the saved state of the packed stream is damaged: {state}")
        self._start = self._position = {name: state[name] for name in self._position}

    def _settings(self) -> dict[str, Any]:
        return {"max_length": self._fitting.max_length, "window_size": self._window, "too_long": self._fitting.too_long, "seed": self._seed}

    def _packs(self, start: dict[str, Any]) -> Iterator[PackedFeature]:
        number, next_row = start["window"], start["next_row"]
        waiting = {(row, piece): window for row, piece, window in start["waiting"]}
        first = min([next_row, *(row for row, _ in waiting)])
        sequences = self._sequences(first)
        held, ahead = _again(sequences, waiting, next_row) if first < next_row else ([], [])
        given = start["given"]
        while True:
            position = {"window": number, "next_row": next_row, "waiting": [[s.row, s.piece, s.window] for s in held]}
            held += [_Sequence(s.row, s.piece, number, s.feature) for s in ahead]
            ahead = []
            ended = True
            for sequence in sequences:
                fresh = _Sequence(sequence.row, sequence.piece, number, sequence.feature)
                if len(held) >= self._window and fresh.piece == 0:
                    ahead, ended = [fresh], False
                    break
                held.append(fresh)
            if not held:
                return
            next_row = ahead[0].row if ahead else held[-1].row + 1
            packs, held = self._pack(held, number, ended)
            for index, pack in enumerate(packs):
                if index >= given:
                    self._position = {**position, "given": index + 1}
                    yield PackedFeature(features=[sequence.feature for sequence in pack])
            number, given = number + 1, 0
            if ended:
                return

    def _sequences(self, first: int) -> Iterator[_Sequence]:
        for row, content in enumerate(rows_from(self._source, first), start=first):
            feature = checked_feature(content, row)
            for piece in range(len(self._fitting.lengths(len(feature), row))):
                yield _Sequence(row, piece, 0, self._fitting.piece(feature, piece))

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
            found.append(_Sequence(sequence.row, sequence.piece, window, sequence.feature))
    return found, []
