"""Where compiled kernels are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft import jit
from foredraft.cache import kernel_sources


def test_kernels_are_kept_by_their_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    for registers, ending in ((False, ""), (True, "-amx")):
        monkeypatch.setattr(jit, "MATRIX_REGISTERS", registers)
        assert jit._directory() == str(tmp_path / "kernels" / (kernel_sources() + ending))


def test_kernels_need_no_cache_that_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file"))
    found = Path(jit._directory())
    assert found.is_dir()
    assert tmp_path not in found.parents
