"""TRL's GRPOTrainer a few steps at a time. Runs in TRL's own environment, which has none of Twinkle's packages.

usage: _trl_steps.py FOLDER   (of model, tokenizer and prompts.json)

Says `ready`, then reads numbers of steps from standard input, and answers each with a line of JSON: one object a step, `seconds` and parts of them.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

spent: dict[str, float] = defaultdict(float)
answers = os.fdopen(os.dup(1), "w")  # what the libraries print goes elsewhere
os.dup2(2, 1)


def say(line: str) -> None:
    print(line, file=answers, flush=True)


def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def run(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments, **options)
        finally:
            spent[name] += time.perf_counter() - start

    return run


class OnDemand(TrainerCallback):
    """Holds the training back until steps are asked for, and answers when they are done."""

    def __init__(self) -> None:
        self.left = 0
        self.rows: list[dict[str, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if not self.left:
            if self.rows:
                say(json.dumps(self.rows))
            line = sys.stdin.readline().strip()
            if not line:
                os._exit(0)  # nobody asks any more
            self.left, self.rows = int(line), []
        spent.clear()
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.rows.append({"seconds": time.perf_counter() - self.start, **spent})
        self.left -= 1


def main(folder: Path) -> None:
    settings = json.loads((folder / "prompts.json").read_text())
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,  # the comparison is in fp32
        per_device_train_batch_size=settings["prompts"] * settings["num_samples"],
        num_generations=settings["num_samples"],
        max_completion_length=settings["max_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_steps=100_000,
        logging_steps=100_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.float32},
        seed=0,
    )
    trainer = GRPOTrainer(
        model=str(folder),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=lambda completion_ids, **_: [len(set(ids)) / len(ids) for ids in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": settings["texts"]}),
        callbacks=[OnDemand()],
    )
    generate, prepare = trainer._generate_single_turn, trainer._generate_and_score_completions
    trainer._generate_single_turn = timed("sample_s", generate)
    trainer._generate_and_score_completions = timed("rollout_s", prepare)
    say("ready")
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
