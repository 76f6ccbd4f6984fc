"""Weights as the compiled passes read them: by address, products in tiles, norms and biases in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.models import kernels
from foredraft.models.fused import norm


class Tiles:
    """Holds what it gives addresses of. Products are in one piece of memory, which numpy asks the system to
    keep in large pages.

    shapes: of each weight to come that is not in bytes, outputs and inputs; outputs: the most, if none is.
    """

    def __init__(self, shapes: Iterable[tuple[int, int]] = (), *, outputs: int = 0) -> None:
        shapes = list(shapes)
        size = sum(kernels.tiles(outputs) * kernels.WIDTH * inputs for outputs, inputs in shapes)
        self._free = torch.from_numpy(np.empty(size, np.int16)).view(torch.bfloat16)
        widest = max((outputs for outputs, _ in shapes), default=outputs)
        self._zeros = torch.zeros(kernels.tiles(widest) * kernels.WIDTH)
        self._held = [self._free, self._zeros]

    @property
    def no_bias(self) -> int:
        """Zeros, as many as there may be outputs."""
        return self._zeros.data_ptr()

    def product(self, weight: Tensor) -> int:
        """Lay out weight [outputs, inputs]."""
        tiles = kernels.laid_out(weight.detach())
        place, self._free = self._free[: tiles.numel()], self._free[tiles.numel() :]
        place.view(tiles.shape).copy_(tiles)
        return place.data_ptr()

    def in_bytes(self, weight: Tensor) -> tuple[int, int]:
        """Lay out weight [outputs, inputs] in bytes; where these are, and their scales."""
        small, scales = kernels.in_bytes(weight.detach())
        return self._hold(small), self._hold(scales)

    def bias(self, linears: list[Any], together: Callable[..., Tensor] | None = None) -> int:
        """The biases of linear layers that are one product, put together as their weights are."""
        if linears[0].bias is None:
            return self.no_bias
        parts = [part.bias.detach().float() for part in linears]
        whole = torch.cat(parts) if together is None else together(*(part[:, None] for part in parts))[:, 0]
        return self._hold(torch.cat([whole, whole.new_zeros(-len(whole) % kernels.WIDTH)]))

    def norm(self, module: Any) -> int:
        """The weights of a norm; 0 for none."""
        return 0 if module is None else self._hold(norm(module).weight.float())

    def _hold(self, part: Tensor) -> int:
        self._held.append(part.contiguous())
        return self._held[-1].data_ptr()
