from __future__ import annotations

import re
from typing import Any

from muser_decode.api.openapi import OPERATIONS, document
from muser_decode.api.parameters import HARMLESS
from muser_decode.api.schema import CHAT, GENERATION


def test_the_document_and_the_routes_are_one_table(kit: Any) -> None:
    response = kit.caller().request("GET", "/openapi.json")
    paths = response.json()["paths"]
    assert {(m.upper(), path) for path, methods in paths.items() for m in methods} == {
        (operation.method, operation.path) for operation in OPERATIONS
    }
    assert response.json()["openapi"] == "3.1.0"


def test_every_reference_resolves_and_every_name_is_used_once() -> None:
    whole = document("1")
    text = str(whole)
    for reference in re.findall(r"#/components/schemas/(\w+)", text):
        assert reference in whole["components"]["schemas"]  # type: ignore[index]
    names = [operation.name for operation in OPERATIONS]
    assert len(set(names)) == len(names)


def test_nothing_that_is_refused_is_offered() -> None:
    assert not set(HARMLESS) & (set(CHAT) | set(GENERATION))


def test_a_parameter_that_is_offered_is_read(kit: Any) -> None:
    """Each parameter of a chat, given a value of no type that it has, is refused by its own name."""
    caller = kit.caller()
    # `user` alone is taken as it comes and ignored.
    for name in (set(CHAT) | set(GENERATION)) - {"user"}:
        error = caller.chat(**{name: {"\u0000": []} if name != "tools" else 1}).json()["error"]
        assert error["param"].startswith(name), name
