"""Log-probabilities and entropy from logits, a piece of the tokens at a time.

Shape suffixes: B rows, T tokens, N = B * T tokens, V vocabulary.
"""

from typing import Any

import torch

# Logits that are widened to float32 at once: 64 MiB.
_ELEMENTS_AT_ONCE = 1 << 24


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, log_totals = [], [], []
        for begin, end in _pieces(logits_NV):
            scaled = logits_NV[begin:end].float() / temperature_N[begin:end, None]
            log_total = scaled.logsumexp(-1)
            log_p = scaled - log_total[:, None]
            logprobs.append(log_p.gather(-1, targets_N[begin:end, None])[:, 0])
            # A token of probability 0 adds 0, not 0 * -inf.
            entropies.append(-torch.where(log_p.isinf(), 0.0, log_p.exp() * log_p).sum(-1))
            log_totals.append(log_total)
        ctx.save_for_backward(logits_NV, targets_N, temperature_N, torch.cat(log_totals))
        entropy_N = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_N)
        return torch.cat(logprobs), entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, targets_N, temperature_N, log_total_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        # d logp(target) / dz_v = [v is the target] - p_v, and z = logits / temperature.
        grad_N = grads[0] / temperature_N
        for begin, end in _pieces(logits_NV):
            scaled = logits_NV[begin:end].float() / temperature_N[begin:end, None]
            piece = (scaled - log_total_N[begin:end, None]).exp_().mul_(-grad_N[begin:end, None])
            piece.scatter_add_(-1, targets_N[begin:end, None], grad_N[begin:end, None])
            grad_NV[begin:end] = piece
        return grad_NV, None, None


def _pieces(logits_NV: torch.Tensor) -> list[tuple[int, int]]:
    size = max(1, _ELEMENTS_AT_ONCE // logits_NV.shape[-1])
    return [(begin, min(begin + size, len(logits_NV))) for begin in range(0, len(logits_NV), size)]


def token_logprobs(logits_BTV: torch.Tensor, targets_BT: torch.Tensor, temperature_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each target, differentiable, and the entropy (nats) of its distribution, without a graph; float32 ``[B, T]``.

    Beside the logits only one number a token is kept for backward.

    Args:
        logits_BTV: of any float type.
        targets_BT: token ids.
        temperature_BT: logits are divided by it first.
    """
    shape = targets_BT.shape
    logprobs_N, entropy_N = _Logprobs.apply(logits_BTV.flatten(0, 1), targets_BT.flatten(), temperature_BT.flatten())  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs_N.view(shape), entropy_N.view(shape)
