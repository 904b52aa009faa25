from __future__ import annotations

import re
from typing import Any

import pytest

from muser_decode.api.openapi import OPERATIONS


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_needs_nothing_from_elsewhere(kit: Any, path: str) -> None:
    response = kit.caller().request("GET", path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    # No other host, no file beside the page, no text taken as markup.
    assert not re.search(r"(?:src|href)=[\"'](?!/|#|data:)", response.text)
    assert not re.search(r"https?://(?!www\.w3\.org/)", response.text)
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\b", response.text)


def test_what_can_be_read_can_be_asked_for_its_headers(kit: Any) -> None:
    caller = kit.caller()
    for path in ("/", "/docs", "/openapi.json", "/health", "/ready", "/v1/models", "/v1/models/tiny"):
        got, asked = caller.request("GET", path), caller.request("HEAD", path)
        assert (asked.status_code, asked.headers) == (got.status_code, got.headers)
    assert caller.request("HEAD", "/v1/chat/completions").status_code == 405


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_calls_only_what_is_served(kit: Any, path: str) -> None:
    called = set(re.findall(r"(?:fetch|call)\(\"([^\"]+)\"", kit.caller().request("GET", path).text))
    assert called
    assert called <= {operation.path for operation in OPERATIONS}


def test_the_chat_page_shows_the_key_with_every_call_and_keeps_it_for_its_tab_alone(kit: Any) -> None:
    page = kit.caller().request("GET", "/").text
    # The one place that talks to the node is the one that adds the key.
    assert re.findall(r"\bfetch\(([^,)]*)", page) == ["path"]
    assert page.count("authorization") == 1
    assert "sessionStorage" in page
    assert not re.search(r"localStorage|document\.cookie|indexedDB", page)
