"""POST /tokenize, /detokenize, /apply-template and /explain-cache: what the model reads, without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from muser_decode.api.answering import served
from muser_decode.api.body import parse_object
from muser_decode.api.completions import read_ids
from muser_decode.api.errors import invalid
from muser_decode.api.fields import Fields
from muser_decode.api.parameters import HARMLESS, refuse_unsupported
from muser_decode.api.preparing import Kitchen
from muser_decode.api.schemas import Asked, read_asked

RENDERING = frozenset({"add_generation_prompt", "add_special_tokens", "chat_template", "continue_final_message"})
"""What would change how a conversation is written. The rest of a chat's body concerns its answer, and there is none."""


class TextEndpoints:
    """Turns texts, conversations and token ids into one another."""

    def __init__(self, kitchen: Kitchen) -> None:
        self._kitchen = kitchen

    async def tokenize(self, request: Request) -> Response:
        """Return the ids of a text (`prompt` or `content`), or of a conversation (`messages`).

        Raises:
            ApiError: the request is refused.
        """
        return await self._apart(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids; control tokens are spelled out.

        Raises:
            ApiError: the request is refused.
        """
        return await self._apart(request, self._detokenize)

    async def apply_template(self, request: Request) -> Response:
        """Return a conversation as the model reads it, control tokens spelled out.

        Raises:
            ApiError: the request is refused.
        """
        return await self._apart(request, self._apply_template)

    async def explain_cache(self, request: Request) -> Response:
        """Return what is held of a prompt, given as ids (`tokens`), a text or a conversation, and why no more.

        Raises:
            ApiError: the request is refused.
        """
        return await self._apart(request, self._explain_cache)

    async def _apart(self, request: Request, work: Callable[[Fields], dict[str, object]]) -> Response:
        async def answer(_request: Request, body: bytes) -> Response:
            fields = Fields(self._with_model(parse_object(body)))
            return JSONResponse(await asyncio.to_thread(work, fields))

        return await served(request, self._kitchen.limits.max_body_nbytes, answer)

    def _with_model(self, body: dict[str, object]) -> dict[str, object]:
        """Return the body with the served model where it names none: there is no choice to make here."""
        return body if body.get("model") is not None else {**body, "model": self._kitchen.backend.model_id}

    def _tokenize(self, fields: Fields) -> dict[str, object]:
        self._kitchen.check_model(str(fields.text("model")))
        ids = self._prompt_ids(fields)
        return {"tokens": ids, "count": len(ids), "max_model_len": self._kitchen.backend.context_tokens}

    def _explain_cache(self, fields: Fields) -> dict[str, object]:
        self._kitchen.check_model(str(fields.text("model")))
        given = fields.raw("tokens")
        ids = self._prompt_ids(fields) if given is None else self._known_ids(given)
        return dict(self._kitchen.backend.explain_held(ids))

    def _prompt_ids(self, fields: Fields) -> list[int]:
        if fields.raw("messages") is not None:
            return list(self._kitchen.prompt(_conversation(fields)).ids)
        return self._text_ids(fields)

    def _text_ids(self, fields: Fields) -> list[int]:
        text = fields.text("prompt")
        text = fields.text("content") if text is None else text
        if text is None:
            raise invalid(
                "prompt", "Missing required parameter: 'prompt', or 'messages'.", "missing_required_parameter"
            )
        tokenizer = self._kitchen.backend.tokenizer
        begins = fields.boolean("add_special_tokens") is not False and tokenizer.adds_bos
        return [*([tokenizer.bos_id] if begins and tokenizer.bos_id is not None else []), *tokenizer.encode(text)]

    def _detokenize(self, fields: Fields) -> dict[str, object]:
        self._kitchen.check_model(str(fields.text("model")))
        if fields.raw("tokens") is None:
            raise fields.missing("tokens")
        return {"prompt": self._spelled(self._known_ids(fields.raw("tokens")))}

    def _known_ids(self, given: object) -> list[int]:
        ids = list(read_ids("tokens", given))
        size = self._kitchen.backend.tokenizer.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            raise invalid("tokens", f"Invalid 'tokens': token ids go from 0 to {size - 1}.")
        return ids

    def _apply_template(self, fields: Fields) -> dict[str, object]:
        ids = self._kitchen.prompt(_conversation(fields)).ids
        return {"prompt": self._spelled(ids), "tokens": ids}

    def _spelled(self, ids: list[int] | tuple[int, ...]) -> str:
        return b"".join(map(self._kitchen.spelling.data, ids)).decode("utf-8", "replace")


def _conversation(fields: Fields) -> Asked:
    refuse_unsupported(fields.values(), frozenset(HARMLESS) - RENDERING)
    return read_asked(fields)
