"""Logs as lines of JSON, each with the request that it belongs to."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TextIO

LogFormat = Literal["json", "text"]

_context: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("twinkle_log_context", default={})  # noqa: B039 (never changed)
# Of every record; what else is in one was given with extra=.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@contextmanager
def log_context(**fields: Any) -> Iterator[None]:
    """Log lines of this task or thread carry these fields: `request_id`, `tenant`, ..."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, the context's fields, and those given with `extra=`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds, fraction = divmod(record.created, 1)
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(fraction * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_context.get(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """A record as a line to read, with the request's id at its end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        request_id = _context.get().get("request_id") or getattr(record, "request_id", None)
        first, newline, rest = text.partition("\n")
        return f"{first} [{request_id}]{newline}{rest}" if request_id else text


def configure_logging(level: str, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Send the process's log to a stream (standard error), in that format, in place of what was configured before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # A line for each of its HTTP requests is more than a server of others' requests should write.
    logging.getLogger("httpx").setLevel(logging.WARNING)
