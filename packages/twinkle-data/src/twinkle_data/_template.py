"""From conversations to tokens, with masks that cover exactly what the assistant wrote."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from ._checks import is_whole
from ._errors import DataError, DatasetError, FormatError, MissingExtraError, SequenceTooLongError, TemplateError
from ._formats import IGNORE_INDEX, InputFeature
from ._messages import ROLES, Message, PreferencePair, Trajectory, check_unicode
from ._packed import cut
from ._rendering import ChatRenderer
from ._sampling import append_context
from ._skeletons import Span
from ._tokens import ChatTokenizer
from ._wording import a_kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Truncation = Literal["error", "left", "right", "split", "drop"]
_TRUNCATIONS = ("error", "left", "right", "split", "drop")
# Rows that are tokenised in one call. More gain nothing, and their texts and tokens would have to be held together.
_BATCH = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendered:
    text: str
    spans: list[Span]
    trajectory: Trajectory


_Batch = list["_Rendered | DataError"]


class Template:
    """A Hugging Face tokenizer and its chat template (https://huggingface.co/docs/transformers/chat_templating).

    Args:
        tokenizer_or_path: a tokenizer, or the folder or hub name of one.
        max_length: the most tokens of a feature; None: no limit.
        truncation: what happens to a longer one. 'error' raises, 'left' and 'right' cut tokens away on that side, 'split' makes several
            features of `max_length` tokens of it (those without a trained token are left out, unless the row has none at all), 'drop'
            leaves the row out. Where one row may become several or none, use `batch_encode` or `Dataset.encode`.
        system: a system prompt for conversations that begin with none.
        other_roles: roles that the chat template knows beside 'system', 'developer', 'user', 'assistant', 'tool' and 'ipython'. Others are
            errors: most templates render a misspelt 'assistant' as it stands, and nothing of it would be trained on.

    Raises:
        MissingExtraError: transformers is not installed.
        TemplateError: there is no tokenizer at that path.
        FormatError: a `max_length` below 1, or an unknown truncation.
    """

    def __init__(
        self,
        tokenizer_or_path: "PreTrainedTokenizerBase | str | Path",
        *,
        max_length: int | None = None,
        truncation: Truncation = "error",
        system: str | None = None,
        other_roles: Iterable[str] = (),
    ) -> None:
        if max_length is not None and not (is_whole(max_length) and max_length >= 1):
            raise FormatError(f"Template.max_length is {max_length!r}; it must be None or a whole number, at least 1")
        if truncation not in _TRUNCATIONS:
            raise FormatError(f"Template.truncation is {truncation!r}; it must be 'error', 'left', 'right', 'split' or 'drop'")
        self.tokenizer = _load_tokenizer(tokenizer_or_path) if isinstance(tokenizer_or_path, (str, Path)) else tokenizer_or_path
        self.max_length = max_length
        self.truncation: Truncation = truncation
        self._roles = frozenset((*ROLES, *other_roles))
        self._system = None if system is None else Message(role="system", content=system)
        self._renderer = ChatRenderer(self.tokenizer)
        self._tokens = ChatTokenizer(self.tokenizer)

    def __repr__(self) -> str:
        limit = "" if self.max_length is None else f", max_length={self.max_length}, truncation={self.truncation!r}"
        return f"<Template of {self.tokenizer.name_or_path or type(self.tokenizer).__name__}{limit}>"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens at which sampling stops: the one that the template writes after an assistant turn, and the tokenizer's own."""
        own = self.tokenizer.eos_token_id
        ids = [own] if isinstance(own, int) else []
        if self.tokenizer.chat_template:
            ends = [self._renderer.end_token]
            if self._renderer.is_open:
                with suppress(TemplateError):  # a template without tools
                    ends.append(self._renderer.call_end_token)
            ids = [*map(self._token_id, ends), *ids]
        return tuple(dict.fromkeys(ids))

    @property
    def pad_token_id(self) -> int:
        """The token to pad with: the tokenizer's, else its end token, else 0. Padding is masked, so any token of the vocabulary will do."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if isinstance(token, int):
                return token
        return 0

    def _token_id(self, token: str) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        assert isinstance(token_id, int)
        return token_id

    def encode(self, trajectory: Trajectory | Sequence[Message | Mapping[str, Any]], add_generation_prompt: bool = False) -> InputFeature:
        """One trajectory as tokens.

        Without a generation prompt, `completion_mask` is true on exactly the assistant's tokens (end token included, the template's
        headers and the line break after the end token not), and `labels` are set on those whose message has not `loss=False`;
        `loss_weights` are set where a trained message has another weight than 1. With a generation prompt, the feature is a prompt:
        earlier assistant turns are context, neither masked nor labelled unless their message has `loss=True`.

        The ids are those of `tokenizer.apply_chat_template`, with three exceptions. Two keep to what a sampler sees: where a token
        would straddle the border between prompt and answer, the two are tokenised apart; and where the template rewrites earlier turns
        once later ones follow, each trained turn stays as it was when it was sampled. So the ids of the prompt before an answer begin the
        conversation's (where a template rewrites earlier answers, those of the prompt before the first). And where the template ends the
        last turn with no token (GLM's), its end token is added, so that a model learns to stop.

        Raises:
            TemplateError: the template refuses the messages, leaves out a part of them (tools, calls, reasoning), or the assistant's
                tokens cannot be told from the rest.
            SequenceTooLongError: more than `max_length` tokens, and truncation is 'error', 'split' or 'drop'.
        """
        feature = next(self._encoded([self._trajectory(trajectory)], add_generation_prompt))
        if isinstance(feature, DataError):
            raise feature
        return self._one(feature)

    def batch_encode(
        self, trajectories: Sequence[Trajectory | Sequence[Message | Mapping[str, Any]]], add_generation_prompt: bool = False
    ) -> list[InputFeature]:
        """`encode` of each, faster than one by one. Errors name the index.

        Rows that are too long are left out when truncation is 'drop', and become several features when it is 'split'.
        """
        features: list[InputFeature] = []
        for index, found in enumerate(self.encode_each(trajectories, add_generation_prompt)):
            if isinstance(found, DataError):
                raise type(found)(f"trajectories[{index}]: {found}") from found
            features += found
        return features

    def encode_each(
        self, trajectories: Sequence[Trajectory | Sequence[Message | Mapping[str, Any]]], add_generation_prompt: bool = False
    ) -> "list[list[InputFeature] | DataError]":
        """For each trajectory its features (one; none or several as `truncation` says), or the error that it failed with."""
        results: list[list[InputFeature] | DataError] = [self._trajectory_or_error(one) for one in trajectories]  # pyright: ignore[reportAssignmentType]
        good = [index for index, one in enumerate(results) if isinstance(one, Trajectory)]
        encoded = self._encoded([results[index] for index in good], add_generation_prompt)  # pyright: ignore[reportArgumentType]
        for index, feature in zip(good, encoded, strict=True):
            try:
                results[index] = feature if isinstance(feature, DataError) else self._fit(feature)
            except SequenceTooLongError as error:
                results[index] = error
        return results

    def encode_pair(self, pair: PreferencePair) -> tuple[InputFeature, InputFeature]:
        """The chosen and the rejected conversation; the messages that both begin with are context, without labels.

        Raises: as `encode`.
        """
        common = pair.num_common_messages
        sides: list[InputFeature] = []
        for name in ("chosen", "rejected"):
            side: Trajectory = getattr(pair, name)
            context = [replace(message, loss=False) if message.role == "assistant" else message for message in side.messages[:common]]
            user_data = {**pair.user_data, **side.user_data}
            try:
                sides.append(self.encode(Trajectory(messages=[*context, *side.messages[common:]], user_data=user_data, tools=side.tools)))
            except SequenceTooLongError as error:
                advice = ", and a pair cannot be split: set truncation to 'left', 'right' or 'drop'" if self.truncation == "split" else ""
                raise SequenceTooLongError(f"{name}: {error}{advice}") from error
        return sides[0], sides[1]

    def encode_text(self, text: str, user_data: Mapping[str, Any] | None = None) -> list[InputFeature]:
        """A plain text and the tokenizer's end token, every token trained on; one feature, or none or several as `truncation` says.

        Raises:
            FormatError: an empty text, no text, or one that no tokenizer can encode.
            SequenceTooLongError: more than `max_length` tokens, and truncation is 'error'.
        """
        if not isinstance(text, str):
            raise FormatError(f"a text must be a string, not {type(text).__name__} ({text!r:.40})")
        if not text:
            raise FormatError("the text is empty")
        check_unicode("the text", text)
        end = self.tokenizer.eos_token_id
        input_ids = np.array([*self.tokenize(text), *([end] if isinstance(end, int) else [])], np.int64)
        return self._fit(InputFeature(input_ids=input_ids, labels=input_ids, user_data=dict(user_data or {})))

    def extend(self, feature: InputFeature, messages: Sequence[Message | Mapping[str, Any]], add_generation_prompt: bool = True) -> InputFeature:
        """A feature that ends with a sampled turn, with the turns appended that answer it: multi-turn sampling without tokenising again.

        Only the new turns are rendered and tokenised. The end token is added, untrained, where the sampled turn was cut off before it.

        Raises:
            TemplateError: the template refuses the messages.
            SequenceTooLongError: more than `max_length` tokens, and truncation is 'error', 'split' or 'drop'.
        """
        new = Trajectory(messages=messages).messages
        self._check_roles(new)
        text = self._renderer.continuation(new, add_generation_prompt)
        # A special token in front makes the tokenizer treat what follows as the middle of a text; it is taken off again.
        end = self._renderer.end_token
        tokens = self.tokenize(end + text)
        assert tokens[0] == self._token_id(end)
        last = int(feature.input_ids[-1])
        if self._renderer.is_open:  # the text begins with the token that ends the sampled turn
            tokens = tokens[2:] if last == tokens[1] else tokens[1:]
        elif last in self.eos_token_ids:
            tokens = tokens[1:]
        return self._one(append_context(feature, tokens))

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text as it stands: no template, no beginning-of-text token."""
        return self._tokens.tokenize(text)

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, without special tokens unless asked for."""
        return self._tokens.decode(tokens, skip_special_tokens=skip_special_tokens)

    def fingerprint_parts(self) -> list[Any]:
        """What its encodings depend on, for the names of cached results."""
        backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else sorted(self.tokenizer.get_vocab().items())
        special = {name: str(value) for name, value in sorted(self.tokenizer.special_tokens_map.items())}
        return [vocabulary, special, str(self.tokenizer.chat_template), self.max_length, self.truncation, self._system and self._system.content]

    def _trajectory(self, trajectory: Trajectory | Sequence[Message | Mapping[str, Any]]) -> Trajectory:
        trajectory = trajectory if isinstance(trajectory, Trajectory) else Trajectory(messages=trajectory)
        self._check_roles(trajectory.messages)
        if self._system is None or trajectory.messages[0].role == "system":
            return trajectory
        return replace(trajectory, messages=(self._system, *trajectory.messages))

    def _check_roles(self, messages: Sequence[Message]) -> None:
        for index, message in enumerate(messages):
            if message.role not in self._roles:
                raise FormatError(
                    f"messages[{index}].role is {message.role!r}, which is no known role ({', '.join(sorted(self._roles))}); correct it, or, if the "
                    f"chat template knows it, say Template(..., other_roles=[{message.role!r}])"
                )

    def _trajectory_or_error(self, trajectory: Any) -> "Trajectory | DataError":
        try:
            return self._trajectory(trajectory)
        except DataError as error:
            return error

    def _encoded(self, trajectories: Sequence[Trajectory], add_generation_prompt: bool) -> Iterator[InputFeature | DataError]:
        """Each trajectory as a feature of any length, or the error that it failed with."""
        batches = ([self._rendered(one, add_generation_prompt) for one in batch] for batch in _batches(trajectories))
        for rendered, tokens in self._tokenized(batches, ahead=len(trajectories) > _BATCH):
            found = iter(tokens)
            for one in rendered:
                try:
                    yield one if isinstance(one, DataError) else self._feature(one, next(found), add_generation_prompt)
                except DataError as error:
                    yield error

    def _tokenized(self, batches: Iterator[_Batch], ahead: bool) -> Iterator[tuple[_Batch, list[list[int]]]]:
        """Each batch with its tokens. `ahead`: a batch is tokenised, which needs no Python, while those around it are worked at."""
        if not ahead:
            for batch in batches:
                yield batch, self._tokens.tokenize_all(_texts(batch))
            return
        with ThreadPoolExecutor(1, "twinkle-tokenize") as thread:
            before: tuple[_Batch, Future[list[list[int]]]] | None = None
            for batch in batches:
                following = batch, thread.submit(self._tokens.tokenize_all, _texts(batch))
                if before is not None:
                    yield before[0], before[1].result()
                before = following
            if before is not None:
                yield before[0], before[1].result()

    def _rendered(self, trajectory: Trajectory, add_generation_prompt: bool) -> "_Rendered | DataError":
        try:
            return self._render(trajectory, add_generation_prompt)
        except DataError as error:
            return error

    def _render(self, trajectory: Trajectory, add_generation_prompt: bool) -> _Rendered:
        messages = trajectory.messages
        if add_generation_prompt and messages[-1].role == "assistant":
            raise TemplateError("the last message is an assistant turn already: drop it, or encode without a generation prompt")
        if add_generation_prompt and not any(message.loss for message in messages):
            text, spans = self._renderer.prompt(trajectory)
        else:
            text, spans = self._renderer.conversation(trajectory, add_generation_prompt)
        if not text:
            raise TemplateError("the chat template renders these messages as an empty text")
        if not text.isascii():
            check_unicode("the rendered text (of tools or calls, since the messages' own texts are checked before)", text)
        return _Rendered(text=text, spans=spans, trajectory=trajectory)

    def _feature(self, rendered: _Rendered, tokens: list[int], add_generation_prompt: bool) -> InputFeature:
        messages = rendered.trajectory.messages
        input_ids, bounds = self._tokens.bounds(rendered.text, tokens, rendered.spans, self._renderer.markers if rendered.spans else ())
        completion_mask = np.zeros(len(input_ids), np.bool_)
        labels = np.full(len(input_ids), IGNORE_INDEX, np.int64)
        loss_weights = None
        for span, (start, stop) in zip(rendered.spans, bounds, strict=True):
            message = messages[span.message]
            if not (message.loss or not add_generation_prompt):
                continue
            completion_mask[start:stop] = True
            if message.loss is not False:
                labels[start:stop] = input_ids[start:stop]
                if message.loss_weight != 1:
                    loss_weights = np.ones(len(input_ids), np.float32) if loss_weights is None else loss_weights
                    loss_weights[start:stop] = message.loss_weight
        return InputFeature(
            input_ids=input_ids,
            labels=labels,
            completion_mask=completion_mask,
            loss_weights=loss_weights,
            user_data=dict(rendered.trajectory.user_data),
        )

    def _one(self, feature: InputFeature) -> InputFeature:
        if self.max_length is None or len(feature) <= self.max_length:
            return feature
        if self.truncation in ("left", "right"):
            return self._fit(feature)[0]
        self._refuse(feature)

    def _fit(self, feature: InputFeature) -> "list[InputFeature]":
        limit, length = self.max_length, len(feature)
        if limit is None or length <= limit:
            return [feature]
        if self.truncation == "error":
            self._refuse(feature)
        if self.truncation == "drop":
            return []
        if self.truncation == "left":
            return [cut(feature, slice(length - limit, length))]
        if self.truncation == "right":
            return [cut(feature, slice(0, limit))]
        parts = [cut(feature, slice(start, start + limit)) for start in range(0, length, limit)]
        return [part for part in parts if _is_trained(part)] or parts

    def _refuse(self, feature: InputFeature) -> NoReturn:
        advice = "raise max_length, or set truncation to 'left', 'right', 'split' (several rows) or 'drop' (which leaves the row out)"
        if self.truncation in ("split", "drop"):
            advice = f"with truncation={self.truncation!r} use batch_encode or Dataset.encode, where a row may become several or none"
        raise SequenceTooLongError(f"{len(feature)} tokens, max_length is {self.max_length}: {advice}")


def check_template(template: object) -> None:
    """Raises DatasetError for what is no template, as the name of one's tokenizer."""
    if not callable(getattr(template, "encode_each", None)):
        example = f"Template({template!r:.100})" if isinstance(template, (str, Path)) else "Template(tokenizer)"
        raise DatasetError(f"encode takes a Template, not {a_kind(template)}: {example}")


def _batches(trajectories: Sequence[Trajectory]) -> Iterator[Sequence[Trajectory]]:
    return (trajectories[first : first + _BATCH] for first in range(0, len(trajectories), _BATCH))


def _texts(batch: _Batch) -> list[str]:
    return [one.text for one in batch if isinstance(one, _Rendered)]


def _is_trained(feature: InputFeature) -> bool:
    # Nothing precedes the first token, so nothing is learnt from it.
    return feature.labels is None or bool((feature.labels[1:] != IGNORE_INDEX).any())


def _load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    text = os.fspath(path)
    is_hub_name = isinstance(path, str) and not text.startswith((".", "/", "~")) and text.count("/") <= 1
    if not is_hub_name and not Path(path).is_dir():
        raise TemplateError(f"cannot load a tokenizer from {text!r}: there is no such folder; give the folder of a Hugging Face checkpoint")
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
