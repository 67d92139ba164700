"""Where a loader's batches come from: rows by index, or a stream; read here, or ahead in worker processes."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twinkle_mesh import DeviceMesh

from ._balance import CostKind, balanced_order, sequence_costs
from ._checks import check_counts, check_epochs, check_state, check_whole
from ._errors import DatasetError
from ._formats import InputFeature
from ._packed import PackedFeature
from ._row_streams import RowStream
from ._sampler import DeviceMeshSampler, check_smallest
from ._wording import a_kind
from ._workers import WorkerPool


class BatchSource(Protocol):
    """Batches of rows one after another, and the position among them."""

    def __len__(self) -> int:
        """The number of batches of all epochs. Raises TypeError where it is not known."""
        ...

    def next(self) -> list[Any] | None:
        """The next batch, or None after the last."""
        ...

    def rewind(self) -> None:
        """Go back to the first batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was given out."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        ...


class IndexedBatches:
    """Batches of a dataset with random access, in the order of a sampler; read ahead where there are workers."""

    def __init__(self, dataset: Any, sampler: DeviceMeshSampler, *, num_workers: int, prefetch_batches: int, timeout_s: float) -> None:
        def read(indices: NDArray[np.int64]) -> list[Any]:
            return [dataset[index] for index in indices.tolist()]

        self._sampler, self._read = sampler, read
        self._pool = WorkerPool(read, num_workers, timeout_s=timeout_s, what="a batch of rows") if num_workers else None
        self._most_ahead = num_workers * prefetch_batches
        self._ahead: deque[dict[str, Any]] = deque()
        self._state = sampler.state_dict()

    def __len__(self) -> int:
        return len(self._sampler)

    def next(self) -> list[Any] | None:
        if self._pool is None:
            return self._next_here()
        try:
            self._fill(self._pool)
            if not self._ahead:
                return None
            batch, after = self._pool.take(), self._ahead.popleft()
            self._fill(self._pool)
        except BaseException:  # whoever goes on after that goes on where the last batch ended
            self.load_state_dict(self._state)
            raise
        self._state = after
        return batch

    def _next_here(self) -> list[Any] | None:
        before = self._sampler.state_dict()
        try:
            indices = self._sampler.next()
            return None if indices is None else self._read(indices)
        except BaseException:  # the position stays before a batch that nobody got
            self._sampler.load_state_dict(before)
            raise

    def _fill(self, pool: WorkerPool) -> None:
        while len(self._ahead) < self._most_ahead and (indices := self._sampler.next()) is not None:
            self._ahead.append(self._sampler.state_dict())
            pool.submit(indices)

    def rewind(self) -> None:
        self._stop()
        self._sampler.rewind()
        self._state = self._sampler.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict() if self._pool is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._stop()
        self._state = self._sampler.state_dict()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._ahead.clear()


class StreamBatches:
    """Batches of a stream; read ahead by one worker process where there is one.

    Every data rank reads the whole stream and keeps its slice of each global batch, so a position means the same under every mesh.
    """

    def __init__(
        self,
        stream: RowStream,
        *,
        batch_size: int,
        mesh: DeviceMesh | None,
        slices: bool,
        drop_last: bool,
        num_epochs: int | None,
        min_batch_size: int | None,
        balance: CostKind | None,
        num_workers: int,
        prefetch_batches: int,
        timeout_s: float,
    ) -> None:
        if num_workers > 1:
            raise DatasetError(f"num_workers is {num_workers}; a stream is read by one worker at most")
        check_whole("batch_size", batch_size, 1)
        check_epochs(num_epochs)
        check_smallest(batch_size if drop_last else 1, batch_size, min_batch_size, mesh)
        self._stream, self._num_epochs = stream, num_epochs
        self._batch_size, self._min_batch_size, self._drop_last = batch_size, min_batch_size or 1, drop_last
        self._mesh, self._slices = mesh, slices
        self._balance: CostKind | None = balance
        # The position after the last batch that was given out, and the iteration that goes on from there.
        self._state = self._beginning = {"epoch": 0, "batch": 0, "stream": None, "batch_size": batch_size}
        self._iterator: Iterator[tuple[list[Any], dict[str, Any]]] | None = None
        self._pool = WorkerPool(lambda _: self._read(), 1, timeout_s=timeout_s, what="a batch of rows") if num_workers else None
        self._most_ahead = prefetch_batches

    def __len__(self) -> int:
        raise TypeError("the loader reads a stream, whose length is not known")

    def next(self) -> list[Any] | None:
        try:
            if self._pool is None:
                batch, self._state = self._read()
            else:
                while len(self._pool) < self._most_ahead:
                    self._pool.submit("the stream")
                batch, self._state = self._pool.take()
        except BaseException:  # whoever goes on after that goes on where the last batch ended
            self._go_to(self._state)
            raise
        if batch is None:
            self._go_to(self._state)
        return batch

    def _read(self) -> tuple[list[Any] | None, dict[str, Any]]:
        """The next batch, and the position after it."""
        if self._iterator is None:
            self._iterator = self._from(self._state)
        return next(self._iterator, (None, {**self._state, "epoch": self._num_epochs, "batch": 0, "stream": None}))

    def _from(self, position: dict[str, Any]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        epoch, number, state = position["epoch"], position["batch"], position["stream"]
        while self._num_epochs is None or epoch < self._num_epochs:
            rows: list[Any] = []
            for row, state in self._stream.iterate(state):  # noqa: B020 (the state at which it begins, then those that it passes)
                rows.append(row)
                if len(rows) == self._batch_size:
                    number += 1
                    yield self._share(rows), {**self._beginning, "epoch": epoch, "batch": number, "stream": state}
                    rows = []
            if rows and not self._drop_last:
                number += 1
                yield self._share(rows), {**self._beginning, "epoch": epoch, "batch": number, "stream": state}
            if number == 0:
                raise DatasetError(f"the stream's {len(rows)} rows fill no batch of {self._batch_size}; lower batch_size or set drop_last=False")
            epoch, number, state = epoch + 1, 0, None

    def _share(self, rows: list[Any]) -> list[Any]:
        rows = [rows[index % len(rows)] for index in range(max(len(rows), self._min_batch_size))]
        kind = self._balance
        if kind is not None and self._mesh is not None:
            costs = [_cost(row, kind) for row in rows]
            rows = [rows[index] for index in balanced_order(costs, self._mesh.data_world_size).tolist()]
        return rows[self._mesh.get_slice(len(rows))] if self._slices and self._mesh is not None else rows

    def rewind(self) -> None:
        self._go_to(self._beginning)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, ("epoch", "batch", "stream"), {"batch_size": self._batch_size})
        check_counts(state, ("epoch", "batch"))
        self._stream.iterate(state["stream"])  # it refuses a state that is not its own
        self._go_to(state)

    def _go_to(self, state: dict[str, Any]) -> None:
        self._state, self._iterator = state, None
        if self._pool is not None:
            self._pool.close()


def _cost(row: Any, kind: CostKind) -> float:
    if isinstance(row, PackedFeature):
        return float(sequence_costs(row.lengths, kind).sum())
    if isinstance(row, InputFeature):
        return float(sequence_costs([len(row)], kind)[0])
    raise DatasetError(f"balance={kind!r} needs encoded rows; a row is {a_kind(row)}")
