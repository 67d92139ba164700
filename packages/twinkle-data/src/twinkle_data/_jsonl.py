"""JSON lines: rows read at once, or from their places in the file when they are asked for."""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ._errors import DatasetError
from ._places import Places
from ._rows import Listed, read_part
from ._skipped import Skipped, warn_of_skipped
from ._wording import a_kind

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# What reading a file raises, a packed one included.
READ_ERRORS = (EOFError, OSError, zlib.error)
_BLOCK_BYTES = 1 << 22
# Longer lines are taken to hold something; a longer blank one is an error when it is read.
_BLANK_BYTES = 64


def open_bytes(path: Path) -> IO[bytes]:
    """A file's bytes, unpacked when it is a gzip file (by its first bytes, whatever its name), a UTF-8 byte order mark left out.

    Raises:
        DatasetError: there is no such file, it cannot be unpacked, or it is UTF-16.
    """
    file = _open(path)
    try:
        start = file.read(4)
    except READ_ERRORS as error:
        file.close()
        raise _unreadable(path, error) from error
    # Without a mark: JSON and CSV begin with an ASCII character, of which UTF-16 and UTF-32 make at least one byte that is 0.
    if start[:2] in _UTF16 or b"\0" in start:
        file.close()
        raise DatasetError(f"{path} is a UTF-16 or UTF-32 file; make it UTF-8, e.g. iconv -f UTF-16 -t UTF-8 {path.name}")
    file.seek(3 if start.startswith(_BOM) else 0)
    return file


def read_all(file: IO[bytes], path: Path) -> bytes:
    """The rest of a file that `open_bytes` opened.

    Raises:
        DatasetError: it cannot be read or unpacked to its end.
    """
    try:
        return file.read()
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DatasetError:
    hint = "; the gzip file was cut off or is damaged" if isinstance(error, (EOFError, gzip.BadGzipFile, zlib.error)) else ""
    return DatasetError(f"cannot read {str(path)!r}: {error}{hint}")


def _open(path: Path) -> IO[bytes]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise DatasetError(f"there is no file {str(path)!r}") from None
    except OSError as error:
        raise DatasetError(f"cannot read {str(path)!r}: {error}") from error
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    # The file object closes the file below it when it is collected; gzip.open by path would not find the magic bytes for us.
    return gzip.GzipFile(fileobj=file) if packed else file  # pyright: ignore[reportReturnType]


def is_packed(path: Path) -> bool:
    """Whether it is a gzip file."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def parse_object(text: bytes, where: object) -> dict[str, Any]:
    """One JSON object.

    Raises:
        DatasetError: text that is not UTF-8, not JSON, nested too deep, no object, or an object that has a key twice. Names `where`.
    """
    row = parse_json(text, where)
    if not isinstance(row, dict):
        hint = "; a file with one list of all rows is a .json file" if isinstance(row, list) else ""
        raise DatasetError(f"{where}: {a_kind(row)}, not a JSON object{hint}")
    return row


def parse_json(text: bytes, where: object) -> Any:
    """Any JSON value; errors as `parse_object`."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{where}: not UTF-8 ({error})") from error
    except RecursionError:
        raise DatasetError(f"{where}: values are nested too deep") from None
    except _DuplicateKeyError as error:
        raise DatasetError(f"{where}: {error}") from None
    except ValueError as error:
        hint = "" if text.endswith(b"\n") else "; it has no line end: the file may have been cut off here"
        if text.strip() in (b"[", b"{") and not hint:
            hint = "; each line of a .jsonl file is an object: a file with one JSON text over several lines is a .json file"
        raise DatasetError(f"{where}: not valid JSON ({error}){hint}") from error


class _DuplicateKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _DuplicateKeyError(f"an object has the key {twice!r} twice")
    return made


