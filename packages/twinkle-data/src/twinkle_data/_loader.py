"""The data loader: global batches of rows, once for a run, sliced where nobody else slices."""

from collections.abc import Callable, Iterable
from typing import Any, Self

from twinkle_mesh import DeviceMesh
from twinkle_remote import current_runtime, remote_class, remote_function

from ._dataset import Dataset
from ._sampler import DeviceMeshSampler


@remote_class(execute="first")
class DataLoader:
    """Gives out a dataset in batches: lists of rows.

    Who gets what: in Ray mode the batches are whole, and the dispatch of the call that takes them slices. In local mode and under
    torchrun every process has its own loader, which gives it its data rank's slice of every global batch, if the mesh has more than
    one data rank. So one script does the same everywhere.

    `iter(loader)` begins at the first batch, or, after `load_state_dict`, at the saved one.

    Args:
        dataset: a `Dataset`, anything that `Dataset` takes, or a function that returns one (called where the loader lives, so that rows
            need not travel there).
        batch_size: rows of a global batch.
        device_mesh: of the component that takes the batches. None: data parallel over the processes that were launched.
        shuffle: a new order for every epoch, from the seed.
        seed: of the orders.
        drop_last: leave out the rows at the end of an epoch that fill no batch.
        num_epochs: how often the rows are gone through; None: without end.
        remote_group: the device group on whose first worker the loader lives; None: in this process.

    Raises:
        DatasetError: rows or settings that make no batch for every data rank; see `DeviceMeshSampler`.
    """

    def __init__(
        self,
        dataset: Dataset | Iterable[Any] | Callable[[], Any],
        *,
        batch_size: int,
        device_mesh: DeviceMesh | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        num_epochs: int | None = 1,
        remote_group: str | None = None,
    ) -> None:
        self._dataset = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
        slices = device_mesh is not None and device_mesh.data_world_size > 1 and current_runtime().slices_in_loader
        self._sampler = DeviceMeshSampler(
            len(self._dataset),
            batch_size=batch_size,
            device_mesh=device_mesh,
            slice_batches=slices,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_epochs=num_epochs,
        )
        self._resumed = False

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def __len__(self) -> int:
        """The number of batches of all epochs. Raises TypeError where there is no end."""
        return len(self._sampler)

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def __iter__(self) -> Self:
        """The loader itself, at its first batch, or at the saved one where a position was loaded since the last iteration."""
        if not self._resumed:
            self._sampler.rewind()
        self._resumed = False
        return self

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def __next__(self) -> list[Any]:
        """The next batch. Raises StopIteration after the last."""
        indices = self._sampler.next()
        if indices is None:
            raise StopIteration
        return [self._dataset[int(index)] for index in indices]

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was given out, as plain JSON. The same on all ranks; one copy is enough."""
        return self._sampler.state_dict()

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up at a saved position: the next `iter(loader)` begins there.

        Raises:
            LoaderStateError: a position that was saved under other settings or with other data.
        """
        self._sampler.load_state_dict(state)
        self._resumed = True
