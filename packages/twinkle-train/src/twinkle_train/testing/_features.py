"""Training rows made from code, with everything that a layout could get wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from twinkle_data import IGNORE_INDEX, InputFeature, ModelOutput
from twinkle_remote import LazyResult

from .._contract import TrainModel


def random_features(
    lengths: Sequence[int] = (7, 12, 5, 16, 9, 11), *, vocab_size: int = 300, seed: int = 0, weighted: bool = True, temperature: float = 1.0
) -> list[InputFeature]:
    """One row a length: random tokens, a prompt of at least one token that is not trained on, and gaps in what is.

    weighted: loss weights that differ from token to token. temperature: of all rows; 1 leaves logits as they are. The first token id
    used is 2, since 0 and 1 are the padding and end tokens of the tiny checkpoints.
    """
    rng = np.random.default_rng(seed)
    features: list[InputFeature] = []
    for length in lengths:
        input_ids = rng.integers(2, vocab_size, length)
        trained = np.arange(length) >= rng.integers(1, max(2, length // 2))
        trained[1:-1] &= rng.random(length - 2) > 0.2
        features.append(
            InputFeature(
                input_ids=input_ids,
                labels=np.where(trained, input_ids, IGNORE_INDEX),
                completion_mask=trained,
                loss_weights=rng.uniform(0.5, 1.5, length).astype(np.float32) if weighted else None,
                temperature=temperature,
            )
        )
    return features


def rollout_features(trainer: TrainModel, features: Sequence[InputFeature], *, seed: int = 0, drift: float = 0.3) -> list[InputFeature]:
    """The rows as if an older policy had sampled them: its log-probabilities, a reference policy's, and advantages a row.

    drift: how far both policies are from the trainer's, in nats a token; large enough that some ratios are clipped.
    """
    rng = np.random.default_rng(seed)
    logprobs = collected(trainer.forward_only(features)).logprobs
    if logprobs is None:
        raise ValueError("this rank returns no log-probabilities (it is not on the last stage); make the rows by the reference trainer")
    made: list[InputFeature] = []
    for feature, own in zip(features, logprobs, strict=True):
        known = np.arange(len(own)) > 0
        made.append(
            replace(
                feature,
                logprobs=own + known * rng.normal(0, drift, len(own)).astype(np.float32),
                ref_logprobs=own + known * rng.normal(0, drift, len(own)).astype(np.float32),
                advantages=float(rng.normal()),
            )
        )
    return made


def collected(result: ModelOutput | LazyResult) -> ModelOutput:
    """The output of a batch method, whether the trainer is remote or not."""
    return cast(ModelOutput, result.get()) if isinstance(result, LazyResult) else result
