"""Training checkpoints: resumed in the same layout bit for bit, in another to rounding, whatever was killed or failed in between."""

import contextlib
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Adam amplifies rounding by 1 / eps; what is compared is the states' way through files.
_ADAM = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}
_SINGLE: dict[str, Any] = {"sizes": {"world_size": 1}}


@contextlib.contextmanager
def _trainer(path: Path, sizes: dict[str, Any], **options: Any) -> Iterator[Any]:
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    trainer = MegatronTrainer(path, mesh, **options)
    try:
        trainer.set_loss("cross_entropy")
        yield trainer
    finally:
        trainer.close()


def _steps(trainer: Any, rows: list[Any], number: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of so many steps, each on rows of its own."""
    share = trainer._mesh.get_slice(len(rows), int(os.environ["RANK"]))
    done: list[tuple[float, float]] = []
    for _ in range(number):
        begin = trainer.get_train_configs()["adapters"][""]["step"] % len(rows)
        turned = rows[begin:] + rows[:begin]
        loss = trainer.forward_backward(turned[share], 2).loss
        done.append((loss, trainer.clip_grad_and_step(1.0)))
    return done


def save_on_rank(path: Path, layout: dict[str, Any], rows: list[Any], target: Path) -> tuple[Any, Any]:
    """Two steps, a checkpoint, two steps: these and the weights after them."""
    with _trainer(path, **layout) as trainer:
        trainer.set_optimizer("adamw", **_ADAM)
        trainer.set_lr_scheduler("cosine", warmup_steps=2, total_steps=10)
        _steps(trainer, rows, 2)
        trainer.save_checkpoint(target, user_state={"rows": 2})
        return _steps(trainer, rows, 2), trainer.export_weights()


def resume_on_rank(path: Path, layout: dict[str, Any], rows: list[Any], target: Path, forget: bool = False) -> tuple[Any, Any]:
    """The two steps that follow the checkpoint. forget: with moments of zero, for a control."""
    with _trainer(path, **layout) as trainer:
        assert trainer.resume_from_checkpoint(target) == {"rows": 2}
        if forget:
            for placement in trainer._engine._bridge.placements(trainer._engine._bare):
                for name, flat, _ in trainer._engine.trainable("").optimizer.states(placement.tensor):
                    if name.startswith("exp_avg"):
                        flat.zero_()
        return _steps(trainer, rows, 2), trainer.export_weights()


# (family, sizes of the model), the layout that writes, the layout that reads.
RESHARDED: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "tp2 sp to pp2": (
        ("qwen3", {"tie_word_embeddings": True, "vocab_size": 301}),
        {"sizes": {"tp_size": 2, "sequence_parallel": True}},
        {"sizes": {"pp_size": 2}},
    ),
    "dp2 distributed optimizer to one": (("qwen2", {}), {"sizes": {"dp_size": 2}, "use_distributed_optimizer": True}, _SINGLE),
    "ep2 to one": (("qwen3_moe", {}), {"sizes": {"ep_size": 2, "world_size": 2}}, _SINGLE),
}
RESHARDED_TOO: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "one to dp2 distributed optimizer": (("llama", {}), _SINGLE, {"sizes": {"dp_size": 2}, "use_distributed_optimizer": True}),
    "one to ep2 distributed optimizer": (("mixtral", {}), _SINGLE, {"sizes": {"ep_size": 2, "world_size": 2}, "use_distributed_optimizer": True}),
    "biases and latent attention, ep2 to tp2 sp": (
        ("deepseek_v3", {}),
        {"sizes": {"ep_size": 2, "world_size": 2}},
        {"sizes": {"tp_size": 2, "sequence_parallel": True}},
    ),
    "vpp2 of uneven stages to tp2 sp": (
        ("llama", {"num_hidden_layers": 5}),
        {"sizes": {"pp_size": 2, "vpp_size": 2}, "layers_per_stage": (1, 2, 1, 1)},
        {"sizes": {"tp_size": 2, "sequence_parallel": True}},
    ),
    "pp2 dp2 distributed optimizer, tied, to tp2 cp2 sp": (
        ("qwen3", {"tie_word_embeddings": True}),
        {"sizes": {"pp_size": 2, "dp_size": 2}, "use_distributed_optimizer": True},
        {"sizes": {"tp_size": 2, "cp_size": 2, "sequence_parallel": True}},
    ),
    "tp2 dp2 overlapping distributed optimizer to pp4": (
        ("qwen3", {"num_hidden_layers": 4}),
        {"sizes": {"tp_size": 2, "dp_size": 2, "sequence_parallel": True}, "use_distributed_optimizer": True, "overlap_communication": True},
        {"sizes": {"pp_size": 4}},
    ),
    "ep4 to etp2 ep2": (
        ("qwen3_moe", {}),
        {"sizes": {"ep_size": 4, "world_size": 4}, "use_distributed_optimizer": True},
        {"sizes": {"dp_size": 2, "tp_size": 2, "etp_size": 2, "ep_size": 2, "world_size": 4, "sequence_parallel": True}},
    ),
}


def _world_size(layout: dict[str, Any]) -> int:
    from twinkle_mesh import DeviceMesh

    return DeviceMesh.from_sizes(device_type="cpu", **layout["sizes"]).world_size


def _reshard(row: Any, pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    (family, model_sizes), writes, reads = row
    path, target = checkpoint(family, **model_sizes), tmp_path / "checkpoint"
    want, weights = pools(_world_size(writes)).run(save_on_rank, path, writes, features, target, timeout_s=300)[0]
    have, again = pools(_world_size(reads)).run(resume_on_rank, path, reads, features, target, timeout_s=300)[0]
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(again[name], weight, rtol=0, atol=1e-5, err_msg=name)
    forgotten, _ = pools(_world_size(reads)).run(resume_on_rank, path, reads, features, target, forget=True, timeout_s=300)[0]
    assert abs(forgotten[1][0] - want[1][0]) > 1e-3, "steps without the moments were the same: these rows prove nothing"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RESHARDED)
def test_training_goes_on_in_another_layout(name: str, pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    _reshard(RESHARDED[name], pools, checkpoint, features, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RESHARDED_TOO)
def test_training_goes_on_in_another_layout_of_all(name: str, pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    _reshard(RESHARDED_TOO[name], pools, checkpoint, features, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_main_copies_of_bfloat16_weights_come_back_bit_for_bit(pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    layout = {"sizes": {"dp_size": 2}, "use_distributed_optimizer": True, "mixed_precision": "bf16"}
    path = checkpoint("qwen2")
    want, _ = pools(2).run(save_on_rank, path, layout, features, tmp_path / "checkpoint")[0]
    have, _ = pools(2).run(resume_on_rank, path, layout, features, tmp_path / "checkpoint")[0]
    assert have == want
    other = {**layout, "use_distributed_optimizer": False}
    have, _ = pools(2).run(resume_on_rank, path, other, features, tmp_path / "checkpoint")[0]
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-2)


def crash_on_rank(path: Path, rows: list[Any], folder: Path, die_at: int | None, number: int) -> list[tuple[float, float]]:
    """Steps until there are `number`, going on from the last checkpoint, with one written in the background after each.

    die_at: rank 1 is killed (SIGKILL) in the forward pass of that step.
    """
    from twinkle_train import CrossEntropyLoss, list_checkpoints

    def loss(loss_input: Any) -> Any:
        if trainer.get_train_configs()["adapters"][""]["step"] == die_at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return CrossEntropyLoss()(loss_input)

    # Dropout, so that the generators' states count, too.
    with _trainer(path, {"dp_size": 2}, use_distributed_optimizer=True, transformer_options={"hidden_dropout": 0.1}) as trainer:
        trainer.set_loss(loss)
        trainer.set_optimizer("adamw", **_ADAM)
        if saved := list_checkpoints(folder):
            trainer.resume_from_checkpoint(saved[-1])
        done: list[tuple[float, float]] = []
        while (step := trainer.get_train_configs()["adapters"][""]["step"]) < number:
            done += _steps(trainer, rows, 1)
            trainer.save_checkpoint(folder / f"step-{step + 1}", background=True)
        return done


@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_from_its_last_checkpoint_bit_for_bit(two_ranks: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    from twinkle_train import list_checkpoints, remove_unfinished

    path = checkpoint("qwen3")
    whole = two_ranks.run(crash_on_rank, path, features, tmp_path / "whole", None, 6, timeout_s=300)[0]
    assert [folder.name for folder in list_checkpoints(tmp_path / "whole")] == [f"step-{step}" for step in range(1, 7)]
    with pytest.raises(AssertionError, match="exit code -9"):
        two_ranks.run(crash_on_rank, path, features, tmp_path / "killed", 4, 6, timeout_s=300)
    left = [folder.name for folder in list_checkpoints(tmp_path / "killed")]
    # The one after step 4 was being written when the rank died, or just done.
    assert left in (["step-1", "step-2", "step-3"], ["step-1", "step-2", "step-3", "step-4"])
    remove_unfinished(tmp_path / "killed")
    resumed = two_ranks.run(crash_on_rank, path, features, tmp_path / "killed", None, 6, timeout_s=300)[0]
    assert resumed == whole[len(left) :]
    assert len({loss for loss, _ in whole}) == 6


def failing_on_rank(path: Path, rows: list[Any], folder: Path) -> tuple[list[str], list[str]]:
    """What is raised, and where, when rank 1 cannot write: at once, and in the background."""
    import torch.distributed as dist

    from twinkle_megatron import CheckpointError
    from twinkle_train import CallOrderError, list_checkpoints

    raised: list[str] = []
    with _trainer(path, {"tp_size": 2, "sequence_parallel": True}) as trainer:
        trainer.set_optimizer("adamw", **_ADAM)
        trainer.save_checkpoint(folder / "first")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if os.environ["RANK"] == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            try:
                trainer.save_checkpoint(folder / "second")
            except CheckpointError as error:
                raised.append(str(error))
            trainer.save_checkpoint(folder / "third", background=True)
            trainer._checkpoints._writing.done.wait(60)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        try:
            _steps(trainer, rows, 1)
        except CheckpointError as error:
            raised.append(str(error))
        trainer.zero_grad()
        _steps(trainer, rows, 1)
        trainer.save_checkpoint(folder / "fourth", background=True)
        trainer.wait_for_checkpoint()
        # What one rank cannot read is an error on all of them, too: no weight is changed, and all refuse to go on with a fresh optimizer.
        weights = trainer.export_weights()
        _steps(trainer, rows, 1)
        trained = trainer.export_weights()
        if os.environ["RANK"] == "1":
            (folder / "fourth" / "generators-1.pt").rename(folder / "generators")
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"generators-1\.pt: No such file"):
            trainer.resume_from_checkpoint(folder / "fourth")
        dist.barrier()
        info = folder / "fourth" / "checkpoint.json"
        written = info.read_text()
        dist.barrier()
        if os.environ["RANK"] == "0":
            info.write_text(json.dumps(json.loads(written) | {"checksums": {}}))  # as earlier versions wrote it: found out in the middle
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"could not read .*generators-1\.pt"):
            trainer.resume_from_checkpoint(folder / "fourth")
        now = {name: weight.numpy().copy() for name, weight in trainer._engine.export_weights()}
        assert all(np.array_equal(weight, trained[name]) for name, weight in now.items())
        with pytest.raises(CallOrderError, match="did not end"):
            _steps(trainer, rows, 1)
        dist.barrier()
        if os.environ["RANK"] == "1":
            (folder / "generators").rename(folder / "fourth" / "generators-1.pt")
            info.write_text(written)
        dist.barrier()
        trainer.resume_from_checkpoint(folder / "fourth")
        now = trainer.export_weights()
        assert all(np.array_equal(now[name], weight) for name, weight in weights.items())
        return raised, [path.name for path in list_checkpoints(folder)]


@pytest.mark.timeout(900)
def test_a_checkpoint_that_a_rank_cannot_write_is_an_error_on_all_and_not_listed(
    two_ranks: Any, checkpoint: Any, features: Any, tmp_path: Path
) -> None:
    for raised, listed in two_ranks.run(failing_on_rank, checkpoint("qwen3"), features, tmp_path):
        assert len(raised) == 2
        assert "second (rank 1)" in raised[0]
        assert "third (rank 1)" in raised[1]
        assert listed == ["first", "fourth"]


def plain_on_rank(path: Path, rows: list[Any], target: Path) -> None:
    """megatron-core's own reader finds the weights, whole, under its names; another model's checkpoint is refused, and nothing changes."""
    import shutil

    from twinkle_megatron import CheckpointError
    from twinkle_train.testing import conformance

    with _trainer(path, {"world_size": 1}) as trainer:
        from megatron.core import dist_checkpointing  # the trainer makes megatron-core ready for a CPU, before which it must not be imported

        trainer.set_optimizer("sgd", lr=0.1, momentum=0.9)
        _steps(trainer, rows, 1)
        trainer.save_checkpoint(target)
        weights = trainer.export_weights()
        tensors = dist_checkpointing.load_plain_tensors(str(target))
        np.testing.assert_array_equal(tensors["embedding.word_embeddings.weight"].numpy(), weights["model.embed_tokens.weight"])
        down = tensors["decoder.layers.1.mlp.linear_fc2.weight"].numpy()
        np.testing.assert_array_equal(down, weights["model.layers.1.mlp.down_proj.weight"])
        gate_and_up = [weights[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        np.testing.assert_array_equal(tensors["decoder.layers.0.mlp.linear_fc1.weight"].numpy(), np.concatenate(gate_and_up))
        assert tensors["optimizer.state.momentum_buffer.decoder.layers.1.mlp.linear_fc2.weight"].abs().max() > 0

        content = json.loads((target / "checkpoint.json").read_text())
        for entries, message in (({"mixed_precision": "bf16"}, "mixed_precision='bf16'"), ({"model_type": "llama"}, "model_type='llama'")):
            (target / "checkpoint.json").write_text(json.dumps({**content, "engine": content["engine"] | entries}))
            with pytest.raises(CheckpointError, match=message):
                trainer.resume_from_checkpoint(target)
        (target / "checkpoint.json").write_text(json.dumps(content))
        (data,) = target.glob("*.distcp")
        shutil.move(data, target / "elsewhere")
        with pytest.raises(CheckpointError, match="No such file"):
            trainer.resume_from_checkpoint(target)
        shutil.move(target / "elsewhere", data)
        trainer.resume_from_checkpoint(target)
        _steps(trainer, rows, 1)
        conformance.check_changed_bytes(trainer, target.parent / "changed")


@pytest.mark.timeout(900)
def test_megatron_core_reads_the_folder_and_what_does_not_fit_is_refused(pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    pools(1).run(plain_on_rank, checkpoint("qwen3"), features, tmp_path / "checkpoint")


def other_model_on_rank(path: Path, target: Path) -> str:
    from twinkle_megatron import CheckpointError

    with _trainer(path, {"world_size": 1}) as trainer:
        before = trainer.export_weights()
        with pytest.raises(CheckpointError) as raised:
            trainer.resume_from_checkpoint(target)
        for name, weight in trainer._engine.export_weights():
            np.testing.assert_array_equal(weight.numpy(), before[name])
        trainer.load(path)
        trainer.export_weights()
        return str(raised.value)


@pytest.mark.timeout(900)
def test_a_checkpoint_of_another_size_changes_no_weight(pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    pools(1).run(save_on_rank, checkpoint("llama"), _SINGLE, features, tmp_path / "checkpoint")
    (message,) = pools(1).run(other_model_on_rank, checkpoint("llama", num_hidden_layers=3), tmp_path / "checkpoint")
    assert "has no tensor decoder.layers.2" in message
    (message,) = pools(1).run(other_model_on_rank, checkpoint("llama", intermediate_size=64), tmp_path / "checkpoint")
    assert "this model's is" in message
