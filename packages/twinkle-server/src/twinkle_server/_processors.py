"""Datasets, loaders and templates that the server holds for tenants: classes, functions and arguments by name from a list. In memory only."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from twinkle_client import types as wire

from ._config import ServerConfig
from ._errors import Busy, Exhausted, Invalid, NotFound

_CLASSES = {"dataset": "Dataset", "dataloader": "DataLoader", "template": "Template"}
_FUNCTIONS = {
    "dataset": frozenset({"__len__", "__getitem__"}),
    "dataloader": frozenset({"__len__", "__iter__", "__next__", "state_dict", "load_state_dict"}),
    "template": frozenset({"encode", "batch_encode", "tokenize", "decode"}),
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "dataset": {},
    "dataloader": {"batch_size": int, "shuffle": bool, "seed": int, "drop_last": bool, "num_epochs": int | None, "min_batch_size": int | None},
    "template": {"max_length": int | None, "truncation": str, "system": str | None},
}
_MAX_BATCH = 65_536
_ANSWERS = 4  # of one object, kept for requests that are sent again


@dataclass
class _Held:
    """An object of a tenant's."""

    tenant: str
    kind: str
    value: Any
    options: dict[str, Any]
    model: str = ""
    used_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    iterator: Iterator[Any] | None = None
    answers: OrderedDict[str, Any] = field(default_factory=OrderedDict[str, Any])


class Processors:
    """What tenants have the server hold. All methods block."""

    def __init__(self, config: ServerConfig, template: Callable[[str, Mapping[str, Any]], Any]) -> None:
        self._config = config
        self._template = template
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()

    def create(self, tenant: str, body: wire.CreateProcessor, processor_id: str | None = None) -> str:
        """Makes an object; Invalid for a class or an argument that is not on the list. processor_id: given, a second call makes no second object."""
        kind = body.processor_type
        name = body.class_type.rpartition(".")[2]
        if _CLASSES.get(kind) != name or name not in (*self._config.processors, "Template"):
            raise Invalid(f"{kind} {body.class_type[:100]!r} is not on this server's list: {', '.join(sorted(_CLASSES.values()))}")
        if processor_id is not None and processor_id in self._held:
            self._own(tenant, processor_id)
            return processor_id
        self._check_room(tenant)
        options = body.options
        held = {"dataset": self._dataset, "dataloader": self._loader, "template": self._make_template}[kind](tenant, options)
        held_id = processor_id or f"prc-{secrets.token_hex(10)}"
        with self._lock:
            if held_id not in self._held:  # or the same request, sent again meanwhile, was faster
                self._check_room(tenant)
                self._held[held_id] = held
        return held_id

    def call(self, tenant: str, processor_id: str, function: str, arguments: Mapping[str, Any], key: str | None = None) -> Any:
        """Calls a function of the list; plain JSON. Raises Exhausted at an iterator's end.

        key: of the request: the last few answers, an iterator's end among them, are given again where a request is sent again, so that no batch
        is lost with a connection.
        """
        held = self._own(tenant, processor_id)
        if function not in _FUNCTIONS[held.kind]:
            raise Invalid(f"{function[:100]!r} is not on the list of a {held.kind}: {', '.join(sorted(_FUNCTIONS[held.kind]))}")
        held.used_at = time.monotonic()
        with held.lock:
            if key is not None and key in held.answers:
                answer = held.answers[key]
            else:
                try:
                    answer = getattr(self, f"_{held.kind}_call")(held, function, dict(arguments))
                except Exhausted as end:
                    answer = end
                if key is not None:
                    held.answers[key] = answer
                    while len(held.answers) > _ANSWERS:
                        held.answers.popitem(last=False)
        if isinstance(answer, Exhausted):
            raise Exhausted(answer.detail)
        return answer

    def template_options(self, tenant: str, processor_id: str, model: str) -> dict[str, Any]:
        """The options of a template that is held; Invalid for one of another model."""
        held = self._own(tenant, processor_id)
        if held.kind != "template" or held.model != model:
            raise Invalid(f"{processor_id} is no template of {model}")
        return dict(held.options)

    def expire(self, older_than_s: float) -> None:
        """Lets go of what was not used for so long."""
        oldest = time.monotonic() - older_than_s
        with self._lock:
            for name in [name for name, each in self._held.items() if each.used_at < oldest]:
                del self._held[name]

    def _check_room(self, tenant: str) -> None:
        if sum(each.tenant == tenant for each in tuple(self._held.values())) >= self._config.limits.processors:
            raise Busy(f"you have {self._config.limits.processors} datasets and loaders already")

    def _own(self, tenant: str, processor_id: str) -> _Held:
        held = self._held.get(processor_id)
        if held is None or held.tenant != tenant:
            raise NotFound(f"there is no {processor_id[:100]!r}; what the server holds ends with it")
        return held

    def _dataset(self, tenant: str, options: dict[str, Any]) -> _Held:
        from .native._convert import data_layer, record_of

        source = options.pop("source", options.pop("dataset_id", None))
        _checked("dataset", options)
        if isinstance(source, str):
            rows: Any = str(self._file(source))
        elif isinstance(source, list) and source:
            rows = [record_of(_row(index, each)) for index, each in enumerate(source)]
        else:
            raise Invalid("source is a list of rows, or the name of a file that this server offers")
        return _Held(tenant, "dataset", data_layer().Dataset(rows), {})

    def _file(self, name: str) -> Path:
        # The name is compared with those that are there, and is never a path itself.
        for folder in self._config.dataset_dirs:
            for path in folder.iterdir() if folder.is_dir() else ():
                if path.name == name and path.is_file():
                    return path
        raise NotFound(f"this server offers no dataset {name[:200]!r}")

    def _loader(self, tenant: str, options: dict[str, Any]) -> _Held:
        from .native._convert import data_layer

        reference = options.pop("dataset", None)
        if isinstance(reference, list):
            dataset = self._dataset(tenant, {"source": reference})
        elif isinstance(reference, dict) and set(reference) == {"processor_id"} and isinstance(reference["processor_id"], str):
            dataset = self._own(tenant, reference["processor_id"])
        else:
            raise Invalid("dataset is a reference to one that the server holds ({'processor_id': ...}), or a list of rows")
        if dataset.kind != "dataset":
            raise Invalid("dataset refers to something else")
        checked = _checked("dataloader", options)
        if not 1 <= checked.get("batch_size", 0) <= _MAX_BATCH:
            raise Invalid(f"batch_size is from 1 to {_MAX_BATCH}")
        return _Held(tenant, "dataloader", data_layer().DataLoader(dataset.value, **checked), checked)

    def _make_template(self, tenant: str, options: dict[str, Any]) -> _Held:
        model = options.pop("tokenizer_or_path", options.pop("model_id", None))
        if not isinstance(model, str) or self._config.model(model) is None:
            raise Invalid("a template is that of a base model of this server, by its name")
        checked = _checked("template", options)
        return _Held(tenant, "template", self._template(model, checked), checked, model)

    def _dataset_call(self, held: _Held, function: str, arguments: dict[str, Any]) -> Any:
        from .native._convert import plain_row

        if function == "__len__":
            return len(held.value)
        (index,) = _typed(arguments, {"index": int})
        if not -len(held.value) <= index < len(held.value):
            raise Exhausted(f"row {index} of {len(held.value)}")
        return plain_row(held.value[index])

    def _dataloader_call(self, held: _Held, function: str, arguments: dict[str, Any]) -> Any:
        from .native._convert import plain_row

        if function == "__len__":
            try:
                return len(held.value)
            except TypeError as error:
                raise Invalid(f"this loader has no end: {error}") from None
        if function == "__iter__":
            held.iterator = iter(held.value)
            return None
        if function == "__next__":
            if held.iterator is None:
                held.iterator = iter(held.value)
            batch = next(held.iterator, None)
            if batch is None:
                held.iterator = None
                raise Exhausted("the loader has given its last batch; __iter__ begins again")
            return [plain_row(row) for row in batch]
        if function == "state_dict":
            return held.value.state_dict()
        (state,) = _typed(arguments, {"state": dict[str, Any]})
        held.iterator = None
        try:
            held.value.load_state_dict(state)
        except (KeyError, TypeError, AttributeError) as error:
            raise Invalid(f"this is no loader's state: {error}") from None
        return None

    def _template_call(self, held: _Held, function: str, arguments: dict[str, Any]) -> Any:
        from .native._convert import plain_row, record_of

        if function == "tokenize":
            (text,) = _typed(arguments, {"text": str})
            return held.value.tokenize(text)
        if function == "decode":
            tokens, skips = _typed(arguments, {"tokens": list[int], "skip_special_tokens": bool}, skip_special_tokens=True)
            if tokens and not 0 <= min(tokens) <= max(tokens) < 1 << 31:
                raise Invalid("tokens holds what is no token")
            return held.value.decode(tokens, skip_special_tokens=skips)
        if function == "encode":
            trajectory, adds = _typed(arguments, {"trajectory": wire.Trajectory, "add_generation_prompt": bool}, add_generation_prompt=False)
            return plain_row(held.value.encode(record_of(trajectory), add_generation_prompt=adds))
        rows, adds = _typed(arguments, {"trajectories": list[wire.Trajectory], "add_generation_prompt": bool}, add_generation_prompt=False)
        return [plain_row(row) for row in held.value.batch_encode([record_of(each) for each in rows], add_generation_prompt=adds)]


