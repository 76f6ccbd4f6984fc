"""What is wrong with a draft head, and why: layer ids, norms, vocabulary maps, missing or misfitting tensors.

A head with a wrong flag still drafts, only badly, and nothing else ever says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.models.formats import eagle1, eagle3, medusa
from foredraft.models.formats.eagle3 import IDS, LAYER
from foredraft.models.formats.files import HeadFiles, TargetFacts, default_layers
from foredraft.models.head_shape import draft_vocab, head_module, misfit

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """error: it cannot be run as it is; warning: it may draft badly; note: worth knowing."""

    severity: Severity
    text: str


def lint(files: HeadFiles, target: TargetFacts | None = None) -> list[Finding]:
    """Return all that is wrong or noteworthy, errors first; against its target too if that is given."""
    check = {"eagle": _eagle, "eagle1": _eagle1, "medusa": _medusa}[files.kind]
    order = ("error", "warning", "note")
    found = sorted(check(files, target), key=lambda finding: order.index(finding.severity))
    if not (found and found[0].severity == "error") and (wrong := _unlike_module(files, target)):
        found.insert(0, _error(wrong))
    return found


def check_fits(files: HeadFiles, target: TargetFacts) -> None:
    """Raise CheckpointError with the first error of lint."""
    for finding in lint(files, target):
        if finding.severity == "error":
            raise CheckpointError(f"{files.path}: {finding.text}")


def _unlike_module(files: HeadFiles, target: TargetFacts | None) -> str | None:
    """Return what keeps the tensors from being the weights of what the config describes."""
    try:
        with torch.device("meta"):
            module = head_module(files, target)
    except CheckpointError as error:
        return str(error)
    return misfit(module, files.tensors)


def _error(text: str) -> Finding:
    return Finding("error", text)


def _wrong_shape(
    files: HeadFiles, name: str, wanted: tuple[int | None, ...], cause: str
) -> Iterator[Finding]:
    """Compare a tensor's shape, where None is any size; say nothing of one that is not there."""
    tensor = files.tensors.get(name)
    if tensor is None:
        return
    shape = tuple(tensor.shape)
    fits = len(shape) == len(wanted) and all(
        want in (None, size) for want, size in zip(wanted, shape, strict=True)
    )
    if not fits:
        said = ["any" if size is None else size for size in wanted]
        yield _error(f"{name} is {list(shape)}, expected {said}: {cause}".replace("'any'", "any"))


def _eagle(files: HeadFiles, target: TargetFacts | None) -> Iterator[Finding]:
    if damage := _damage(files, eagle3.REQUIRED, "EAGLE-3"):
        yield damage
        return
    yield from _eagle_shapes(files, target)
    yield from _layer_ids(files, target)
    yield from _norms(files)
    yield from _layer_kind(files)
    yield from _vocabulary(files, target)
    yield from _borrowed(files, target)


def _layer_kind(files: HeadFiles) -> Iterator[Finding]:
    rope = files.config.get("rope_parameters") or files.config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        yield Finding("warning", f"its rotary angles are of type {kind!r}, and it is run with plain ones")
    act = files.config.get("hidden_act") or "silu"
    if act not in ("silu", "swish"):
        yield Finding("warning", f"its activation is {act!r}, and it is run with silu")


def _eagle1(files: HeadFiles, target: TargetFacts | None) -> Iterator[Finding]:
    if damage := _damage(files, eagle1.REQUIRED, "EAGLE-1"):
        yield damage
        return
    hidden = files.tensors["fc.weight"].shape[0]
    yield from _layer_shapes(files, hidden, "an EAGLE-1 layer reads one width, EAGLE-3's two")
    yield from _layer_kind(files)
    width = target.hidden_size if target else hidden
    yield from _wrong_shape(files, "fc.weight", (width, 2 * width), "the head is for another target")
    yield from _other_vocabulary(files, target)
    if target:
        shape = (target.vocab_size, width)
        yield from _wrong_shape(files, "lm_head.weight", shape, "an EAGLE-1 head drafts from all tokens")
    yield from _borrowed(files, target)


def _damage(files: HeadFiles, required: tuple[str, ...], what: str) -> Finding | None:
    """Return what keeps the rest from being looked at: a tensor that is missing, or no matrix."""
    missing = [name for name in required if name not in files.tensors]
    if missing:
        return _error(f"{len(missing)} tensors are missing, first {missing[0]}: the file is no {what} head")
    bent = [name for name in required if files.tensors[name].dim() != (1 if "norm" in name else 2)]
    if bent:
        shape = list(files.tensors[bent[0]].shape)
        return _error(f"{bent[0]} is {shape}, which is no shape of an {what} head's")
    return None


