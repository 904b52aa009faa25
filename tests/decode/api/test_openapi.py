from __future__ import annotations

import ast
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from muser_decode import api
from muser_decode.api import completions, messages_request, responses_request, schemas
from muser_decode.api.keys import OPEN_PATHS
from muser_decode.api.openapi import (
    CHAT_BODY,
    COMPLETION_BODY,
    MESSAGES_BODY,
    OPERATIONS,
    RESPONSES_BODY,
    document,
)
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


def test_a_field_that_an_endpoint_offers_is_refused_by_those_that_do_not_read_it() -> None:
    offered = [set(body["properties"]) for body in (CHAT_BODY, COMPLETION_BODY, RESPONSES_BODY, MESSAGES_BODY)]
    # Labels, which change no answer.
    assert set.union(*offered) - set.intersection(*offered) - set(HARMLESS) == {"metadata", "user"}


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (CHAT_BODY, schemas.READ),
        (COMPLETION_BODY, completions.READ),
        (RESPONSES_BODY, responses_request.READ),
        (MESSAGES_BODY, messages_request.READ),
    ],
    ids=["chat", "completions", "responses", "messages"],
)
def test_nothing_that_is_refused_is_offered(body: Any, read: frozenset[str]) -> None:
    refused = set(HARMLESS) - read
    # Agents say of each request that it is not to be stored.
    assert set(body["properties"]) & refused <= {"store"}
    assert read & set(HARMLESS) == read


def sent_statuses() -> set[int]:
    """Every status that the source of the API gives an `ApiError` by name."""
    calls = [
        node
        for path in Path(api.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ApiError"
    ]
    named = [call.args[0] for call in calls if isinstance(call.args[0], ast.Attribute)]
    return {HTTPStatus[argument.attr].value for argument in named if ast.unparse(argument.value) == "HTTPStatus"}


def test_every_status_that_is_sent_is_described_and_no_other() -> None:
    assert {400, 401, 403, 404, 413, 415, 500, 503, 504} <= sent_statuses()
    paths: Any = document("1")["paths"]
    for operation in OPERATIONS:
        described = set(map(int, paths[operation.path][operation.method.lower()]["responses"]))
        assert described <= sent_statuses() | {200}
        assert 403 in described
        assert (401 in described) == (operation.path not in OPEN_PATHS)
        if operation.streams:
            assert described == sent_statuses() | {200}


def test_a_parameter_that_is_offered_is_read(kit: Any) -> None:
    """Each parameter of a chat, given a value of no type that it has, is refused by its own name."""
    caller = kit.caller()
    # `user` alone is taken as it comes and ignored.
    for name in (set(CHAT) | set(GENERATION)) - {"user"}:
        error = caller.chat(**{name: {"\u0000": []} if name != "tools" else 1}).json()["error"]
        assert error["param"].startswith(name), name
