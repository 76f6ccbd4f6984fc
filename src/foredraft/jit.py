"""numba, told where to keep what it compiles: it reads that when it is imported."""

import atexit
import ctypes
import os
import platform
import shutil
import sys
import tempfile
from typing import Any

from foredraft.cache import cache_dir, kernel_sources

# A system call of Linux's, ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA.
_ARCH_PRCTL, _ASK_FOR, _TILE_DATA = 158, 0x1023, 18


def _has_matrix_registers() -> bool:
    """Ask Linux for the registers of a matrix unit (AMX): whoever does not ask may not use them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR, _TILE_DATA)
    return not refused


def _directory() -> str:
    """Return where compiled kernels of these sources are kept. numba asks for a place that can be written:
    where the cache is none, it is one until this program ends.
    """
    wanted = cache_dir() / "kernels" / (kernel_sources() + "-amx" * MATRIX_REGISTERS)
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return str(wanted)
    except OSError:
        made = tempfile.mkdtemp(prefix="foredraft-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return made


# What is compiled for them must not meet a process that was refused them.
MATRIX_REGISTERS = _has_matrix_registers()
os.environ.setdefault("NUMBA_CACHE_DIR", _directory())

from numba import njit as njit  # noqa: E402
from numba import types as types  # noqa: E402

OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "boundscheck": False}
