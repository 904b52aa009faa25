"""The HTTP application: OpenAI's chat endpoint in front of one backend."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from muser_decode.api.backend import ChatBackend
from muser_decode.api.chat import ChatEndpoint
from muser_decode.api.errors import ApiError, FailureBarrier, answer_api_error, answer_http_error
from muser_decode.api.hosts import HostGuard
from muser_decode.api.limits import Limits
from muser_decode.api.models import ModelEndpoints
from muser_decode.template import ChatTemplate


def create_app(backend: ChatBackend, limits: Limits | None = None, chat_template: str | None = None) -> FastAPI:
    """Return the application. `chat_template` replaces the checkpoint's own.

    Bodies are read by hand, strictly and under a bound, so there is no generated schema to publish.

    Raises:
        TemplateUnusable: no chat template, or one that does not compile.
    """
    chat = ChatEndpoint(backend, ChatTemplate(backend.tokenizer, chat_template), limits or Limits())
    models = ModelEndpoints(backend)
    app = FastAPI(title="Muser", openapi_url=None, redirect_slashes=False)
    app.add_middleware(HostGuard)
    app.add_middleware(FailureBarrier)
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_api_route("/v1/chat/completions", chat.answer, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", models.list, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{model:path}", models.show, methods=["GET"], response_model=None)
    app.add_api_route("/health", models.health, methods=["GET"], response_model=None)
    app.add_api_route("/ready", models.ready, methods=["GET"], response_model=None)
    return app
