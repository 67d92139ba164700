"""What the model's folder says: end tokens, names of the weights, whether it has a tokenizer."""

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._errors import ModelNotFound

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model folder in Hugging Face's format."""

    folder: Path

    @classmethod
    def find(cls, model_id: str | Path) -> "ModelFiles":
        """The folder at `model_id`, or of the hub model of that name; ModelNotFound when there is neither."""
        folder = Path(model_id)
        if not folder.is_dir():
            if not _HUB_ID.fullmatch(str(model_id)):
                raise ModelNotFound(f"there is no model folder {str(model_id)!r}: give the path of a folder with config.json and *.safetensors")
            folder = _download(str(model_id))
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"{str(folder)!r} is no model folder: it has no config.json")
        return cls(folder)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder holds a tokenizer."""
        return any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end tokens that the model's own configuration names."""
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = self._read(name).get("eos_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
        return tuple(dict.fromkeys(found))

    @property
    def dtype(self) -> str:
        """The dtype that the configuration names; 'auto' (vLLM decides) when it names none."""
        config = self._read("config.json")
        return str(config.get("dtype") or config.get("torch_dtype") or "auto")

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors in the folder's safetensors files, but for a head that is tied to the embedding."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            with file.open("rb") as stream:
                (size,) = struct.unpack("<Q", stream.read(8))  # https://github.com/huggingface/safetensors#format
                entries = json.loads(stream.read(size))
            shapes |= {name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"}
        if self._read("config.json").get("tie_word_embeddings"):
            shapes.pop("lm_head.weight", None)
        return shapes

    @property
    def linear_names(self) -> list[str]:
        """The last parts of the names of all linear layers, without the head ('q_proj', ...)."""
        names = {
            name.split(".")[-2] for name, shape in self.weight_shapes.items() if name.endswith(".weight") and len(shape) == 2 and "." in name[:-7]
        }
        return sorted((names | {"experts"}) - {"lm_head", "embed_tokens", "wte", "wpe"})

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return json.loads(path.read_text()) if path.is_file() else {}


def _download(model_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"there is no folder {model_id!r}, and no model of that name can be had from the hub: {error}") from error
