"""The HTTP application: OpenAI's endpoints and their neighbours in front of one backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from muser_decode.api.backend import ChatBackend
from muser_decode.api.chat import ChatEndpoint
from muser_decode.api.completions import CompletionEndpoint
from muser_decode.api.errors import ApiError, FailureBarrier, answer_api_error, answer_http_error
from muser_decode.api.exposition import MetricsEndpoint
from muser_decode.api.hosts import LOOPBACK_NAMES, HostGuard
from muser_decode.api.keys import KeyGuard
from muser_decode.api.limits import Limits
from muser_decode.api.messages import MessagesEndpoint
from muser_decode.api.models import ModelEndpoints
from muser_decode.api.openapi import OPERATIONS
from muser_decode.api.pages import Pages
from muser_decode.api.preparing import Kitchen
from muser_decode.api.responses import ResponsesEndpoint
from muser_decode.api.texts import TextEndpoints
from muser_decode.entrance import Entrance
from muser_decode.template import ChatTemplate


def create_app(
    backend: ChatBackend,
    limits: Limits | None = None,
    chat_template: str | None = None,
    entrance: Entrance | None = None,
    exposition: Callable[[], bytes] | None = None,
) -> FastAPI:
    """Return the application. `chat_template` replaces the checkpoint's own; `entrance` None: this machine, no key.

    Bodies are read by hand, strictly and under a bound, so the framework's own schema stays off.

    Raises:
        TemplateUnusable: no chat template, or one that does not compile.
    """
    kitchen = Kitchen(backend, ChatTemplate(backend.tokenizer, chat_template), limits or Limits())
    app = FastAPI(title="Muser", openapi_url=None, redirect_slashes=False)
    if entrance is not None and entrance.keys is not None:
        app.add_middleware(KeyGuard, keys=entrance.keys)
    app.add_middleware(HostGuard, allowed=LOOPBACK_NAMES if entrance is None else entrance.names)
    app.add_middleware(FailureBarrier)
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    served = {**endpoints(kitchen), "metrics": MetricsEndpoint(exposition).answer}
    for operation in OPERATIONS:
        # A model's name may hold slashes.
        path = operation.path.replace("{model}", "{model:path}")
        # Whoever may read something may ask for its headers alone; the server leaves the body out.
        methods = ["GET", "HEAD"] if operation.method == "GET" else [operation.method]
        app.add_api_route(path, served[operation.name], methods=methods, response_model=None)
    return app


def endpoints(kitchen: Kitchen) -> dict[str, Callable[..., Any]]:
    """Return what answers each operation, by its name."""
    models, texts, pages = ModelEndpoints(kitchen.backend), TextEndpoints(kitchen), Pages()
    messages = MessagesEndpoint(kitchen)
    return {
        "chat": ChatEndpoint(kitchen).answer,
        "completions": CompletionEndpoint(kitchen).answer,
        "responses": ResponsesEndpoint(kitchen).answer,
        "messages": messages.answer,
        "count_tokens": messages.count,
        "tokenize": texts.tokenize,
        "detokenize": texts.detokenize,
        "apply_template": texts.apply_template,
        "explain_cache": texts.explain_cache,
        "models": models.list,
        "model": models.show,
        "health": models.health,
        "ready": models.ready,
        "openapi": pages.openapi,
        "docs": pages.docs,
        "page": pages.chat,
    }
