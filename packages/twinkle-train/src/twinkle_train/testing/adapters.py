"""What adapters of every trainer must do alike, each on a rank: trainers' own tests call these.

A maker is a context manager that gives a new trainer with adapters of some names, each configured alike: `adapters_on(Trainer(...), names, lora)`.
Where steps are taken, `share` is the part of the rows that this rank gets (`mesh.get_slice(len(rows), rank)`). Every rank makes the same calls.
What differs raises AssertionError.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_data import InputFeature

__all__ = [
    "ADAM",
    "Maker",
    "States",
    "adapters_on",
    "check_apart",
    "check_interrupted",
    "check_merged",
    "check_peft_reads",
    "check_refused_files",
    "check_resumed",
    "resume_states",
    "same",
    "save_states",
    "take_steps",
]

ADAM: dict[str, Any] = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}
"""Settings of AdamW under which a few steps change tiny models by much more than rounding."""

Maker = Callable[[Sequence[str]], AbstractContextManager[Any]]
States = tuple[list[tuple[float, float]], dict[str, Any]]
"""Losses and gradient norms of steps, and the adapter's matrices after them."""


@contextlib.contextmanager
def adapters_on(trainer: Any, names: Sequence[str], lora: Any) -> Iterator[Any]:
    """The trainer with adapters of these names on it, each and the base with the cross-entropy; closed at the end."""
    try:
        trainer.set_loss("cross_entropy")
        for name in names:
            trainer.add_adapter_to_model(name, lora)
            trainer.set_loss("cross_entropy", adapter_name=name)
        yield trainer
    finally:
        trainer.close()


def same(mine: Any, theirs: Any) -> bool:
    """Whether two dicts or lists of arrays are equal bit for bit. None, of a rank that has no outputs, equals None."""
    if mine is None or theirs is None:
        return mine is theirs
    if not isinstance(mine, Mapping):
        mine, theirs = dict(enumerate(mine)), dict(enumerate(theirs))
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)


def take_steps(trainer: Any, rows: Sequence[InputFeature], share: slice, name: str, number: int = 1) -> list[tuple[float, float]]:
    """Loss and gradient norm of so many steps of an adapter, each on rows in another order, which its step counter gives."""
    done: list[tuple[float, float]] = []
    for _ in range(number):
        begin = trainer.get_train_configs()["adapters"][name]["step"] % len(rows)
        loss = trainer.forward_backward([*rows[begin:], *rows[:begin]][share], 2, adapter_name=name).loss
        done.append((loss, trainer.clip_grad_and_step(1.0, adapter_name=name)))
    return done


def check_apart(make: Maker, rows: Sequence[InputFeature], share: slice, names: tuple[str, str]) -> None:
    """The base and two adapters, trained in turn, make bit for bit the steps that each makes when it is trained alone.

    names: of the adapters; one that begins as the other does shows that names are compared whole.
    """
    first, second = names
    alone: dict[str, States] = {}
    for name in ("", *names):
        with make([name] if name else []) as trainer:
            trainer.set_optimizer("adamw", **ADAM, adapter_name=name)
            if name:
                outputs = [trainer.forward_only(rows[:2], adapter_name=each).logprobs for each in ("", name)]
                assert same(*outputs), "an adapter begins with an update of zero"
            alone[name] = take_steps(trainer, rows, share, name, 2), trainer.export_weights(adapter_name=name)
    with make(names) as trainer:
        for name in names:
            trainer.set_optimizer("adamw", **ADAM, adapter_name=name)
        base = trainer.export_weights()
        done: dict[str, list[Any]] = {name: [] for name in names}
        for _ in range(2):
            for name in names:
                done[name] += take_steps(trainer, rows, share, name)
        for name in names:
            assert done[name] == alone[name][0]
            assert same(trainer.export_weights(adapter_name=name), alone[name][1])
        assert done[first] != done[second], "adapters begin with other matrices"
        assert same(trainer.export_weights(), base)
        # And the base among adapters is the base alone.
        trainer.set_optimizer("adamw", **ADAM)
        steps: list[Any] = []
        for _ in range(2):
            steps += take_steps(trainer, rows, share, "")
            take_steps(trainer, rows, share, first)
        assert steps == alone[""][0]
        assert same(trainer.export_weights(), alone[""][1])
        assert same(trainer.export_weights(adapter_name=second), alone[second][1])


