"""A real browser without a window: Debian's chromium, driven by Playwright, which brings none of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 30_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium here: the page is not tested (Debian: chromium)")
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=path,
            headless=True,
            args=list(FLAGS),
            viewport={"width": 1100, "height": 720},
        )
        context.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        yield context
        context.close()


@dataclass
class Seen:
    """A page, every address that it asked for, and what went wrong in it."""

    page: Page
    asked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def shot(self, folder: Path, name: str) -> None:
        """Leave a picture for a person to look at."""
        self.page.screenshot(path=folder / f"{name}.png")


@pytest.fixture
def seen(browser: BrowserContext) -> Iterator[Seen]:
    page = browser.new_page()
    seen = Seen(page)
    page.on("request", lambda request: seen.asked.append(request.url))
    page.on("pageerror", lambda error: seen.wrong.append(str(error)))
    page.on("console", lambda message: seen.wrong.append(message.text) if message.type == "error" else None)
    yield seen
    page.close()
