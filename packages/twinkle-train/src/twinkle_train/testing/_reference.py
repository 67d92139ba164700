"""The trainer that all others are measured against: plain torch on the Hugging Face model, in one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinkle_data import Batch, InputProcessor

from .._checkpoints import CheckpointInfo, begin_checkpoint, publish_checkpoint
from .._errors import CallOrderError, ConfigError, InputError
from .._optimizer import OptimizerConfig, adjust_torch_optimizer, build_torch_optimizer
from .._totals import ReduceGroups
from .._trainer import ComputeLoss, TokenOutputs, TrainerBase
from ._attention import PER_SEQUENCE, register_per_sequence


class ReferenceTrainer(TrainerBase):
    """The trainer contract on a Hugging Face model with nothing parallel, nothing fused and nothing remote.

    Packed rows and padding-free batches (`set_processor(InputProcessor(padding_free=True, ...))`) attend sequence by sequence.

    model_id: a folder with a Hugging Face checkpoint. dtype: of the weights; float64 gives a yardstick for rounding errors.

    Raises ConfigError when the folder has no checkpoint, ImportError without transformers.
    """

    def __init__(self, model_id: str | os.PathLike[str], *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = Path(model_id)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} holds no Hugging Face checkpoint (no config.json)")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        # eager: attention written out, so that nothing of the reference is a fused kernel.
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        register_per_sequence()
        self._device = torch.device(device)
        self._model.to(self._device)
        self._folder = folder
        self._optimizer: torch.optim.Optimizer | None = None
        super().__init__(groups=ReduceGroups(), processor=InputProcessor(pad_token_id=self._tokenizer.pad_token_id or 0), packed_rows=True)

    def _forward(self, adapter_name: str, batch: Batch) -> TokenOutputs:
        def tensor(array: NDArray[np.generic]) -> torch.Tensor:
            return torch.as_tensor(array, device=self._device)

        logits_BTV = self._model(
            input_ids=tensor(batch.input_ids),
            position_ids=tensor(batch.position_ids),
            **self._attention(batch),
            # transformers 5.19 attends across packed documents when a cache is made.
            use_cache=False,
        ).logits
        all_logprobs_BTV = (logits_BTV / tensor(batch.temperature)[..., None]).log_softmax(-1)
        logprobs_BT = all_logprobs_BTV.gather(-1, tensor(batch.targets)[..., None])[..., 0]
        entropy_BT = -(all_logprobs_BTV.detach().exp() * all_logprobs_BTV.detach()).sum(-1)
        top_logprobs_BTK = top_tokens_BTK = None
        if self._wanted.top_k:
            top_logprobs_BTK, top_tokens_BTK = all_logprobs_BTV.detach().topk(self._wanted.top_k)
        return TokenOutputs(
            logprobs_BT,
            entropy_BT,
            top_tokens_BTK=top_tokens_BTK,
            top_logprobs_BTK=top_logprobs_BTK,
            logits_BTV=logits_BTV.detach() if self._wanted.logits else None,
        )

    def _attention(self, batch: Batch) -> dict[str, Any]:
        """The model's arguments that tell what attends to what."""
        self._model.config._attn_implementation = PER_SEQUENCE if batch.is_packed else "eager"
        if not batch.is_packed:
            # Padding on the right is invisible to causal attention; and a mask of ones would hide document boundaries.
            return {"attention_mask": None if batch.valid[:, 0].all() else torch.as_tensor(batch.valid, device=self._device)}
        config = self._model.config
        others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
        if others:
            raise InputError(f"packed rows need full attention in all layers, which keeps sequences apart; {self._folder} has {others}")
        return {"attention_mask": None, "cu_seq_lens_q": torch.as_tensor(batch.cu_seq_lens)}

    def _run(self, adapter_name: str, batches: Sequence[Batch], compute_loss: ComputeLoss | None) -> list[TokenOutputs]:
        kept: list[TokenOutputs] = []
        for index, batch in enumerate(batches):
            with torch.set_grad_enabled(compute_loss is not None):
                outputs = self._forward(adapter_name, batch)
                if compute_loss is not None:
                    compute_loss(index, outputs).sum.backward()
            kept.append(replace(outputs, logprobs_BT=outputs.logprobs_BT.detach()))
        return kept

    def _reduce_gradients(self, adapter_name: str) -> None:
        pass  # there is one process

    def _scale_gradients(self, adapter_name: str, factor: float) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _gradient_norm(self, adapter_name: str) -> float:
        squares = [p.grad.double().square().sum() for p in self._model.parameters() if p.grad is not None]
        return float(torch.stack(squares).sum().sqrt())

    def _make_optimizer(self, adapter_name: str, config: OptimizerConfig) -> None:
        self._optimizer = build_torch_optimizer(config, self._model.parameters())

    def _adjust_optimizer(self, adapter_name: str, config: OptimizerConfig) -> None:
        assert self._optimizer is not None, "the trainer checks that there is an optimizer"
        adjust_torch_optimizer(self._optimizer, config)

    def _optimizer_step(self, adapter_name: str, learning_rate: float) -> None:
        if self._optimizer is None:
            raise CallOrderError("step needs an optimizer: call set_optimizer first")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def _zero_gradients(self, adapter_name: str) -> None:
        self._model.zero_grad(set_to_none=True)

    def _export_gradients(self, adapter_name: str) -> dict[str, NDArray[np.float32]]:
        return {
            name: _to_numpy(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            for name, parameter in self._model.named_parameters()
        }

    def export_weights(self, *, adapter_name: str = "") -> dict[str, NDArray[np.float32]]:
        self._state(adapter_name)
        return {name: _to_numpy(parameter) for name, parameter in self._model.named_parameters()}

    def save(self, path: str | os.PathLike[str], *, adapter_name: str = "", merge: bool = False) -> None:
        self._state(adapter_name)
        self._model.save_pretrained(path)
        self._tokenizer.save_pretrained(path)

    def load(self, path: str | os.PathLike[str], *, adapter_name: str = "") -> None:
        from transformers import AutoModelForCausalLM

        self._state(adapter_name)

        dtype = next(self._model.parameters()).dtype
        self._model.load_state_dict(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict())

    def _write_checkpoint(self, target: Path, info: CheckpointInfo, *, background: bool) -> None:
        # In the background or not: what a small model needs to be written, nobody waits for.
        folder = begin_checkpoint(target)
        optimizer = None if self._optimizer is None else self._optimizer.state_dict()
        torch.save({"model": self._model.state_dict(), "optimizer": optimizer, "generator": torch.get_rng_state()}, folder / "state.pt")
        publish_checkpoint(target, info.to_json())

    def _read_checkpoint(self, path: Path, info: CheckpointInfo) -> None:
        state = torch.load(path / "state.pt", map_location=self._device, weights_only=True)
        self._model.load_state_dict(state["model"])
        if state["optimizer"] is not None:
            assert self._optimizer is not None, "resume_from_checkpoint made it"
            self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generator"].cpu())

    def _engine_config(self) -> dict[str, Any]:
        return {"trainer": type(self).__name__, "model": str(self._folder), "device": str(self._device)}


def _to_numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().cpu().numpy().copy()
