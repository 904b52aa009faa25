"""Requests made of the OpenAPI document, some of which break it: none is answered with a 5xx.

schemathesis makes the bodies; its own plugin for pytest is not used, since it lags behind pytest.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from local_backend import local_backend, served
from schemathesis import GenerationMode

from muser_decode.api.openapi import OPERATIONS

EXAMPLES = int(os.environ.get("MUSER_SCHEMA_EXAMPLES", "10"))
"""Bodies of each kind for each operation. An answer of the tiny model costs some milliseconds a token."""

DRAINED_S = 30.0

DESCRIBED = [operation for operation in OPERATIONS if operation.path != "/openapi.json"]
"""schemathesis leaves out the document itself."""


@pytest.fixture(scope="module")
def described(tiny_llama: Any) -> Any:
    with local_backend(tiny_llama, max_queue=64) as backend, served(backend) as url:
        # Answers stay short whatever a body asks for.
        backend.context_tokens = 160
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")
        end = time.monotonic() + DRAINED_S
        while backend.engine.load and time.monotonic() < end:
            time.sleep(0.05)
        # Whatever was asked, nothing is left running.
        assert backend.engine.load == 0


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fits", "breaks"])
@pytest.mark.parametrize("operation", DESCRIBED, ids=[operation.name for operation in DESCRIBED])
def test_no_request_breaks_the_server(described: Any, operation: Any, mode: GenerationMode) -> None:
    if mode is GenerationMode.NEGATIVE and operation.body is None:
        return
    target = described[operation.path][operation.method]

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(case=target.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call(timeout=60)
        assert response.status_code < 500, (case.body, response.text)
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    ask()


def test_the_document_describes_every_operation(described: Any) -> None:
    named = {(operation.ok().method.upper(), operation.ok().path) for operation in described.get_all_operations()}
    assert named == {(operation.method, operation.path) for operation in DESCRIBED}
