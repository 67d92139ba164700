"""How far a sampler is from transformers on the same weights: for tests of samplers and of what keeps them current. Needs transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def reference_logprobs(model: Any, tokens: Sequence[int] | NDArray[np.integer], temperature: float = 1.0) -> NDArray[np.float64]:
    """What a model of transformers makes of tokens: the log-probability of each, [T]; the first has none and is 0."""
    ids = torch.as_tensor(np.asarray(tokens))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].double() / temperature
    picked = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], picked.numpy()])


def logprob_error(
    sampler: Any,
    model: Any,
    prompts: Sequence[list[int]],
    *,
    temperature: float = 1.0,
    max_tokens: int = 8,
    adapter_name: str = "",
    score: bool = True,
) -> float:
    """The largest difference between log-probabilities of a sampler and of a model of transformers (or peft).

    Over sampled tokens at their temperature and, with `score`, over those of the prompts. Raises what went wrong with a request.
    """
    worst = 0.0
    if score:
        for prompt, found in zip(prompts, sampler.score(list(prompts), adapter_name=adapter_name), strict=True):
            worst = max(worst, float(np.abs(found - reference_logprobs(model, prompt)).max()))
    options = {"max_tokens": max_tokens, "temperature": temperature}
    for prompt, response in zip(prompts, sampler.sample(list(prompts), options, adapter_name=adapter_name), strict=True):
        sequence = response.raise_for_error().sequences[0]
        expected = reference_logprobs(model, [*prompt, *sequence.tokens], temperature)[len(prompt) :]
        worst = max(worst, float(np.abs(expected - sequence.logprobs).max()))
    return worst


def greedy_is_equal(sampler: Any, model: Any, prompts: Sequence[list[int]], *, max_tokens: int = 8, adapter_name: str = "") -> bool:
    """Whether greedy decoding gives the tokens that `model.generate` gives, for each prompt."""
    responses = sampler.sample(list(prompts), {"max_tokens": max_tokens, "temperature": 0}, adapter_name=adapter_name)
    equal: list[bool] = []
    for prompt, response in zip(prompts, responses, strict=True):
        made = model.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0)[0, len(prompt) :]
        equal.append(response.raise_for_error().sequences[0].tokens == made.tolist())
    return all(equal)
