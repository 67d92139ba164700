"""TwinkleClient: sessions, training runs and checkpoints of a server."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ._errors import ClientError, ConfigError
from ._heartbeat import Beats, Heartbeat
from ._registry import register, unregister
from ._settings import make_settings

if TYPE_CHECKING:
    from ._resources import CapacityInfo, Checkpoint, CheckpointPath, CheckpointType, Cursor, CurvePoint, ServerCapabilities, TrainingRun, WeightsInfo

HEALTH_TIMEOUT_S = 5.0


def check_interval(interval_s: float) -> float:
    """The interval; raises ConfigError for one that is not above 0."""
    if not interval_s > 0:
        raise ConfigError(f"session_heartbeat_interval is {interval_s}; it must be a number of seconds above 0")
    return interval_s


class TwinkleClient:
    """A session with a server, kept alive by a thread until `close()`, the end of a `with`, or the end of the process.

    It may be used by any number of threads, and a process may have several. The handles (`TransformersModel`, `vLLMSampler`, `DataLoader`, ...)
    use the one given as `client=`, else the latest that is open.

    Args:
        base_url: of the server; None: TWINKLE_SERVER_URL, else http://localhost:8000.
        api_key: None: TWINKLE_SERVER_TOKEN. A server on the same machine may take requests without one.
        route_prefix: of the server's routes.
        session_heartbeat_interval: seconds between two heartbeats.
        session_metadata: plain JSON that is kept with the session.
        timeout_s: of a control request, all attempts together.
        call_timeout_s: of a verb of a model or sampler, from its first attempt to its result, waiting in the queue included.
        max_retries: further attempts of a request that may be repeated, with growing pauses between them.

    Raises:
        ConfigError: arguments that cannot work. Unreachable, DeadlineExceeded, Unauthorized, and the like: no session could be made.
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
        # httpx and pydantic are loaded here, not when the module is imported.
        from . import _endpoints
        from ._connection import Connection

        self._endpoints = _endpoints
        self.connection = Connection(settings)
        self._lock = threading.Lock()
        self._heartbeat: Heartbeat | None = None
        try:
            self.renew_session()
        except BaseException:
            self.connection.close()
            raise
        register(self)

    def __repr__(self) -> str:
        return f"<TwinkleClient of {self.connection.settings.url}, session {self.session_id}>"

    @property
    def session_id(self) -> str | None:
        """Of the session that the server keeps for this client."""
        return self.connection.headers.session_id

    @property
    def is_session_lost(self) -> bool:
        """Whether the server does not know the session any more. Verbs then raise SessionLost, until `renew_session()`."""
        return self.connection.headers.is_session_lost

    def renew_session(self) -> str:
        """Make a new session in place of the present one, and return its id. Runs and checkpoints stay; they belong to the key, not the session."""
        session = self.connection.run(self._endpoints.create_session(self._metadata))
        with self._lock:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self.connection.headers.session_id, self.connection.headers.is_session_lost = session.session_id, False
            beats = Beats(self.connection.settings.url, self._interval_s)
            self._heartbeat = Heartbeat(lambda: self._beat(beats), self._interval_s)
        return session.session_id

    def _beat(self, beats: Beats) -> bool:
        """Send one heartbeat, in the thread; False: the session is lost, or this client is closed."""
        session_id = self.session_id
        if session_id is None:
            return False
        try:
            self.connection.run(self._endpoints.session_heartbeat(session_id), timeout_s=max(self._interval_s, 1.0))
        except ConfigError:  # closed meanwhile
            return False
        except ClientError as error:
            if beats.failed(error, session_id):
                self.connection.headers.is_session_lost = True
                return False
            return True
        beats.succeeded()
        return True

    def health_check(self) -> bool:
        """Whether the server answers that it is well. Raises nothing for one that does not."""
        try:
            return self.connection.run(self._endpoints.health(), timeout_s=HEALTH_TIMEOUT_S).status == "ok"
        except ConfigError:
            raise
        except ClientError:
            return False

    def get_server_capabilities(self) -> ServerCapabilities:
        """The models that the server has."""
        return self.connection.run(self._endpoints.capabilities())

    def list_training_runs(self, limit: int = 20, offset: int = 0, *, all_users: bool = False) -> list[TrainingRun]:
        """Training runs, the latest first. all_users: those of every tenant, which needs a key with the admin scope."""
        return self.list_training_runs_with_cursor(limit, offset, all_users=all_users)[0]

    def list_training_runs_with_cursor(self, limit: int = 20, offset: int = 0, *, all_users: bool = False) -> tuple[list[TrainingRun], Cursor]:
        """The same, and where the page lies: `cursor.limit`, `cursor.offset`, `cursor.total_count`."""
        page = self.connection.run(self._endpoints.training_runs(limit, offset, all_users))
        return page.training_runs, page.cursor

    def get_training_run(self, run_id: str) -> TrainingRun:
        """One run. Raises NotFound."""
        return self.connection.run(self._endpoints.training_run(run_id))

    def find_training_run_by_model(self, base_model: str) -> list[TrainingRun]:
        """All runs on a base model."""
        found: list[TrainingRun] = []
        offset, total = 0, 1
        while offset < total:
            runs, cursor = self.list_training_runs_with_cursor(self._endpoints.PAGE, offset)
            found += [run for run in runs if run.base_model == base_model]
            offset, total = offset + len(runs), cursor.total_count if runs else 0
        return found

    def get_training_curve(self, run_id: str, after: int = 0) -> list[CurvePoint]:
        """What calls on a run measured, oldest first: at most 1000 points, those behind the point of number `after`. Raises NotFound."""
        return self.connection.run(self._endpoints.training_curve(run_id, after)).points

    def list_checkpoints(self, run_id: str) -> list[Checkpoint]:
        """The whole checkpoints of a run. Raises NotFound."""
        return self.connection.run(self._endpoints.checkpoints(run_id)).checkpoints

    def get_checkpoint_path(self, run_id: str, checkpoint_id: str) -> CheckpointPath:
        """Where a checkpoint is: `.path` on the server's file system, `.twinkle_path` its URI. Raises NotFound."""
        return self.connection.run(self._endpoints.checkpoint_path(run_id, checkpoint_id))

    def get_latest_checkpoint_path(self, run_id: str) -> str | None:
        """The URI of a run's newest checkpoint, for `resume_from_checkpoint`; None when it has none. Raises NotFound for the run."""
        return self._endpoints.latest_path(self.list_checkpoints(run_id))

    def delete_checkpoint(self, run_id: str, checkpoint_id: str) -> bool:
        """Delete that checkpoint and nothing else; whether the server did. Raises NotFound."""
        return self.connection.run(self._endpoints.delete_checkpoint(run_id, checkpoint_id)).success

    def download_checkpoint(self, run_id: str, checkpoint_id: str, path: str | os.PathLike[str]) -> Path:
        """Fetch a checkpoint of one's own, or a public one, as a folder: `adapter/` in peft's format, `state/`, `manifest.json`. Returns `path`.

        The folder is there when every file has the SHA-256 that the server says, and not before. A download that broke goes on where it was, also
        when this is called again: what has come is in `path` + `.part`.

        Raises:
            Conflict: `path` is there already. NotFound: there is no such checkpoint. DamagedCheckpoint: what came is not what the server has.
        """
        from ._transfers import download

        return download(self.connection, self._endpoints.download_checkpoint(run_id, checkpoint_id), Path(path))

    def upload_checkpoint(self, run_id: str, name: str, path: str | os.PathLike[str], checkpoint_type: CheckpointType = "weights") -> Checkpoint:
        """Make a checkpoint of a run, to load and to sample from, of an adapter in peft's format: a folder with `adapter_config.json` and
        `adapter_model.safetensors`, or one that `download_checkpoint` made. Rank and scaling must be the run's.

        The server keeps nothing of a body whose SHA-256 is another than was sent with it. One that broke begins anew, as
        often as other requests are repeated.

        Raises:
            InvalidRequest: no adapter, or one that does not fit the run. Conflict: there is a checkpoint of that name. QuotaExceeded: no room.
        """
        from ._transfers import upload

        return upload(self.connection, self._endpoints.upload_checkpoint(run_id, name, checkpoint_type), Path(path))

    def end_training_run(self, run_id: str) -> bool:
        """End a run: its adapter and optimizer are gone, its checkpoints stay, and its name may be used again. Raises NotFound."""
        return (self.connection.run(self._endpoints.end_training_run(run_id))).success

    def get_capacity_info(self) -> CapacityInfo:
        """How many adapters the server takes: `.max_loras`, `.used_loras`, `.free_loras`."""
        return self.connection.run(self._endpoints.capacity_info())

    def get_weights_info(self, twinkle_path: str) -> WeightsInfo:
        """What a checkpoint is of: `.base_model`, `.is_lora`, `.lora_rank`. Raises NotFound."""
        return self.connection.run(self._endpoints.weights_info(twinkle_path))

    def close(self) -> None:
        """Stop the heartbeat and close the connections. The server ends the session in its time; runs and checkpoints stay. Harmless twice."""
        unregister(self)
        self.connection.close()
        with self._lock:
            if self._heartbeat is not None:
                self._heartbeat.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
