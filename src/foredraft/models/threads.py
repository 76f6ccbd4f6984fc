"""Threads that share a kernel with the one that calls it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch


@cache
def _pool() -> ThreadPoolExecutor:
    """The others."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="kernel")


def share(kernel: Callable[..., None], args: tuple[Any, ...], size: int, *, alone: bool = False) -> None:
    """Call kernel(*args, address) in every thread, or in this one alone, each with so many bytes of its own,
    and wait. A thread that did not begin before all was done does not begin.
    """
    own, *pieces = torch.empty(1 if alone else torch.get_num_threads(), size, dtype=torch.uint8)
    others = [_pool().submit(kernel, *args, piece.data_ptr()) for piece in pieces]
    kernel(*args, own.data_ptr())
    for other in others:
        if not other.cancel():
            other.result()
