"""The data loader: global batches of rows, once for a run, sliced where nobody else slices."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from numpy.typing import ArrayLike

from twinkle_mesh import DeviceMesh
from twinkle_remote import current_runtime, remote_class, remote_function

from ._balance import CostKind
from ._batches import BatchSource, IndexedBatches, StreamBatches
from ._checks import check_whole
from ._dataset import Dataset
from ._errors import DatasetError
from ._packing import PackingDataset
from ._packing_stream import IterablePackingDataset
from ._row_streams import RowStream, is_stream
from ._sampler import DeviceMeshSampler

Balance = Literal["auto", "tokens", "cost"]


@remote_class(execute="first")
class DataLoader:
    """Gives out a dataset in batches: lists of rows.

    Who gets what: in Ray mode the batches are whole, and the dispatch of the call that takes them slices. In local mode and under
    torchrun every process has its own loader, which gives it its data rank's slice of every global batch, if the mesh has more than
    one data rank. So one script does the same everywhere.

    `iter(loader)` begins at the first batch, or, after `load_state_dict`, at the saved one. A loader has one position: several consumers
    that call `next` on it share the batches, each of which goes to one of them. On a worker's loader iteration gives LazyResults, which
    stay there until they are looked at; passed on to another component, its workers fetch their shares without the driver.

    Args:
        dataset: a `Dataset`, anything that `Dataset` takes, a stream (`IterablePackingDataset`, a `RowStream`), or a function that returns one of
            these (called where the loader lives, so that rows need not travel there).
        batch_size: rows of a global batch.
        device_mesh: of the component that takes the batches. None: data parallel over the processes that were launched.
        shuffle: a new order for every epoch, from the seed. Not for streams.
        seed: of the orders.
        drop_last: leave out the rows at the end of an epoch that fill no batch. The default, unlike torch's.
        num_epochs: how often the rows are gone through; None: without end.
        min_batch_size: the fewest rows of a global batch; a shorter one (with drop_last=False) has its rows again, in turn.
        balance: order the rows of each global batch so that the slices of all data ranks are alike in 'tokens', or in 'cost' (the squares of
            the sequences' lengths), or in these costs, `[N]` or `[N, K]`, one for each of N rows. 'auto': in 'cost' for packed rows, whose
            lengths are known, else not. None: rows stay in their order.
        num_workers: processes that read batches ahead; 0: none. A stream is read by one at most.
        prefetch_batches: how many batches each reads ahead.
        worker_timeout_s: seconds that a worker may take for one batch.
        remote_group: the device group on whose first worker the loader lives; None: in this process.

    Raises:
        DatasetError: rows or settings that make no batch for every data rank; see `DeviceMeshSampler`.
    """

    def __init__(
        self,
        dataset: Dataset | RowStream | Iterable[Any] | Callable[[], Any],
        *,
        batch_size: int,
        device_mesh: DeviceMesh | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        num_epochs: int | None = 1,
        min_batch_size: int | None = None,
        balance: Balance | ArrayLike | None = "auto",
        num_workers: int = 0,
        prefetch_batches: int = 2,
        worker_timeout_s: float = 600.0,
        remote_group: str | None = None,
    ) -> None:
        rows: Any = dataset() if callable(dataset) and not isinstance(dataset, Iterable) and not is_stream(dataset) else dataset
        rows = rows if is_stream(rows) or isinstance(rows, Dataset) else Dataset(rows)
        self._described = f"<DataLoader: batches of {batch_size} from {rows!r}>"
        slices = device_mesh is not None and device_mesh.data_world_size > 1 and current_runtime().slices_in_loader
        check_whole("num_workers", num_workers, 0)
        check_whole("prefetch_batches", prefetch_batches, 1 if num_workers else 0)
        ahead = {"num_workers": num_workers, "prefetch_batches": prefetch_batches, "timeout_s": worker_timeout_s}
        self._lock = threading.Lock()
        self._resumed = False
        self._batches: BatchSource
        if is_stream(rows):
            stream: RowStream = rows
            if shuffle:
                raise DatasetError("a stream cannot be shuffled: its rows come one after another; shuffle what it reads")
            self._batches = StreamBatches(
                stream,
                batch_size=batch_size,
                mesh=device_mesh,
                slices=slices,
                drop_last=drop_last,
                num_epochs=num_epochs,
                min_batch_size=min_batch_size,
                balance=_stream_balance(balance, stream),
                **ahead,
            )
            return
        sampler = DeviceMeshSampler(
            len(rows),
            batch_size=batch_size,
            device_mesh=device_mesh,
            slice_batches=slices,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_epochs=num_epochs,
            min_batch_size=min_batch_size,
            costs=_row_costs(balance, rows),
            data_id=rows.fingerprint if isinstance(rows, PackingDataset) else None,
        )
        self._batches = IndexedBatches(rows, sampler, **ahead)

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def __len__(self) -> int:
        """The number of batches of all epochs. Raises TypeError where there is no end, or it is not known (a stream)."""
        return len(self._batches)

    @remote_function(dispatch="all", execute="first", collect="first")
    def __iter__(self) -> Iterator[list[Any]]:
        """The batches from the first, or, where a position was loaded since the last iteration, from the saved one."""
        with self._lock:
            if not self._resumed:
                self._batches.rewind()
            self._resumed = False
        return _Rest(self._next)

    @remote_function(dispatch="all", execute="first", collect="first")
    def __next__(self) -> list[Any]:
        """The next batch. Raises StopIteration after the last; WorkerError or LoaderTimeoutError for a worker that died or hangs."""
        return self._next()

    def _next(self) -> list[Any]:
        with self._lock:
            batch = self._batches.next()
        if batch is None:
            raise StopIteration
        return batch

    def __repr__(self) -> str:
        return self._described

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was given out, as plain JSON. The same on all ranks; one copy is enough."""
        with self._lock:
            return self._batches.state_dict()

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up at a saved position: the next `iter(loader)` begins there.

        Raises:
            LoaderStateError: a position that was saved under other settings or with other data.
        """
        with self._lock:
            self._batches.load_state_dict(state)
            self._resumed = True


class _Rest(Iterator[list[Any]]):
    """The batches that are left. Not the loader, which begins anew whenever it is iterated, also by `for batch in iter(loader)`."""

    def __init__(self, take: Callable[[], list[Any]]) -> None:
        self._take = take

    def __next__(self) -> list[Any]:
        return self._take()


def _row_costs(balance: Balance | ArrayLike | None, rows: Dataset) -> ArrayLike | None:
    if not isinstance(balance, str):
        return balance
    kind = "cost" if balance == "auto" else _kind(balance)
    if isinstance(rows, PackingDataset):
        return rows.row_costs(kind)
    if balance == "auto":
        return None
    raise DatasetError(f"balance={balance!r} needs the lengths of all rows: pack them with PackingDataset, or give balance=[the cost of each row]")


def _stream_balance(balance: Balance | ArrayLike | None, rows: RowStream) -> CostKind | None:
    if balance == "auto":
        return "cost" if isinstance(rows, IterablePackingDataset) else None
    if balance is None or isinstance(balance, str):
        return None if balance is None else _kind(balance)
    raise DatasetError("balance is a list of costs; a stream's rows have no numbers to look them up by: take 'tokens', 'cost' or None")


def _kind(balance: str) -> CostKind:
    if balance not in ("tokens", "cost"):
        raise DatasetError(f"balance is {balance!r}; it must be 'auto', 'tokens', 'cost', None, or a cost for each row")
    return balance
