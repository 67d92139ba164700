"""Packing beside TRL's and binpacking's, balance over data ranks, resuming a stream, and a padding-free step.

Each figure is measured in a process of its own, the compared things alternately in it. TRL and binpacking are the dependency group `bench`:

    uv export --frozen --extra cpu --group bench --no-header --no-annotate | uv pip sync --python .venv/bin/python -

Without them their lines are left out. `./dev setup` takes them away again.
"""

import argparse
import importlib.util
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle_data import (
    DataLoader,
    InputFeature,
    InputProcessor,
    IterablePackingDataset,
    PackingDataset,
    balanced_order,
    pack_lengths,
    sequence_costs,
)
from twinkle_mesh import DeviceMesh

CAPACITY = 4096
_PERIOD = 1 << 16


def lognormal_lengths(num_rows: int, *, capacity: int = CAPACITY, seed: int = 0) -> NDArray[np.int64]:
    """Lengths as chat data has them: median 400 tokens, mean 640, cut off at the capacity."""
    return np.clip(np.random.default_rng(seed).lognormal(6, 1, num_rows), 1, capacity).astype(np.int64)


def seconds(call: Callable[[], object]) -> float:
    """Processor seconds of one call: other work on the machine does not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def show(name: str, value: str, target: str = "") -> None:
    """One line of the table."""
    print(f"{name:58} {value:>14}   {target}", flush=True)


def fill(lengths: NDArray[np.int64], num_packs: int) -> float:
    """The share of the packs that holds tokens."""
    return float(lengths.sum() / (num_packs * CAPACITY))


def packing(num_rows: int = 1_000_000, num_compared: int = 100_000, num_binpacking: int = 20_000, repeat: int = 3) -> None:
    """Whole-set packing: time and fill, beside TRL's best-fit and binpacking on fewer rows."""
    lengths = lognormal_lengths(num_rows)
    packs = pack_lengths(lengths, CAPACITY, seed=0)
    took_s = min(seconds(lambda: pack_lengths(lengths, CAPACITY, seed=0)) for _ in range(repeat))
    show(f"pack_lengths, {num_rows:,} rows", f"{took_s:.2f} s", "<= 1 s")
    show("  fill", f"{fill(lengths, len(packs)):.5f}", ">= 0.999")
    if importlib.util.find_spec("trl"):
        _beside_trl(lengths[:num_compared], repeat)
    if importlib.util.find_spec("binpacking"):
        _beside_binpacking(lengths[:num_binpacking], repeat)


def _beside_trl(lengths: NDArray[np.int64], repeat: int) -> None:
    import datasets
    import pyarrow as pa
    from trl.data_utils import pack_dataset  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    datasets.disable_caching()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int32)))
    rows = datasets.Dataset(pa.table({"input_ids": tokens}))
    for what, batch_size in (("whole set", len(lengths)), ("windows of 1,000", 1000)):
        sizes: list[int] = []

        def theirs(batch_size: int = batch_size, sizes: list[int] = sizes) -> None:
            sizes.append(len(pack_dataset(rows, CAPACITY, strategy="bfd", map_kwargs={"batch_size": batch_size})))

        ours_s, theirs_s = zip(*[(seconds(lambda: pack_lengths(lengths, CAPACITY)), seconds(theirs)) for _ in range(repeat)], strict=True)
        ratio = statistics.median(b / a for a, b in zip(ours_s, theirs_s, strict=True))
        show(f"TRL pack_dataset(strategy='bfd'), {len(lengths):,} rows, {what}", f"{min(theirs_s):.2f} s", "(moves the tokens, too)")
        show("  fill", f"{fill(lengths, sizes[0]):.5f}", f"ours {fill(lengths, len(pack_lengths(lengths, CAPACITY))):.5f}, whole set")
        show("  TRL / ours", f"{ratio:.0f}x", ">= 10x")


def _beside_binpacking(lengths: NDArray[np.int64], repeat: int) -> None:
    import binpacking  # pyright: ignore[reportMissingImports]

    items = lengths.tolist()
    found: list[int] = []
    ours_s = [seconds(lambda: pack_lengths(lengths, CAPACITY)) for _ in range(repeat)]
    theirs_s = seconds(lambda: found.append(len(binpacking.to_constant_volume(items, CAPACITY))))
    windows = [items[start : start + 1000] for start in range(0, len(items), 1000)]
    windowed = sum(len(binpacking.to_constant_volume(window, CAPACITY)) for window in windows)
    show(f"binpacking.to_constant_volume, {len(items):,} rows", f"{theirs_s:.2f} s")
    show("  fill, whole set and windows of 1,000", f"{fill(lengths, found[0]):.5f}", f"{fill(lengths, windowed):.5f}")
    ours = fill(lengths, len(pack_lengths(lengths, CAPACITY)))
    show("  binpacking / ours", f"{theirs_s / statistics.median(ours_s):.0f}x", f">= 10x; our fill {ours:.5f}")


def stream(num_rows: int = 100_000) -> None:
    """Packing a stream by windows of 1,000."""
    lengths = lognormal_lengths(num_rows)
    token = np.zeros(CAPACITY, np.int64)
    rows = [InputFeature(input_ids=token[:length]) for length in lengths.tolist()]
    count: list[int] = []
    taken_s = seconds(lambda: count.append(sum(1 for _ in IterablePackingDataset(rows, CAPACITY, window=1000))))
    show(f"IterablePackingDataset, {num_rows:,} rows, windows of 1,000", f"{taken_s:.2f} s")
    show("  fill", f"{fill(lengths, count[0]):.5f}", ">= 0.998")


