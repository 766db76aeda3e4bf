"""Debian's Chromium, driven by Playwright; what is asked of a page is asked of its document."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.tools import tool

DESKTOP, PHONE = (1440, 900), (390, 844)
_TIMEOUT_MS = 30_000.0


@contextmanager
def start_browser() -> Iterator[Browser]:
    """One that is gone when the body ends. A machine without Chromium leaves the test out, with the reason."""
    program = tool("chromium", "apt-get install chromium")
    with sync_playwright() as playwright:
        # Its sandbox wants rights that root in a container has not got; the pages are our own.
        expect.set_options(timeout=_TIMEOUT_MS)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_page(
    browser: Browser,
    url: str,
    size: tuple[int, int] = DESKTOP,
    scheme: Literal["light", "dark"] = "light",
) -> Iterator[Page]:
    """A tab of its own. Fails where the page has an error, asks anybody else, or breaks its own security policy."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(_TIMEOUT_MS)
    page, complaints = context.new_page(), []

    def asked(address: str) -> None:
        if not address.startswith((f"{url}/", f"blob:{url}/", "data:image/svg+xml,")):
            complaints.append(f"asked {address}")

    def said(words: str) -> None:
        if "Content Security Policy" in words or "TrustedHTML" in words:
            complaints.append(words)

    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("request", lambda request: asked(request.url))
    page.on("console", lambda message: said(message.text))
    try:
        page.goto(url)
        yield page
        assert complaints == []
    finally:
        try:
            # A handler that is still at work when its page goes fails later, in whatever test asks the browser next.
            page.unroute_all(behavior="wait")
        finally:
            context.close()
