from __future__ import annotations

from typing import Any

ITEM = {"id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "muser", "muser": {"lane": "native"}}


def test_the_list_holds_the_served_model(kit: Any) -> None:
    response = kit.caller().request("GET", "/v1/models")
    assert (response.status_code, response.json()) == (200, {"object": "list", "data": [ITEM]})


def test_a_model_is_found_by_name_and_alias(kit: Any) -> None:
    kit.backend.aliases = frozenset({"org/tiny"})
    for name in ("tiny", "org/tiny"):
        response = kit.caller().request("GET", f"/v1/models/{name}")
        assert (response.status_code, response.json()) == (200, ITEM)


def test_another_model_is_not_found(kit: Any) -> None:
    response = kit.caller().request("GET", "/v1/models/org/other")
    assert response.status_code == 404
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("model_not_found", "model")


def test_health_says_that_the_process_lives(kit: Any) -> None:
    kit.backend.is_ready = (False, "loading")
    response = kit.caller().request("GET", "/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_ready_names_the_reason_when_it_is_not(kit: Any) -> None:
    caller = kit.caller()
    response = caller.request("GET", "/ready")
    assert (response.status_code, response.json()) == (200, {"status": "ready", "reason": "", "producers": []})
    kit.backend.is_ready = (False, "the engine is loading")
    response = caller.request("GET", "/ready")
    body = {"status": "not ready", "reason": "the engine is loading", "producers": []}
    assert (response.status_code, response.json()) == (503, body)


def test_ready_lists_the_producers_which_do_not_decide_it(kit: Any) -> None:
    gone = {"name": "a:1", "state": "unreachable", "reason": "gone"}
    kit.backend.status = {"producers": [gone]}
    response = kit.caller().request("GET", "/ready")
    assert (response.status_code, response.json()["producers"]) == (200, [gone])


def test_a_status_that_fails_is_a_500_and_the_next_request_works(kit: Any) -> None:
    kit.backend.status = None
    caller = kit.caller()
    response = caller.request("GET", "/v1/models")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    kit.backend.status = {"lane": "native"}
    assert caller.request("GET", "/v1/models").status_code == 200
