"""GET /, /docs and /openapi.json: what people read in a browser. Nothing in it comes from another host."""

from __future__ import annotations

from importlib import metadata, resources

from starlette.responses import HTMLResponse, JSONResponse, Response

from muser_decode.api.openapi import document

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""A page may run its own script and talk to this node. Other hosts and frames are out."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Pages:
    """The two pages, read once, and the document that one of them shows."""

    def __init__(self) -> None:
        folder = resources.files("muser_decode") / "page"
        self._chat = (folder / "chat.html").read_text(encoding="utf-8")
        self._docs = (folder / "docs.html").read_text(encoding="utf-8")
        self._document = document(metadata.version("muser"))

    async def chat(self) -> Response:
        """Return the page to chat and to see the node's state."""
        return HTMLResponse(self._chat, headers=HEADERS)

    async def docs(self) -> Response:
        """Return the page that shows the OpenAPI document."""
        return HTMLResponse(self._docs, headers=HEADERS)

    async def openapi(self) -> Response:
        """Return the OpenAPI document."""
        return JSONResponse(self._document)
