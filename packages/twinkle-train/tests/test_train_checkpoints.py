"""Training checkpoints: only whole ones are listed, and what does not fit is refused by name."""

import json
import os
import shutil
import signal

import pytest
import torch

from twinkle_train import (
    CallOrderError,
    CheckpointError,
    ConfigError,
    begin_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    publish_checkpoint,
    read_checkpoint,
    remove_unfinished,
    staged_folder,
)
from twinkle_train.testing import ReferenceTrainer, random_features


@pytest.fixture
def trained(checkpoint):
    trainer = ReferenceTrainer(checkpoint)
    trainer.set_loss("cross_entropy")
    trainer.set_optimizer("adamw", lr=0.01, betas=(0.8, 0.9))
    trainer.set_lr_scheduler("cosine", warmup_steps=1, total_steps=9)
    trainer.forward_backward(random_features())
    trainer.clip_grad_and_step()
    return trainer


def test_checkpoints_are_listed_by_step_and_pruned_from_the_oldest(trained, tmp_path):
    for name in ("b", "c", "a"):
        trained.save_checkpoint(tmp_path / "all" / name)
        trained.forward_backward(random_features())
        trained.clip_grad_and_step()
    assert [path.name for path in list_checkpoints(tmp_path / "all")] == ["b", "c", "a"]
    assert [path.name for path in prune_checkpoints(tmp_path / "all", 2)] == ["b"]
    assert [path.name for path in list_checkpoints(tmp_path / "all")] == ["c", "a"]
    with pytest.raises(ConfigError, match="at least 1"):
        prune_checkpoints(tmp_path / "all", 0)
    assert list_checkpoints(tmp_path / "absent") == []


def test_a_write_that_is_cut_off_leaves_the_checkpoint_before_listed(trained, tmp_path, monkeypatch):
    trained.save_checkpoint(tmp_path / "one")

    def out_of_space(*arguments, **options):
        raise OSError(28, "No space left on device")

    # What a full disk does to the writer; what is tested is the checkpoint before.
    monkeypatch.setattr(torch, "save", out_of_space)
    for name in ("one", "two"):
        with pytest.raises(OSError, match="No space"):
            trained.save_checkpoint(tmp_path / name)
    assert list_checkpoints(tmp_path) == [tmp_path / "one"]
    monkeypatch.undo()
    trained.resume_from_checkpoint(tmp_path / "one")
    assert len(list(tmp_path.iterdir())) > 1
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "one"]


@pytest.mark.parametrize("survived", [0, 1, 2, 3])
def test_a_process_that_dies_while_it_replaces_a_checkpoint_leaves_the_old_or_the_new_one(trained, tmp_path, survived):
    trained.save_checkpoint(tmp_path / "one", user_state={"row": 1})
    (begin_checkpoint(tmp_path / "one") / "state.pt").write_bytes(b"")
    info = (tmp_path / "one" / "checkpoint.json").read_text().replace('"row": 1', '"row": 2')
    child = os.fork()
    if not child:
        left = survived

        def mortal(call):
            def counted(*arguments, **options):
                nonlocal left
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return call(*arguments, **options)

            return counted

        os.rename, shutil.rmtree = mortal(os.rename), mortal(shutil.rmtree)
        try:
            publish_checkpoint(tmp_path / "one", info)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert list_checkpoints(tmp_path) == [tmp_path / "one"]
    assert read_checkpoint(tmp_path / "one").user_state["row"] in (1, 2)


def test_all_files_are_there_before_a_folder_is_a_checkpoint(trained, tmp_path):
    trained.save_checkpoint(tmp_path / "one", user_state={"row": 3})
    info = read_checkpoint(tmp_path / "one")
    folder = begin_checkpoint(tmp_path / "two")
    (folder / "state.pt").write_bytes(b"half")
    assert list_checkpoints(tmp_path) == [tmp_path / "one"]
    publish_checkpoint(tmp_path / "two", info.to_json())
    assert list_checkpoints(tmp_path) == [tmp_path / "one", tmp_path / "two"]
    assert read_checkpoint(tmp_path / "two") == info
    assert info.user_state == {"row": 3}


