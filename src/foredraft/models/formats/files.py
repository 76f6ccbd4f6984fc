"""A draft head as read from a directory, and the facts about a target that it must agree with."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from foredraft.errors import CheckpointError

Kind = Literal["eagle", "eagle1", "medusa"]
Layout = Literal["eagle3", "speculators", "eagle1", "medusa"]


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a head must know of its target. path: the directory of its weights, if they are at hand."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    name: str
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head: its config.json and its tensors, in the names of the SpecForge and Medusa layouts.

    layout: how the files at `path` are laid out; config and tensors are the same whatever it is.
    """

    kind: Kind
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    path: Path
    layout: Layout

    @property
    def own(self) -> dict[str, Any]:
        """What foredraft notes in the config; empty for heads from elsewhere."""
        noted: dict[str, Any] = self.config.get("foredraft") or {}
        return noted

    @property
    def hidden_layers(self) -> tuple[int, ...] | None:
        """The target's hidden states that are fused (0: the embedding, i: the output of layer i - 1); None
        if nothing says which.
        """
        found = self.own.get("hidden_layers")
        return None if found is None else tuple(found)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the hidden states that EAGLE-3 fuses where a config names none."""
    return (2, num_layers // 2, num_layers - 3)


def target_facts(path: Path) -> TargetFacts:
    """Read a model directory's config.json. Raises CheckpointError if it is not a language model's."""
    config = read_json(path / "config.json")
    text = config.get("text_config", config)
    try:
        names = ("hidden_size", "vocab_size", "num_hidden_layers")
        hidden, vocab, layers = (int(text[name]) for name in names)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / 'config.json'} is not that of a target: it lacks {error}") from error
    return TargetFacts(hidden, vocab, layers, path.name, path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: a head is a directory with config.json") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it holds no JSON object")
    return value


_NUMBERS = (
    "hidden_size",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "medusa_num_heads",
    "medusa_num_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_POSITIVE = ("rms_norm_eps", "rope_theta")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OBJECTS = (
    "eagle_config",
    "foredraft",
    "transformer_layer_config",
    "target",
    "rope_parameters",
    "rope_scaling",
)
_LISTS = ("eagle_aux_hidden_state_layer_ids", "hidden_layers")


def check_types(config: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError unless the entries that are read are of the types they should have."""
    for name, value in config.items():
        if value is None:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if name in _NUMBERS and not (whole and value > 0):
            raise CheckpointError(f"{path}: {name} is {value!r}, expected a whole number above 0")
        if name in _POSITIVE and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise CheckpointError(f"{path}: {name} is {value!r}, expected a number above 0")
        if name in _FLAGS and not isinstance(value, bool):
            raise CheckpointError(f"{path}: {name} is {value!r}, expected true or false")
        if name in _LISTS and not (isinstance(value, list) and all(isinstance(i, int) for i in value)):
            raise CheckpointError(f"{path}: {name} is {value!r}, expected a list of layer numbers")
        if name == "tree" and not (isinstance(value, list) and all(_is_path(entry) for entry in value)):
            raise CheckpointError(f"{path}: {name} is {value!r}, expected lists of ranks, 0 or more")
        if name in _OBJECTS:
            if not isinstance(value, dict):
                raise CheckpointError(f"{path}: {name} is {value!r}, expected an object")
            check_types(value, path)


def _is_path(entry: Any) -> bool:
    return isinstance(entry, list) and bool(entry) and all(type(rank) is int and rank >= 0 for rank in entry)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of all safetensors files of a directory. Raises CheckpointError.

    Pickled files are never opened, as they can run any code.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = sorted(file.name for end in ("pt", "bin", "pth", "ckpt") for file in path.glob(f"*.{end}"))
        if pickled:
            raise CheckpointError(
                f"{path / pickled[0]} is pickled, and a pickle can run any code when it is loaded: ask its "
                "author for safetensors, or convert it where you trust it"
            )
        raise CheckpointError(f"{path} holds no *.safetensors file: a head is a directory with one")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no dict
                    if name in tensors:
                        raise CheckpointError(f"{file} holds {name}, which another file beside it holds too")
                    tensors[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
    return tensors


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write safetensors to a file that others may read as far as they may read any new file; the library
    leaves it to its owner.
    """
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(mode)


def target_rows(target: TargetFacts, name: Literal["lm_head", "embed"], rows: Tensor | None) -> Tensor:
    """Read rows (all if None) of a target's vocabulary matrix, [rows, hidden]. Raises CheckpointError."""
    assert target.path is not None
    wanted = {"lm_head": ("lm_head.weight",), "embed": ("model.embed_tokens.weight", "embed_tokens.weight")}
    tied = wanted[name] + (wanted["embed"] if name == "lm_head" else ())
    places = _places(target.path)
    for tensor in tied:
        if tensor in places:
            matrix = target_tensor(target, tensor)
            return matrix if rows is None else matrix[rows]
    raise CheckpointError(f"{target.path} holds none of {', '.join(tied)}: its layout is not known here")


def target_tensor(target: TargetFacts, name: str) -> Tensor:
    """Read one tensor of a target. Raises CheckpointError."""
    assert target.path is not None
    tensor = stored_tensors(target.path)(name)
    if tensor is None:
        raise CheckpointError(f"{target.path} holds no {name}: its layout is not known here")
    return tensor


def stored_tensors(path: Path) -> Callable[[str], Tensor | None]:
    """Return what reads a tensor of a model directory by its name, None if there is none. Its file is mapped
    only as long as the tensor is in use.
    """
    from safetensors import safe_open

    places = _places(path)

    def read(name: str) -> Tensor | None:
        if name not in places:
            return None
        with safe_open(places[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    return read


def norms(target: TargetFacts) -> list[tuple[str, Tensor]]:
    """Return name and weight of each norm of a target, by name. Raises CheckpointError if there is none."""
    from safetensors import safe_open

    assert target.path is not None
    found: dict[str, Tensor] = {}
    for file in target.path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names = fnmatch.filter(opened.keys(), "*norm.weight")
            found |= {name: opened.get_tensor(name) for name in names}
    if not found:
        raise CheckpointError(f"{target.path} holds no norms: its layout is not known here")
    return sorted(found.items())


def has_tensor(path: Path, *names: str) -> bool:
    """True if a directory holds a tensor of one of these names. Raises CheckpointError."""
    from safetensors import SafetensorError

    try:
        return not _places(path).keys().isdisjoint(names)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _places(path: Path) -> Mapping[str, Path]:
    """Return which file of a model directory holds each tensor."""
    from safetensors import safe_open

    places: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            places |= dict.fromkeys(opened.keys(), file)
    return places
