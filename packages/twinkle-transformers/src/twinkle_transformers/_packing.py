"""Whether a model keeps the sequences of a packed row apart: asked once, of the model itself."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from ._attention import Attention, Rows
from ._errors import UnsupportedModelError

_LENGTHS = (5, 6)
# Of the largest logit: far above rounding, far below what a wrong position or a token too many does.
_TOLERANCE = 1e-3
_STRETCHES = ("Compressor", "Indexer")


def packing_fault(model: Any, attention: Attention | None, reason: str = "") -> str | None:
    """Why the model must not be given packed rows, or None when it may.

    Two short sequences are run as one row, and the second alone. The second's logits must be the same, and their derivative to the first's embeddings
    exactly zero, in any precision: attention, convolution or recurrence that crosses from one to the other would show.

    Args:
        model: whole, in float32 on the CPU, before it is sharded.
        attention: of this model. None: it has none that can be told, for the `reason`.

    Raises:
        UnsupportedModelError: its attention refuses to run as it is set up.
    """
    name = type(model).__name__
    if attention is None:
        return reason
    if not takes_positions(model):
        return f"{name}.forward has no position_ids, so positions cannot begin anew in each sequence"
    if stretches := stretch_modules(model):
        return f"{name} puts tokens together by stretches of the row, whatever sequence they are of ({', '.join(stretches)})"
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    tokens = [(torch.arange(length) * 7 + 3 * length) % vocabulary for length in _LENGTHS]
    training, base = model.training, attention.base
    model.eval()
    if base not in ("eager", "sdpa"):  # a kernel of GPUs: what is asked is about the model, not about the kernel
        attention.base = "eager" if hasattr(sys.modules[type(model).__module__], "eager_attention_forward") else "sdpa"
    try:
        return _compare(model, attention, tokens)
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever the model's own code raises: it cannot take the mask
        return f"{name} failed on a packed row: {type(error).__name__}: {error}"
    finally:
        attention.base = base
        model.train(training)
        model.zero_grad(set_to_none=True)


def takes_positions(model: Any) -> bool:
    """Whether the model's forward has position_ids."""
    return "position_ids" in inspect.signature(model.forward).parameters


def stretch_modules(model: Any) -> list[str]:
    """The classes of a model's modules that compress, or choose from, all columns of a row (DeepSeek-V3.2 and -V4): what they do shows in long rows
    only, and depends on where a row begins."""
    return sorted({type(module).__name__ for module in model.modules() if type(module).__name__.endswith(_STRETCHES)})


def _compare(model: Any, attention: Attention, tokens: list[torch.Tensor]) -> str | None:
    name, (first, second) = type(model).__name__, _LENGTHS
    embedded: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        ids = torch.tensor([[0] * first + [1] * second])
        rows = Rows(shape=(1, first + second), sequence_ids_BT=ids, segments=(0, first, first + second))
        positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
        packed = _logits(model, attention, rows, torch.cat(tokens)[None], positions)[0, first:]
        alone = _logits(model, attention, Rows(shape=(1, second)), tokens[1][None], torch.arange(second)[None])[0].detach()
    finally:
        hook.remove()
    if len(embedded) != 2:
        return f"{name} does not call its input embeddings once a forward, so it cannot be checked"
    (gradient,) = torch.autograd.grad(packed.square().sum(), embedded[0])
    if gradient[0, :first].any():
        return f"tokens of one sequence reach the next one of the row in {name} ({_mixers(model)})"
    if not (packed.detach() - alone).abs().max() <= _TOLERANCE * alone.abs().max():
        return f"{name} gives a sequence other logits in a packed row than alone"
    return None


def _logits(model: Any, attention: Attention, rows: Rows, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    with attention.of(rows):
        return model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), position_ids=position_ids, use_cache=False).logits


def _mixers(model: Any) -> str:
    """The classes of modules that mix tokens otherwise than by attention, as far as names tell."""
    hints: tuple[Callable[[Any], bool], ...] = (lambda m: isinstance(m, torch.nn.Conv1d), lambda m: hasattr(m, "conv1d") or hasattr(m, "A_log"))
    found = sorted({type(module).__name__ for module in model.modules() if any(hint(module) for hint in hints)} - {"Conv1d"})
    return f"look at {', '.join(found)}" if found else "its attention does not use the mask that it is given"
