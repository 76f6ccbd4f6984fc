"""Linear layers whose weight oneDNN keeps in its own blocked layout (CPU, bfloat16).

Plain linears reorder or stream the weight badly for a few rows. Packed, a row's result does not depend on how
many rows share the pass, as long as there are at least two: one row alone takes another kernel, which is
slower and sums in another order (docs/performance.md). Hence one to three rows are filled up to four.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST_ROWS = 4  # from here to about 6 rows the kernel is at its fastest
_ROWS = 8  # the layout is chosen for about this many rows: a draft of seven and its root


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True where packed layers exist and are faster."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_slow(dtype: torch.dtype, device: torch.device) -> bool:
    """True where torch multiplies in a precision more slowly than in float32."""
    return device.type == "cpu" and dtype != torch.float32 and not can_pack(dtype, device)


class PackedLinear(nn.Module):
    """y = x W^T + b with a packed W. Inference only; the weight cannot be read back."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]. Returns [..., out_features]."""
        rows = x.numel() // self.in_features
        if 0 < rows < LEAST_ROWS:
            out: Tensor = self(fill(x.reshape(rows, -1)))
            return out[:rows].view(*x.shape[:-1], -1)
        out = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return out


class PlainLinear(nn.Module):
    """The same with a weight as it is: for what cannot be packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]. Returns [..., out_features]."""
        return F.linear(x, self.weight, self.bias)


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | PlainLinear:
    """Return the fastest linear layer for weight [out, in] and bias [out], for inference only."""
    kind = PackedLinear if can_pack(weight.dtype, weight.device) else PlainLinear
    return kind(weight, bias)


def pack_together(layers: list[nn.Linear]) -> PackedLinear | PlainLinear:
    """Return one layer whose outputs are those of `layers`, one after another; all read the same input."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if layers[0].bias is None:
        return pack(weight)
    return pack(weight, torch.cat([layer.bias.detach() for layer in layers]))


def fill(x: Tensor) -> Tensor:
    """Repeat the last of a few rows, [rows, width], until there are LEAST_ROWS."""
    return torch.cat([x, x[-1:].expand(LEAST_ROWS - len(x), -1)])


def pack_linears(model: nn.Module) -> None:
    """Replace every plain nn.Linear below `model`; a weight that nothing else holds is freed."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child.weight, child.bias))
