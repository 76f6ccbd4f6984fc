"""What a few rows of a pass need between its linear layers, in bfloat16 on a CPU, one compiled call for each.

Of a pass over one row torch spends as much time between products as in them: every operation costs
microseconds before it does anything. These kernels are compiled by numba at their first use and kept on disk.
A row's result depends on nothing but the row: sums run in the order of positions in the text, wherever its
keys lie and whatever else the pass holds, so the same token has the same bits decoded alone, in a chain or in
a tree. Tensors are passed as addresses; lengths and strides count elements.
"""

import os

from foredraft.zoo import cache_dir

os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_dir() / "kernels"))  # numba reads it when it is imported

from foredraft.models.kernels.attend import LEAST, scratch_size
from foredraft.models.kernels.dense import HAS_TILES, WIDTH, in_bytes, interleaved, laid_out, tiles
from foredraft.models.kernels.glue import add_norm, swiglu, turn_and_write
from foredraft.models.kernels.head import (
    BEST,
    CANDIDATES,
    FED,
    LEVEL_PHASES,
    LEVELS,
    SEQ_FIELDS,
    lay_out_first,
    run_head,
)
from foredraft.models.kernels.layers import ENDING, PHASES, run_layers
from foredraft.models.kernels.numbers import LOG2E
from foredraft.models.kernels.phases import PUT, attended, own_bytes, product
from foredraft.models.kernels.share import PHASE_BYTES
from foredraft.models.kernels.sight import UNIT, lay_out

__all__ = [
    "BEST",
    "CANDIDATES",
    "ENDING",
    "FED",
    "HAS_TILES",
    "LEAST",
    "LEVELS",
    "LEVEL_PHASES",
    "LOG2E",
    "PHASES",
    "PHASE_BYTES",
    "PUT",
    "SEQ_FIELDS",
    "UNIT",
    "WIDTH",
    "add_norm",
    "attended",
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
    "swiglu",
    "tiles",
    "turn_and_write",
]
