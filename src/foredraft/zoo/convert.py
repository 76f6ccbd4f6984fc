"""GGUF file -> directory of safetensors. transformers reads the weights; what it would drop is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import ModelError
from foredraft.zoo.gguf_file import GgufFile, read_gguf

if TYPE_CHECKING:
    import torch

_F32, _F16 = 0, 1
# What transformers raises for a model it does not know, or knows and stumbles over.
_UNREADABLE = (ImportError, LookupError, TypeError, ValueError, RuntimeError, AttributeError, OSError)
_INSTEAD = "use the model's safetensors directory or Hugging Face id instead"


def bytes_after(gguf: GgufFile) -> int:
    """Return about how many bytes the converted model takes, its tokenizer included."""
    width = 4 if _matrix_types(gguf) == {_F32} else 2
    return gguf.elements * width + 48_000_000


def convert(path: Path, out: Path) -> None:
    """Write safetensors, config, generation config and tokenizer of a GGUF file to the directory `out`.

    Float files keep their type; quantised weights are dequantised and rounded to bfloat16. Raises
    CheckpointError for a damaged file and ModelError for one whose model would not come out the same.
    """
    gguf = read_gguf(path)
    _refuse_lossy(gguf)
    with _quiet():
        try:
            model, tokenizer = _load(gguf)
        except (
            ImportError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
            AttributeError,
            OSError,
        ) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"{path.name} (architecture {gguf.architecture!r}) cannot be read: {said}; {_INSTEAD}"
            ) from error
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def _load(gguf: GgufFile) -> tuple[Any, Any]:
    """Return the model, in dense weights and ready to be saved, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(gguf.path.parent), "gguf_file": gguf.path.name}
    model, info = AutoModelForCausalLM.from_pretrained(**place, dtype=_dtype(gguf), output_loading_info=True)
    _require_same(gguf, model, info["missing_keys"])
    # A model that came from GGUF calls itself quantised and refuses to be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    ends = [gguf.meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    if None not in ends and ends[0] != ends[1]:
        model.generation_config.eos_token_id = ends
    tokenizer = AutoTokenizer.from_pretrained(**place)
    for name in ("bos", "eos"):  # transformers before 5.23 takes one for the other
        if (token := gguf.meta.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
    if gguf.meta.get("tokenizer.ggml.pre") == "smollm":
        _split_digits(tokenizer)
    return model, tokenizer


def _refuse_lossy(gguf: GgufFile) -> None:
    """Refuse what transformers passes over without a word: scaled rotary positions and split files."""
    arch, meta = gguf.architecture, gguf.meta
    scaling = meta.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none" or f"{arch}.rope.scale_linear" in meta:
        raise ModelError(f"{gguf.path.name} scales its rotary positions ({scaling}): {_INSTEAD}")
    parts = int(meta.get("split.count", 0))
    if parts > 1:
        raise ModelError(
            f"{gguf.path.name} is one of {parts} parts: join them with `llama-gguf-split --merge` first"
        )


def _require_same(gguf: GgufFile, model: Any, missing: set[str]) -> None:
    """Refuse unless every value of the file went into the model and every weight of it came from there."""
    weights = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}  # tied ones once
    found = sum(weights.values())
    if missing or found != gguf.elements:
        raise ModelError(
            f"{gguf.path.name} (architecture {gguf.architecture!r}) has {gguf.elements:,} values, the model "
            f"made from it {found:,}, with {len(missing)} weights missing: {_INSTEAD}"
        )


def _matrix_types(gguf: GgufFile) -> set[int]:
    return {tensor.type for tensor in gguf.tensors if len(tensor.dims) > 1}


def _dtype(gguf: GgufFile) -> torch.dtype:
    import torch

    types = _matrix_types(gguf)
    if types == {_F32}:
        return torch.float32
    return torch.float16 if types <= {_F16, _F32} else torch.bfloat16


def _split_digits(tokenizer: Any) -> None:
    """Cut every digit off before anything else, as SmolLM's own tokenizer does: "  1" is "  ", "1"."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back transformers' bars and notices; its errors still reach us as exceptions."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
