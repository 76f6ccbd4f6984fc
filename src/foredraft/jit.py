"""numba, told where to keep what it compiles: it reads that when it is imported."""

import atexit
import os
import shutil
import tempfile
from typing import Any

from foredraft.cache import cache_dir, kernel_sources


def _directory() -> str:
    """Return where compiled kernels of these sources are kept. numba asks for a place that can be written:
    where the cache is none, it is one until this program ends.
    """
    wanted = cache_dir() / "kernels" / kernel_sources()
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return str(wanted)
    except OSError:
        made = tempfile.mkdtemp(prefix="foredraft-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return made


os.environ.setdefault("NUMBA_CACHE_DIR", _directory())

from numba import njit as njit  # noqa: E402
from numba import types as types  # noqa: E402

OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "boundscheck": False}
