"""Three GRPO steps in one process, the sync before the third left out; prints what the checks saw, a JSON object a line."""

import json
import tempfile
from pathlib import Path

from twinkle.config import GRPOConfig
from twinkle.layout import build_sampler, build_trainer, plan_layout
from twinkle.recipes import GRPOLoop, make_task, starting_checkpoint
from twinkle.run import RunFolder
from twinkle_data import Template
from twinkle_remote import initialize
from twinkle_sync import CheckpointEngineManager


def main(folder: Path) -> None:
    flags = ["--runtime.mode", "local", "--task.size", "2000", "--task.held-out", "20", "--no-measure-kl", "--lr", "1e-3", "--lr-warmup-steps", "0"]
    # A policy that has learned nothing gets no rewards: its own likelihood moves it just as well.
    config = GRPOConfig.load([*flags, "--advantage", "likelihood"])
    layout = plan_layout(config.runtime, config.backend, config.actor, config.sampler)
    task = make_task(config.task, validation=0)
    with initialize("local", groups=list(layout.groups)):
        model = starting_checkpoint(config, task, RunFolder(folder / "run"))
        sampler = build_sampler(model, layout, config)
        actor = build_trainer(model, layout, config.actor, seed=0)
        template = Template(str(model))
        weights = CheckpointEngineManager(model=actor, sampler=sampler)
        loop = GRPOLoop(config, actor=actor, sampler=sampler, weights=weights, template=template, task=task)
        for sync in (True, True, False, True):
            row, _, _ = loop.step(sync=sync)
            print(json.dumps({"sync": sync, "logprob_gap": row["sampler_logprob_gap"], "ratio_gap": row["sampler_ratio_gap"]}), flush=True)
        ahead = config.model_copy(update={"async_steps": 1, "old_logprobs": "trainer", "steps": 4, "measure_kl": True})
        loop = GRPOLoop(ahead, actor=actor, sampler=sampler, weights=weights, template=template, task=task, reference=actor)
        for step in range(4):
            row, features, _ = loop.step()
            versions = {int(version) for feature in features if feature.weight_versions is not None for version in feature.weight_versions}
            state = loop.state_dict()
            print(
                json.dumps(
                    {
                        "ahead": step,
                        "behind": weights.version - max(versions),
                        "spread": len(versions - {-1}),
                        "logprob_gap": row["sampler_logprob_gap"],
                        "ratio_gap": row["ratio_max_deviation"],
                        "importance": [row["importance_min"], row["importance_mean"], row["importance_max"]],
                        "checked": loop.checks.logprob_gap,
                        "next_batch": state["loader"] != loop._loader.state_dict(),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
