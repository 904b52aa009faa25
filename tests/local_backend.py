"""A decode node without router and producer: an engine over a checkpoint, the HTTP side in front of it, a socket."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muser_decode.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402 - after the BLAS that it is to use
import uvicorn  # noqa: E402

from muser_decode.app import create_app  # noqa: E402
from muser_decode.decoder import MlxDecoder  # noqa: E402
from muser_decode.engine.generation import Generation  # noqa: E402
from muser_decode.engine.loop import Engine, Submission  # noqa: E402
from muser_decode.engine.request import EventSink, GenerationRequest  # noqa: E402
from muser_decode.explaining import explain_held  # noqa: E402
from muser_wire.geometry import ElementType  # noqa: E402
from muser_wire.model.checkpoint import open_checkpoint  # noqa: E402
from muser_wire.model.tokenizer import Tokenizer, load_tokenizer  # noqa: E402

CHUNK = 16


@dataclass
class LocalBackend:
    """See `muser_decode.api.backend.ChatBackend`."""

    engine: Engine
    tokenizer: Tokenizer
    context_tokens: int
    model_id: str = "tiny"
    aliases: frozenset[str] = frozenset()
    created: int = 1

    @property
    def places(self) -> int:
        return self.engine.places

    def submit_all(self, parts: Sequence[tuple[GenerationRequest, EventSink]]) -> list[Generation]:
        return self.engine.submit_all([Submission(request, sink, None, "no producer") for request, sink in parts])

    def ready(self) -> tuple[bool, str]:
        return self.engine.healthy(), "engine"

    def explain_held(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        return explain_held(None, prompt_ids)

    def describe_status(self) -> dict[str, Any]:
        return {"requests": self.engine.load}


@contextlib.contextmanager
def local_backend(path: Path, max_queue: int = 4, **sizes: Any) -> Iterator[LocalBackend]:
    """Start an engine over the checkpoint at `path`, computing in f32; stop it afterwards."""
    checkpoint = open_checkpoint(path)
    engine = Engine(
        lambda: MlxDecoder(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=False),
        chunk_tokens=CHUNK,
        max_queue=max_queue,
        staging_nbytes=1 << 16,
        **sizes,
    )
    engine.start()
    try:
        yield LocalBackend(engine, load_tokenizer(path), checkpoint.spec.max_positions)
    finally:
        engine.stop()


@contextlib.contextmanager
def served(backend: LocalBackend, **options: Any) -> Iterator[str]:
    """Serve a backend over HTTP on loopback; give the URL. The options are those of `create_app`."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(backend, **options)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
