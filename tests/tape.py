"""A stand-in for CUDA graphs on a CPU: the operations of a pass are recorded, then repeated in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foredraft.models.buckets import Outputs, Work

READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")  # wait for the device


class Tape(TorchDispatchMode):
    """Records what runs below it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @property
    def names(self) -> list[str]:
        """Of the operations, with the shapes of what they gave."""
        return [
            f"{func.overloadpacket.__name__} {[tuple(leaf.shape) for leaf in tensors(out)]}"
            for func, _, _, out in self.calls
        ]

    @property
    def reads(self) -> list[str]:
        """Operations for which a host would wait."""
        return [name for name in self.names if name.split()[0] in READS]

    def replay(self) -> None:
        """Repeat all of it, results into the tensors that held them."""
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the results of an operation."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def record(work: Work) -> Work:
    """As models.buckets.recorder makes them: the pass runs once, later calls repeat what was recorded."""
    with Tape() as tape:
        outputs = work()
    assert not tape.reads

    def replay() -> Outputs:
        tape.replay()
        return outputs

    return replay