def check_interrupted(make: Maker, rows: Sequence[InputFeature], share: slice) -> None:
    """forward, calculate_loss, backward of an adapter and of the base, in one another's way and another adapter's: the same gradients."""
    with make(["a", "b"]) as trainer:
        for name in ("", "a", "b"):
            trainer.set_optimizer("sgd", lr=0.1, adapter_name=name)
        take_steps(trainer, rows, share, "a")
        want: dict[str, dict[str, Any]] = {}
        for name in ("a", ""):
            trainer.forward_backward(rows[share], adapter_name=name)
            want[name] = trainer.export_gradients(adapter_name=name)
            trainer.zero_grad(adapter_name=name)
        trainer.forward(rows[share], adapter_name="a")
        trainer.forward(rows[share])
        trainer.forward_only(rows[share], adapter_name="b")
        trainer.calculate_loss(adapter_name="a")
        trainer.calculate_loss()
        trainer.forward_backward(rows[share], adapter_name="b")
        trainer.backward(adapter_name="a")
        trainer.backward()
        for name, gradients in want.items():
            have = trainer.export_gradients(adapter_name=name)
            assert have.keys() == gradients.keys()
            for key, gradient in gradients.items():
                np.testing.assert_allclose(have[key], gradient, rtol=0, atol=1e-6, err_msg=f"{name}/{key}")
            assert not _has_all() or max(float(np.abs(gradient).max()) for gradient in gradients.values()) > 1e-3


