"""Several samplers as one, on the driver's side."""

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from twinkle_data import InputFeature, SampleResponse, SamplingParams
from twinkle_sync import CheckpointEngineManager, SyncError

from ._errors import ReplicaLost, SamplerError, SamplingOptionError
from ._inputs import SamplerInput, check_batch
from ._options import OptionSource, params_of_each
from ._sampler import vLLMSampler

OnFailure = Literal["retry", "error"]
State = Literal["serving", "waiting", "lost"]

_UNBOUNDED_TOKENS = 512  # what a completion without max_tokens counts as
_REMEMBERED = 4096  # prompts whose replica is remembered
_RECHECK_S = 0.5


@dataclass(eq=False, slots=True)
class _Work:
    """A request on its way through the pool."""

    prompt: SamplerInput
    params: Any
    adapter: str
    key: int
    tokens: int
    answer: "Future[SampleResponse]" = field(default_factory=Future)
    failures: int = 0
    on_tokens: Callable[[list[int]], None] | None = None
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """How one replica of a pool is doing.

    state: 'serving', 'waiting' (it has other weights than the manager's version) or 'lost'. losses: how often it died. error: of the last time.
    """

    state: State
    outstanding_tokens: int
    running: int
    losses: int
    error: str


class SamplerPool:
    """Spreads requests over samplers (replicas), each a `vLLMSampler` in a device group of its own, so that one may die without the others.

    A request goes to the replica with the fewest outstanding tokens; all samples of a prompt, and a prompt that comes again soon, to the same
    one, where its prefix is cached. Results come as they finish. One thread for each replica carries requests there and back.

    Args:
        replicas: handles of samplers, or samplers of this process.
        weights: the manager that sends weights to all of them (`CheckpointEngineManager(model=..., sampler=replicas)`): a replica serves while
            it has the version `weights.version`. Without one, replicas serve what they were built with.
        on_failure: what becomes of a dead replica's requests. 'retry': they begin anew on another one, at most `max_retries` times; 'error':
            their responses have the error ReplicaLost.
        resync: a replica that was restarted gets weights by `weights.sync_weights()`, called from the pool's thread. Only where the trainer may
            be read at any time; else the replica waits until your next synchronisation.
        wait_s: the longest that an idle look for results takes.

    A replica is restarted when its component was built with `on_failure='restart'` (see twinkle_remote).
    """

    def __init__(
        self,
        replicas: Sequence[vLLMSampler],
        *,
        weights: CheckpointEngineManager | None = None,
        on_failure: OnFailure = "retry",
        max_retries: int = 2,
        resync: bool = False,
        wait_s: float = 0.02,
    ) -> None:
        if not replicas:
            raise SamplingOptionError("a pool needs at least one replica")
        if on_failure not in ("retry", "error"):
            raise SamplingOptionError(f"on_failure is {on_failure!r}; it is 'retry' or 'error'")
        self._weights, self._on_failure, self._max_retries, self._resync, self._wait_s = weights, on_failure, max_retries, resync, wait_s
        self._condition = threading.Condition()
        self._homeless: deque[_Work] = deque()
        self._known: OrderedDict[int, _Replica] = OrderedDict()
        self._works: dict[Future[SampleResponse], _Work] = {}
        self._closed = False
        self._replicas = [_Replica(self, sampler, index) for index, sampler in enumerate(replicas)]
        for replica in self._replicas:
            replica.thread.start()

    def submit(
        self,
        inputs: Sequence[SamplerInput],
        sampling_params: OptionSource | Sequence[OptionSource] | None = None,
        num_samples: int | None = None,
        adapter_name: str | Sequence[str] = "",
    ) -> "list[Future[SampleResponse]]":
        """Let requests enter; their futures give the responses. Arguments as of `vLLMSampler.sample`.

        A response has an `error` where the request failed. Raises SamplingOptionError for options that all share and that are wrong.
        """
        return self._enter(inputs, sampling_params, num_samples, adapter_name, None)

    def _enter(
        self,
        inputs: Sequence[SamplerInput],
        sampling_params: OptionSource | Sequence[OptionSource] | None,
        num_samples: int | None,
        adapter_name: str | Sequence[str],
        on_tokens: Callable[[list[int]], None] | None,
    ) -> "list[Future[SampleResponse]]":
        check_batch(inputs)
        params = params_of_each(sampling_params, num_samples, len(inputs), rank=0)
        adapters = [adapter_name] * len(inputs) if isinstance(adapter_name, str) else list(adapter_name)
        if len(adapters) != len(inputs):
            raise SamplingOptionError(
                f"there are {len(inputs)} inputs but {len(adapters)} adapter names: give one for all, or a list with one for each"
            )
        works: list[_Work] = []
        for index, (prompt, wanted, adapter) in enumerate(zip(inputs, params, adapters, strict=True)):
            key, size = _describe(prompt)
            work = _Work(prompt, wanted, adapter, hash((key, adapter)), 0, on_tokens=on_tokens)
            if isinstance(wanted, SamplingParams):
                work.tokens = size + wanted.num_samples * (wanted.max_tokens or _UNBOUNDED_TOKENS)
            else:
                work.answer.set_result(_failed(SamplingOptionError(f"inputs[{index}]: {wanted}")))
            works.append(work)
        with self._condition:
            if self._closed:
                raise SamplerError("the pool is closed")
            self._works |= {work.answer: work for work in works if not work.answer.done()}
            self._homeless.extend(work for work in works if not work.answer.done())
            self._place()
        return [work.answer for work in works]

    def sample(
        self,
        inputs: Sequence[SamplerInput],
        sampling_params: OptionSource | Sequence[OptionSource] | None = None,
        num_samples: int | None = None,
        adapter_name: str | Sequence[str] = "",
    ) -> list[SampleResponse]:
        """`submit`, and wait for all: one response for each input, in order."""
        answers = self.submit(inputs, sampling_params, num_samples, adapter_name)
        try:
            return [answer.result() for answer in answers]
        except BaseException:
            self.abort(answers)
            raise

    async def sample_async(
        self,
        inputs: Sequence[SamplerInput],
        sampling_params: OptionSource | Sequence[OptionSource] | None = None,
        num_samples: int | None = None,
        adapter_name: str | Sequence[str] = "",
    ) -> AsyncIterator[tuple[int, SampleResponse]]:
        """Index and response of each input, as they finish. Requests whose responses nobody waits for any more are aborted."""
        answers = self.submit(inputs, sampling_params, num_samples, adapter_name)
        loop, finished = asyncio.get_running_loop(), cast("asyncio.Queue[int]", asyncio.Queue())

        def tell(index: int) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(finished.put_nowait, index)

        for index, answer in enumerate(answers):
            answer.add_done_callback(lambda _, index=index: tell(index))
        try:
            for _ in answers:
                index = await finished.get()
                yield index, answers[index].result()
        finally:
            self.abort([answer for answer in answers if not answer.done()])

    async def stream(
        self, prompt: SamplerInput, sampling_params: OptionSource | None = None, *, adapter_name: str = ""
    ) -> AsyncIterator[tuple[list[int], SampleResponse | None]]:
        """The tokens of one completion as they come, all so far each time, and last of all the response beside them."""
        loop, news = asyncio.get_running_loop(), cast("asyncio.Queue[list[int] | None]", asyncio.Queue())

        def tell(tokens: list[int] | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.put_nowait, tokens)

        (answer,) = self._enter([prompt], sampling_params, None, adapter_name, tell)
        answer.add_done_callback(lambda _: tell(None))
        seen: list[int] = []
        try:
            while (tokens := await news.get()) is not None:
                if len(tokens) > len(seen):
                    seen = tokens
                    yield tokens, None
            response = answer.result()
            yield (response.sequences[0].tokens if response.sequences else seen), response
        finally:
            if not answer.done():
                self.abort([answer])

    def abort(self, answers: "Sequence[Future[SampleResponse]] | None" = None) -> None:
        """End these requests, or all; their responses have what was sampled, with stop reason 'abort'."""
        with self._condition:
            chosen = None if answers is None else {self._works[answer] for answer in answers if answer in self._works}
            for replica in self._replicas:
                for work in [*replica.waiting, *replica.running.values()]:
                    work.aborted = work.aborted or chosen is None or work in chosen
            for work in [work for work in self._homeless if chosen is None or work in chosen]:
                self._homeless.remove(work)
                self._settle(work, _failed(SamplerError("the request was aborted before any replica could take it")))
            self._condition.notify_all()

    def status(self) -> list[ReplicaStatus]:
        """How the replicas are doing, in order."""
        with self._condition:
            return [replica.status() for replica in self._replicas]

    def close(self) -> None:
        """Abort what runs and end the threads; the samplers stay."""
        self.abort()
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for replica in self._replicas:
            replica.thread.join(30)
        with self._condition:
            while self._homeless:
                self._settle(self._homeless.popleft(), _failed(SamplerError("the pool was closed")))

    def __enter__(self) -> "SamplerPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # What follows is for replicas, with the condition held.

    def _place(self) -> None:
        """Give requests that are nowhere to replicas; with none left that could ever serve, end them."""
        serving = [replica for replica in self._replicas if replica.state == "serving"]
        while self._homeless and serving:
            work = self._homeless.popleft()
            least = min(serving, key=lambda replica: replica.outstanding)
            known = self._known.get(work.key)
            if known in serving and known.outstanding <= least.outstanding + 4 * work.tokens:
                least = known
            self._known[work.key] = least
            self._known.move_to_end(work.key)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            least.waiting.append(work)
            least.outstanding += work.tokens
        if all(replica.state == "lost" and replica.is_final for replica in self._replicas):
            error = next((replica.error for replica in self._replicas if replica.error), "")
            while self._homeless:
                self._settle(self._homeless.popleft(), _failed(ReplicaLost(f"no replica is left: {error}")))
        self._condition.notify_all()

    def _settle(self, work: _Work, response: SampleResponse) -> None:
        self._works.pop(work.answer, None)
        if not work.answer.done():
            work.answer.set_result(response)

    def _give_up(self, works: Sequence[_Work], error: str) -> None:
        """A replica has lost these requests."""
        for work in works:
            work.failures += 1
            if work.aborted or self._on_failure == "error" or work.failures > self._max_retries:
                self._settle(work, _failed(ReplicaLost(f"the replica died with the request ({work.failures} times so far): {error}")))
            else:
                self._homeless.append(work)
        self._place()

    def _expected_version(self) -> int | None:
        return None if self._weights is None else self._weights.version


