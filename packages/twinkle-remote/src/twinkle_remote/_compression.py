"""Compression of what travels between nodes (`initialize(compress="zstd")`); off unless asked for."""

import importlib
from typing import Any

from twinkle_remote._errors import MissingCompressionError, RemoteTypeError

# The fastest level that zstandard documents as a default range; more gains little on token ids and costs several times the time.
_LEVEL = 1


def check_codec(compress: str | None, compress_above_bytes: int) -> None:
    """Raises RemoteTypeError for an unknown codec or size, MissingCompressionError where zstandard is not installed."""
    if compress is None:
        return
    if compress != "zstd":
        raise RemoteTypeError(f"compress={compress!r} is not known; known are None and 'zstd'")
    if isinstance(compress_above_bytes, bool) or not isinstance(compress_above_bytes, int) or compress_above_bytes < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RemoteTypeError(f"compress_above_bytes={compress_above_bytes!r}: a size in bytes is a whole number of at least 0")
    _zstandard()


def compress(buffer: Any) -> bytes:
    """The buffer's bytes as one zstd frame."""
    return _zstandard().ZstdCompressor(level=_LEVEL).compress(buffer)


def decompress(frame: Any) -> bytes:
    """The bytes of a frame."""
    return _zstandard().ZstdDecompressor().decompress(frame)


def _zstandard() -> Any:
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ModuleNotFoundError as error:
        if error.name != "zstandard":
            raise
        raise MissingCompressionError("compress='zstd' needs zstandard, which is not installed: pip install 'twinkle-remote[compress]'") from error
    return zstandard
