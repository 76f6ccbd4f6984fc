"""Weights as the compiled passes read them: by address, products in tiles, norms and biases in float32."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.models import kernels


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

    def vector(self, values: Tensor) -> int:
        """A bias, or the weights of a norm."""
        return self._hold(F.pad(values.detach().float(), (0, -len(values) % kernels.WIDTH)))

    def _hold(self, part: Tensor) -> int:
        self._held.append(part.contiguous())
        return self._held[-1].data_ptr()