class _Replica:
    """One sampler of a pool, and the thread that talks to it."""

    def __init__(self, pool: SamplerPool, sampler: vLLMSampler, index: int) -> None:
        self.pool, self.sampler = pool, sampler
        self.state: State = "waiting"
        self.is_final = False
        self.error = ""
        self.losses = 0
        self.outstanding = 0
        self.waiting: deque[_Work] = deque()
        self.running: dict[str, _Work] = {}
        self.dropped: list[str] = []  # ids of requests that began anew while the sampler, which refused to work, may still have them
        self.thread = threading.Thread(target=self._run, name=f"twinkle-pool-{index}", daemon=True)

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(self.state, self.outstanding, len(self.running) + len(self.waiting), self.losses, self.error)

    def _run(self) -> None:
        pool = self.pool
        while True:
            try:
                if self.state != "serving":
                    self._come_back()
                with pool._condition:
                    if pool._closed and not self.running:
                        return
                    if self.state != "serving":
                        pool._condition.wait(_RECHECK_S)
                        continue
                    if not self.waiting and not self.running:
                        pool._condition.wait()
                        continue
                    entering, self.waiting = list(self.waiting), deque()
                    going = [name for name, work in self.running.items() if work.aborted]
                self._talk(entering, going)
            except Exception as error:  # whatever ends a worker: what it worked on is told or retried, and the pool goes on
                self._lose(error)
                if self.is_final:
                    return

    def _talk(self, entering: list[_Work], going: list[str]) -> None:
        """Carry requests there and responses back."""
        pool = self.pool
        if entering:
            # Until the ids are there the requests are nobody's: they are kept where a failure finds them.
            with pool._condition:
                placeholders = {f"entering-{id(work)}": work for work in entering}
                self.running |= placeholders
            ids = list(self.sampler.submit([w.prompt for w in entering], [w.params for w in entering], None, [w.adapter for w in entering]))
            with pool._condition:
                for name in placeholders:
                    del self.running[name]
                self.running |= dict(zip(ids, entering, strict=True))
        if going:
            self.sampler.abort(going)
        for name, response in self.sampler.collect(list(self.running), pool._wait_s):
            with pool._condition:
                work = self.running.pop(name)
                self.outstanding -= work.tokens
                pool._settle(work, response)
        if watched := {name: work.on_tokens for name, work in self.running.items() if work.on_tokens is not None}:
            for name, tokens in self.sampler.peek(list(watched)):
                watched[name](tokens)

    def _come_back(self) -> None:
        """Serve, if the sampler lives and has the weights that it should have. A remote component without workers restarts at its first call."""
        pool = self.pool
        expected = pool._expected_version()
        version = self.sampler.weight_version()
        if expected is not None and version != expected and pool._resync and pool._weights is not None and self.losses:
            with _one_resync:
                if self.sampler.weight_version() != pool._expected_version():
                    pool._weights.sync_weights()
            expected, version = pool._expected_version(), self.sampler.weight_version()
        if self.dropped:
            self.sampler.abort(self.dropped)
            self.sampler.collect(self.dropped)
            self.dropped = []
        with pool._condition:
            self.state = "serving" if expected is None or version == expected else "waiting"
            if self.state == "serving":
                self.error = ""
                pool._place()

    def _lose(self, error: Exception) -> None:
        pool = self.pool
        with pool._condition:
            refused = isinstance(error, SyncError)  # half-loaded weights: the sampler lives, and serves after the next synchronisation
            was_serving = self.state == "serving"
            self.state = "waiting" if refused else "lost"
            self.error = f"{type(error).__name__}: {error}"
            if not refused:
                # One that cannot even say its version after it was lost will not come back.
                self.is_final = not was_serving and self.losses > 0
                self.losses += 1
            self.dropped = [*self.dropped, *(name for name in self.running if not name.startswith("entering-"))] if refused else []
            works = [*self.running.values(), *self.waiting]
            self.running, self.waiting, self.outstanding = {}, deque(), 0
            pool._give_up(works, self.error)
        time.sleep(0.01 if was_serving else _RECHECK_S)


_one_resync = threading.Lock()


def _describe(prompt: Any) -> tuple[int, int]:
    """A number that equal prompts share, and about how many tokens a prompt has."""
    if isinstance(prompt, InputFeature):
        return hash(prompt.input_ids.tobytes()), len(prompt)
    if isinstance(prompt, str):
        return hash(prompt), len(prompt) // 4 + 1
    if isinstance(prompt, (list, tuple, np.ndarray)) and all(isinstance(token, (int, np.integer)) for token in prompt):
        return hash(tuple(int(token) for token in prompt)), len(prompt)
    text = repr(prompt)
    return hash(text), len(text) // 4 + 1


def _failed(error: Exception) -> SampleResponse:
    return SampleResponse(sequences=[], prompt_token_ids=[], error=error)