def test_optimizer_schedule_and_counters_are_the_checkpoints(trained, checkpoint, tmp_path):
    trained.save_checkpoint(tmp_path / "one")
    fresh = ReferenceTrainer(checkpoint)
    fresh.set_optimizer("sgd", lr=3.0)
    fresh.resume_from_checkpoint(tmp_path / "one")
    want, have = trained.get_train_configs()["adapters"][""], fresh.get_train_configs()["adapters"][""]
    assert {**have, "loss": want["loss"]} == want
    assert have["step"] == 1


def test_a_checkpoint_without_an_optimizer_keeps_the_one_that_was_set(checkpoint, tmp_path):
    trainer = ReferenceTrainer(checkpoint)
    trainer.save_checkpoint(tmp_path / "one")
    trainer.set_loss("cross_entropy")
    trainer.set_optimizer("sgd", lr=0.5)
    trainer.forward_backward(random_features())
    trainer.clip_grad_and_step()
    trainer.resume_from_checkpoint(tmp_path / "one")
    assert trainer.get_train_configs()["adapters"][""]["step"] == 0
    trainer.forward_backward(random_features())
    trainer.clip_grad_and_step()


def test_accumulated_gradients_are_not_dropped_silently(trained, tmp_path):
    trained.forward_backward(random_features())
    with pytest.raises(CallOrderError, match=r"step\(\)"):
        trained.save_checkpoint(tmp_path / "one")
    trained.step()
    trained.save_checkpoint(tmp_path / "one")


@pytest.mark.parametrize("user_state", [{"loader": object()}, {"pair": (1, 2)}, {"by_row": {1: 2}}])
def test_a_user_state_that_would_come_back_as_something_else_is_refused(trained, tmp_path, user_state):
    with pytest.raises(ConfigError, match="user_state"):
        trained.save_checkpoint(tmp_path / "one", user_state=user_state)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_checkpoint_is_an_error_that_names_one(trained, tmp_path):
    trained.save_checkpoint(tmp_path / "run" / "one")
    for wrong in (tmp_path / "run", tmp_path / "run" / "two"):
        with pytest.raises(CheckpointError, match=r"did you mean .*one"):
            trained.resume_from_checkpoint(wrong)
    with pytest.raises(CheckpointError, match="no whole training checkpoint"):
        trained.resume_from_checkpoint(tmp_path / "elsewhere" / "x")
    content = json.loads((tmp_path / "run" / "one" / "checkpoint.json").read_text())
    (tmp_path / "run" / "one" / "checkpoint.json").write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        trained.resume_from_checkpoint(tmp_path / "run" / "one")


def test_what_is_no_checkpoint_is_never_replaced(trained, tmp_path):
    for name, content in (("notes", {"notes.txt": "mine"}), ("run", {"checkpoint.json": "{}", "states/step-1/checkpoint.json": "{}"})):
        for file, text in content.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
        with pytest.raises(FileExistsError, match="would be deleted"):
            trained.save_checkpoint(tmp_path / name)
        assert {str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*") if path.is_file()} == set(content)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="it is a file"):
        trained.save_checkpoint(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    trained.save_checkpoint(tmp_path / "empty")
    trained.save_checkpoint(tmp_path / "empty")
    assert read_checkpoint(tmp_path / "empty").step == 1
    with pytest.raises(FileExistsError, match=r"holds 'notes.txt'"), staged_folder(tmp_path / "notes", "config.json"):
        pass
    with staged_folder(tmp_path / "weights", "config.json") as folder:
        (folder / "config.json").write_text("{}")
    with staged_folder(tmp_path / "weights", "config.json") as folder:
        (folder / "config.json").write_text("[]")
    assert (tmp_path / "weights" / "config.json").read_text() == "[]"
    with pytest.raises(FileExistsError, match=r"holds 'config.json'"), staged_folder(tmp_path / "weights", "adapter_config.json"):
        pass
