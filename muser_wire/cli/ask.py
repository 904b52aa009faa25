"""One chat over HTTP, streamed: what a client of the decode node sees, with the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field

from muser_wire.errors import WireError

REQUEST_TIMEOUT_S = 300.0
"""How long a node may take from one byte of an answer to the next; a local prefill sends none meanwhile."""

JsonObject = dict[str, object]


class AskFailed(WireError):
    """The endpoint could not be reached, refused the request, or broke off its answer."""

    code = "ask_failed"


@dataclass(frozen=True)
class Answer:
    """A complete answer. `account` is the node's `muser` object, `usage` OpenAI's."""

    text: str
    account: JsonObject = field(default_factory=dict)
    usage: JsonObject = field(default_factory=dict)

    @property
    def route(self) -> str:
        """How the prompt was prefilled, in the node's word."""
        return str(self.account.get("route", "unknown"))

    @property
    def reason(self) -> str:
        """Why the route is not remote; empty when it is."""
        return str(self.account.get("reason", ""))


@dataclass(frozen=True)
class Endpoint:
    """A decode node's HTTP port. `key` is shown where the node wants one; `tls` None: plain HTTP."""

    port: int
    host: str = "127.0.0.1"
    key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        """The address that a client is given."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls is None else 'https'}://{host}:{self.port}"

    def model_id(self) -> str:
        """Return the name of the served model.

        Raises:
            AskFailed: there was no usable answer.
        """
        with self._request("GET", "/v1/models", None) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise AskFailed(f"{self.url}/v1/models gave no model: {error}") from error

    def explain_cache(self, body: JsonObject) -> JsonObject:
        """Return what the node says of the prompt that a body asks for: which blocks of it are held.

        Raises:
            AskFailed: the request was refused, or there was no usable answer.
        """
        with self._request("POST", "/explain-cache", body) as response:
            try:
                answer = json.load(response)
            except ValueError as error:
                raise AskFailed(f"{self.url}/explain-cache gave no JSON: {error}") from error
        if not isinstance(answer, dict):
            raise AskFailed(f"{self.url}/explain-cache gave no JSON object")
        return answer

    def ask(self, prompt: str, max_tokens: int, on_text: Callable[[str], None]) -> Answer:
        """Send one user message, greedy; call `on_text` with each piece of text as it comes; return the whole.

        Raises:
            AskFailed: the request was refused, or the stream ended before its end mark.
        """
        body: JsonObject = {
            "model": self.model_id(),
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return read_answer(self.chunks(body), on_text)

    def chunks(self, body: JsonObject) -> Generator[JsonObject, None, None]:
        """Yield the chunks of a streamed chat as they come. Closing the iterator closes the connection.

        Raises:
            AskFailed: the request was refused, or the stream ended before its end mark.
        """
        with self._request("POST", "/v1/chat/completions", body) as response:
            yield from events(response)

    def _connection(self) -> http.client.HTTPConnection:
        if self.tls is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S)
        return http.client.HTTPSConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S, context=self.tls)

    def _headers(self) -> dict[str, str]:
        shown = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return {"content-type": "application/json", **shown}

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: JsonObject | None) -> Iterator[http.client.HTTPResponse]:
        """Yield a response of status 200. Errors of the connection while it is read are mapped too."""
        connection = self._connection()
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, self._headers())
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise AskFailed(f"{method} {path}: HTTP {response.status}: {error_text(response.read())}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise AskFailed(f"{method} {path}: {error or type(error).__name__}") from error
        finally:
            connection.close()


def events(lines: Iterable[bytes]) -> Iterator[JsonObject]:
    """Yield the JSON object of each server-sent event up to `[DONE]`.

    Raises:
        AskFailed: an event reports an error or is not JSON, or the lines end without `[DONE]`.
    """
    for line in lines:
        name, _, value = line.decode().rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if name != "data":
            continue
        if value == "[DONE]":
            return
        try:
            event = json.loads(value)
        except ValueError as error:
            raise AskFailed(f"an event is not JSON: {error}") from error
        if "error" in event:
            raise AskFailed(error_text(value.encode()))
        yield event
    raise AskFailed("the answer broke off before its end")


def read_answer(chunks: Iterable[JsonObject], on_text: Callable[[str], None]) -> Answer:
    """Return what a stream of chat completion chunks adds up to."""
    pieces: list[str] = []
    account: JsonObject = {}
    usage: JsonObject = {}
    for chunk in chunks:
        if piece := delta_text(chunk):
            pieces.append(piece)
            on_text(piece)
        account = json_object(chunk, "muser") or account
        usage = json_object(chunk, "usage") or usage
    return Answer("".join(pieces), account, usage)


def delta_text(chunk: JsonObject) -> str:
    """Return the text that one chunk adds; most control chunks add none."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return ""
    return str(json_object(choices[0], "delta").get("content") or "")


def json_object(holder: JsonObject, name: str) -> JsonObject:
    """Return the object under `name`, or an empty one."""
    value = holder.get(name)
    return value if isinstance(value, dict) else {}


def error_text(body: bytes) -> str:
    """Return the message of an OpenAI error object, or the start of whatever came instead.

    >>> error_text(b'{"error": {"message": "no such model", "type": "invalid_request_error"}}')
    'no such model'
    """
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")
