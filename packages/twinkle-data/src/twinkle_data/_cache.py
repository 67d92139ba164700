"""Results of work on all rows, kept in a folder under a digest of the rows and of the work."""

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ._errors import DataError, DatasetError
from ._places import Places
from ._skipped import Skipped
from ._wording import a_kind


class CachedRows(Sequence[Any]):
    """Rows that lie in a cache folder, each read when it is asked for. The folder is trusted: rows are pickles."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.places: Places | None = None
        self._file: tuple[int, IO[bytes]] | None = None
        try:
            meta = json.loads((folder / "meta.json").read_text())
            self.fingerprint = str(meta["fingerprint"])
            self._stops: NDArray[np.int64] = np.load(folder / "stops.npy")
            self.indices: NDArray[np.int64] = np.load(folder / "indices.npy")
            self.skipped = Skipped(count=meta["skipped"], reasons=tuple(meta["reasons"]))
            size = int(self._stops[-1]) if len(self._stops) else 0
            sizes_fit = len(self._stops) == len(self.indices) and (folder / "rows.bin").stat().st_size == size
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise self._damaged() from error
        if not sizes_fit:
            raise self._damaged()

    def _damaged(self) -> DatasetError:
        return DatasetError(f"the cached rows in {self._folder} are damaged; delete the folder, and they are made again")

    def __len__(self) -> int:
        return len(self._stops)

    def __getitem__(self, index: Any) -> Any:
        start = int(self._stops[index - 1]) if index else 0
        try:
            if self._file is None or self._file[0] != os.getpid():
                self._file = (os.getpid(), (self._folder / "rows.bin").open("rb", buffering=0))
            return pickle.loads(os.pread(self._file[1].fileno(), int(self._stops[index]) - start, start))
        except (OSError, EOFError, ValueError, IndexError, KeyError, pickle.UnpicklingError) as error:
            raise self._damaged() from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


def cached_rows(cache_dir: Path, fingerprint: str) -> CachedRows | None:
    """The rows that were kept under a digest; None when there are none."""
    folder = cache_dir / fingerprint
    return CachedRows(folder) if folder.is_dir() else None


def keep_rows(cache_dir: Path, fingerprint: str, chunks: Iterable[Any]) -> CachedRows:
    """Writes chunks (with `values`, `indices` and `skipped`) as they come, and gives the rows back. A folder appears whole or not at all.

    Raises:
        DatasetError: the folder cannot be written (a full disk, say), or a result cannot be pickled.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=cache_dir))
    except OSError as error:
        raise DatasetError(f"cannot write to cache_dir {str(cache_dir)!r}: {error}") from error
    try:
        _write(unfinished, fingerprint, chunks)
        try:
            unfinished.rename(cache_dir / fingerprint)
        except OSError:
            if not (cache_dir / fingerprint).is_dir():  # else another process was first, with the same rows
                raise
        return CachedRows(cache_dir / fingerprint)
    except DataError:
        raise
    except OSError as error:
        raise DatasetError(f"cannot write to cache_dir {str(cache_dir)!r}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise DatasetError(f"{a_kind(value)} cannot be kept in cache_dir ({error}); return plain values, or work without it") from error


def _write(folder: Path, fingerprint: str, chunks: Iterable[Any]) -> None:
    stops, indices, at, skipped = list[int](), list[int](), 0, Skipped()
    with (folder / "rows.bin").open("wb") as file:
        for chunk in chunks:
            for value in chunk.values:
                at += file.write(_pickled(value))
                stops.append(at)
            indices += chunk.indices
            skipped += chunk.skipped
    np.save(folder / "stops.npy", np.array(stops, np.int64))
    np.save(folder / "indices.npy", np.array(indices, np.int64))
    meta = {"fingerprint": fingerprint, "skipped": skipped.count, "reasons": list(skipped.reasons)}
    (folder / "meta.json").write_text(json.dumps(meta))