def balance(num_rows: int = 50_000, batch_size: int = 64, num_ranks: int = 8) -> None:
    """What the data rank that pays most pays, beside the mean, over all global batches."""
    lengths = lognormal_lengths(num_rows)
    packed = PackingDataset(_Unread(num_rows), CAPACITY, lengths=lengths)
    mesh = DeviceMesh.from_sizes(dp_size=num_ranks)

    def ratios(costs: NDArray[np.float64], balanced: bool) -> list[float]:
        found: list[float] = []
        for start in range(0, len(costs) - batch_size + 1, batch_size):
            own = costs[start : start + batch_size]
            order = balanced_order(own, num_ranks) if balanced else np.arange(batch_size)
            loads = [own[order[mesh.get_slice(batch_size, rank)]].sum() for rank in range(num_ranks)]
            found.append(max(loads) / statistics.fmean(loads))
        return found

    for what, costs in (("packs", packed.row_costs("cost")), ("plain rows", sequence_costs(lengths, "cost"))):
        for balanced in (False, True):
            each = ratios(costs, balanced)
            order = "balanced" if balanced else "in order"
            target = "<= 1.02" if balanced and what == "packs" else ""
            show(f"cost of {what} {order}, {num_ranks} ranks, {batch_size} a batch: max/mean", f"{statistics.fmean(each):.4f}", target)
            show("  the worst batch", f"{max(each):.4f}")
    took_s = seconds(lambda: ratios(packed.row_costs("cost"), True)) / (len(packed) // batch_size)
    show("  time to balance a batch", f"{took_s * 1e3:.1f} ms")


class _Unread:
    """Rows that are only counted."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> InputFeature:
        raise IndexError(index)


class _Procedural:
    """A stream that makes each row from its number, and can begin with any."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.lengths = lognormal_lengths(_PERIOD)
        self.token = np.zeros(CAPACITY, np.int64)

    def iterate(self, state: int | None = None) -> Iterator[tuple[InputFeature, int]]:
        for number in range(state or 0, self.num_rows):
            yield InputFeature(input_ids=self.token[: int(self.lengths[number % _PERIOD])]), number + 1


def resume(num_rows: int = 10_000_000) -> None:
    """From a saved position in a stream of ten million rows to the next batch: packed, plain, and without `iter_from`."""

    def loader(packed: bool) -> DataLoader:
        rows = _Procedural(num_rows)
        return DataLoader(IterablePackingDataset(rows, CAPACITY) if packed else rows, batch_size=16)

    for packed in (True, False):
        first = loader(packed)
        for _ in itertools.islice(first, 300):
            pass
        state = _moved(first.state_dict(), num_rows - 50_000)
        again = loader(packed)
        again.load_state_dict(state)
        took_s = seconds(lambda again=again: next(iter(again)))
        show(f"resume at row {num_rows - 50_000:,} of {num_rows:,}, {'packed' if packed else 'plain'}", f"{took_s:.3f} s", "<= 5 s")


def _moved(state: dict[str, Any], row: int) -> dict[str, Any]:
    """The same position about so many rows later, as reading the first millions is not what is measured: by whole periods of the rows."""
    inner = state["stream"]
    if isinstance(inner, int):
        return {**state, "stream": row}
    shift = (row - inner["next_row"]) // _PERIOD * _PERIOD
    waiting = [[number + shift, piece, window] for number, piece, window in inner["waiting"]]
    moved = {name: inner[name] + shift for name in ("first_row", "first_state", "next_row")}
    return {**state, "stream": {**inner, **moved, "waiting": waiting}}


def padding_free(num_rows: int = 64, repeat: int = 3) -> None:
    """A training step of the reference trainer on a tiny model: padded and padding-free, alternately."""
    import torch

    from twinkle_train.testing import ReferenceTrainer, tiny_qwen3

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.2, 0.9, num_rows), 8, 512).astype(int)
    rows = [InputFeature(input_ids=rng.integers(2, 300, length)) for length in lengths.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_qwen3(Path(folder) / "model")
        trainers = [ReferenceTrainer(checkpoint), ReferenceTrainer(checkpoint)]
    trainers[1].set_processor(InputProcessor(padding_free=True))
    for trainer in trainers:
        trainer.set_loss("cross_entropy")
        trainer.set_optimizer("sgd", lr=0.01)

    def step(trainer: ReferenceTrainer) -> None:
        trainer.forward_backward(rows)
        trainer.clip_grad_and_step()

    for trainer in trainers:
        step(trainer)
    pairs = [(seconds(lambda: step(trainers[0])), seconds(lambda: step(trainers[1]))) for _ in range(repeat)]
    tokens = num_rows * int(lengths.max()) / int(lengths.sum())
    show("padded step, tiny Qwen3", f"{statistics.median(a for a, _ in pairs) * 1e3:.0f} ms")
    show("padding-free step", f"{statistics.median(b for _, b in pairs) * 1e3:.0f} ms")
    show("  padded tokens / real tokens", f"{tokens:.2f}")
    show("  padded / padding-free", f"{statistics.median(a / b for a, b in pairs):.2f}x", f">= {0.9 * tokens:.2f}x")


FIGURES: dict[str, Callable[[], None]] = {
    "packing": packing,
    "stream": stream,
    "balance": balance,
    "resume": resume,
    "padding_free": padding_free,
}
"""What this script measures, by name; `./dev bench data` runs them, too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"any of {', '.join(FIGURES)} (default: all)")
    chosen = parser.parse_args().figures or list(FIGURES)
    if unknown := [name for name in chosen if name not in FIGURES]:
        parser.error(f"there is no figure {unknown[0]!r}; there are {', '.join(FIGURES)}")
    if len(chosen) == 1:
        FIGURES[chosen[0]]()
        return
    for name in chosen:
        subprocess.run([sys.executable, "-P", __file__, name], check=True)


if __name__ == "__main__":
    main()
