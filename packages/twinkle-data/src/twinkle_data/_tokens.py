"""From text to tokens, and from characters of the text to indices of its tokens."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._errors import TemplateError
from ._skeletons import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Bounds = list[tuple[int, int]]


class _Places(NamedTuple):
    """The special tokens in a text, in order. ends: index of the character behind each; tokens: index of the token behind it."""

    ends: list[int]
    markers: list[str]
    tokens: list[int]


class ChatTokenizer:
    """Tokenises texts as they stand (no beginning-of-text token is added), and finds where the spans of a text are among its tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._tails: dict[tuple[str, str], list[int]] = {}
        self._markers: dict[tuple[str, ...], tuple[dict[str, Any], frozenset[Any], re.Pattern[str]]] = {}

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.tokenize_all([text])[0]

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        # What `tokenizer(texts)` does, without the offsets, masks and type ids that it makes besides. It resets these settings first.
        if hasattr(backend, "encode_batch_fast") and backend.truncation is None and backend.padding is None and not backend.encode_special_tokens:
            if len(texts) == 1:
                return [backend.encode_batch_fast(texts, add_special_tokens=False)[0].ids]
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [list(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens."""
        text = self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def bounds(self, text: str, whole: list[int], spans: Sequence[Span], markers: Sequence[str]) -> tuple[NDArray[np.int64], _Bounds]:
        """The tokens of a text such that none straddles a span's border, and each span's first token and the one after its last.

        Args:
            text: that was tokenised.
            whole: its tokens.
            spans: in order.
            markers: special tokens among which the spans stand. A special token parts a text: what follows it is tokenised on its own.
                So a border is clean if the piece from the last marker to the border has the tokens there that it has by itself.
        """
        ids = np.array(whole, np.int64)
        if not spans:
            return ids, []
        found: _Bounds = []
        places = self._places(text, whole, tuple(markers))
        for span in spans:
            start = self._clean_cut(text, whole, span.start, places)
            stop = self._clean_cut(text, whole, span.stop, places)
            if start is None or stop is None:
                return self._tokenize_apart(text, whole, spans)
            found.append((start, stop))
        return ids, found

    def _places(self, text: str, whole: list[int], markers: tuple[str, ...]) -> "_Places":
        """Where the markers end in the text, and the indices of the tokens behind them; none where text and tokens have other markers."""
        if markers not in self._markers:
            ids = {marker: self._tokenizer.convert_tokens_to_ids(marker) for marker in markers}  # pyright: ignore[reportArgumentType] # of one token
            longest_first = "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True))
            self._markers[markers] = ids, frozenset(ids.values()), re.compile(longest_first)
        ids, wanted, pattern = self._markers[markers]
        in_text = list(pattern.finditer(text)) if markers else []
        in_tokens = [index for index, token in enumerate(whole) if token in wanted]
        names = [match.group() for match in in_text]
        if [ids[name] for name in names] != [whole[index] for index in in_tokens]:
            return _Places([], [], [])
        return _Places([match.end() for match in in_text], names, [index + 1 for index in in_tokens])

    def _clean_cut(self, text: str, whole: list[int], cut: int, places: "_Places") -> int | None:
        """The index of the first token after a cut (a character index); None where it cannot be told, or a token straddles the cut."""
        last = bisect_right(places.ends, cut) - 1
        if last < 0:
            return None
        first = places.tokens[last]
        tail = text[places.ends[last] : cut]
        if not tail:
            return first
        tokens = self._tail(places.markers[last], tail)
        stop = first + len(tokens)
        return stop if whole[first:stop] == tokens else None

    def _tail(self, marker: str, tail: str) -> list[int]:
        """The tokens of a text that follows a marker. Those of a template's fixed parts are kept."""
        if (tokens := self._tails.get((marker, tail))) is not None:
            return tokens
        tokens = self.tokenize(marker + tail)[1:]
        if len(tail) <= 64 and len(self._tails) < 1024:
            self._tails[marker, tail] = tokens
        return tokens

    def _tokenize_apart(self, text: str, whole: list[int], spans: Sequence[Span]) -> tuple[NDArray[np.int64], _Bounds]:
        rest = whole
        ids: list[int] = []
        cuts: list[int] = []
        anchor = 0
        for cut in (cut for span in spans for cut in (span.start, span.stop)):
            part = self.tokenize(text[anchor:cut])
            if rest[: len(part)] == part:
                cuts.append(len(ids) + len(part))
                continue
            ids, anchor, rest = ids + part, cut, self.tokenize(text[cut:])
            cuts.append(len(ids))
        ids = ids + rest
        if anchor and self.decode(ids, skip_special_tokens=False) != self.decode(whole, skip_special_tokens=False):
            raise TemplateError(
                f"a token straddles the border of an assistant turn near {text[max(0, anchor - 20) : anchor + 20]!r}, and this tokenizer "
                "does not tokenise the parts to the same text; end the template's generation prompt with a special token or a line break"
            )
        return np.array(ids, np.int64), list(zip(cuts[::2], cuts[1::2], strict=True))
