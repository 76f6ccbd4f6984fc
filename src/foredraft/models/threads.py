"""Threads that share a kernel with the one that calls it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor


def count() -> int:
    """How many threads there are, this one included."""
    return torch.get_num_threads()


@cache
def pool() -> ThreadPoolExecutor:
    """The others."""
    return ThreadPoolExecutor(max(1, count() - 1), thread_name_prefix="kernel")


def share(kernel: Callable[..., None], args: tuple[Any, ...], scratch: Seq[Tensor]) -> None:
    """Call kernel(*args, address) in as many threads as there are pieces of scratch, and wait for them. One
    that did not begin before all was done does not begin.
    """
    others = [pool().submit(kernel, *args, piece.data_ptr()) for piece in scratch[1:]]
    kernel(*args, scratch[0].data_ptr())
    for other in others:
        if not other.cancel():
            other.result()
