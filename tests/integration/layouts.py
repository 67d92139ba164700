"""Three steps of supervised training and three of recorded rollouts in every layout, on one Ray; prints a JSON object a step.

usage: layouts.py RUN_FOLDER (of a recorded `twinkle grpo` run)
"""

import json
import sys
from pathlib import Path

from twinkle import DeviceGroup, DeviceMesh, MegatronModel, Template
from twinkle.config import GRPOConfig, SFTConfig
from twinkle.recipes import make_task, read_rollouts, set_up_actor, set_up_sft, sft_step, train_step
from twinkle_data import DataLoader
from twinkle_remote import initialize

STEPS = 3
LAYOUTS = {
    "one rank": {"dp_size": 1},
    "tp 2": {"tp_size": 2},
    "pp 2": {"pp_size": 2},
    "tp 2 with sequence parallel": {"tp_size": 2, "sequence_parallel": True},
    "dp 2": {"dp_size": 2},
}


def main(run: Path) -> None:
    sft, grpo = SFTConfig.load([]), GRPOConfig.load([])
    task = make_task(sft.task.model_copy(update={"size": 2000, "held_out": 50}), validation=0)
    conversations = [task.worked(problem) for problem in task.training]
    template = Template(str(run / "model"))
    groups = [DeviceGroup(name="two", ranks=2, device_type="cpu"), DeviceGroup(name="one", ranks=1, device_type="cpu")]
    with initialize("ray", groups=groups, threads_per_worker=1):
        for name, sizes in LAYOUTS.items():
            mesh = DeviceMesh.from_sizes(**sizes, device_type="cpu")
            actor = MegatronModel(str(run / "model"), device_mesh=mesh, remote_group="two" if mesh.world_size == 2 else "one")
            set_up_sft(actor, lr=sft.lr, lr_warmup_steps=sft.lr_warmup_steps)
            batches = DataLoader(conversations, batch_size=sft.batch_size, shuffle=True, seed=0)
            for step, batch in zip(range(1, STEPS + 1), batches, strict=False):
                sft_step(actor, template, batch, max_grad_norm=sft.max_grad_norm, micro_batch_size=None)
                report("sft", name, step, actor.calculate_metric())
            actor.load(str(run / "initial"))
            set_up_actor(actor, grpo)
            for (step, features, _), _ in zip(read_rollouts(run), range(STEPS), strict=False):
                report("replay", name, step, train_step(actor, features, grpo))
            del actor


def report(job: str, layout: str, step: int, metrics: dict[str, float]) -> None:
    print(json.dumps({"job": job, "layout": layout, "step": step, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
