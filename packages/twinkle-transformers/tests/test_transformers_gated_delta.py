"""Gated DeltaNet by itself: on bare models, its parts beside plain recurrences, what is refused. Layouts are in test_transformers_parity."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from twinkle_transformers import GatedDeltaNetPaddingFreePatch, UnsupportedModelError
from twinkle_transformers._gated_delta import _convolution, _recurrence

LENGTHS = (70, 5, 130, 64)
BOUNDS = (0, *np.cumsum(LENGTHS).tolist())


def bare(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_a_bare_model_keeps_packed_sequences_apart_until_the_patch_is_removed(family: str, checkpoint: Any) -> None:
    model, other = bare(checkpoint(family)), bare(checkpoint(family))
    ids = torch.arange(BOUNDS[-1])[None] * 7 % 300
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        parts = itertools.pairwise(BOUNDS)
        alone = torch.cat([other(input_ids=ids[:, begin:end], use_cache=False).logits for begin, end in parts], 1)
        stock = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        patch = GatedDeltaNetPaddingFreePatch().apply(model)
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        generated = model.generate(ids[:, :5], max_new_tokens=3, do_sample=False)
        with pytest.raises(UnsupportedModelError, match="a row of several sequences cannot be cached"):
            model(input_ids=ids, position_ids=positions)
        patch.remove()
        after = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    # A few roundings of logits of size 10; without the patch they are of another row.
    assert (packed - alone).abs().max() < 1e-5
    assert (stock - alone).abs().max() > 1e-2
    assert torch.equal(after, stock)
    assert torch.equal(generated, other.generate(ids[:, :5], max_new_tokens=3, do_sample=False))


def token_by_token(query: Any, key: Any, value: Any, decay: Any, beta: Any) -> torch.Tensor:
    """The gated delta rule as arXiv:2412.06464 writes it, equation 10, for one sequence: ``[L, H, D]``."""

    def unit(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6)

    query, key = unit(query) * query.shape[-1] ** -0.5, unit(key)
    state, outs = torch.zeros(*key.shape[1:], value.shape[-1], dtype=value.dtype), []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        error = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, error * b[:, None])
        outs.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(outs)


def test_convolution_and_recurrence_of_several_sequences_are_those_of_each(checkpoint: Any) -> None:
    torch.manual_seed(0)
    number = BOUNDS[-1]
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((number, 6), (6, 4), (6,)))
    query, key = (torch.randn(1, number, 2, 8, requires_grad=True) for _ in range(2))
    value, beta = torch.randn(1, number, 4, 8, requires_grad=True), torch.rand(1, number, 4, requires_grad=True)
    decay = (-torch.rand(1, number, 4)).requires_grad_()
    layer = next(module for module in bare(checkpoint("qwen3_next")).modules() if hasattr(module, "A_log"))
    leaves = (x, weight, bias, query, key, value, decay, beta)
    have = [_convolution(x, weight, bias, BOUNDS), _recurrence(layer, query, key, value, decay, beta, BOUNDS)[0]]
    convolved, recurrent = [], []
    wide = [tensor.repeat_interleave(2, 2)[0] for tensor in (query, key)]
    for begin, end in itertools.pairwise(BOUNDS):
        padded = nn.functional.pad(x[begin:end].T[None], (3, 0))
        convolved.append(nn.functional.conv1d(padded, weight[:, None], bias, groups=6)[0].T)
        recurrent.append(token_by_token(*(tensor[begin:end] for tensor in (*wide, value[0], decay[0], beta[0]))))
    want = [torch.cat(convolved), torch.cat(recurrent)]
    weights = [torch.randn_like(tensor) for tensor in want]
    totals = [torch.stack([(a * b).sum() for a, b in zip(each, weights, strict=True)]).sum() for each in (have, want)]
    grads = [torch.autograd.grad(total, leaves) for total in totals]
    for mine, theirs in zip([*have, *grads[0]], [*want, *grads[1]], strict=True):
        assert (mine - theirs).abs().max() < 2e-5 * theirs.abs().max().clamp(min=1)


def test_models_without_such_layers_and_layers_that_compute_otherwise_are_refused(checkpoint: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM has no Gated DeltaNet layers"):
        GatedDeltaNetPaddingFreePatch().apply(bare(checkpoint("qwen3")))
    model = bare(checkpoint("qwen3_next"))
    layer = next(module for module in model.modules() if hasattr(module, "A_log"))
    own = layer.forward
    layer.forward = lambda *inputs, **options: own(*inputs, **options) * 2
    with pytest.raises(UnsupportedModelError, match="Qwen3NextGatedDeltaNet computes otherwise than the Gated DeltaNet that is known"):
        GatedDeltaNetPaddingFreePatch().apply(model)