def iterate_jsonl(path: Path) -> Iterator[tuple[int, bytes]]:
    """Line number (from 1) and bytes of every line that is not blank."""
    with open_bytes(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    yield number, line
        except READ_ERRORS as error:
            raise _unreadable(path, error) from error


def load_jsonl(path: Path, *, lazy: bool, skip_errors: bool) -> Sequence[Any]:
    """The rows of a file.

    Args:
        path: of the file; gzip files are unpacked.
        lazy: keep them in the file; a row is parsed when it is read. Takes 20 bytes of memory a row. Of a gzip file the unpacked
            text is held in memory.
        skip_errors: leave out lines that are not JSON objects, and count them. All are then parsed once, lazy or not.
    """
    if lazy:
        return _lazy(path, skip_errors)
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    skipped = Skipped()
    for number, line in iterate_jsonl(path):
        try:
            rows.append(parse_object(line, f"{path}, line {number}"))
            numbers.append(number)
        except DatasetError as error:
            if not skip_errors:
                raise
            skipped += Skipped(count=1, reasons=(str(error),))
    warn_of_skipped(skipped)
    return Listed(rows, Places(names=(str(path),), numbers=np.array(numbers, np.int64)), skipped)


def _lazy(path: Path, skip_errors: bool) -> "JsonLines":
    with open_bytes(path) as file:
        stamp = _stamp(path.stat())
        text = read_all(file, path) if is_packed(path) else None
        first = file.tell() if text is None else 0
    starts, sizes, numbers = _index(_blocks(path, first) if text is None else [text], first)
    rows = JsonLines(path, starts, sizes, numbers, text, stamp)
    good = np.ones(len(rows), np.bool_)
    for index in np.flatnonzero(sizes <= _BLANK_BYTES):
        good[index] = not rows.line(index).isspace()
    if not skip_errors:
        return rows if good.all() else JsonLines(path, starts[good], sizes[good], numbers[good], text, rows.stamp)
    skipped = Skipped()
    for index in np.flatnonzero(good):
        try:
            rows[index]
        except DatasetError as error:
            good[index] = False
            skipped += Skipped(count=1, reasons=(str(error),))
    warn_of_skipped(skipped)
    return JsonLines(path, starts[good], sizes[good], numbers[good], text, rows.stamp, skipped)


def _blocks(path: Path, first: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(first)
        while block := file.read(_BLOCK_BYTES):
            yield block


def _index(blocks: Iterable[bytes], first: int) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Start, bytes (line end included) and number of every line that is not empty."""
    ends: list[NDArray[np.int64]] = []
    at = first
    for block in blocks:
        ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + at)
        at += len(block)
    breaks = np.concatenate(ends) if ends else np.zeros(0, np.int64)
    starts = np.concatenate([np.array([first], np.int64), breaks + 1])
    sizes = np.append(breaks + 1, at) - starts
    if sizes.max() >= 2**31:
        raise DatasetError(f"line {int(sizes.argmax()) + 1} has {int(sizes.max())} bytes; a row may have 2 GiB at most")
    content = sizes - 1
    content[-1] = sizes[-1]  # nothing ends the last line
    full = np.flatnonzero(content > 0)
    return starts[full], sizes[full].astype(np.int32), full + 1


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


class JsonLines(Sequence[Any]):
    """The rows of a JSON lines file, each read from its place when it is asked for. Can be sent to other processes of the machine."""

    def __init__(
        self,
        path: Path,
        starts: NDArray[np.int64],
        sizes: NDArray[np.int32],
        numbers: NDArray[np.int64],
        text: bytes | None,
        stamp: tuple[int, int, int],
        skipped: Skipped | None = None,
    ) -> None:
        self._path, self._starts, self._sizes, self._text = path.absolute(), starts, sizes, text
        self.stamp, self.skipped = stamp, skipped
        self.places = Places(names=(str(path),), numbers=numbers)
        self._file: tuple[int, IO[bytes]] | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        return parse_object(self.line(index), self.places.tell(index))

    def line(self, index: Any) -> bytes:
        """The bytes of a row, line end included."""
        start, size = int(self._starts[index]), int(self._sizes[index])
        if self._text is not None:
            return self._text[start : start + size]
        descriptor = self._descriptor()
        line = os.pread(descriptor, size, start)
        self._check_stamp(os.fstat(descriptor))  # after reading, so that no change between the two is missed
        return line

    def part(self, start: int, stop: int) -> Sequence[Any]:
        if self._text is not None:
            return read_part(self, start, stop)
        piece = slice(start, stop)
        copy = JsonLines(self._path, self._starts[piece], self._sizes[piece], self.places.numbers[piece], None, self.stamp)
        copy.places = self.places.take(piece)
        return copy

    def _descriptor(self) -> int:
        # Opened anew in a forked or unpickled copy: processes share no file object.
        if self._file is None or self._file[0] != os.getpid():
            try:
                file = self._path.open("rb", buffering=0)
            except OSError as error:
                raise DatasetError(f"{self._path} can no longer be read: {error}") from error
            self._file = (os.getpid(), file)
        return self._file[1].fileno()

    def _check_stamp(self, status: os.stat_result) -> None:
        if _stamp(status) != self.stamp:
            raise DatasetError(f"{self._path} has changed since its lines were counted; make the dataset again")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}
