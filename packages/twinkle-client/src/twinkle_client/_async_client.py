"""TwinkleClient for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from . import _endpoints
from ._client import HEALTH_TIMEOUT_S, check_interval
from ._connection import AsyncConnection
from ._errors import ClientError, ConfigError
from ._heartbeat import Beats
from ._settings import make_settings

if TYPE_CHECKING:
    from ._resources import CapacityInfo, Checkpoint, CheckpointPath, CheckpointType, Cursor, CurvePoint, ServerCapabilities, TrainingRun, WeightsInfo


class AsyncTwinkleClient:
    """TwinkleClient for an event loop: `async with AsyncTwinkleClient(...) as client:`. The arguments are the same, and so is what methods do.

    The session is made on entering (or by `await client.start()`), and kept alive by a task.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        route_prefix: str = "/twinkle",
        session_heartbeat_interval: float = 10,
        session_metadata: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
        call_timeout_s: float = 3600.0,
        max_retries: int = 4,
    ) -> None:
        settings = make_settings(base_url, api_key, route_prefix, timeout_s, call_timeout_s, max_retries)
        self._interval_s = check_interval(session_heartbeat_interval)
        self._metadata = session_metadata
        self.connection = AsyncConnection(settings)
        self._beating: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<AsyncTwinkleClient of {self.connection.settings.url}, session {self.session_id}>"

    @property
    def session_id(self) -> str | None:
        """Of the session that the server keeps for this client; None before `start()`."""
        return self.connection.headers.session_id

    @property
    def is_session_lost(self) -> bool:
        """Whether the server does not know the session any more. Verbs then raise SessionLost, until `renew_session()`."""
        return self.connection.headers.is_session_lost

    async def start(self) -> Self:
        """Make the session, unless there is one."""
        if self.session_id is None:
            await self.renew_session()
        return self

    async def renew_session(self) -> str:
        """Make a new session in place of the present one, and return its id."""
        session = await self.connection.run(_endpoints.create_session(self._metadata))
        await self._stop_beating()
        self.connection.headers.session_id, self.connection.headers.is_session_lost = session.session_id, False
        self._beating = asyncio.create_task(self._beat(session.session_id), name="twinkle-heartbeat")
        return session.session_id

    async def _beat(self, session_id: str) -> None:
        beats = Beats(self.connection.settings.url, self._interval_s)
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.connection.run(_endpoints.session_heartbeat(session_id), timeout_s=max(self._interval_s, 1.0))
            except ConfigError:  # closed meanwhile
                return
            except ClientError as error:
                if beats.failed(error, session_id):
                    self.connection.headers.is_session_lost = True
                    return
            else:
                beats.succeeded()

    async def _stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating

    async def health_check(self) -> bool:
        """Whether the server answers that it is well. Raises nothing for one that does not."""
        try:
            return (await self.connection.run(_endpoints.health(), timeout_s=HEALTH_TIMEOUT_S)).status == "ok"
        except ConfigError:
            raise
        except ClientError:
            return False

    async def get_server_capabilities(self) -> ServerCapabilities:
        """The models that the server has."""
        return await self.connection.run(_endpoints.capabilities())

    async def list_training_runs(self, limit: int = 20, offset: int = 0, *, all_users: bool = False) -> list[TrainingRun]:
        """Training runs, the latest first. all_users: those of every tenant, which needs a key with the admin scope."""
        return (await self.list_training_runs_with_cursor(limit, offset, all_users=all_users))[0]

    async def list_training_runs_with_cursor(self, limit: int = 20, offset: int = 0, *, all_users: bool = False) -> tuple[list[TrainingRun], Cursor]:
        """The same, and where the page lies."""
        page = await self.connection.run(_endpoints.training_runs(limit, offset, all_users))
        return page.training_runs, page.cursor

    async def get_training_run(self, run_id: str) -> TrainingRun:
        """One run. Raises NotFound."""
        return await self.connection.run(_endpoints.training_run(run_id))

    async def find_training_run_by_model(self, base_model: str) -> list[TrainingRun]:
        """All runs on a base model."""
        found: list[TrainingRun] = []
        offset, total = 0, 1
        while offset < total:
            runs, cursor = await self.list_training_runs_with_cursor(_endpoints.PAGE, offset)
            found += [run for run in runs if run.base_model == base_model]
            offset, total = offset + len(runs), cursor.total_count if runs else 0
        return found

    async def get_training_curve(self, run_id: str, after: int = 0) -> list[CurvePoint]:
        """What calls on a run measured, oldest first: at most 1000 points, those behind the point of number `after`. Raises NotFound."""
        return (await self.connection.run(_endpoints.training_curve(run_id, after))).points

    async def list_checkpoints(self, run_id: str) -> list[Checkpoint]:
        """The whole checkpoints of a run. Raises NotFound."""
        return (await self.connection.run(_endpoints.checkpoints(run_id))).checkpoints

    async def get_checkpoint_path(self, run_id: str, checkpoint_id: str) -> CheckpointPath:
        """Where a checkpoint is: `.path` on the server's file system, `.twinkle_path` its URI. Raises NotFound."""
        return await self.connection.run(_endpoints.checkpoint_path(run_id, checkpoint_id))

    async def get_latest_checkpoint_path(self, run_id: str) -> str | None:
        """The URI of a run's newest checkpoint, for `resume_from_checkpoint`; None when it has none. Raises NotFound for the run."""
        return _endpoints.latest_path(await self.list_checkpoints(run_id))

    async def delete_checkpoint(self, run_id: str, checkpoint_id: str) -> bool:
        """Delete that checkpoint and nothing else; whether the server did. Raises NotFound."""
        return (await self.connection.run(_endpoints.delete_checkpoint(run_id, checkpoint_id))).success

    async def download_checkpoint(self, run_id: str, checkpoint_id: str, path: str | os.PathLike[str]) -> Path:
        """Fetch a checkpoint of one's own, or a public one, as a folder: `adapter/` in peft's format, `state/`, `manifest.json`. Returns `path`.

        The folder is there when every file has the SHA-256 that the server says, and not before. A download that broke goes on where it was, also
        when this is called again: what has come is in `path` + `.part`.

        Raises:
            Conflict: `path` is there already. NotFound: there is no such checkpoint. DamagedCheckpoint: what came is not what the server has.
        """
        from ._transfers import download_async

        return await download_async(self.connection, _endpoints.download_checkpoint(run_id, checkpoint_id), Path(path))

    async def upload_checkpoint(
        self, run_id: str, name: str, path: str | os.PathLike[str], checkpoint_type: CheckpointType = "weights"
    ) -> Checkpoint:
        """Make a checkpoint of a run, to load and to sample from, of an adapter in peft's format: a folder with `adapter_config.json` and
        `adapter_model.safetensors`, or one that `download_checkpoint` made. Rank and scaling must be the run's.

        The server keeps nothing of a body whose SHA-256 is another than was sent with it. One that broke begins anew, as
        often as other requests are repeated.

        Raises:
            InvalidRequest: no adapter, or one that does not fit the run. Conflict: there is a checkpoint of that name. QuotaExceeded: no room.
        """
        from ._transfers import upload_async

        return await upload_async(self.connection, _endpoints.upload_checkpoint(run_id, name, checkpoint_type), Path(path))

    async def end_training_run(self, run_id: str) -> bool:
        """End a run: its adapter and optimizer are gone, its checkpoints stay, and its name may be used again. Raises NotFound."""
        return (await self.connection.run(_endpoints.end_training_run(run_id))).success

    async def get_capacity_info(self) -> CapacityInfo:
        """How many adapters the server takes: `.max_loras`, `.used_loras`, `.free_loras`."""
        return await self.connection.run(_endpoints.capacity_info())

    async def get_weights_info(self, twinkle_path: str) -> WeightsInfo:
        """What a checkpoint is of: `.base_model`, `.is_lora`, `.lora_rank`. Raises NotFound."""
        return await self.connection.run(_endpoints.weights_info(twinkle_path))

    async def close(self) -> None:
        """Stop the heartbeat and close the connections. Harmless twice."""
        await self._stop_beating()
        await self.connection.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
