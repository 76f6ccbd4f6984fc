"""numba, told where to keep what it compiles: it reads that when it is imported."""

import os
from typing import Any

from foredraft.cache import cache_dir

os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_dir() / "kernels"))

from numba import njit as njit
from numba import types as types

OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "boundscheck": False}
