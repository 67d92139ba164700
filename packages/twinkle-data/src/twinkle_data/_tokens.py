"""From text to tokens, and from characters of the text to indices of its tokens."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._errors import TemplateError
from ._skeletons import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Bounds = list[tuple[int, int]]


class ChatTokenizer:
    """Tokenises texts as they stand (no beginning-of-text token is added), and finds where the spans of a text are among its tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._tails: dict[tuple[str, str], list[int]] = {}
        self._marker_ids: dict[str, int] = {}

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
        found: _Bounds = []
        at = self._places(text, ids, markers) if spans else {}
        for span in spans:
            start = self._clean_cut(text, ids, span.start, at)
            stop = self._clean_cut(text, ids, span.stop, at)
            if start is None or stop is None:
                return self._tokenize_apart(text, whole, spans)
            found.append((start, stop))
        return ids, found

    def _places(self, text: str, ids: NDArray[np.int64], markers: Sequence[str]) -> dict[str, NDArray[np.int64]]:
        """Where each marker of the text is among the tokens; without those that occur another number of times there."""
        places: dict[str, NDArray[np.int64]] = {}
        for marker in markers:
            if marker not in self._marker_ids:
                self._marker_ids[marker] = self._tokenizer.convert_tokens_to_ids(marker)  # pyright: ignore[reportArgumentType] # of one token
            indices = np.flatnonzero(ids == self._marker_ids[marker])
            if len(indices) and len(indices) == text.count(marker):
                places[marker] = indices
        return places

    def _clean_cut(self, text: str, ids: NDArray[np.int64], cut: int, places: dict[str, NDArray[np.int64]]) -> int | None:
        """The index of the first token after a cut (a character index); None where it cannot be told, or a token straddles the cut."""
        last, marker = -1, ""
        for candidate in places:
            if (found := text.rfind(candidate, max(0, last), cut)) > last:
                last, marker = found, candidate
        if last < 0:
            return None
        first = int(places[marker][text.count(marker, 0, cut) - 1]) + 1
        tail = text[last + len(marker) : cut]
        if not tail:
            return first
        tokens = self._tail(marker, tail)
        stop = first + len(tokens)
        return stop if ids[first:stop].tolist() == tokens else None

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
