"""Sampling in plain torch: for trying out and for tests, where vLLM is not installed. One prompt at a time.

Shape suffixes: N samples of a prompt, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twinkle_data import FormatError, InputFeature, SampledSequence, SampleResponse, SamplingParams, Template, Trajectory, append_sample
from twinkle_mesh import DeviceMesh
from twinkle_remote import remote_class, remote_function

_Matrices = dict[str, tuple[torch.Tensor, torch.Tensor, float]]
Progress = tuple[list[int], list[float]]
_COLDEST = 1e-5  # below it logits overflow


@remote_class(execute="all")
class TorchSampler:
    """The methods of `twinkle_vllm.vLLMSampler` that the server uses, on transformers' own model, with a cache of keys and values.

    model_id: a local folder with a Hugging Face checkpoint. Log-probabilities are of log_softmax(logits / temperature); greedy ones of the logits as
    they are. `structured_output` is refused.
    """

    def __init__(self, model_id: str, device_mesh: DeviceMesh | None = None, remote_group: str | None = None, *, dtype: str = "float32") -> None:
        from transformers import AutoModelForCausalLM

        del remote_group  # remote_class has read it
        is_cuda = torch.cuda.is_available() and (device_mesh is None or device_mesh.device_type != "cpu")
        self._device = torch.device("cuda" if is_cuda else "cpu")
        loaded: Any = AutoModelForCausalLM.from_pretrained(model_id, dtype=getattr(torch, dtype))
        self._model: Any = loaded.to(self._device).eval()
        self._template = Template(Path(model_id))
        self._max_length = int(getattr(self._model.config, "max_position_embeddings", 1 << 20))
        self._vocab_size = int(self._model.get_input_embeddings().weight.shape[0])
        self._adapters: dict[str, _Matrices] = {}
        self._lock = threading.Lock()

    @classmethod
    def __worker_env__(cls, device_type: str) -> dict[str, str]:
        """The environment that the workers of a group need."""
        return {} if device_type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}

    @remote_function(dispatch="slice_dp", collect="flatten", allow_empty=True)
    def sample(
        self,
        inputs: Sequence[Any],
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        num_samples: int | None = None,
        adapter_name: str = "",
    ) -> list[SampleResponse]:
        """As `vLLMSampler.sample`; what is wrong with one prompt is its response's `error`."""
        each: Sequence[Any] = sampling_params if isinstance(sampling_params, (list, tuple)) else [sampling_params] * len(inputs)
        if len(each) != len(inputs):
            raise FormatError(f"there are {len(inputs)} inputs but sampling_params for {len(each)}")
        matrices = self._adapters[adapter_name] if adapter_name else {}
        responses: list[SampleResponse] = []
        for index, (item, given) in enumerate(zip(inputs, each, strict=True)):
            params = given if isinstance(given, SamplingParams) else SamplingParams(**dict(given or {}))
            if num_samples is not None:
                params = replace(params, num_samples=num_samples)
            if not isinstance(sampling_params, (list, tuple)) and params.seed is not None:
                params = replace(params, seed=params.seed + index)  # or equal prompts would get equal completions
            try:
                *_, response = self._steps(self._prompt(item), params, matrices)
            except (FormatError, ValueError) as error:
                response = SampleResponse(sequences=[], prompt_token_ids=[], error=error)
            assert isinstance(response, SampleResponse), "the last of the steps"
            responses.append(response)
        return responses

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def stream(self, item: Any, params: SamplingParams, adapter_name: str = "") -> Iterator[list[Progress] | SampleResponse]:
        """As `sample` for one prompt: after each step the tokens and log-probabilities so far of each completion, and last of all the response."""
        try:
            yield from self._steps(self._prompt(item), params, self._adapters[adapter_name] if adapter_name else {})
        except (FormatError, ValueError) as error:
            yield SampleResponse(sequences=[], prompt_token_ids=[], error=error)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def load_adapter(self, adapter_name: str, path: str) -> None:
        """Loads an adapter from a folder in peft's format."""
        from safetensors.torch import load_file

        config = json.loads((Path(path) / "adapter_config.json").read_text())
        scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
        tensors = {name: tensor.to(self._device, self._model.dtype) for name, tensor in load_file(Path(path) / "adapter_model.safetensors").items()}
        matrices: _Matrices = {}
        for name, a in tensors.items():
            module, ends, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
            if ends:
                if not isinstance(self._model.get_submodule(module), nn.Linear):
                    raise FormatError(f"the adapter is on {module}, which is no linear layer of this model")
                matrices[module] = (a, tensors[name.replace(".lora_A.", ".lora_B.")], scaling)
        self._adapters[adapter_name] = matrices

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def unload_adapter(self, adapter_name: str) -> None:
        """Forgets an adapter."""
        del self._adapters[adapter_name]

    def _prompt(self, item: Any) -> InputFeature:
        if isinstance(item, Trajectory):
            item = self._template.encode(item, add_generation_prompt=True)
        elif isinstance(item, str):
            item = InputFeature(input_ids=self._template.tokenize(item))
        elif not isinstance(item, InputFeature):
            item = InputFeature(input_ids=item)
        if item.input_ids.max() >= self._vocab_size:
            raise FormatError(f"the prompt has the token {item.input_ids.max()}, and the model's vocabulary has {self._vocab_size}")
        if len(item) >= self._max_length:
            raise FormatError(f"the prompt has {len(item)} tokens, and the model takes {self._max_length}")
        return item

    def _steps(self, prompt: InputFeature, params: SamplingParams, matrices: _Matrices) -> Iterator[list[Progress] | SampleResponse]:
        self._check(params)
        prompt_T = torch.as_tensor(prompt.input_ids, device=self._device)
        room = self._max_length - len(prompt)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        output = self._forward(matrices, prompt_T.expand(params.num_samples, -1), None)
        prompt_logprobs: list[float] = []
        if params.prompt_logprobs:
            logprobs_TV = output.logits[0].float().log_softmax(-1)
            prompt_logprobs = [0.0, *logprobs_TV[:-1].gather(-1, prompt_T[1:, None])[:, 0].tolist()]
        # A seed of its own where none is given; torch's global generator is the trainer's.
        generator = torch.Generator(self._device).manual_seed((secrets.randbits(63) if params.seed is None else params.seed) & ((1 << 63) - 1))
        ends = set(self._template.eos_token_ids) | set(params.stop_token_ids)
        rows = [_Row() for _ in range(params.num_samples)]
        for step in range(limit):
            tokens_N = self._draw_step(output.logits[:, -1], params, ends, step, rows, generator)
            yield [(row.tokens, row.logprobs) for row in rows]
            if all(row.reason is not None for row in rows):
                break
            if step + 1 < limit:
                output = self._forward(matrices, tokens_N[:, None], output.past_key_values)
        sequences = [self._sequence(prompt, row, params) for row in rows]
        yield SampleResponse(
            sequences=sequences, prompt_token_ids=prompt.input_ids.tolist(), user_data=prompt.user_data, prompt_logprobs=prompt_logprobs
        )

    def _check(self, params: SamplingParams) -> None:
        if params.structured_output is not None:
            raise FormatError("structured_output needs the vLLM sampler")
        if params.top_logprobs > self._vocab_size:
            raise FormatError(f"top_logprobs is {params.top_logprobs}, and the model's vocabulary has {self._vocab_size}")
        for name in ("logit_bias", "stop_token_ids"):
            if wrong := [token for token in getattr(params, name) if not 0 <= token < self._vocab_size]:
                raise FormatError(f"{name} has the token {wrong[0]}, and the model's vocabulary has {self._vocab_size}")

    @torch.inference_mode()
    def _forward(self, matrices: _Matrices, tokens_NT: torch.Tensor, cache: Any) -> Any:
        # The adapter is on the model for this call only: others' calls come between two steps.
        with self._lock, ExitStack() as stack:
            for name, (a, b, scaling) in matrices.items():
                handle = self._model.get_submodule(name).register_forward_hook(_adding(a, b, scaling))
                stack.callback(handle.remove)
            return self._model(input_ids=tokens_NT, past_key_values=cache, use_cache=True)

    @torch.inference_mode()
    def _draw_step(
        self, logits_NV: torch.Tensor, params: SamplingParams, ends: set[int], step: int, rows: list[_Row], generator: torch.Generator
    ) -> torch.Tensor:
        biased_NV = self._biased(logits_NV.float(), params, ends if step < params.min_tokens else set())
        logprobs_NV = (biased_NV / max(params.temperature or 1.0, _COLDEST)).log_softmax(-1)
        tokens_N = _draw(logprobs_NV, params, generator)
        for index, row in enumerate(rows):
            if row.reason is None:
                self._append(row, int(tokens_N[index]), logprobs_NV[index], params, ends)
        return tokens_N

    def _biased(self, logits_NV: torch.Tensor, params: SamplingParams, banned: set[int]) -> torch.Tensor:
        for token, bias in params.logit_bias.items():
            logits_NV[:, token] += bias
        for token in banned:
            logits_NV[:, token] = float("-inf")
        return logits_NV

    def _append(self, row: _Row, token: int, logprobs_V: torch.Tensor, params: SamplingParams, ends: set[int]) -> None:
        row.tokens.append(token)
        row.logprobs.append(float(logprobs_V[token]))
        if params.top_logprobs:
            best = logprobs_V.topk(params.top_logprobs)
            row.top.append(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        if token in ends:
            row.reason = "stop"
        elif params.stop and len(row.tokens) >= params.min_tokens:
            text = self._template.decode(row.tokens)
            row.reason = "stop" if any(stop in text for stop in params.stop) else None

    def _sequence(self, prompt: InputFeature, row: _Row, params: SamplingParams) -> SampledSequence:
        logprobs = row.logprobs if params.logprobs else []
        feature = append_sample(prompt, row.tokens, logprobs or None, temperature=params.temperature) if row.tokens else prompt
        return SampledSequence(
            tokens=row.tokens,
            logprobs=logprobs,
            stop_reason="stop" if row.reason == "stop" else "length",
            decoded=self._template.decode(row.tokens),
            new_input_feature=feature,
            top_logprobs=row.top if params.logprobs else [],
        )


class _Row:
    """A completion that grows. reason: why it ended, None while it grows."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[dict[int, float]] = []
        self.reason: str | None = None


def _adding(a: torch.Tensor, b: torch.Tensor, scaling: float) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        del module
        return output + (inputs[0] @ a.T @ b.T) * scaling

    return hook


def _draw(logprobs_NV: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> torch.Tensor:
    if params.temperature == 0:
        return logprobs_NV.argmax(-1)
    probs_NV = logprobs_NV.exp()
    if params.top_k > 0:
        lowest_N1 = probs_NV.topk(min(params.top_k, probs_NV.shape[-1])).values[:, -1:]
        probs_NV = torch.where(probs_NV < lowest_N1, 0.0, probs_NV)
    if params.top_p < 1:
        sorted_NV, order_NV = probs_NV.sort(-1, descending=True)
        # What comes before a token decides, so that the first that reaches top_p is kept.
        sorted_NV[sorted_NV.cumsum(-1) - sorted_NV >= params.top_p * sorted_NV.sum(-1, keepdim=True)] = 0.0
        probs_NV = torch.zeros_like(probs_NV).scatter(-1, order_NV, sorted_NV)
    if params.min_p > 0:
        probs_NV = torch.where(probs_NV < params.min_p * probs_NV.max(-1, keepdim=True).values, 0.0, probs_NV)
    return torch.multinomial(probs_NV, 1, generator=generator)[:, 0]
