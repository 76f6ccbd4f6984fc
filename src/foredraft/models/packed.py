"""Linear layers whose weight oneDNN keeps in its own blocked layout (CPU, bfloat16).

Plain linears reorder or stream the weight badly for a few rows: packed, a pass over one row of SmolLM2 takes
26 ms instead of 36, and one over eight rows 29 ms instead of 42 (docs/performance.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ROWS = 8  # the layout is chosen for about this many rows: a draft of seven and its root


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True where packed layers exist and are faster."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear(nn.Module):
    """y = x W^T + b with a packed W. Inference only; the weight cannot be read back."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]. Returns [..., out_features]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def pack_linears(model: nn.Module) -> None:
    """Replace every plain nn.Linear below `model`; a weight that nothing else holds is freed."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
