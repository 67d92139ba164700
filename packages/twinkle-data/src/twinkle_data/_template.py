"""From conversations to tokens, with masks that cover exactly what the assistant wrote."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ._errors import FormatError, MissingExtraError, SequenceTooLongError, TemplateError
from ._formats import IGNORE_INDEX, InputFeature, Message, Trajectory
from ._rendering import ChatRenderer
from ._sampling import append_context

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Truncation = Literal["error", "left", "right", "drop"]


class Template:
    """A Hugging Face tokenizer and its chat template (https://huggingface.co/docs/transformers/chat_templating).

    Args:
        tokenizer_or_path: a tokenizer, or the folder or hub name of one.
        max_length: the most tokens of a feature; None: no limit.
        truncation: what happens to a longer one. 'error' raises, 'left' and 'right' cut tokens away on that side, 'drop' leaves the row
            out of `batch_encode` and `Dataset.encode`.

    Raises:
        MissingExtraError: transformers is not installed.
        TemplateError: there is no tokenizer at that path.
        FormatError: a `max_length` below 1, or an unknown truncation.
    """

    def __init__(
        self, tokenizer_or_path: "PreTrainedTokenizerBase | str | Path", *, max_length: int | None = None, truncation: Truncation = "error"
    ) -> None:
        if max_length is not None and max_length < 1:
            raise FormatError(f"Template.max_length is {max_length}; it must be None or at least 1")
        if truncation not in ("error", "left", "right", "drop"):
            raise FormatError(f"Template.truncation is {truncation!r}; it must be 'error', 'left', 'right' or 'drop'")
        self.tokenizer = _load_tokenizer(tokenizer_or_path) if isinstance(tokenizer_or_path, (str, Path)) else tokenizer_or_path
        self.max_length = max_length
        self.truncation: Truncation = truncation
        self._renderer = ChatRenderer(self.tokenizer)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens at which sampling stops: the one that the template writes after an assistant turn, and the tokenizer's own."""
        own = self.tokenizer.eos_token_id
        ids = [own] if isinstance(own, int) else []
        if self.tokenizer.chat_template:
            ids.insert(0, self._end_token_id)
        return tuple(dict.fromkeys(ids))

    @property
    def pad_token_id(self) -> int:
        """The token to pad with: the tokenizer's, else its end token, else 0. Padding is masked, so any token of the vocabulary will do."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if isinstance(token, int):
                return token
        return 0

    @property
    def _end_token_id(self) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(self._renderer.end_token)
        assert isinstance(token_id, int)
        return token_id

    def encode(self, trajectory: Trajectory | Sequence[Message | Mapping[str, Any]], add_generation_prompt: bool = False) -> InputFeature:
        """One trajectory as tokens.

        Without a generation prompt, `completion_mask` is true on exactly the assistant's tokens (end token included, the template's
        headers and the line break after the end token not), and `labels` are set on those whose message has not `loss=False`. With one,
        the feature is a prompt: earlier assistant turns are context, neither masked nor labelled unless their message has `loss=True`.

        The ids are those of `tokenizer.apply_chat_template`, with two exceptions, both of which keep to what a sampler sees: where a token
        would straddle the border between prompt and answer, the two are tokenised apart; and where the template rewrites earlier turns
        once later ones follow, each trained turn stays as it was when it was sampled. So a prompt's ids begin the conversation's.

        Raises:
            TemplateError: the template refuses the messages, or the assistant's tokens cannot be told from the rest.
            SequenceTooLongError: more than `max_length` tokens, and truncation is 'error' or 'drop'.
        """
        trajectory = trajectory if isinstance(trajectory, Trajectory) else Trajectory(messages=trajectory)
        messages = trajectory.messages
        if add_generation_prompt and messages[-1].role == "assistant":
            raise TemplateError("the last message is an assistant turn already: drop it, or encode without a generation prompt")
        if add_generation_prompt and not any(message.loss for message in messages):
            text, spans = self._renderer.prompt(messages)
        else:
            text, spans = self._renderer.conversation(messages, add_generation_prompt)
        ids, bounds = self._tokenize_apart(text, [cut for span in spans for cut in (span.start, span.stop)])
        input_ids = np.array(ids, np.int64)
        completion_mask = np.zeros(len(ids), np.bool_)
        labels = np.full(len(ids), IGNORE_INDEX, np.int64)
        for span, start, stop in zip(spans, bounds[::2], bounds[1::2], strict=True):
            loss = messages[span.message].loss
            completion_mask[start:stop] = loss is True or not add_generation_prompt
            if loss is True or (loss is None and not add_generation_prompt):
                labels[start:stop] = input_ids[start:stop]
        feature = InputFeature(input_ids=input_ids, labels=labels, completion_mask=completion_mask, user_data=dict(trajectory.user_data))
        return self._truncate(feature)

    def batch_encode(self, trajectories: Sequence[Trajectory], add_generation_prompt: bool = False) -> list[InputFeature]:
        """`encode` of each; rows that are too long are left out when truncation is 'drop'. Errors name the index."""
        features: list[InputFeature] = []
        for index, trajectory in enumerate(trajectories):
            try:
                features.append(self.encode(trajectory, add_generation_prompt))
            except SequenceTooLongError as error:
                if self.truncation != "drop":
                    raise SequenceTooLongError(f"trajectories[{index}]: {error}") from error
            except TemplateError as error:
                raise TemplateError(f"trajectories[{index}]: {error}") from error
        return features

    def extend(self, feature: InputFeature, messages: Sequence[Message | Mapping[str, Any]], add_generation_prompt: bool = True) -> InputFeature:
        """A feature that ends with a sampled turn, with the turns appended that answer it: multi-turn sampling without tokenising again.

        Only the new turns are rendered and tokenised. The end token is added, untrained, where the sampled turn was cut off before it.

        Raises:
            TemplateError: the template refuses the messages.
            SequenceTooLongError: more than `max_length` tokens, and truncation is 'error' or 'drop'.
        """
        new = Trajectory(messages=messages).messages
        end_id = self._end_token_id
        # The end token in front makes the tokenizer treat what follows as the middle of a text; it is taken off again.
        tokens = self.tokenize(self._renderer.end_token + self._renderer.continuation(new, add_generation_prompt))
        assert tokens[0] == end_id
        ended = int(feature.input_ids[-1]) in self.eos_token_ids
        return self._truncate(append_context(feature, tokens[1:] if ended else tokens))

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text as it stands: no template, no beginning-of-text token."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore[reportArgumentType]

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, without special tokens unless asked for."""
        text = self.tokenizer.decode([int(t) for t in tokens], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _tokenize_apart(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens of a text such that none straddles a cut (a character index), and the token index of every cut."""
        rest = whole = self.tokenize(text)
        ids: list[int] = []
        bounds: list[int] = []
        anchor = 0
        for cut in cuts:
            part = self.tokenize(text[anchor:cut])
            if rest[: len(part)] == part:
                bounds.append(len(ids) + len(part))
                continue
            ids, anchor, rest = ids + part, cut, self.tokenize(text[cut:])
            bounds.append(len(ids))
        ids = ids + rest
        if anchor and self.decode(ids, skip_special_tokens=False) != self.decode(whole, skip_special_tokens=False):
            raise TemplateError(
                f"a token straddles the border of an assistant turn near {text[max(0, anchor - 20) : anchor + 20]!r}, and this tokenizer "
                "does not tokenise the parts to the same text; end the template's generation prompt with a special token or a line break"
            )
        return ids, bounds

    def _truncate(self, feature: InputFeature) -> InputFeature:
        limit, length = self.max_length, len(feature)
        if limit is None or length <= limit:
            return feature
        if self.truncation in ("error", "drop"):
            raise SequenceTooLongError(
                f"{length} tokens, max_length is {limit}: raise max_length, or set truncation to 'left', 'right' or 'drop' (which leaves the row out)"
            )
        keep = slice(length - limit, length) if self.truncation == "left" else slice(0, limit)
        names = ("input_ids", "labels", "position_ids", "completion_mask", "loss_weights", "logprobs")
        cut = {name: value[keep] for name in names if (value := getattr(feature, name)) is not None}
        if "logprobs" in cut:
            cut["logprobs"] = np.concatenate([[0.0], cut["logprobs"][1:]])  # nothing precedes what is now the first token
        return replace(feature, **cut)


def _load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingExtraError("loading a tokenizer needs transformers: pip install 'twinkle-data[hf]'") from error
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        where = "that folder holds no tokenizer" if Path(path).is_dir() else "there is no such folder, and no such model in reach on the hub"
        raise TemplateError(f"cannot load a tokenizer from {str(path)!r}: {where} ({error})") from error
