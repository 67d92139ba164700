"""The engine's own thread: requests enter one by one, and leave as they finish."""

import atexit
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from twinkle_data import InputFeature
from twinkle_sync import WeightsUnavailable

from ._adapters import Adapter
from ._errors import EngineFailed, SamplerError

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm import SamplingParams as EngineParams

PauseMode = Literal["keep", "abort", "wait"]

_numbers = itertools.count()
# What vLLM knows of the batch that it computes is global to the process: two engines must not step at the same time.
one_engine_at_a_time = threading.Lock()


class Refused(Exception):
    """vLLM would not take a request."""


@dataclass(eq=False, slots=True)
class Request:
    """One request on its way.

    ended: its last output; None when it was aborted before it began. version: of the weights that it began with.
    """

    prompt: InputFeature
    params: "EngineParams"
    adapter: Adapter | None = None
    id: str = field(default_factory=lambda: f"request-{next(_numbers)}")
    ended: "Future[RequestOutput | None]" = field(default_factory=Future)
    version: int | None = None
    on_output: "Callable[[RequestOutput], None] | None" = None


class EngineLoop:
    """Runs vLLM's step loop in a thread of its own, for as long as there are requests.

    Everything that touches the engine happens in that thread, or between two of its steps in `exclusive()`. version: of the weights that the
    engine holds; requests are marked with the one that they begin with.
    """

    def __init__(self, engine: "LLM") -> None:
        self._engine = engine
        self._condition = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        self._holds = 0  # exclusive() blocks that are open or wait
        self._held = False
        self._stepping = False
        self._paused = self._draining = self._closed = False
        self.version = 0
        self._fault: Exception | None = None  # of an update that failed
        engine.llm_engine.set_weight_version("0")
        self._thread = threading.Thread(target=self._run, name="twinkle-vllm-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called and `resume` not yet."""
        return self._paused

    @property
    def unfinished(self) -> list[Request]:
        """The requests that run or wait."""
        with self._condition:
            return [*self._running.values(), *self._waiting]

    def submit(self, requests: Iterable[Request]) -> None:
        """Let requests enter; those of one call enter together, so that the same calls draw the same samples.

        After a failed update they end at once, with its error.
        """
        with self._condition:
            if self._fault is not None:  # whoever asks for the weights first may have done so before the update
                for request in requests:
                    request.ended.set_exception(self._fault)
                return
            self._waiting.extend(requests)
            self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No step runs inside; requests stay where they are. Not for use inside itself."""
        with self._condition:
            self._holds += 1
            self._condition.wait_for(lambda: not self._stepping and not self._held)
            self._held = True
        try:
            with one_engine_at_a_time:
                yield
        finally:
            with self._condition:
                self._holds -= 1
                self._held = False
                self._condition.notify_all()

    def update(self, load: Callable[[], None], version: int) -> None:
        """Change the weights by `load`, which is then called version `version`. When it raises, all requests end with that error."""
        with self.exclusive():
            try:
                load()
            except BaseException as error:  # an interruption too leaves weights that are neither old nor new
                with self._condition:
                    self._fault = WeightsUnavailable(f"loading weights version {version} failed ({type(error).__name__}: {error})")
                self._abort(self.unfinished, self._fault)
                raise
            self._fault = None
            self._engine.llm_engine.set_weight_version(str(version))
            self.version = version

    def progress(self, requests: Sequence[Request]) -> list[list[int]]:
        """What each has sampled so far, of its first sample."""
        with self.exclusive():
            processor = self._engine.llm_engine.output_processor
            found: list[list[int]] = []
            for request in requests:
                states = [processor.request_states[name] for name in processor.external_req_ids.get(request.id, ())]
                detokenizers = [state.detokenizer for state in states if state.request_index == 0 and state.detokenizer is not None]
                found.append(list(detokenizers[0].output_token_ids) if detokenizers else [])
            return found

    def abort(self, requests: Sequence[Request], error: Exception | None = None) -> None:
        """End these requests; what they have sampled so far is their output, or `error` is raised by their future."""
        with self.exclusive():
            self._abort(requests, error)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Step no more until `resume`.

        'keep' leaves the requests where they are, 'abort' ends them, 'wait' lets those that run come to their end first and starts no other.
        Raises SamplerError when they do not within `timeout_s`; the sampler is not paused then.
        """
        if mode == "wait":
            with self._condition:
                if not self.finish(lambda request: True, timeout_s):
                    raise SamplerError(
                        f"pause('wait'): {len(self._running)} requests still run after {timeout_s:g} s; use mode 'abort', or wait longer"
                    )
                self._paused = True
        with self.exclusive():
            self._paused = True
            if mode == "abort":
                self._abort(self.unfinished)

    def resume(self) -> None:
        """Go on."""
        with self._condition:
            self._paused = False
            self._condition.notify_all()

    def finish(self, which: Callable[[Request], bool], timeout_s: float) -> bool:
        """Let those that run come to their end, and no other begin meanwhile; False when they did not within `timeout_s`."""
        with self._condition:
            before, self._draining = self._draining, True
            try:
                return self._condition.wait_for(lambda: not any(map(which, self._running.values())), timeout_s)
            finally:
                self._draining = before
                self._condition.notify_all()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something that changes between steps; False when it did not within `timeout_s`."""
        with self._condition:
            return self._condition.wait_for(condition, timeout_s)

    def close(self) -> None:
        """End the thread; requests that still run are abandoned."""
        atexit.unregister(self.close)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join(5)

    def _has_work(self) -> bool:
        if self._closed:
            return True
        if self._holds or self._paused:
            return False
        return bool(self._running) or (bool(self._waiting) and not self._draining)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(self._has_work)
                if self._closed:
                    return
                entering = [] if self._draining else list(self._waiting)
                self._waiting = deque(self._waiting) if self._draining else deque()
                self._running |= {request.id: request for request in entering}
                self._stepping = True
            try:
                with one_engine_at_a_time:
                    for request in entering:
                        self._admit(request)
                    outputs = self._engine.llm_engine.step() if self._running else []
                for output in outputs:
                    self._deliver(output)
            except BaseException as error:  # the edge of a thread: whoever waits for a request hears of it
                self._fail(error)
            finally:
                with self._condition:
                    self._stepping = False
                    self._condition.notify_all()

    def _admit(self, request: Request) -> None:
        from vllm.inputs.engine import tokens_input

        request.version = self.version
        lora = None if request.adapter is None else request.adapter.request
        try:
            self._engine.llm_engine.add_request(
                request.id, tokens_input(request.prompt.input_ids.tolist()), request.params, lora_request=lora, arrival_time=time.time()
            )
        except Exception as error:  # what vLLM finds wrong with this request
            del self._running[request.id]
            request.ended.set_exception(Refused(str(error)))

    def _deliver(self, output: Any) -> None:
        request = self._running.get(output.request_id)
        if request is None:
            return
        if request.on_output is not None:
            request.on_output(output)
        if output.finished:
            del self._running[output.request_id]
            request.ended.set_result(output)

    def _abort(self, requests: Sequence[Request], error: Exception | None = None) -> None:
        """Inside `exclusive`."""
        for request in requests:
            if request.ended.done():
                continue
            output: Any = None
            if self._running.pop(request.id, None) is not None:
                output = _what_there_is(self._engine, request.id)
                self._forget([request.id], internal=False)
            else:
                self._waiting.remove(request)
            if error is None:
                request.ended.set_result(output)
            else:
                request.ended.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        """The engine raised: no request that runs can be trusted to go on. Others can be served after that."""
        failed, self._running = list(self._running.values()), {}
        self._forget(list(self._engine.llm_engine.output_processor.request_states), internal=True)
        if isinstance(error, Exception):
            error = EngineFailed(f"vLLM failed with {type(error).__name__}: {error}").with_traceback(error.__traceback__)
        for request in failed:
            request.ended.set_exception(error)

    def _forget(self, request_ids: list[str], *, internal: bool) -> None:
        engine = self._engine.llm_engine
        engine.abort_request(request_ids, internal=internal)
        # vLLM 0.32 keeps the parents of several samples for ever once their samples were aborted.
        parents = engine.output_processor.parent_requests
        alive = {state.parent_req.request_id for state in engine.output_processor.request_states.values() if state.parent_req is not None}
        for name in [name for name in parents if name not in alive]:
            del parents[name]


def _what_there_is(engine: "LLM", request_id: str) -> "RequestOutput | None":
    """The output of a request that is about to be aborted. (vLLM 0.32 makes one for its AsyncLLM only.)"""
    from vllm.v1.engine import FinishReason

    processor = engine.llm_engine.output_processor
    output: Any = None
    for internal_id in processor.external_req_ids.get(request_id, ()):
        state = processor.request_states[internal_id]
        output = state.make_request_output(new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None)
    return output