def _row(index: int, value: Any) -> Any:
    """A row of JSON as the record that it is; another mapping as it is."""
    if not isinstance(value, dict):
        raise Invalid(f"source.{index} is no row: a mapping of fields")
    for name, kind in (("input_ids", wire.InputFeature), ("messages", wire.Trajectory), ("features", wire.PackedFeature)):
        if name in value:
            try:
                return TypeAdapter(kind).validate_python(value)
            except ValidationError as error:
                raise Invalid(f"source.{index}: {_told(error)}") from None
    return value


def _checked(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    known = _OPTIONS[kind]
    if unknown := sorted(set(options) - set(known)):
        raise Invalid(f"a {kind} has no options {', '.join(unknown)[:300]} here; it has {', '.join(known) or 'none'}")
    return {name: _value(name, value, known[name]) for name, value in options.items()}


def _typed(arguments: dict[str, Any], kinds: dict[str, Any], **defaults: Any) -> list[Any]:
    if unknown := sorted(set(arguments) - set(kinds)):
        raise Invalid(f"there is no argument {', '.join(unknown)[:300]}; there are {', '.join(kinds)}")
    if missing := sorted(set(kinds) - set(arguments) - set(defaults)):
        raise Invalid(f"{', '.join(missing)}: missing")
    return [_value(name, arguments[name], kind) if name in arguments else defaults[name] for name, kind in kinds.items()]


def _value(name: str, value: Any, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value, strict=kind in (int, bool, str))
    except ValidationError as error:
        raise Invalid(f"{name}: {_told(error)}") from None


def _told(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, each['loc']))} {each['msg']}".strip() for each in error.errors(include_url=False)[:5])[:1000]
