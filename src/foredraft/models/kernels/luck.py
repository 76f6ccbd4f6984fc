"""The noise with which a target will draw, as a draft wants it: soon, and near enough.

A target's token is the one with the largest log-probability plus Gumbel noise (race.py says it without
logarithms), so what a head expects of it is what the head finds likely plus the same noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foredraft.jit import OPTIONS, njit
from foredraft.models.kernels.numbers import F32, I32, U32, bits_of, float_of
from foredraft.race import word

_LN2 = F32(0.6931471805599453)


@njit(inline="always")
def _log(x: Any) -> Any:
    """The natural logarithm of a normal number within 5e-5."""
    bits = bits_of(x)
    m = float_of((bits & U32(0x7FFFFF)) | U32(0x3F800000)) - F32(1)
    p = F32(-0.22771264) + m * F32(0.05994559)
    p = F32(1.44261568) + m * (F32(-0.71706393) + m * (F32(0.44227418) + m * p))
    return (F32(I32(bits >> U32(23))) - F32(127) + m * p) * _LN2


@njit(**OPTIONS)
def gumbels(key: Any, ids: Any, found: Any) -> None:
    """Fill found, float32 [tokens], with the Gumbel noise of tokens, int64, under a key of noise.Noise.

    That is -log(-log(u)) of a token's uniform u, by the upper bits of 1 - u. In two loops, since the first is
    of words twice as wide.
    """
    for place in range(len(found)):
        top = I32(word(key, ids[place]) >> np.uint64(32))
        found[place] = F32(I32(U32(0x7FFFFFFF - top) >> U32(1)))
    for place in range(len(found)):
        missing = (found[place] + F32(0.5)) * F32(2.0**-31)
        # Near u = 1 a logarithm would lose what matters there.
        small = missing * (F32(6) - missing) / (F32(6) - F32(4) * missing)
        large = -_log(max(F32(1) - missing, F32(2.0**-32)))
        found[place] = -_log(small if missing < F32(0.25) else large)
