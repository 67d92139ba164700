"""What a save replaces, and what it leaves alone."""

from pathlib import Path

import pytest
import torch

from twinkle_train import ConfigError, InputError, LossInput, LossOutput, staged_folder
from twinkle_train.testing import ReferenceTrainer, random_features


@pytest.fixture
def trainer(checkpoint):
    trainer = ReferenceTrainer(checkpoint)
    trainer.set_loss("cross_entropy")
    trainer.set_optimizer("sgd", lr=0.1)
    return trainer


@pytest.mark.parametrize("how", ["save", "save_checkpoint"])
def test_files_of_ones_own_stay_where_a_checkpoint_is_replaced(trainer, tmp_path, how):
    save, target = getattr(trainer, how), tmp_path / "out"
    save(target)
    written = {path.name for path in target.iterdir()}
    for name in ("README.md", "eval_results.json", "tokenizer_config.json"):
        (target / name).write_text(name)
    (target / "model-00007-of-00009.safetensors").write_text("of an earlier save")
    save(target)
    assert {path.name for path in target.iterdir()} == written | {"README.md", "eval_results.json", "tokenizer_config.json"}
    assert (target / "README.md").read_text() == "README.md"


def test_a_staged_folder_keeps_files_of_ones_own_and_links_but_no_old_weights(tmp_path):
    real, link = tmp_path / "disk", tmp_path / "latest"
    real.mkdir()
    link.symlink_to(real)
    for name in ("mark", "notes.txt", "model-00002-of-00002.safetensors", "model.safetensors.index.json"):
        (real / name).write_text("old")
    with staged_folder(link, "mark") as folder:
        for name in ("mark", "model.safetensors"):
            (folder / name).write_text("new")
    assert link.is_symlink()
    assert {path.name: path.read_text() for path in real.iterdir()} == {"mark": "new", "model.safetensors": "new", "notes.txt": "old"}


@pytest.mark.parametrize("how", ["save", "save_checkpoint"])
def test_a_link_stays_a_link(trainer, tmp_path, how):
    (tmp_path / "disk").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "disk")
    for _ in range(2):
        getattr(trainer, how)(tmp_path / "latest")
        assert (tmp_path / "latest").is_symlink()
        assert any((tmp_path / "disk").iterdir())


def test_the_working_folder_is_not_replaced(trainer, tmp_path, monkeypatch):
    trainer.save_checkpoint(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(FileExistsError, match="it is the working folder, and would be replaced"):
        trainer.save_checkpoint("")
    (tmp_path / "out" / "mark").touch()
    with pytest.raises(FileExistsError, match="working folder"), staged_folder(Path(), "mark"):
        pytest.fail("a folder was made")
    assert (tmp_path / "out" / "checkpoint.json").is_file()


def test_a_loss_without_a_graph_is_an_error_and_nothing_is_lost(trainer):
    def detached(x: LossInput) -> LossOutput:
        return LossOutput(sum=-(x.logprobs_BT * x.mask_BT).sum().detach(), weight=x.mask_BT.sum())

    rows = random_features()
    trainer.set_loss(detached)
    with pytest.raises(InputError, match="a sum without a graph, so nothing would be trained"):
        trainer.forward_backward(rows)
    with torch.no_grad():
        assert trainer.forward_only(rows).logprobs is not None
    trainer.zero_grad()
    trainer.set_loss("cross_entropy")
    assert trainer.forward_backward(rows).loss > 0


def test_numbers_that_are_texts_are_told(trainer):
    with pytest.raises(ConfigError, match=r"lr must be a number, got '1e-3' \(str\)"):
        trainer.set_optimizer("adamw", lr="1e-3")
    with pytest.raises(ConfigError, match="betas must be a number, got None"):
        trainer.set_optimizer("adamw", betas=(0.9, None))
    rows = random_features()
    for size in (2.5, "2", True, 0):
        with pytest.raises(ConfigError, match="micro_batch_size must be a whole number >= 1, or None"):
            trainer.forward_backward(rows, size)
    trainer.forward_backward(rows)
    with pytest.raises(ConfigError, match="max_grad_norm must be a number, got None"):
        trainer.clip_grad_and_step(None)
    assert trainer.clip_grad_and_step(1.0) > 0
