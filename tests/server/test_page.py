"""The page in Debian's Chromium: a message, coloured tokens, drafting on and off, keyboard, phone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, server: Any) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1100, "height": 800})
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.goto(server.url)
    yield opened
    opened.close()
    assert not problems


def test_tokens_arrive_coloured(page: Page, server: Any) -> None:
    expect(page.locator("#model")).to_have_text("tiny, draft ngram")
    page.keyboard.type("the cat")  # the field has the focus
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_be_enabled(timeout=20_000)
    answer = page.locator(".turn.assistant")
    assert answer.locator(".token.a").count() > 0
    assert answer.locator(".token.b, .token.r").count() > 0
    colours = {
        answer.locator(f".token.{origin}").first.evaluate("node => getComputedStyle(node).backgroundColor")
        for origin in "ab"
    }
    assert len(colours) == 2
    for figure in ("#mean", "#rate", "#speed"):
        expect(page.locator(figure)).to_have_text(re.compile(r"\d"))
    assert page.locator("#chart rect").count() > 0
    assert server.idle()


def test_both_ways_and_without_drafts(page: Page) -> None:
    page.locator("#both").check()
    page.locator("#say").fill("the mat")
    page.locator("#send").click()
    expect(page.locator("#gain")).to_have_text(re.compile(r"\d\.\d\d"), timeout=20_000)
    expect(page.locator("#send")).to_be_enabled(timeout=20_000)
    plain, drafted = page.locator(".turn.assistant").all()
    shown = "node => [...node.querySelectorAll('.token')].map((one) => one.textContent).join('')"
    assert plain.evaluate(shown) == drafted.evaluate(shown)
    assert plain.locator(".token.a").count() == 0
    page.locator("#draft").uncheck()
    page.locator("#both").uncheck()
    page.locator("#say").fill("again")
    page.locator("#say").press("Enter")
    expect(page.locator("#send")).to_be_enabled(timeout=20_000)
    assert page.locator(".turn.assistant").nth(2).locator(".token.a").count() == 0


def test_an_error_is_shown_and_an_answer_can_be_stopped(page: Page, server: Any) -> None:
    page.locator("#tokens").fill("1500")
    page.locator("#say").fill("the cat")
    page.locator("#say").press("Enter")
    expect(page.locator(".turn.assistant .token").first).to_be_attached(timeout=20_000)
    page.locator("#stop").press("Enter")  # a click waits until the page, which grows, is at rest
    expect(page.locator("#send")).to_be_enabled()
    assert server.idle()
    page.locator("#reset").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_an_answer_that_ends_late_is_no_part_of_a_new_conversation(page: Page) -> None:
    page.locator("#tokens").fill("1500")
    page.locator("#say").fill("the cat")
    page.locator("#say").press("Enter")
    expect(page.locator(".turn.assistant .token").first).to_be_attached(timeout=20_000)
    page.locator("#reset").press("Enter")
    expect(page.locator("#send")).to_be_enabled()
    page.locator("#tokens").fill("4")
    page.locator("#say").fill("the mat")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.locator("#say").press("Enter")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "the mat"}]
    expect(page.locator("#send")).to_be_enabled(timeout=20_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(browser: Any, server: Any, scheme: Any, tmp_path: Path) -> None:
    phone = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    phone.goto(server.url)
    phone.locator("#say").fill("the cat")
    phone.locator("#say").press("Enter")
    expect(phone.locator("#send")).to_be_enabled(timeout=20_000)
    assert phone.evaluate("document.documentElement.scrollWidth") <= 360
    ground = phone.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(251, 251, 249)") == (scheme == "light")
    phone.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
    phone.close()
