"""A tokenizer made from code and an arithmetic task that a tiny model learns in a minute: nothing is downloaded.

The tokenizer and the task are those of the `tiny` preset of `twinkle grpo`. The task is reasoning-gym's `chain_sum`; a response is the
running totals of the sum, so its last word is the answer: `1 10 10` for `0 + 1 + 9 - 0`.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._dataset import Dataset
from ._errors import DatasetError, MissingExtraError
from ._messages import Message, Trajectory
from ._sampling import SampledSequence
from ._tasks import task_dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["ArithmeticTask", "arithmetic_task", "exact_match", "running_totals", "toy_tokenizer", "with_response"]

PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
"""Contents verbatim, nothing but the end token after an assistant's: a tiny model has no tokens to spend on markers."""


def toy_tokenizer(texts: Iterable[str], *, vocab_size: int = 384) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer trained on the texts, with one token a digit, `<pad>` = 0, `<eos>` = 1 and a verbatim chat template.

    Training is deterministic. It stops early when there is nothing left to merge: 2,000 arithmetic questions give 303 tokens.

    Args:
        texts: what to train on.
        vocab_size: the most tokens; at least 258 (256 bytes and the two special tokens).

    Raises:
        MissingExtraError: transformers is not installed.
        DatasetError: a vocabulary below 258.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ModuleNotFoundError as error:
        if error.name not in ("tokenizers", "transformers"):
            raise
        raise MissingExtraError("the toy tokenizer needs transformers: pip install 'twinkle-data[hf]'") from error
    if vocab_size < 258:
        raise DatasetError(f"vocab_size is {vocab_size}; 256 bytes and two special tokens need 258")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD_TOKEN, eos_token=EOS_TOKEN)
    fast.chat_template = CHAT_TEMPLATE
    return fast


@dataclass(frozen=True, kw_only=True)
class ArithmeticTask:
    """Distinct problems in two parts that share no expression. Rows are `Trajectory`s: one user message, and in `user_data` the
    'question', 'answer', 'expression' and 'response' (the running totals).
    """

    train: Dataset
    held_out: Dataset


def arithmetic_task(
    *, num_terms: int = 4, num_digits: int = 1, num_problems: int = 20_000, num_held_out: int = 1_000, seed: int = 1234, held_out_share: int = 8
) -> ArithmeticTask:
    """Problems of reasoning-gym's `chain_sum`, without duplicates, split by a hash of the expression.

    Whether an expression is held out depends on the expression alone: a problem is never in both parts, whatever the seed and the sizes.

    Args:
        num_terms: numbers in a sum.
        num_digits: digits of each.
        num_problems: how many are drawn before duplicates are removed.
        num_held_out: the most held-out problems; those beyond it are left out altogether.
        seed: of the draw.
        held_out_share: one expression in so many is held out.

    Raises:
        MissingExtraError: reasoning-gym is not installed.
        DatasetError: a part would be empty.
    """
    drawn = task_dataset(
        "chain_sum", min_terms=num_terms, max_terms=num_terms, min_digits=num_digits, max_digits=num_digits, size=num_problems, seed=seed
    )
    distinct = {row.user_data["question"]: _problem(row) for row in drawn}
    train, held_out = list[Trajectory](), list[Trajectory]()
    for row in distinct.values():
        (train if _bucket(row.user_data["expression"], held_out_share) else held_out).append(row)
    if not train or not held_out:
        raise DatasetError(f"{len(distinct)} distinct problems are too few to split; raise num_problems, num_terms or num_digits")
    return ArithmeticTask(train=Dataset(train), held_out=Dataset(held_out[:num_held_out]))


def _problem(row: Trajectory) -> Trajectory:
    expression = row.user_data["metadata"]["expression"]
    user_data = {
        "question": row.user_data["question"],
        "answer": row.user_data["answer"],
        "expression": expression,
        "response": running_totals(expression),
    }
    return Trajectory(messages=row.messages, user_data=user_data)


def _bucket(expression: str, buckets: int) -> int:
    return int(hashlib.sha1(expression.encode(), usedforsecurity=False).hexdigest(), 16) % buckets


def running_totals(expression: str) -> str:
    """The totals after each number of a chain of sums: `running_totals('0 + 1 + 9 - 0') == '1 10 10'`.

    Raises:
        DatasetError: an expression that is not numbers joined by + and -.
    """
    first, *rest = re.split(r"\s+", expression.strip())
    operators, numbers = rest[::2], rest[1::2]
    if len(operators) != len(numbers) or not numbers or any(op not in "+-" for op in operators):
        raise DatasetError(f"{expression!r} is not a chain of sums such as '0 + 1 + 9 - 0'")
    total, totals = int(first), list[str]()
    for operator, number in zip(operators, numbers, strict=True):
        total += int(number) if operator == "+" else -int(number)
        totals.append(str(total))
    return " ".join(totals)


def with_response(problem: Trajectory) -> Trajectory:
    """The problem with its running totals as the assistant's turn: what supervised training learns from."""
    answer = Message(role="assistant", content=problem.user_data["response"])
    return Trajectory(messages=[*problem.messages, answer], user_data=problem.user_data)


def exact_match(sequence: SampledSequence, answer: str) -> bool:
    """Whether a completion ended by itself and its last word is the answer, to the character. No partial credit."""
    return sequence.stop_reason == "stop" and sequence.decoded.split(" ")[-1] == answer
