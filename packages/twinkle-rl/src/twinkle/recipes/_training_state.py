"""Training checkpoints of a run: written every so many steps, some kept, and found again by `--resume`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle._errors import ConfigError
from twinkle.run import RunFolder
from twinkle_train import list_checkpoints, prune_checkpoints, remove_unfinished

if TYPE_CHECKING:
    from twinkle.layout import Trainer

TRAINING_STATE = "training-state"


class TrainingStates:
    """Writes the actor's training checkpoints into the run folder, in the background.

    Args:
        actor: the trained model.
        folder: of the run.
        every: steps between two of them; 0: none is written.
        keep: how many whole ones stay.
        last_step: after which there is one, too, so that a run can be made longer.
    """

    def __init__(self, actor: Trainer, folder: RunFolder, *, every: int, keep: int, last_step: int) -> None:
        self._actor, self._folder = actor, folder
        self._every, self._keep, self._last_step = every, keep, last_step

    def after(self, step: int, user_state: Callable[[], dict[str, Any]]) -> None:
        """Write one if it is time, with what the loop needs to go on.

        Args:
            step: steps taken.
            user_state: gives plain JSON.
        """
        if not self._every or (step % self._every and step != self._last_step):
            return
        with self._folder.writing(TRAINING_STATE) as states:
            self._actor.save_checkpoint(str(states / f"step-{step:06d}"), user_state={**user_state(), "step": step}, background=True)
            # The one before is whole by now, this one is not listed yet.
            prune_checkpoints(states, self._keep)

    def finish(self) -> None:
        """Wait for the last one."""
        if self._every:
            with self._folder.writing(TRAINING_STATE) as states:
                self._actor.wait_for_checkpoint()
                prune_checkpoints(states, self._keep)


def last_state(run: Path) -> Path:
    """The last whole training checkpoint of a run; what was cut off beside it is deleted.

    Raises:
        ConfigError: the run has none.
    """
    states = run.expanduser().absolute() / TRAINING_STATE
    whole = list_checkpoints(states)
    if not whole:
        raise ConfigError(
            f"--resume {run}: it has no training checkpoint in {TRAINING_STATE}/ (it ended before --checkpoint-every steps, or that was 0)"
        )
    remove_unfinished(states)
    return whole[-1]