def check_peft_reads(path: Path, folder: Path, rows: Sequence[InputFeature], logprobs: Sequence[Any], target_modules: Sequence[str]) -> None:
    """peft and transformers read an adapter (`folder/adapter`) and the model merged with it (`folder/merged`): both give these log-probabilities.

    path: the base model's checkpoint. target_modules: that adapter_config.json should name.
    """
    import json

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), folder / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    farthest = 0.0
    for row, have in zip(rows, logprobs, strict=True):
        ids = torch.as_tensor(row.input_ids)[None]

        def of(model: Any, ids: Any = ids, temperature: float = float(row.temperature)) -> Any:
            with torch.no_grad():
                return (model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()

        np.testing.assert_allclose(of(adapted), have[1:], rtol=0, atol=3e-5)
        np.testing.assert_allclose(of(merged), have[1:], rtol=0, atol=3e-5)
        farthest = max(farthest, float(np.abs(of(plain) - have[1:]).max()))
    assert farthest > 0.05, "the adapter does nothing: this proves nothing"
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(target_modules)
    assert config["base_model_name_or_path"] == str(path)


def check_merged(path: Path, folder: Path, merged: Mapping[str, Any]) -> None:
    """Weights with an adapter in them (arrays, by Hugging Face name) are what peft merges from the adapter in `folder`; all others are untouched.

    path: the base model's checkpoint, of which `merged` must have every tensor that the adapter changes.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    expected = PeftModel.from_pretrained(plain, folder).merge_and_unload().state_dict()
    changed = {name for name in before if not torch.equal(expected[name], before[name])}
    assert changed & merged.keys(), "the adapter does nothing: this proves nothing"
    # transformers holds the experts of a layer in one tensor, under another name than a checkpoint.
    assert all(".experts." in name for name in changed - merged.keys())
    for name in sorted(changed & merged.keys()):
        np.testing.assert_allclose(merged[name], expected[name].numpy(), rtol=0, atol=1e-6, err_msg=name)
    for name in merged.keys() & before.keys() - changed:
        assert np.array_equal(merged[name], before[name].numpy()), name


def check_refused_files(trainer: Any, saved: Path, module: str, other_module: str, error: type[Exception]) -> None:
    """An adapter of rank 2 on one module alone, which is in the folder `saved`, is not read into adapters that are configured otherwise.

    module: its name, with the layer's number in it, 1, as in `layers.1.self_attn.q_proj`. other_module: another that the model has.
    """
    last = module.rpartition(".")[2]
    zeroth = re.escape(module.replace("layers.1.", "layers.0."))
    for name, lora, message in (
        ("r", {"r": 4, "target_modules": [module]}, "with r=2, and this one has 4"),
        ("scaling", {"r": 2, "lora_alpha": 1, "target_modules": [last]}, "with lora_alpha=8"),
        ("missing", {"r": 2, "target_modules": [last]}, f"lacks 2 matrices of the adapter 'missing': .*{zeroth}.lora_A"),
        ("left", {"r": 2, "target_modules": [other_module]}, "lacks"),
    ):
        trainer.add_adapter_to_model(name, lora)
        _expect(error, message, lambda name=name: trainer.load(saved, adapter_name=name))
    _expect(error, "no adapter in peft's format", lambda: trainer.load(saved.parent, adapter_name="r"))


def save_states(make: Maker, rows: Sequence[InputFeature], share: slice, target: Path) -> States:
    """Two steps of an adapter, a checkpoint of it and one of all into `target`, and the two steps that follow; another adapter beside it."""
    with make(["a", "b"]) as trainer:
        trainer.set_optimizer("adamw", **ADAM, adapter_name="a")
        trainer.set_lr_scheduler("cosine", warmup_steps=2, total_steps=10, adapter_name="a")
        take_steps(trainer, rows, share, "a", 2)
        trainer.save_checkpoint(target / "own", user_state={"rows": 2}, adapter_name="a")
        trainer.save_checkpoint(target / "all", user_state={"rows": 3}, background=True)
        done = take_steps(trainer, rows, share, "a", 2)
        trainer.wait_for_checkpoint()
        return done, trainer.export_weights(adapter_name="a")


def resume_states(
    make: Maker, rows: Sequence[InputFeature], share: slice, target: Path, forget: Callable[[Any], None] | None = None, other: str = "sgd"
) -> States:
    """The two steps that follow the checkpoints of `save_states`, resumed alone, with all, and under another name.

    forget: called with the resumed trainer, makes the adapter's moments zero: a control. other: the optimizer of the adapter beside it.
    """
    with make(["a", "b"]) as trainer:
        trainer.set_optimizer(other, lr=0.1, adapter_name="b")
        take_steps(trainer, rows, share, "b")
        beside = trainer.export_weights(adapter_name="b")
        assert trainer.resume_from_checkpoint(target / "own", adapter_name="a") == {"rows": 2}
        if forget is not None:
            forget(trainer)
        result = take_steps(trainer, rows, share, "a", 2), trainer.export_weights(adapter_name="a")
        assert same(trainer.export_weights(adapter_name="b"), beside)
        if forget is None:
            assert trainer.resume_from_checkpoint(target / "all") == {"rows": 3}
            assert take_steps(trainer, rows, share, "a", 2) == result[0]
            restored = trainer.export_weights(adapter_name="b")  # on every rank
            assert not _has_all() or not same(restored, beside)
            assert trainer.resume_from_checkpoint(target / "own", adapter_name="b", saved_as="a") == {"rows": 2}
            assert take_steps(trainer, rows, share, "b", 2) == result[0]
        return result


def check_resumed(written: States, resumed: States, forgotten: States, again: States | None) -> None:
    """Rank 0's results of `save_states`, of `resume_states` in another layout, the same without moments, and in the layout that wrote (or None)."""
    want, weights = written
    np.testing.assert_allclose(resumed[0], want, rtol=0, atol=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(resumed[1][name], weight, rtol=0, atol=1e-5, err_msg=name)
    assert abs(forgotten[0][1][0] - want[1][0]) > 1e-3, "steps without the moments were the same: these rows prove nothing"
    if again is not None:
        assert again[0] == want, "in the same layout bit for bit"


def _expect(error: type[Exception], pattern: str, call: Callable[[], object]) -> None:
    message: str | None = None
    try:
        call()
    except error as raised:
        message = str(raised)
    assert message is not None, f"no {error.__name__} with {pattern!r}"
    assert re.search(pattern, message), f"{pattern!r} is not in {message!r}"


def _has_all() -> bool:
    """Whether this rank gets whole tensors."""
    return os.environ.get("RANK", "0") == "0"
