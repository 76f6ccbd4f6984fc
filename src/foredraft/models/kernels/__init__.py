"""Passes in bfloat16 on a CPU, all of one compiled call that threads share.

Of a pass over one row torch spends as much time between products as in them: every operation costs
microseconds before it does anything. These kernels are compiled by numba at their first use and kept on disk.
A row's result depends on nothing but the row: sums run in the order of its inputs, and of positions in the
text, wherever their keys lie and whatever else the pass holds, so the same token has the same bits decoded
alone, in a chain or in a tree. Tensors are passed as addresses.
"""

import foredraft.jit  # noqa: F401  before numba is imported
from foredraft.models.kernels.attend import LEAST, heads_together, scratch_size
from foredraft.models.kernels.dense import WIDTH, in_bytes, interleaved, laid_out, tiles
from foredraft.models.kernels.head import LEVEL_PHASES, run_head
from foredraft.models.kernels.layers import ENDING, PHASES, run_layers
from foredraft.models.kernels.luck import gumbels
from foredraft.models.kernels.matrix import HAS_UNIT
from foredraft.models.kernels.numbers import LOG2E
from foredraft.models.kernels.pairs import IS_QUICK, PROCESSOR
from foredraft.models.kernels.phases import PUT, PUT_GELU, PUT_SILU, attended, own_bytes, product
from foredraft.models.kernels.share import PHASE_BYTES
from foredraft.models.kernels.sight import UNIT, lay_out
from foredraft.models.kernels.tree import (
    BEST,
    CANDIDATES,
    FED,
    FOUND,
    LEVELS,
    SEQ_FIELDS,
    TAKEN,
    lay_out_first,
)

__all__ = [
    "BEST",
    "CANDIDATES",
    "ENDING",
    "FED",
    "FOUND",
    "HAS_UNIT",
    "IS_QUICK",
    "LEAST",
    "LEVELS",
    "LEVEL_PHASES",
    "LOG2E",
    "PHASES",
    "PHASE_BYTES",
    "PROCESSOR",
    "PUT",
    "PUT_GELU",
    "PUT_SILU",
    "SEQ_FIELDS",
    "TAKEN",
    "UNIT",
    "WIDTH",
    "attended",
    "gumbels",
    "heads_together",
    "in_bytes",
    "interleaved",
    "laid_out",
    "lay_out",
    "lay_out_first",
    "own_bytes",
    "product",
    "run_head",
    "run_layers",
    "scratch_size",
    "tiles",
]
