"""Encoding beside apply_chat_template, memory of a 1 GB file; and packing, balance, resume, padding-free steps.

Each sub-bench runs in a new process: `encode`, `lazy`, and those of data_packing.py. Without names, all of them.

    ./dev bench data [encode] [lazy] [--rows 1000] [--repeat 7] [--bytes 1000000000] ...
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinkle_data import Dataset, IterableDataset, Template

HERE = Path(__file__).resolve().parent
NEIGHBOUR = HERE / "data_packing.py"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Like Qwen3's: the last turn gets an (empty) reasoning part, earlier ones do not. Turns are kept as sampled, at more renderings a row.
REWRITING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def texts(count: int, seed: int = 0) -> Callable[[int], str]:
    """A function that gives texts of so many words, from the docstrings and code of the standard library."""
    files = sorted(Path(json.__file__).parent.parent.glob("*.py"))[:count]
    words = " ".join(file.read_text(errors="ignore") for file in files).split()
    draw = random.Random(seed)

    def text(size: int) -> str:
        first = draw.randrange(len(words) - size)
        return " ".join(words[first : first + size])

    return text


def make_tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE tokenizer, trained on the same texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = texts(60, seed=1)
    tokenizer.train_from_iterator((text(200) for _ in range(1500)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def conversations(rows: int, words: int) -> list[list[dict[str, str]]]:
    """Conversations of one to four exchanges; an answer has about so many words, a question a third."""
    text, draw = texts(60), random.Random(2)
    made: list[list[dict[str, str]]] = []
    for _ in range(rows):
        exchanges = draw.choice([1, 1, 1, 2, 3, 4])
        made.append(
            [
                {"role": role, "content": text(max(1, int(size * draw.uniform(0.3, 1.7))))}
                for _ in range(exchanges)
                for role, size in (("user", words / 3), ("assistant", words))
            ]
        )
    return made


def encode(options: argparse.Namespace) -> None:
    """Rows a second of `Dataset.encode` beside `apply_chat_template(tokenize=True)`, one by one and all in one call. Medians of pairs."""
    tokenizer = make_tokenizer(options.vocab_size)
    print(f"{'template':>10} {'words':>6} {'tokens':>7} {'one by one':>11} {'in one call':>12} {'twinkle':>9} {'ratio':>6} {'ratio':>6}")
    for words in (8, 100):
        rows = conversations(options.rows, words)
        dataset = Dataset([{"messages": row} for row in rows])
        for name, text in (("chatml", CHATML), ("llama3", LLAMA3), ("rewriting", REWRITING)):
            tokenizer.chat_template = text
            template = Template(tokenizer)
            features = dataset.encode(template, lazy=False)
            expected = tokenizer.apply_chat_template(rows, tokenize=True)["input_ids"]
            if name != "rewriting" and [feature.input_ids.tolist() for feature in features] != expected:
                raise SystemExit(f"{name}: the ids differ: the times cannot be compared")
            runs: dict[str, Callable[[], Any]] = {
                "one": lambda rows=rows: [tokenizer.apply_chat_template(row, tokenize=True) for row in rows],
                "all": lambda rows=rows: tokenizer.apply_chat_template(rows, tokenize=True),
                "ours": lambda template=template, dataset=dataset: dataset.encode(template, lazy=False),
            }
            times: dict[str, list[float]] = {key: [] for key in runs}
            for _ in range(options.repeat):
                for key, run in runs.items():
                    start = time.perf_counter()
                    run()
                    times[key].append(time.perf_counter() - start)
            speed = {key: len(rows) / statistics.median(seconds) for key, seconds in times.items()}
            ratio = {key: statistics.median(a / b for a, b in zip(times[key], times["ours"], strict=True)) for key in ("one", "all")}
            tokens = sum(map(len, features)) / len(rows)
            print(
                f"{name:>10} {words:>6} {tokens:>7.0f} {speed['one']:>9.0f}/s {speed['all']:>10.0f}/s {speed['ours']:>7.0f}/s "
                f"{ratio['one']:>6.2f} {ratio['all']:>6.2f}"
            )
    print("ratios: twinkle's rows a second over those of apply_chat_template, one by one and in one call")


def lazy(options: argparse.Namespace) -> None:
    """Memory of a large JSON lines file through the lazy paths: indexed and shuffled, and streamed. Each in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        text, written, rows = texts(20), 0, 0
        lines = [json.dumps({"messages": [{"role": "user", "content": text(60)}, {"role": "assistant", "content": text(60)}]}) for _ in range(500)]
        with path.open("w", encoding="utf-8") as file:
            while written < options.bytes:
                written += file.write(lines[rows % 500] + "\n")
                rows += 1
        print(f"a file of {path.stat().st_size / 1e9:.2f} GB, {rows:,} rows")
        for way in ("indexed", "streamed"):
            subprocess.run([sys.executable, "-P", __file__, "--read", way, str(path)], check=True, timeout=1800)


def read(way: str, path: Path) -> None:
    """One way of reading, and what it took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    count = 0
    if way == "indexed":
        dataset = Dataset(path, lazy=True)
        opened = time.perf_counter() - start
        for row in dataset.conversations().shuffle(seed=1):
            count += len(row.messages) > 0
    else:
        opened = 0.0
        for row in IterableDataset(path).conversations():
            count += len(row.messages) > 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time.perf_counter() - start
    print(
        f"{way:>10}: {count:,} rows in {seconds:.0f} s (opened in {opened:.1f} s), peak memory {peak / 1024:.0f} MB, "
        f"{before / 1024:.0f} MB of it before the first row"
    )


BENCHES = {"encode": encode, "lazy": lazy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="encode, lazy, or a sub-bench of data_packing.py")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    options, others = parser.parse_known_args()
    if options.read:
        read(options.read[0], Path(options.read[1]))
    elif len(options.names) == 1 and options.names[0] in BENCHES:
        BENCHES[options.names[0]](options)
    else:
        run_all(options.names, others)


def run_all(names: list[str], others: list[str]) -> None:
    """Each bench in a process of its own, with the arguments of this one."""
    flags = [argument for argument in sys.argv[1:] if argument not in names]
    for name in [name for name in names if name in BENCHES] or ([] if names else list(BENCHES)):
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-P", __file__, name, *flags], check=True, timeout=3600)
    packing = [name for name in names if name not in BENCHES]
    if packing and not NEIGHBOUR.exists():
        raise SystemExit(f"there is no sub-bench {packing[0]!r}; there are {', '.join(BENCHES)}")
    if NEIGHBOUR.exists() and (packing or not names):
        subprocess.run([sys.executable, str(NEIGHBOUR), *packing, *others], check=True, timeout=3600)


if __name__ == "__main__":
    main()
