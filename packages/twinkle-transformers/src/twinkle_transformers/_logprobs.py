"""Log-probabilities and entropy from logits, a piece of the tokens at a time.

Shape suffixes: B rows, T tokens, N = B * T tokens, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch

# So many logits are widened to float32 at once: what is made in between stays in a CPU's cache, and is little beside the logits on a GPU.
_ENTRIES_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 25}
# A logit of -inf has probability 0 and adds 0 to the entropy, not 0 * -inf; exp of this is 0, too. NaN stays NaN.
_LEAST = -1e4


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # max, target, sum of exp, sum of exp * z: of each token, z being logits / temperature - max.
        stats = torch.empty(4, len(logits_NV), device=logits_NV.device)
        for rows, z, exp in _pieces(logits_NV):
            torch.div(logits_NV[rows], temperature_N[rows, None], out=z)
            torch.amax(z, -1, out=stats[0, rows])
            z.sub_(stats[0, rows, None])
            stats[1, rows] = z.gather(-1, targets_N[rows, None])[:, 0]
            torch.exp(z.clamp_(min=_LEAST), out=exp)
            torch.sum(exp, -1, out=stats[2, rows])
            torch.sum(z.mul_(exp), -1, out=stats[3, rows])
        max_N, target_N, total_N, weighted_N = stats.unbind()
        log_total_N = total_N.log()
        ctx.save_for_backward(logits_NV, targets_N, temperature_N, max_N + log_total_N)
        entropy_N = log_total_N - weighted_N / total_N
        ctx.mark_non_differentiable(entropy_N)
        return target_N - log_total_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, targets_N, temperature_N, log_total_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        # d logp(target) / dz_v = [v is the target] - p_v, and z = logits / temperature.
        grad_N = grads[0] / temperature_N
        for rows, z, _ in _pieces(logits_NV):
            torch.div(logits_NV[rows], temperature_N[rows, None], out=z)
            z.sub_(log_total_N[rows, None]).exp_().mul_(-grad_N[rows, None])
            z.scatter_add_(-1, targets_N[rows, None], grad_N[rows, None])
            grad_NV[rows] = z
        return grad_NV, None, None


def _pieces(logits_NV: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Which rows, and two float32 tensors of their shape that are used again and again."""
    num_rows, width = logits_NV.shape
    size = max(1, min(num_rows, _ENTRIES_AT_ONCE[logits_NV.device.type] // width))
    first, second = torch.empty(2, size, width, device=logits_NV.device)
    for begin in range(0, num_rows, size):
        end = min(begin + size, num_rows)
        yield slice(begin, end), first[: end - begin], second[: end - begin]


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
