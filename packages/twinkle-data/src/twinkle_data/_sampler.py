"""Which rows come next, on which data rank, and where to take up again."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinkle_mesh import DeviceMesh

from ._balance import balanced_order
from ._checks import check_counts, check_epochs, check_state, check_whole, is_count
from ._errors import DatasetError, LoaderStateError
from ._wording import in_rows


class DeviceMeshSampler:
    """Batches of row indices, cut to one data rank's slice of a mesh or whole.

    The order depends on the seed, the epoch and the number of rows only, never on the mesh: over the data ranks the slices partition the
    global batch in order, and a run may go on under another mesh.

    Args:
        num_rows: of the dataset.
        batch_size: rows of a global batch, over all data ranks together.
        device_mesh: whose data ranks share a batch.
        slice_batches: whether to give out this rank's slice of a batch; without, or without a mesh, batches are whole.
        rank: this process's rank in the mesh; None: the launcher's.
        shuffle: a new order for every epoch, from the seed.
        seed: of the orders.
        drop_last: leave out the rows at the end of an epoch that fill no batch.
        num_epochs: how often the rows are gone through; None: without end.
        min_batch_size: the fewest rows of a global batch; one with fewer has its rows again, in turn, until there are so many (so that each
            data rank has one, with drop_last=False). None: none is filled up.
        costs: what each row costs, `[num_rows]` or `[num_rows, K]`. The rows of a global batch are then ordered so that the slices of all
            data ranks cost the same, as nearly as may be (`balanced_order`). None: rows stay in their order.
        data_id: anything that tells the data apart; a position saved with another one is refused.

    Raises:
        DatasetError: no full batch, or a batch with fewer rows than there are data ranks: some rank would get nothing, and its peers
            would wait for it in the first collective operation. Costs for another number of rows.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        batch_size: int,
        device_mesh: DeviceMesh | None = None,
        slice_batches: bool = True,
        rank: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        num_epochs: int | None = 1,
        min_batch_size: int | None = None,
        costs: ArrayLike | None = None,
        data_id: str | int | None = None,
    ) -> None:
        check_whole("batch_size", batch_size, 1)
        check_epochs(num_epochs)
        check_whole("seed", seed, 0)
        if num_rows < 1:
            raise DatasetError("the dataset has no rows")
        if drop_last and num_rows < batch_size:
            raise DatasetError(f"{in_rows(num_rows)} fill no batch of {batch_size}; lower batch_size or set drop_last=False")
        smallest = batch_size if drop_last or num_rows % batch_size == 0 else num_rows % batch_size
        check_smallest(smallest, batch_size, min_batch_size, device_mesh)
        self.num_rows, self.batch_size, self.num_epochs = num_rows, batch_size, num_epochs
        self._mesh, self._rank = device_mesh if slice_batches else None, rank
        self._min_batch_size, self._data_id = min_batch_size or 1, data_id
        self._num_ranks = 1 if device_mesh is None else device_mesh.data_world_size
        self._costs = None if costs is None else np.asarray(costs, np.float64)
        if self._costs is not None and len(self._costs) != num_rows:
            raise DatasetError(f"there are costs of {in_rows(len(self._costs))}, and {in_rows(num_rows)}")
        self._shuffle, self._seed = shuffle, seed
        self.batches_per_epoch = num_rows // batch_size if drop_last else -(-num_rows // batch_size)
        self._epoch, self._batch = 0, 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """The number of batches of all epochs. Raises TypeError where there is no end."""
        if self.num_epochs is None:
            raise TypeError("the loader has no end (num_epochs=None), so it has no length")
        return self.num_epochs * self.batches_per_epoch

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """The batches from the present position on."""
        while (indices := self.next()) is not None:
            yield indices

    def next(self) -> NDArray[np.int64] | None:
        """The indices of the next batch, or None after the last one."""
        if self.num_epochs is not None and self._epoch >= self.num_epochs:
            return None
        start = self._batch * self.batch_size
        indices = self._epoch_order()[start : start + self.batch_size]
        self._batch += 1
        if self._batch == self.batches_per_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
        indices = np.resize(indices, max(len(indices), self._min_batch_size))
        if self._costs is not None:
            indices = indices[balanced_order(self._costs[indices], self._num_ranks)]
        return indices if self._mesh is None else indices[self._mesh.get_slice(len(indices), self._rank)]

    def rewind(self) -> None:
        """Go back to the first batch of the first epoch."""
        self._epoch, self._batch = 0, 0

    def _epoch_order(self) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != self._epoch:
            order = np.arange(self.num_rows)
            if self._shuffle:
                order = np.random.default_rng([self._seed, self._epoch]).permutation(order)
            self._order = (self._epoch, order)
        return self._order[1]

    def _settings(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
            "batches_per_epoch": self.batches_per_epoch,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "data_id": self._data_id,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position (the epoch, and the batches of it that have been given out) and the settings that it belongs to: plain JSON."""
        return {"epoch": self._epoch, "batch": self._batch, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            LoaderStateError: a position saved under other settings, whose rows would not be the ones left, or not a position at all.
        """
        check_state(state, ("epoch", "batch"), self._settings())
        check_counts(state, ("epoch", "batch"))
        if state["batch"] >= self.batches_per_epoch:
            raise LoaderStateError(f"the saved state of the data loader is damaged: epoch {state['epoch']}, batch {state['batch']}")
        self._epoch, self._batch = int(state["epoch"]), int(state["batch"])


def check_smallest(smallest: int, batch_size: int, min_batch_size: int | None, mesh: DeviceMesh | None) -> None:
    """Refuses settings under which a data rank may get nothing. smallest: the fewest rows of a global batch, before it is filled up.

    Raises:
        DatasetError: see `DeviceMeshSampler`.
    """
    if min_batch_size is not None and (not is_count(min_batch_size) or not 1 <= min_batch_size <= batch_size):
        raise DatasetError(f"min_batch_size is {min_batch_size!r}; it must lie between 1 and batch_size, {batch_size}, or be None")
    fewest = max(smallest, min_batch_size or 0)
    if mesh is not None and fewest < mesh.data_world_size:
        count = mesh.data_world_size
        if fewest == batch_size:
            what, remedy = "batch_size is", f"raise batch_size to at least {count}"
        else:
            what, remedy = "the last batch of an epoch has", f"set drop_last=True, or min_batch_size={count}"
            if batch_size < count:
                remedy = f"raise batch_size to at least {count}, then {remedy}"
        raise DatasetError(f"{what} {fewest}, less than the {count} data ranks of the mesh: some would get nothing; {remedy}")
