"""Checkpoints over a connection, waiting and asynchronous. A download that broke goes on where it was, in the next attempt or the next process;
an upload begins anew."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from ._archives import Parcel, unpack
from ._attempts import Attempts, error_of
from ._calls import Call
from ._errors import Conflict, DamagedCheckpoint
from ._resources import Checkpoint

if TYPE_CHECKING:
    from ._connection import AsyncConnection, Connection


class _Part:
    """What is there of a download: `PATH.part`, and in `PATH.part.etag` of which checkpoint it is."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f"{target.name}.part")
        self._etag = target.with_name(f"{target.name}.part.etag")
        self.path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def etag(self) -> str:
        """Of what is there; '' where nothing is."""
        return self._etag.read_text() if self.path.is_file() and self._etag.is_file() else ""

    def headers(self) -> dict[str, str]:
        """That ask for the rest."""
        size = self.path.stat().st_size if self.etag else 0
        return {"Range": f"bytes={size}-", "If-Range": self.etag} if size else {}

    def begin(self, status: int, headers: Mapping[str, str]) -> bool:
        """Makes ready for an answer's body; False where all is there already. Raises what else the answer is."""
        if status == 416 and self.etag:
            return False
        if status == 200:
            self.path.write_bytes(b"")
            self._etag.write_text(headers.get("etag", ""))
        return True

    def drop(self) -> None:
        """Forgets it."""
        self.path.unlink(missing_ok=True)
        self._etag.unlink(missing_ok=True)


def _check_target(target: Path) -> None:
    if target.exists():
        raise Conflict(f"{target} is there already")


def _finish(part: _Part, target: Path) -> Path:
    try:
        unpack(part.path, target, part.etag)
    except DamagedCheckpoint:
        part.drop()  # or the next download would go on from it
        raise
    part.drop()
    return target


def _upload_headers(parcel: Parcel) -> dict[str, str]:
    return {"Content-Type": "application/x-tar", "Content-Length": str(parcel.size_bytes), "Content-Digest": parcel.content_digest}


def download(connection: Connection, call: Call[bytes], target: Path) -> Path:
    """Fetches an archive, checks it, and makes a folder of it."""
    _check_target(target)
    part, request_id = _Part(target), uuid.uuid4().hex
    attempts = Attempts(call, connection.settings, request_id)
    while True:
        try:
            with connection.stream(call, request_id, part.headers()) as response:
                if response.status_code >= 300 and not (response.status_code == 416 and part.etag):
                    wait_s = attempts.after_answer(response.status_code, response.headers, response.read()) or 0.0
                else:
                    if part.begin(response.status_code, response.headers):
                        with part.path.open("ab") as file:
                            # As they come: what is gathered first is lost when the connection breaks.
                            for chunk in response.iter_bytes():
                                file.write(chunk)
                                attempts = Attempts(call, connection.settings, request_id)  # it goes on, so it may break as often again
                    break
        except httpx.HTTPError as error:
            wait_s = attempts.after_failure(error)
        connection.pause(wait_s)
    return _finish(part, target)


def _after_upload(attempts: Attempts, status: int, headers: Mapping[str, str], content: bytes) -> float | None:
    """As `Attempts.after_answer`; a quota does not grow by waiting."""
    if status == 429 and "retry-after" not in headers:
        raise error_of(status, headers, content)
    return attempts.after_answer(status, headers, content)


def upload(connection: Connection, call: Call[Checkpoint], folder: Path) -> Checkpoint:
    """Sends an adapter, again from its beginning where the connection broke: the server knows by its digest what it has already."""
    parcel, request_id = Parcel(folder), uuid.uuid4().hex
    attempts = Attempts(call, connection.settings, request_id)
    while True:
        try:
            with connection.stream(call, request_id, _upload_headers(parcel), iter(parcel)) as response:
                content = response.read()
        except httpx.HTTPError as error:
            wait_s = attempts.after_failure(error)
        else:
            answered = _after_upload(attempts, response.status_code, response.headers, content)
            if answered is None:
                return attempts.read(content)
            wait_s = answered
        connection.pause(wait_s)


async def download_async(connection: AsyncConnection, call: Call[bytes], target: Path) -> Path:
    """The same for an event loop."""
    _check_target(target)
    part, request_id = _Part(target), uuid.uuid4().hex
    attempts = Attempts(call, connection.settings, request_id)
    while True:
        try:
            async with connection.stream(call, request_id, part.headers()) as response:
                if response.status_code >= 300 and not (response.status_code == 416 and part.etag):
                    wait_s = attempts.after_answer(response.status_code, response.headers, await response.aread()) or 0.0
                else:
                    if part.begin(response.status_code, response.headers):
                        with part.path.open("ab") as file:
                            async for chunk in response.aiter_bytes():
                                await asyncio.to_thread(file.write, chunk)
                                attempts = Attempts(call, connection.settings, request_id)
                    break
        except httpx.HTTPError as error:
            wait_s = attempts.after_failure(error)
        await asyncio.sleep(wait_s)
    return await asyncio.to_thread(_finish, part, target)


async def upload_async(connection: AsyncConnection, call: Call[Checkpoint], folder: Path) -> Checkpoint:
    """The same for an event loop."""
    parcel, request_id = await asyncio.to_thread(Parcel, folder), uuid.uuid4().hex
    attempts = Attempts(call, connection.settings, request_id)

    async def chunks() -> AsyncIterator[bytes]:
        pieces = iter(parcel)
        while (chunk := await asyncio.to_thread(next, pieces, None)) is not None:
            yield chunk

    while True:
        try:
            async with connection.stream(call, request_id, _upload_headers(parcel), chunks()) as response:
                content = await response.aread()
        except httpx.HTTPError as error:
            wait_s = attempts.after_failure(error)
        else:
            answered = _after_upload(attempts, response.status_code, response.headers, content)
            if answered is None:
                return attempts.read(content)
            wait_s = answered
        await asyncio.sleep(wait_s)
