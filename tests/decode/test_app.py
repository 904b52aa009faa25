from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from muser_decode.app import create_app
from muser_decode.template import TemplateUnusable


def backend(chat_template: str | None) -> Any:
    tokenizer = SimpleNamespace(
        chat_template=chat_template, special_ids={}, bos_id=None, eos_ids=frozenset(), adds_bos=False, encode=list
    )
    return SimpleNamespace(tokenizer=tokenizer)


def test_a_checkpoint_without_a_template_is_refused_unless_one_is_configured() -> None:
    with pytest.raises(TemplateUnusable, match="no chat template"):
        create_app(backend(None))
    assert create_app(backend(None), chat_template="{{ messages[0].content }}")


def test_the_paths_that_are_served() -> None:
    app = create_app(backend("x"))
    served = {(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    assert served == {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/apply-template"),
        ("POST", "/explain-cache"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{model:path}"),
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/"),
    }