def _borrowed(files: HeadFiles, target: TargetFacts | None) -> Iterator[Finding]:
    shape = (target.vocab_size if target else None, files.tensors["fc.weight"].shape[0])
    yield from _wrong_shape(files, "embed_tokens.weight", shape, "the head is for another target")
    for name, whose in (("lm_head.weight", "rows"), ("embed_tokens.weight", "embeddings")):
        if name not in files.tensors:
            yield Finding("note", f"{name} is not there: the target's {whose} are used")


def _layer_shapes(files: HeadFiles, width: int, cause: str) -> Iterator[Finding]:
    """Compare what attention reads, `width`, and the config with the tensors of either EAGLE."""
    shape = list(files.tensors["fc.weight"].shape)
    said = files.config.get("hidden_size", shape[0])
    if said != shape[0]:
        yield _error(f"config says hidden_size {said}, fc.weight is {shape}: config.json is another head's")
    for name in "qkv":
        yield from _wrong_shape(files, f"{LAYER}self_attn.{name}_proj.weight", (None, width), cause)


def _eagle_shapes(files: HeadFiles, target: TargetFacts | None) -> Iterator[Finding]:
    config, hidden = files.config, files.tensors["fc.weight"].shape[0]
    cause = "an EAGLE-3 layer reads embedding and features side by side; EAGLE-1's reads one width"
    yield from _layer_shapes(files, 2 * hidden, cause)
    yield from _wrong_shape(files, "norm.weight", (hidden,), "it is another head's")
    width = target.hidden_size if target else config.get("target_hidden_size", hidden)
    layers = files.hidden_layers
    fused = files.tensors["fc.weight"].shape[1]
    if fused % width or (layers is not None and fused != width * len(layers)):
        count = f"{len(layers)} hidden states" if layers is not None else "a number of hidden states"
        wanted = f"[{hidden}, {width * len(layers or (0, 0, 0))}]"
        whose = f" of {target.name}" if target else ""
        yield _error(
            f"fc.weight is [{hidden}, {fused}], expected {wanted} ({count} of width {width}{whose}): "
            "the head is for a target of another hidden size, or names the wrong number of layers"
        )
    if target and "lm_head.weight" not in files.tensors and hidden != target.hidden_size:
        yield _error(
            f"lm_head.weight is not there, and the target's has width {target.hidden_size}, the head "
            f"{hidden}: the head is for another target, or lm_head was lost"
        )
    if target and hidden != target.hidden_size and "embed_tokens.weight" not in files.tensors:
        yield _error(
            f"fc.weight gives width {hidden}, the embeddings of {target.name} have "
            f"{target.hidden_size}, and the head has none of its own: it is for another target"
        )


def _layer_ids(files: HeadFiles, target: TargetFacts | None) -> Iterator[Finding]:
    layers = files.hidden_layers
    written = (files.config.get("eagle_config") or {}).get(IDS)
    if layers is None:
        here = f" (here {list(default_layers(target.num_layers))})" if target else ""
        yield Finding(
            "warning",
            f"no {IDS}: the usual hidden states 2, n/2, n - 3 are taken{here}, outputs of 1, n/2 - 1, n - 4",
        )
        return
    if written and files.layout == "eagle3" and [i + 1 for i in written] != list(layers):
        yield _error(
            f"eagle_config names layer outputs {list(written)}, so hidden states "
            f"{[i + 1 for i in written]}, but foredraft.hidden_layers are {list(layers)}: one of the "
            "two was edited"
        )
    if target is None:
        return
    wrong = [h for h in layers if not 0 <= h <= target.num_layers]
    if wrong:
        yield _error(
            f"hidden state {wrong[0]} does not exist: {target.name} has {target.num_layers} layers, so 0 to "
            f"{target.num_layers}; the head is for a deeper target"
        )
    usual = default_layers(target.num_layers)
    if "target" in files.own or list(layers) == list(usual):
        return
    for shift, reason in (
        (1, "they look like inputs (vLLM's numbers) where this layout counts outputs: lower each by one"),
        (
            -1,
            "they look like outputs (SpecForge's numbers) where this layout counts inputs: raise each by one",
        ),
    ):
        if tuple(h - shift for h in layers) == usual:
            yield Finding(
                "warning",
                f"layer ids stand for hidden states {list(layers)}, one off the usual "
                f"{list(usual)}: {reason}, if acceptance is low",
            )


