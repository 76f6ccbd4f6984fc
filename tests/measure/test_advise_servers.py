"""Advice from servers by URL: measured as `measure` does, advised from as `advise --record` does."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from serving import command, mock

from foredraft.measure.records import RecordFile, read_record

PLAIN = {"ttft_s": 0.01, "inter_token_s": 0.002}
FAST = {"ttft_s": 0.01, "inter_token_s": 0.001, "levels": 3, "accept_rate": 0.8}
ASKED = ["--limit", "2", "--max-tokens", "8"]


def test_servers_are_measured_and_advised_from(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "kept.jsonl"
    with mock(**PLAIN) as base, mock(**FAST) as fast:
        servers = ["--baseline", base, "--variant", f"fast={fast}", *ASKED]
        assert command("advise", *servers, "--load", "1,2", "--out", str(out), "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert command("advise", *servers, "--load", "1") == 0
    shown = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [out]
    record = read_record([out])
    assert {(r.arm, r.load) for r in record.results} == {(a, n) for a in ("baseline", "fast") for n in "12"}
    assert [(one["arm"], one["load"]) for one in told["estimates"]] == [("fast", "1"), ("fast", "2")]
    good, *_, short = told["reasons"]  # between them what depends on times
    assert "over 70%, a good draft for this" in good
    assert "(median 8)" in short
    assert f"- {short}" in shown
    assert "foredraft serve" not in shown  # what a server drafts with is not known by its name
    assert command("advise", "--record", str(out), "--json") == 0
    assert json.loads(capsys.readouterr().out) == told


def test_an_interrupt_advises_from_what_was_measured(monkeypatch: Any, capsys: Any) -> None:
    seen = []

    def interrupted(self: RecordFile, result: Any) -> None:
        seen.append(result)
        add(self, result)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    add = RecordFile.add
    monkeypatch.setattr(RecordFile, "add", interrupted)
    with mock(**PLAIN) as base, mock(**FAST) as fast:
        servers = ["--baseline", base, "--variant", f"fast={fast}", *ASKED, "--load", "1"]
        assert command("advise", *servers) == 130
    assert "Load 1: fast drafted 3.0 a step" in capsys.readouterr().out


def test_requests_that_failed_are_told(capsys: Any) -> None:
    with mock(**PLAIN) as base, mock(**FAST, most=1) as fast:
        servers = ["--baseline", base, "--variant", f"fast={fast}", *ASKED, "--load", "2"]
        assert command("advise", *servers) == 0
    assert "fast at load 2: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--baseline", "URL"], "there is nothing to compare: name a baseline and a variant"),
        (["--variant", "fast=URL"], "there is nothing to compare: name a baseline and a variant"),
        (
            ["--baseline", "URL", "--variant", "a=URL", "--measured", "x"],
            "leave out --record, --baseline and",
        ),
        (
            ["--baseline", "URL", "--variant", "a=URL", "--limit", "1", "--load", "1"],
            "no variant that drafted",
        ),
        (["--record", "x", "--out", "y"], "--out keeps what servers were measured at"),
    ],
)
def test_what_cannot_be_advised_is_one_line(args: list[str], message: str, capsys: Any) -> None:
    with mock(**PLAIN) as url:
        assert command("advise", *(arg.replace("URL", url) for arg in args)) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "\n" not in shown.err.strip()
