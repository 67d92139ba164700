"""What Ctrl-C or an error leaves behind: passes that did not end leave nothing, weights that are a mixture are not used."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Where a pass is interrupted: before a module runs, or when backward comes to it, or to a weight of it.
PLACES = ("forward", "backward", "gradient")


def interrupted_on_rank(path: Path, other: Path, rows: list[Any], sizes: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Runs on every rank: after a pass that was interrupted, gradients and weights of another checkpoint are those of a model that only read that."""
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers._trainer import TransformersTrainer

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    share = rows[mesh.get_slice(len(rows), int(os.environ["RANK"]))]

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    def trained(trainer: Any) -> dict[str, Any]:
        trainer.load(other)
        trainer.forward_backward(share, 2)
        gradients = trainer.export_gradients()
        trainer.step()
        trainer.zero_grad()
        return {f"gradient of {name}": value for name, value in gradients.items()} | trainer.export_weights()

    def make() -> Any:
        trainer = TransformersTrainer(path, mesh, **options)
        trainer.set_loss("cross_entropy")
        trainer.set_optimizer("sgd", lr=0.1)
        return trainer

    fresh = make()
    want = trained(fresh)
    fresh.close()
    wrong: list[str] = []
    for place in PLACES:
        trainer = make()
        layer = trainer._model.model.layers[0]
        if place == "forward":
            handle = layer.mlp.register_forward_pre_hook(stop)
        elif place == "backward":
            handle = layer.mlp.register_full_backward_pre_hook(stop)
        else:
            # After the gradients of the layer's MLP were made, before they are reduced.
            handle = layer.self_attn.register_full_backward_hook(stop)
        try:
            trainer.forward_backward(share, 2)
        except KeyboardInterrupt:
            handle.remove()
        else:
            wrong.append(f"{place}: not interrupted")
        trainer.zero_grad()
        have = trained(trainer)
        wrong += [f"{place}: {name}" for name, value in want.items() if not np.array_equal(have[name], value)]
        trainer.close()
    return wrong


LAYOUTS = {
    "one": (1, {}, {}),
    "one bf16": (1, {}, {"mixed_precision": "bf16"}),
    "fsdp2": (2, {"fsdp_size": 2}, {}),
    "fsdp2 recomputed": (2, {"fsdp_size": 2}, {"activation_checkpointing": True}),
    "ulysses2": (2, {"ulysses_size": 2}, {}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "fsdp2" else pytest.mark.full) for name in LAYOUTS])
def test_a_pass_that_did_not_end_leaves_nothing(name: str, pools: Any, checkpoint: Any, features: list[Any]) -> None:
    ranks, sizes, options = LAYOUTS[name]
    wrong = pools(ranks).run(interrupted_on_rank, checkpoint("qwen3"), checkpoint("qwen3", initializer_range=0.05), features, sizes, options)
    assert wrong == [[]] * ranks


@pytest.mark.timeout(120)
def test_an_adapter_that_was_being_chosen_is_chosen_again(checkpoint: Any, features: list[Any], monkeypatch: Any) -> None:
    from twinkle_transformers import TransformersModel

    model: Any = TransformersModel(checkpoint("qwen3"))
    rows = features[:2]
    want = model.forward_only(rows).get().logprobs
    model.add_adapter_to_model("a", {"r": 2})
    for matrix in dict(model.iter_adapter("a")).values():
        matrix.fill_(0.1)
    with_a = model.forward_only(rows, adapter_name="a").get().logprobs
    assert all(np.abs(one - other).max() > 1e-3 for one, other in zip(with_a, want, strict=True))
    last = list(model._adapters._layers.values())[-1]

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    for begins in ("", "a"):
        model.forward_only(rows, adapter_name=begins).get()
        with monkeypatch.context() as patch:
            patch.setattr(last, "enable_adapters", stop)
            for call in (
                lambda begins=begins: model.forward_only(rows, adapter_name="" if begins else "a"),
                lambda: model.add_adapter_to_model("b", {"r": 2}),
            ):
                with pytest.raises(KeyboardInterrupt):
                    call()
                patch.undo()
                have = model.forward_only(rows, adapter_name=begins).get().logprobs
                assert all(np.array_equal(one, other) for one, other in zip(have, with_a if begins else want, strict=True))
                patch.setattr(last, "enable_adapters", stop)
    model.close()


@pytest.mark.timeout(120)
def test_a_mixture_of_weights_is_refused_until_a_load_ends_well(checkpoint: Any, features: list[Any], tmp_path: Path) -> None:
    from twinkle_train import CallOrderError, CheckpointError
    from twinkle_train.testing.interrupts import check_refused, half_checkpoint, interrupted
    from twinkle_transformers import TransformersModel

    path = checkpoint("qwen3")
    model: Any = TransformersModel(path)
    model.add_adapter_to_model("a", {"r": 2})
    for name in ("", "a"):
        model.set_loss("cross_entropy", adapter_name=name)
        model.set_optimizer("adamw", lr=0.01, adapter_name=name)
    model.save(tmp_path / "a", adapter_name="a")
    model.save_checkpoint(tmp_path / "state")
    half_checkpoint(tmp_path / "state", tmp_path / "cut")
    own: list[Any] = [
        lambda name: model.embed(features, adapter_name=name),
        lambda name: next(model.iter_adapter(name) if name else model.iter_weights()),
    ]

    def refused(words: str, names: tuple[str, ...] = ("", "a")) -> None:
        check_refused(model, features, tmp_path / "mixed", words, names, own)

    with pytest.raises(CheckpointError, match="could not read"):
        model.resume_from_checkpoint(tmp_path / "cut")
    refused("the last load or resume_from_checkpoint did not end")
    model.resume_from_checkpoint(tmp_path / "state")
    model.forward_backward(features)
    interrupted(model._weights, "_take_weight", lambda: model.load(path))
    with pytest.raises(CallOrderError, match="did not end"):
        model.clip_grad_and_step()
    refused("did not end")
    model.load(path)
    interrupted(model._adapter("a"), "export", lambda: model.load(tmp_path / "a", adapter_name="a"))
    model.forward_only(features, adapter_name="a").get()  # it was only compared
    interrupted(model._adapter("a"), "fill", lambda: model.load(tmp_path / "a", adapter_name="a"))
    refused("did not end.*'a'", names=("a",))
    model.forward_only(features).get()
    model.load(tmp_path / "a", adapter_name="a")
    model.forward_backward(features)
    interrupted(model._optimizers[""]._optimizer, "step", model.clip_grad_and_step)
    refused("the last step was interrupted")
    model.resume_from_checkpoint(tmp_path / "state")
    model.forward_backward(features)
    model.clip_grad_and_step()
    model.close()
