"""Every code block of the README runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
MAKE_TARGETS = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_block_runs(place: int) -> None:
    language, code = BLOCKS[place]
    assert language in ("python", "bash")
    if language == "python":
        subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
        return
    for line in code.splitlines():
        command = line.partition("#")[0].split()
        if command and command[0] == "make":  # this very suite is `make test`; the demo has tests of its own
            assert command[1] in MAKE_TARGETS
        elif command:
            assert command[0] == "foredraft"
            subprocess.run(f"{sys.executable} -m {line}", shell=True, check=True, timeout=240)
