"""Objects that the server holds for a session: datasets, loaders, templates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from ._client import TwinkleClient
from ._errors import Exhausted, InvalidRequest
from ._registry import latest_client

if TYPE_CHECKING:
    from ._formats import InputFeature, Trajectory

T = TypeVar("T")


class ServerObject:
    """A handle of an object that the server holds. It ends with the client's session.

    Raises:
        InvalidRequest: a class or an argument that the server does not allow. ConfigError: there is no client.
    """

    def __init__(self, processor_type: str, class_type: str, arguments: Mapping[str, Any], client: TwinkleClient | None) -> None:
        from ._verb_calls import create_processor

        self.client = client if client is not None else latest_client()
        self.processor_id = self.client.connection.run(create_processor(processor_type, class_type, arguments)).processor_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.processor_id} of {self.client!r}>"

    def call(self, function: str, kind: Any = Any, /, **arguments: Any) -> Any:
        """Call a method of the object by its name, one that the server allows; its result is read as `kind`."""
        from ._verb_calls import call_processor

        return self.client.connection.run(call_processor(self.processor_id, function, arguments, kind))


class Dataset(ServerObject):
    """A dataset on the server.

    Args:
        source: rows (records of `twinkle_client` or twinkle-data, or mappings), which are sent; or the name of a file that the server offers.
        client: None: the latest that is open.
        options: further arguments of the dataset, by name.
    """

    def __init__(self, source: Sequence[Any] | str | os.PathLike[str], *, client: TwinkleClient | None = None, **options: Any) -> None:
        super().__init__("dataset", "Dataset", {"source": source, **options}, client)

    def __len__(self) -> int:
        """The number of rows."""
        return self.call("__len__", int)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """A row, or those of a slice. Raises IndexError behind the last."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -(length := len(self)) <= index < length:
            raise IndexError(f"row {index} of {length}")
        return row_of(self.call("__getitem__", index=index))

    def __iter__(self) -> Iterator[Any]:
        """The rows in order."""
        for index in range(len(self)):
            yield row_of(self.call("__getitem__", index=index))


class DataLoader(ServerObject):
    """Batches of a dataset on the server. Iterating begins at the position that it has, and begins anew after the last batch.

    Args:
        dataset: a `Dataset` handle, or what one is made of.
        batch_size: rows of a batch.
        client: None: the dataset's, else the latest that is open.
        options: further arguments of the loader, by name: shuffle, seed, drop_last, num_epochs, ...
    """

    def __init__(self, dataset: Any, *, batch_size: int, client: TwinkleClient | None = None, **options: Any) -> None:
        if not isinstance(dataset, ServerObject):
            dataset = Dataset(dataset, client=client)
        super().__init__("dataloader", "DataLoader", {"dataset": dataset, "batch_size": batch_size, **options}, client or dataset.client)
        self.dataset = dataset

    def __len__(self) -> int:
        """The number of batches. Raises TypeError where there is no end, as `len` does."""
        try:
            return self.call("__len__", int)
        except InvalidRequest as error:
            raise TypeError(str(error)) from error

    def __iter__(self) -> Iterator[list[Any]]:
        """The batches, each a list of rows."""
        self.call("__iter__")
        while True:
            try:
                batch = self.call("__next__", list[Any])
            except Exhausted:
                return
            yield [row_of(row) for row in batch]

    def state_dict(self) -> dict[str, Any]:
        """The position, in plain JSON."""
        return self.call("state_dict", dict[str, Any])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        self.call("load_state_dict", state=dict(state))


class Template(ServerObject):
    """A base model's tokenizer and chat template, on the server.

    Args:
        name: of the base model.
        client: None: the latest that is open.
        options: max_length, truncation, system.
    """

    def __init__(self, name: str | os.PathLike[str], *, client: TwinkleClient | None = None, **options: Any) -> None:
        super().__init__("template", "Template", {"tokenizer_or_path": name, **options}, client)

    def encode(self, trajectory: Trajectory | Mapping[str, Any], add_generation_prompt: bool = False) -> InputFeature:
        """A conversation as one feature."""
        return row_of(self.call("encode", trajectory=trajectory, add_generation_prompt=add_generation_prompt))

    def batch_encode(self, trajectories: Sequence[Trajectory | Mapping[str, Any]], add_generation_prompt: bool = False) -> list[InputFeature]:
        """Conversations as features."""
        rows = self.call("batch_encode", list[Any], trajectories=list(trajectories), add_generation_prompt=add_generation_prompt)
        return [row_of(row) for row in rows]

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text."""
        return self.call("tokenize", list[int], text=text)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.call("decode", str, tokens=list(tokens), skip_special_tokens=skip_special_tokens)


def row_of(value: Any) -> Any:
    """A row of JSON as the record that it is, by the field that only that has; another row stays as it is."""
    if not isinstance(value, dict):
        return value
    from pydantic import TypeAdapter

    from ._formats import InputFeature, PackedFeature, Trajectory

    fields = cast("dict[str, Any]", value)
    for name, kind in (("input_ids", InputFeature), ("messages", Trajectory), ("features", PackedFeature)):
        if name in fields:
            return TypeAdapter[Any](kind).validate_python(fields)
    return fields
