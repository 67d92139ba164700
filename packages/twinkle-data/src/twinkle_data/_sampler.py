"""Which rows come next, on which data rank, and where to take up again."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle_mesh import DeviceMesh

from ._errors import DatasetError, LoaderStateError


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

    Raises:
        DatasetError: no full batch, or a batch with fewer rows than there are data ranks: some rank would get nothing, and its peers
            would wait for it in the first collective operation.
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
    ) -> None:
        if batch_size < 1:
            raise DatasetError(f"batch_size is {batch_size}; it must be at least 1")
        if num_epochs is not None and num_epochs < 1:
            raise DatasetError(f"num_epochs is {num_epochs}; it must be at least 1, or None for no end")
        if num_rows < 1:
            raise DatasetError("the dataset has no rows")
        if drop_last and num_rows < batch_size:
            raise DatasetError(f"{num_rows} rows fill no batch of {batch_size}; lower batch_size or set drop_last=False")
        smallest = batch_size if drop_last or num_rows % batch_size == 0 else num_rows % batch_size
        if device_mesh is not None and smallest < device_mesh.data_world_size:
            what = "batch_size is" if smallest == batch_size else "the last batch of an epoch has"
            raise DatasetError(
                f"{what} {smallest}, less than the {device_mesh.data_world_size} data ranks of the mesh: some would get nothing; "
                "raise batch_size, or set drop_last=True"
            )
        self.num_rows, self.batch_size, self.num_epochs = num_rows, batch_size, num_epochs
        self._mesh, self._rank = device_mesh if slice_batches else None, rank
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
        }

    def state_dict(self) -> dict[str, Any]:
        """The position (the epoch, and the batches of it that have been given out) and the settings that it belongs to: plain JSON."""
        return {"epoch": self._epoch, "batch": self._batch, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            LoaderStateError: a position saved under other settings, whose rows would not be the ones left, or not a position at all.
        """
        own = self._settings()
        if missing := [name for name in ("epoch", "batch", *own) if name not in state]:
            raise LoaderStateError(f"the saved state of the data loader lacks {missing}")
        if changed := {name: (state[name], value) for name, value in own.items() if state[name] != value}:
            told = ", ".join(f"{name} was {old!r}, is {new!r}" for name, (old, new) in changed.items())
            raise LoaderStateError(f"the saved state of the data loader belongs to other settings: {told}; build it as it was, or start anew")
        if state["epoch"] < 0 or not 0 <= state["batch"] < self.batches_per_epoch:
            raise LoaderStateError(f"the saved state of the data loader is damaged: epoch {state['epoch']}, batch {state['batch']}")
        self._epoch, self._batch = int(state["epoch"]), int(state["batch"])
