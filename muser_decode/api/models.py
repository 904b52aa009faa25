"""GET /v1/models, /health and /ready: what is served, and whether."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse, Response

from muser_decode.api.backend import ChatBackend
from muser_decode.api.errors import ApiError


class ModelEndpoints:
    """Speaks of the one model that a backend serves."""

    def __init__(self, backend: ChatBackend) -> None:
        self._backend = backend

    async def list(self) -> Response:
        """Return OpenAI's list of models."""
        return JSONResponse({"object": "list", "data": [self._item()]})

    async def show(self, model: str) -> Response:
        """Return one model, asked for by its name or an alias.

        Raises:
            ApiError: 404, another model.
        """
        if model != self._backend.model_id and model not in self._backend.aliases:
            raise model_not_found(model)
        return JSONResponse(self._item())

    async def health(self) -> Response:
        """Say that the process lives, whatever the engine does."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """Say whether a request would be answered now: 503 and the reason where not. Producers do not decide it."""
        ready, reason = self._backend.ready()
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        body = {"status": "ready" if ready else "not ready", "reason": reason}
        producers = self._backend.describe_status().get("producers", [])
        return JSONResponse({**body, "producers": producers}, status_code=status)

    def _item(self) -> dict[str, object]:
        return {
            "id": self._backend.model_id,
            "object": "model",
            "created": self._backend.created,
            "owned_by": "muser",
            "muser": dict(self._backend.describe_status()),
        }


def model_not_found(model: str) -> ApiError:
    """Return the refusal of a model that is not served here."""
    return ApiError(HTTPStatus.NOT_FOUND, "model_not_found", f"The model {model!r} does not exist here.", param="model")
