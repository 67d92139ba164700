"""Models in training on a server: `from twinkle_client.model import TransformersModel`, with the verbs of the trainers' contract."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ._client import TwinkleClient
from ._registry import latest_client

if TYPE_CHECKING:
    from ._formats import HasToDict, LoraConfig, ModelOutput
    from ._verbs import AdapterAdded, Saved, TensorData, UploadStarted, UploadStatus

    # InputFeature, PackedFeature and Trajectory, of this package or of twinkle-data (which is not known here), or mappings of their fields.
    Inputs = Sequence[Any]

CheckpointType = Literal["weights", "sampler_weights"]


class Model:
    """A handle of a base model that a server trains adapters on. Every verb waits for its result.

    The verbs are those of the local trainers, so a script moves to the service by its imports and its construction. Rows may be the records of
    `twinkle_client`, those of twinkle-data, or mappings of their fields. Calls on one adapter are done in the order in which they are made.

    Args:
        name: of the base model on the server (see `TwinkleClient.get_server_capabilities`).
        client: None: the latest that is open.

    Raises:
        NotFound: the server does not have that model. ConfigError: there is no client.
    """

    def __init__(self, name: str | os.PathLike[str], *, client: TwinkleClient | None = None) -> None:
        from ._verb_calls import ModelCalls

        self.name = os.fspath(name)
        self.client = client if client is not None else latest_client()
        self._calls, self._run = ModelCalls(self.name), self.client.connection.run
        self._run(self._calls.create())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self.client!r}>"

    def add_adapter_to_model(
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
        return self._run(self._calls.add_adapter_to_model(adapter_name, config, save_dir, user_metadata))

    def forward(self, inputs: Inputs, *, adapter_name: str = "") -> ModelOutput:
        """Log-probabilities and entropies of all rows at once; the graph is kept for `calculate_loss` and `backward`."""
        return self._run(self._calls.forward(inputs, adapter_name))

    def forward_only(
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
        return self._run(self._calls.forward_only(inputs, **fields))

    def forward_backward(
        self, inputs: Inputs, micro_batch_size: int | None = None, adapter_name: str = "", *, micro_batch_tokens: int | None = None
    ) -> ModelOutput:
        """Loss and gradients of the rows, in micro-batches of that many (None: the server's default). Gradients accumulate over calls.

        micro_batch_tokens: instead of a number of rows, how many tokens a micro-batch has at most.
        """
        fields = {"micro_batch_size": micro_batch_size, "adapter_name": adapter_name, "micro_batch_tokens": micro_batch_tokens}
        return self._run(self._calls.forward_backward(inputs, **fields))

    def calculate_loss(self, *, adapter_name: str = "") -> float:
        """The loss of the last `forward`. Raises Conflict without one."""
        return self._run(self._calls.calculate_loss(adapter_name))

    def backward(self, *, adapter_name: str = "") -> None:
        """Add the gradients of the last loss. Raises Conflict without one."""
        self._run(self._calls.backward(adapter_name))

    def clip_grad_norm(self, max_grad_norm: float = 1.0, *, adapter_name: str = "") -> float:
        """Scale the gradients so that their norm is at most this; returns the norm before."""
        return self._run(self._calls.clip_grad_norm(max_grad_norm, adapter_name))

    def step(self, *, adapter_name: str = "") -> None:
        """One optimizer step with the accumulated gradients."""
        self._run(self._calls.step(adapter_name))

    def zero_grad(self, *, adapter_name: str = "") -> None:
        """Drop accumulated gradients."""
        self._run(self._calls.zero_grad(adapter_name))

    def lr_step(self, *, adapter_name: str = "") -> float:
        """Set the learning rate to the schedule's, and return it."""
        return self._run(self._calls.lr_step(adapter_name))

    def clip_grad_and_step(self, max_grad_norm: float = 1.0, *, adapter_name: str = "") -> float:
        """clip_grad_norm, step, zero_grad and lr_step in one call; returns the norm before clipping."""
        return self._run(self._calls.clip_grad_and_step(max_grad_norm, adapter_name))

    def set_loss(self, loss: str, *, adapter_name: str = "", **options: Any) -> None:
        """The loss by its name; the options are its own. Raises InvalidRequest for a name that the server does not allow."""
        self._run(self._calls.set_loss(loss, adapter_name, options))

    def set_optimizer(self, name: str = "adamw", lr: float = 1e-5, *, adapter_name: str = "", **options: Any) -> None:
        """A fresh optimizer. options: betas, eps, weight_decay, momentum, and `options`, a mapping for the other classes of torch.optim."""
        self._run(self._calls.set_optimizer(name, lr, adapter_name, options))

    def adjust_optimizer(
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
        self._run(self._calls.adjust_optimizer(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adapter_name=adapter_name))

    def set_lr_scheduler(self, name: str = "constant", *, adapter_name: str = "", **options: Any) -> None:
        """The learning-rate schedule. options: warmup_steps, total_steps, min_lr_ratio, decay_steps."""
        self._run(self._calls.set_lr_scheduler(name, adapter_name, options))

    def set_template(self, template: Any, *, adapter_name: str = "", **options: Any) -> None:
        """The chat template that encodes conversations: the base model's name, or a `Template` handle. options: max_length, truncation, system."""
        self._run(self._calls.set_template(template, adapter_name, options))

    def set_processor(self, processor: Any = "InputProcessor", *, adapter_name: str = "", **options: Any) -> None:
        """The collator by its name; the options are its own."""
        self._run(self._calls.set_processor(processor, adapter_name, options))

    def add_metric(self, metric: str, *, adapter_name: str = "", **options: Any) -> None:
        """A metric by its name; the options are its own."""
        self._run(self._calls.add_metric(metric, adapter_name, options))

    def apply_patch(self, patch: str, *, adapter_name: str = "", **options: Any) -> None:
        """A patch by its name; the options are its own."""
        self._run(self._calls.apply_patch(patch, adapter_name, options))

    def calculate_metric(self, *, adapter_name: str = "") -> dict[str, float]:
        """Means since the last call: loss, grad_norm, lr, and the loss's own."""
        return self._run(self._calls.calculate_metric(adapter_name))

    def get_state_dict(self, *, adapter_name: str = "") -> dict[str, TensorData]:
        """The adapter's matrices by peft's names: dtype, shape, and bytes in base64."""
        return self._run(self._calls.get_state_dict(adapter_name))

    def get_train_configs(self, *, adapter_name: str = "") -> dict[str, Any]:
        """How the trainer is set up, in plain types."""
        return self._run(self._calls.get_train_configs(adapter_name))

    def save(
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
        return self._run(
            self._calls.save(
                name=name,
                adapter_name=adapter_name,
                checkpoint_type=checkpoint_type,
                save_optimizer=save_optimizer,
                user_state=user_state,
                user_metadata=user_metadata,
            )
        )

    def load(self, path: str, *, adapter_name: str = "") -> None:
        """Read weights of a checkpoint (a twinkle:// URI, or a name in this adapter's run). Optimizer and counters stay. Raises NotFound."""
        self._run(self._calls.load(path, adapter_name))

    def resume_from_checkpoint(self, path: str, *, adapter_name: str = "") -> dict[str, Any]:
        """Go on where a checkpoint was saved: weights, optimizer, schedule and counters; returns its user_state. set_loss is still the caller's."""
        return self._run(self._calls.resume_from_checkpoint(path, adapter_name))

    def upload_to_hub(self, path: str, repo_id: str, *, adapter_name: str = "", private: bool = True, token: str | None = None) -> UploadStarted:
        """Have the server upload a checkpoint to the Hugging Face hub; `upload_status` of the result's request_id tells how it goes.

        twinkle-server refuses, since it sends nothing to other services: InvalidRequest says what to do instead (`client.download_checkpoint`, then
        upload from there).
        """
        return self._run(self._calls.upload_to_hub(path=path, repo_id=repo_id, adapter_name=adapter_name, private=private, token=token))

    def upload_status(self, request_id: str) -> UploadStatus:
        """How an upload goes."""
        return self._run(self._calls.upload_status(request_id))


# The server's configuration says which engine trains a model; a script keeps the name that it has.
TransformersModel = Model
MegatronModel = Model
