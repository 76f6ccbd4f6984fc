"""One process a GPU, started by `accelerate launch` or torchrun; alone without one."""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs

from foredraft.errors import ConfigError

_LONGEST_WAIT = timedelta(days=30)  # the others wait while the first process answers prompts or measures
_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def processes(*, some_idle: bool = False) -> Accelerator:
    """Return this process's place among those that train together, and its device.

    some_idle: there are steps in which parameters get no gradient. Raises ConfigError if the launcher asks
    for what is not supported.
    """
    handlers = [
        InitProcessGroupKwargs(timeout=_LONGEST_WAIT),
        DistributedDataParallelKwargs(find_unused_parameters=some_idle),
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")
        found = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no", kwargs_handlers=handlers)
    if found.distributed_type not in _KINDS:
        raise ConfigError(
            f"{found.distributed_type.value} is not supported: every process holds the whole model; launch "
            "with --multi_gpu or --cpu, or alone"
        )
    return found