def _norms(files: HeadFiles) -> Iterator[Finding]:
    config = files.config
    if config.get("norm_before_residual"):
        yield Finding(
            "note",
            "norm_before_residual is true: vLLM knows the flag, SGLang and SpecForge draft badly without it",
        )
    elif files.layout == "speculators" and "norm_before_residual" not in config:
        yield Finding(
            "warning",
            "norm_before_residual is not in config.json: speculators reads that as false, as we do, vLLM as "
            "true; set it to true if acceptance is low",
        )
    for flag in ("norm_before_fc", "fc_norm", "norm_output"):
        if config.get(flag):
            yield _error(f"{flag} is true: foredraft has no such norm, and without it the head drafts badly")


def _vocabulary(files: HeadFiles, target: TargetFacts | None) -> Iterator[Finding]:
    tensors, config = files.tensors, files.config
    vocab = target.vocab_size if target else config.get("vocab_size")
    t2d, d2t = tensors.get("t2d"), tensors.get("d2t")
    yield from _other_vocabulary(files, target)
    if t2d is not None and vocab is not None and len(t2d) != vocab:
        whose = target.name if target else "config.json"
        yield _error(f"t2d is [{len(t2d)}], expected [{vocab}] ({whose}): the head is for another vocabulary")
        return
    rows = draft_vocab(files)
    if rows is None:
        yield _error("nothing says how large the draft vocabulary is: d2t and lm_head.weight are missing")
        return
    yield from _wrong_shape(files, "lm_head.weight", (rows, None), "it has not the draft vocabulary's rows")
    yield from _wrong_shape(files, "d2t", (rows,), "it has not the draft vocabulary's entries")
    if d2t is None:
        if vocab is not None and rows != vocab:
            yield _error(f"d2t is missing: {rows} draft ids cannot be told which of {vocab} tokens they are")
        return
    yield from _map_kind(d2t, t2d, vocab)


def _other_vocabulary(files: HeadFiles, target: TargetFacts | None) -> Iterator[Finding]:
    said = files.config.get("vocab_size")
    if target and said is not None and said != target.vocab_size:
        yield _error(
            f"config says vocab_size {said}, {target.name} has {target.vocab_size}: the head is for another "
            "target"
        )


def _map_kind(d2t: Tensor, t2d: Tensor | None, vocab: int | None) -> Iterator[Finding]:
    if d2t.dim() != 1 or not len(d2t):
        yield _error(f"d2t is {list(d2t.shape)}, expected one entry a draft id: the file is damaged")
        return
    if d2t.is_floating_point():
        yield _error(
            f"d2t is {d2t.dtype}, expected int64: ids above 256 or 2048 are rounded in half precision"
        )
        return
    kind = eagle3.d2t_kind(d2t, t2d, vocab or 2**62)
    if kind == "absolute":
        yield _error(
            "d2t holds target ids, expected offsets (target id = draft id + d2t): every draft id would be "
            "taken for another token. `foredraft convert` writes it as offsets"
        )
    elif kind == "neither":
        yield _error(
            "d2t fits t2d and the vocabulary neither as offsets nor as target ids: the two are of different "
            "heads, or d2t was damaged"
        )
    if t2d is None:
        yield Finding("note", "t2d is missing: it is made from d2t where a layout wants it")


def _medusa(files: HeadFiles, target: TargetFacts | None) -> Iterator[Finding]:
    config, tensors = files.config, files.tensors
    heads, layers = int(config["medusa_num_heads"]), int(config["medusa_num_layers"])
    found = medusa.found_heads(tensors)
    if found != (heads, layers):
        yield _error(
            f"config says {heads} heads of {layers} blocks, the tensors make {found[0]} of {found[1]}: set "
            "medusa_num_heads and medusa_num_layers, or the file is another head's"
        )
        return
    chosen = tensors.get("token_map")
    if chosen is not None and not _names_tokens(chosen, target):
        yield _error("token_map must hold different tokens of the target, int64 [n]: it is another head's")
    if not any(f"{head}.{layers}.weight" in tensors for head in range(heads)):
        yield Finding("note", "no head has a vocabulary projection of its own: the target's lm_head is used")
    for head in range(heads):
        blocks = [tensors.get(f"{head}.{layer}.linear.weight", torch.empty(0)) for layer in range(layers)]
        if layers > 1 and all(block.equal(blocks[0]) for block in blocks[1:]) and bool(blocks[0].any()):
            yield Finding(
                "warning",
                f"all {layers} blocks of head {head} are the same: a list of one module repeated, as the "
                "original trainer makes, trains one block",
            )
            return


def _names_tokens(chosen: Tensor, target: TargetFacts | None) -> bool:
    if chosen.dim() != 1 or chosen.dtype != torch.int64 or not len(chosen):
        return False
    vocab = target.vocab_size if target else math.inf
    return int(chosen.min()) >= 0 and int(chosen.max()) < vocab and len(set(chosen.tolist())) == len(chosen)
