"""Training of sequences as vectors, beside the trainer contract."""

import inspect
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinkle_data import Batch, ModelOutput, PackedFeature
from twinkle_train import ConfigError, Inputs, LossOutput

from ._embeddings import Pooling, check_pooling, contrast, group_ids, pool, row_of
from ._errors import UnsupportedModelError
from ._inputs import model_inputs
from ._trainer import TransformersTrainer, generator_states, set_generator_states


class EmbeddingTrainer(TransformersTrainer):
    """What TransformersModel is on each of its ranks; see there."""

    def embed(
        self, inputs: Inputs, micro_batch_size: int | None = None, adapter_name: str = "", *, pooling: Pooling = "last", normalize: bool = True
    ) -> list[NDArray[np.float32]]:
        """Each row's sequence as a vector of the last layer: `[H]` a row, `[sequences, H]` for a packed one; changes nothing.

        pooling: 'last' takes the vector of a sequence's last token, 'mean' the mean of all. normalize: to length 1.

        Raises:
            UnsupportedModelError: the model does not tell its last layer's output from its logits. ConfigError: an unknown pooling.
        """
        check_pooling(pooling)
        self._use_inputs_of(self._state(adapter_name))
        features, batches, _ = self._prepared(inputs, micro_batch_size)
        self._select(adapter_name, trains=False)
        self._model.eval()
        with self._weights.passing(), torch.no_grad():
            parts = [pool(self._hidden(batch)[0], batch, pooling, normalize=normalize) for batch in batches]
        vectors = torch.cat(parts).cpu().numpy()
        rows = [vectors[row_of(batches) == index] for index in range(len(features))]
        return [row if isinstance(feature, PackedFeature) else row[0] for row, feature in zip(rows, features, strict=True)]

    def contrastive_forward_backward(
        self, inputs: Inputs, micro_batch_size: int | None = None, adapter_name: str = "", *, pooling: Pooling = "last", temperature: float = 0.05
    ) -> ModelOutput:
        """Loss and gradients of sequences that should be near those of their group, `user_data["group"]`, and far from all others of the call.

        The loss is the normalized-temperature cross-entropy (SimCLR, arXiv:2002.05709) over the rows of all ranks and micro-batches, a mean over the
        sequences that are not alone in their group: it does not depend on how rows are divided. With several micro-batches their forward runs
        twice (arXiv:2101.06983). Gradients accumulate as those of `forward_backward` do, whose other errors it raises.

        Returns the loss, its weight and the metric `nearest_is_positive`, the share of sequences whose nearest is of their group.

        Raises:
            InputError: a sequence without a group. ConfigError: an unknown pooling, a temperature of 0, or losses of routers.
        """
        check_pooling(pooling)
        if not temperature > 0:
            raise ConfigError(f"temperature must be > 0, got {temperature}")
        if self._routers.has_losses:
            raise ConfigError("losses of routers are weighed by tokens, not by sequences: set router_aux_loss_coef and router_z_loss_coef to 0")
        state = self._state(adapter_name)
        state.check_can_accumulate("contrastive_forward_backward")
        self._use_inputs_of(state)
        features, batches, _ = self._prepared(inputs, micro_batch_size)
        groups = self._agreed(lambda: group_ids(features, batches))
        losses: list[LossOutput] = []
        error: Exception | None = None
        try:
            self._select(adapter_name, trains=True)
            self._model.train()
            with self._weights.passing():
                losses.append(self._contrast(adapter_name, batches, groups, pooling, temperature))
        except Exception as raised:  # raised again below, once the other ranks know
            error = raised
        except BaseException:  # Ctrl-C: some micro-batches have left their gradients
            state.mark_broken()
            raise
        totals = self._count_gradients(state, losses, error)
        return ModelOutput(loss=totals.loss, loss_weight=totals.weight, metrics=totals.metric_values())

    def _contrast(self, adapter_name: str, batches: list[Batch], groups: NDArray[np.int64], pooling: Pooling, temperature: float) -> LossOutput:
        """Runs backward of the loss of these sequences among those of all ranks."""
        device = self._groups_of_mesh.device
        states = [generator_states(device)]
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for batch in batches:
            with nullcontext() if len(batches) == 1 else torch.no_grad():
                hidden, unused = self._hidden(batch)
                kept.append((pool(hidden, batch, pooling, normalize=True), unused))
            states.append(generator_states(device))
        # The untrained copies that fill up micro-batches come last.
        found = contrast(torch.cat([vectors.detach() for vectors, _ in kept])[: len(groups)], groups, temperature, self._groups_of_mesh.data)
        copies = sum(len(vectors) for vectors, _ in kept) - len(groups)
        gradients = torch.nn.functional.pad(found.gradient_SH, (0, 0, 0, copies)).split([len(vectors) for vectors, _ in kept])
        for batch, state, gradient, (vectors, unused) in zip(batches, states[:-1], gradients, kept, strict=True):
            if len(batches) > 1:
                set_generator_states(state, device)  # the same dropout again
                hidden, unused = self._hidden(batch)
                vectors = pool(hidden, batch, pooling, normalize=True)
            self._scaled(adapter_name, (vectors * gradient).sum() + unused).backward()
        set_generator_states(states[-1], device)
        return found.loss

    def _hidden(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The last layer's output, ``[B, T, H]``, and a zero that stands for what the model made beside it."""
        base = self._model.base_model
        if base is self._model:
            raise UnsupportedModelError(f"{type(self._model).__name__} has no base_model: its last layer's output is not known")
        seen: list[Any] = []
        handle = base.register_forward_hook(lambda module, inputs, out: seen.append(out[0]))
        few: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(self._model).forward).parameters else {}
        try:
            if self._sequence is None:
                logits = self._logits(model_inputs(batch, self._groups_of_mesh.device), **few)
                (hidden,) = seen
            else:
                inputs, columns = self._sequence.split(batch)
                logits = self._logits(inputs, **few)
                hidden = self._sequence.gather(seen[0], columns)
        finally:
            handle.remove()
        # fully_shard waits for backward of what the model returned.
        return hidden, logits.flatten()[:1].float().sum() * 0.0
