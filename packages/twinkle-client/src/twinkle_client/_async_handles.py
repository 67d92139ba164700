"""Models and samplers on a server, for an event loop: the verbs of `Model` and `Sampler`, awaited."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from ._async_client import AsyncTwinkleClient
from ._verb_calls import ModelCalls, SamplerCalls

if TYPE_CHECKING:
    from ._formats import HasToDict, LoraConfig, ModelOutput, SampleResponse
    from ._verbs import AdapterAdded, SampleChunk, Saved, TensorData, UploadStarted, UploadStatus
    from .model import CheckpointType, Inputs
    from .sampler import Params, Prompts


class AsyncModel:
    """Model for an event loop: every verb is awaited.

    Args:
        name: of the base model on the server.
        client: whose session it uses.
    """

    def __init__(self, name: str | os.PathLike[str], *, client: AsyncTwinkleClient) -> None:
        self.name, self.client = os.fspath(name), client
        self._calls, self._run = ModelCalls(self.name), client.connection.run

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self.client!r}>"

    async def create(self) -> None:
        """Make sure that the server has the model. Raises NotFound."""
        await self._run(self._calls.create())

    async def add_adapter_to_model(
        self,
        adapter_name: str,
        config: LoraConfig | HasToDict | Mapping[str, Any] | None = None,
        *,
        save_dir: str | os.PathLike[str] | None = None,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> AdapterAdded:
        """Put an adapter on the model, under a training run of its own, whose id the result has.

        config: a LoraConfig, peft's, or a mapping. save_dir: a label of the run, no path.

        Raises:
            Conflict: the session has an adapter of that name. QuotaExceeded: no room for another one. InvalidRequest: the configuration.
        """
        return await self._run(self._calls.add_adapter_to_model(adapter_name, config, save_dir, user_metadata))

    async def forward(self, inputs: Inputs, *, adapter_name: str = "") -> ModelOutput:
        """Log-probabilities and entropies of all rows at once; the graph is kept for `calculate_loss` and `backward`."""
        return await self._run(self._calls.forward(inputs, adapter_name))

    async def forward_only(
        self,
        inputs: Inputs,
        micro_batch_size: int | None = None,
        adapter_name: str = "",
        *,
        micro_batch_tokens: int | None = None,
        top_k: int = 0,
    ) -> ModelOutput:
        """Log-probabilities and entropies without a graph. Changes nothing. micro_batch_tokens: as in `forward_backward`. top_k: also the so many
        likeliest tokens after each token, and their log-probabilities."""
        fields = {"micro_batch_size": micro_batch_size, "adapter_name": adapter_name, "micro_batch_tokens": micro_batch_tokens, "top_k": top_k}
        return await self._run(self._calls.forward_only(inputs, **fields))

    async def forward_backward(
        self, inputs: Inputs, micro_batch_size: int | None = None, adapter_name: str = "", *, micro_batch_tokens: int | None = None
    ) -> ModelOutput:
        """Loss and gradients of the rows, in micro-batches of that many (None: the server's default). Gradients accumulate over calls.

        micro_batch_tokens: instead of a number of rows, how many tokens a micro-batch has at most.
        """
        fields = {"micro_batch_size": micro_batch_size, "adapter_name": adapter_name, "micro_batch_tokens": micro_batch_tokens}
        return await self._run(self._calls.forward_backward(inputs, **fields))

    async def calculate_loss(self, *, adapter_name: str = "") -> float:
        """The loss of the last `forward`. Raises Conflict without one."""
        return await self._run(self._calls.calculate_loss(adapter_name))

    async def backward(self, *, adapter_name: str = "") -> None:
        """Add the gradients of the last loss. Raises Conflict without one."""
        await self._run(self._calls.backward(adapter_name))

    async def clip_grad_norm(self, max_grad_norm: float = 1.0, *, adapter_name: str = "") -> float:
        """Scale the gradients so that their norm is at most this; returns the norm before."""
        return await self._run(self._calls.clip_grad_norm(max_grad_norm, adapter_name))

    async def step(self, *, adapter_name: str = "") -> None:
        """One optimizer step with the accumulated gradients."""
        await self._run(self._calls.step(adapter_name))

    async def zero_grad(self, *, adapter_name: str = "") -> None:
        """Drop accumulated gradients."""
        await self._run(self._calls.zero_grad(adapter_name))

    async def lr_step(self, *, adapter_name: str = "") -> float:
        """Set the learning rate to the schedule's, and return it."""
        return await self._run(self._calls.lr_step(adapter_name))

    async def clip_grad_and_step(self, max_grad_norm: float = 1.0, *, adapter_name: str = "") -> float:
        """clip_grad_norm, step, zero_grad and lr_step in one call; returns the norm before clipping."""
        return await self._run(self._calls.clip_grad_and_step(max_grad_norm, adapter_name))

    async def set_loss(self, loss: str, *, adapter_name: str = "", **options: Any) -> None:
        """The loss by its name; the options are its own. Raises InvalidRequest for a name that the server does not allow."""
        await self._run(self._calls.set_loss(loss, adapter_name, options))

    async def set_optimizer(self, name: str = "adamw", lr: float = 1e-5, *, adapter_name: str = "", **options: Any) -> None:
        """A fresh optimizer. options: betas, eps, weight_decay, momentum, and `options`, a mapping for the other classes of torch.optim."""
        await self._run(self._calls.set_optimizer(name, lr, adapter_name, options))

    async def adjust_optimizer(
        self,
        *,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        adapter_name: str = "",
    ) -> None:
        """Other settings for the optimizer that is there, from the next step on; None keeps one. Its state and the schedule stay. Raises Conflict
        without an optimizer."""
        await self._run(self._calls.adjust_optimizer(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adapter_name=adapter_name))

    async def set_lr_scheduler(self, name: str = "constant", *, adapter_name: str = "", **options: Any) -> None:
        """The learning-rate schedule. options: warmup_steps, total_steps, min_lr_ratio, decay_steps."""
        await self._run(self._calls.set_lr_scheduler(name, adapter_name, options))

    async def set_template(self, template: Any, *, adapter_name: str = "", **options: Any) -> None:
        """The chat template that encodes conversations: the base model's name, or a `Template` handle. options: max_length, truncation, system."""
        await self._run(self._calls.set_template(template, adapter_name, options))

    async def set_processor(self, processor: Any = "InputProcessor", *, adapter_name: str = "", **options: Any) -> None:
        """The collator by its name; the options are its own."""
        await self._run(self._calls.set_processor(processor, adapter_name, options))

    async def add_metric(self, metric: str, *, adapter_name: str = "", **options: Any) -> None:
        """A metric by its name; the options are its own."""
        await self._run(self._calls.add_metric(metric, adapter_name, options))

    async def apply_patch(self, patch: str, *, adapter_name: str = "", **options: Any) -> None:
        """A patch by its name; the options are its own."""
        await self._run(self._calls.apply_patch(patch, adapter_name, options))

    async def calculate_metric(self, *, adapter_name: str = "") -> dict[str, float]:
        """Means since the last call: loss, grad_norm, lr, and the loss's own."""
        return await self._run(self._calls.calculate_metric(adapter_name))

    async def get_state_dict(self, *, adapter_name: str = "") -> dict[str, TensorData]:
        """The adapter's matrices by peft's names: dtype, shape, and bytes in base64."""
        return await self._run(self._calls.get_state_dict(adapter_name))

    async def get_train_configs(self, *, adapter_name: str = "") -> dict[str, Any]:
        """How the trainer is set up, in plain types."""
        return await self._run(self._calls.get_train_configs(adapter_name))

    async def save(
        self,
        name: str | None = None,
        *,
        adapter_name: str = "",
        checkpoint_type: CheckpointType = "weights",
        save_optimizer: bool = True,
        user_state: Mapping[str, Any] | None = None,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> Saved:
        """Save a checkpoint of the adapter's run; the result has its URI, `.twinkle_path`. When this returns, it is whole and listed.

        name: unique in the run; None: the server picks one. checkpoint_type: 'weights' can be resumed from, 'sampler_weights' sampled from.
        save_optimizer: False: only weights, to be loaded. user_state: plain JSON that `resume_from_checkpoint` gives back.

        Raises:
            Conflict: the run has a checkpoint of that name, or gradients are accumulated. QuotaExceeded: of the space for checkpoints.
        """
        return await self._run(
            self._calls.save(
                name=name,
                adapter_name=adapter_name,
                checkpoint_type=checkpoint_type,
                save_optimizer=save_optimizer,
                user_state=user_state,
                user_metadata=user_metadata,
            )
        )

    async def load(self, path: str, *, adapter_name: str = "") -> None:
        """Read weights of a checkpoint (a twinkle:// URI, or a name in this adapter's run). Optimizer and counters stay. Raises NotFound."""
        await self._run(self._calls.load(path, adapter_name))

    async def resume_from_checkpoint(self, path: str, *, adapter_name: str = "") -> dict[str, Any]:
        """Go on where a checkpoint was saved: weights, optimizer, schedule and counters; returns its user_state. set_loss is still the caller's."""
        return await self._run(self._calls.resume_from_checkpoint(path, adapter_name))

    async def upload_to_hub(
        self, path: str, repo_id: str, *, adapter_name: str = "", private: bool = True, token: str | None = None
    ) -> UploadStarted:
        """Have the server upload a checkpoint to the Hugging Face hub; `upload_status` of the result's request_id tells how it goes.

        twinkle-server refuses, since it sends nothing to other services: InvalidRequest says what to do instead (`client.download_checkpoint`, then
        upload from there).
        """
        return await self._run(self._calls.upload_to_hub(path=path, repo_id=repo_id, adapter_name=adapter_name, private=private, token=token))

    async def upload_status(self, request_id: str) -> UploadStatus:
        """How an upload goes."""
        return await self._run(self._calls.upload_status(request_id))


class AsyncSampler:
    """Sampler for an event loop: every verb is awaited, and `sample_stream` is iterated with `async for`.

    Args:
        name: of the base model on the server.
        client: whose session it uses.
    """

    def __init__(self, name: str | os.PathLike[str], *, client: AsyncTwinkleClient) -> None:
        self.name, self.client = os.fspath(name), client
        self._calls, self._run = SamplerCalls(self.name), client.connection.run

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self.client!r}>"

    async def create(self) -> None:
        """Make sure that the server has the sampler. Raises NotFound."""
        await self._run(self._calls.create())

    async def sample(
        self,
        inputs: Prompts,
        sampling_params: Params = None,
        num_samples: int | None = None,
        adapter_name: str = "",
        *,
        adapter_path: str | None = None,
    ) -> list[SampleResponse]:
        """Sample completions for a batch of prompts, and wait for all of them; see `Sampler.sample`."""
        return (await self._run(self._calls.sample(inputs, sampling_params, num_samples, adapter_name, adapter_path))).samples

    def sample_stream(
        self,
        inputs: Prompts,
        sampling_params: Params = None,
        num_samples: int | None = None,
        adapter_name: str = "",
        *,
        adapter_path: str | None = None,
    ) -> AsyncIterator[SampleChunk]:
        """The same as it comes; see `Sampler.sample_stream`."""
        return self.client.connection.lines(self._calls.sample_stream(inputs, sampling_params, num_samples, adapter_name, adapter_path))

    async def set_template(self, template: Any, **options: Any) -> None:
        """The chat template by which conversations are encoded: the base model's name, or a template that the server holds."""
        await self._run(self._calls.set_template(template, options))

    async def add_adapter_to_sampler(self, adapter_name: str, path: str) -> None:
        """From now on that name means these weights, a twinkle:// URI of 'sampler_weights' or 'weights'. Raises NotFound."""
        await self._run(self._calls.add_adapter_to_sampler(adapter_name, path))

    async def apply_patch(self, patch: str, **options: Any) -> None:
        """A patch by its name; the options are its own."""
        await self._run(self._calls.apply_patch(patch, options))
