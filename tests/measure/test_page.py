"""The report page: one file that needs nothing else, and that a browser shows, light and dark."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from foredraft.measure.page import plots, render, worst, write_page
from foredraft.measure.records import Acceptance, ArmInfo, Header, Record, Result

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def made_up() -> Record:
    """Two arms, two loads, two categories; figures made up by a rule."""
    names = ("none", "ngram", "eagle")
    arms = tuple(ArmInfo(name, "engine", "tiny", name, "here", "ids") for name in names)
    machine = {"cpu": "c", "cores": 2, "memory_gb": 8, "system": "s"}
    header = Header("foredraft measure", "now", machine, {"a": "1"}, arms, ("1", "4"), 8, 0, 32)
    record = Record(header)
    for load in header.loads:
        for number in range(8):
            for place, arm in enumerate(names):
                total = (1 + number / 8) * (1 + (load == "4")) / (1 + 0.3 * place / int(load))
                told = Acceptance("engine", 10, 30 * place, 30 * place, 12 * place, 32, (8, 4)[: 2 * place])
                record.results.append(
                    Result(
                        f"r{number}",
                        ("chat", "<code>")[number % 2],
                        arm,
                        load,
                        0,
                        0.0,
                        total,
                        total / 5,
                        32,
                        text="<b>hello</b>",
                        acceptance=told,
                    )
                )
    return record


def test_the_page_needs_nothing_else() -> None:
    page = render(made_up())
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert "<b>hello" not in page
    assert "&lt;b&gt;hello" in page
    assert page.count("<svg") == len(plots(made_up())) == 5
    assert "nan" not in page
    assert len(worst(made_up())) == 8


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_shows_it_light_and_dark(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    path = tmp_path / "report.html"
    write_page(made_up(), path)
    backs = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 900})
            faults: list[str] = []
            page.on("console", lambda message, seen=faults: seen.append(message.text))
            page.goto(path.as_uri())
            backs.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert page.evaluate("document.documentElement.scrollWidth") <= 1200
            assert page.evaluate("document.querySelectorAll('svg circle').length") > 4
            assert faults == []
            page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
        browser.close()
    assert backs[0] != backs[1]
