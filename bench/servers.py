"""One chat over HTTP: this node, mlx-lm's server, llama-cpp-python's and llama-server: same messages, own caches."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from bench.conversations import messages
from bench.driver import PEERS_DIR, ROOT, BenchError, thread_limits
from muser_wire.model.tokenizer import Tokenizer

MUSER, MLX_LM, LLAMACPP = "muser-decode", "mlx-lm's server", "llama-cpp-python's server"
LLAMA_SERVER = "llama-server"
START_S = 120.0
ANSWER_S = 240.0
LOOK_S = 0.1
MEMORY_MB = 1024

LENGTH_SLACK = 2
"""By how many tokens prompts may differ: a beginning of the text, for one."""

HIT = re.compile(r"(\d+) prefix-match hit")
WHOLE = "full prompt already cached"


@dataclass
class Server:
    """One server's process. `cached` says how many tokens of the last prompt it had, by its usage and new log text."""

    name: str
    command: list[str]
    log: Path
    port: int
    threads: int
    cached: Callable[[dict[str, Any], str], int]
    answers: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        environment = {**os.environ, **thread_limits(self.threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(self.command, stdout=out, stderr=out, env=environment)

    def wait(self) -> None:
        """Return when it answers.

        Raises:
            BenchError: it ended, or did not answer in time; the message holds the end of its log.
        """
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    pass
                self._models()
            except (OSError, http.client.HTTPException):
                time.sleep(LOOK_S)
                continue
            return
        raise BenchError(f"{self.name} does not answer:\n{self.log.read_text(errors='replace')[-2000:]}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def ask(self, asked: list[dict[str, str]], tokens: int) -> str:
        """Stream a greedy answer, and note the time to its first text, and what was cached; return the text."""
        seen = len(self.log.read_bytes())
        body = {
            "model": "muser" if self.name == MUSER else "default_model",
            "messages": asked,
            "temperature": 0,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        started = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        text, first_s, usage = "", 0.0, {}
        for event in _events(self.name, connection.getresponse()):
            usage = event.get("usage") or usage
            piece = next((choice["delta"].get("content") or "" for choice in event.get("choices") or []), "")
            if piece and not first_s:
                first_s = time.perf_counter() - started
            text += piece
        connection.close()
        new = self.log.read_bytes()[seen:].decode(errors="replace")
        answer = {"first_s": first_s, "cached": self.cached(usage, new), "prompt": usage.get("prompt_tokens", 0)}
        self.answers.append({**answer, "text": text})
        return text

    def _models(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        response.read()
        connection.close()
        if response.status != http.client.OK:
            # It listens, and still loads.
            raise http.client.HTTPException(f"{self.name} answered {response.status}")


def _events(name: str, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events.

    Raises:
        BenchError: the answer is no stream.
    """
    if response.status != http.client.OK:
        raise BenchError(f"{name} answered {response.status}: {response.read()[:500]!r}")
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def cached_by_usage(usage: dict[str, Any], _log: str) -> int:
    """Return what a usage object says was cached."""
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def cached_by_log(usage: dict[str, Any], log: str) -> int:
    """Return what llama-cpp-python logged of its last prompt.

    >>> cached_by_log({}, "Llama.generate: 7 prefix-match hit, remaining 2 prompt tokens to eval")
    7
    """
    if WHOLE in log:
        return int(usage.get("prompt_tokens", 0))
    found = HIT.findall(log)
    return int(found[-1]) if found else 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def muser(model: Path, folder: Path, threads: int) -> Server:
    """Start the decode node, alone, with memory for prompts."""
    port = free_port()
    numerics = ["--dtype", "f32", "--kv", "f16", "--threads", str(threads)]
    sizes = ["--cache-memory-mb", str(MEMORY_MB), "--port", str(port)]
    command = [sys.executable, "-m", "muser_decode", "serve", "--model", str(model), *numerics, *sizes]
    return Server(MUSER, command, folder / "muser.log", port, threads, cached_by_usage)


def mlx_lm(python: Path, model: Path, folder: Path, threads: int) -> Server:
    """Start mlx-lm's server over a folder of f32 weights, with this product's BLAS."""
    port = free_port()
    command = [str(python), str(PEERS_DIR / "mlxlm_server.py"), "--model", str(model), "--port", str(port)]
    return Server(MLX_LM, command, folder / "mlx-lm.log", port, threads, cached_by_usage)


def llamacpp(python: Path, model: Path, folder: Path, threads: int, context: int) -> Server:
    """Start llama-cpp-python's server, which goes on from the prompt before, with flash attention."""
    port, count = free_port(), str(threads)
    sizes = ["--n_ctx", str(context), "--n_batch", str(context), "--n_threads", count, "--n_threads_batch", count]
    flags = ["--flash_attn", "true", "--verbose", "true", "--port", str(port), "--host", "127.0.0.1"]
    command = [str(python), "-m", "llama_cpp.server", "--model", str(model), *sizes, *flags]
    return Server(LLAMACPP, command, folder / "llama.log", port, threads, cached_by_log)


def llama_server(binary: Path, model: Path, folder: Path, threads: int, context: int) -> Server:
    """Start llama.cpp's own server with one slot, flash attention, and its own defaults for what it keeps."""
    port, count = free_port(), str(threads)
    sizes = ["--ctx-size", str(context), "--parallel", "1", "--threads", count, "--threads-batch", count]
    flags = ["--flash-attn", "on", "--host", "127.0.0.1", "--port", str(port)]
    command = [str(binary), "--model", str(model), *sizes, *flags]
    return Server(LLAMA_SERVER, command, folder / "llama-server.log", port, threads, cached_by_usage)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer and its template as a Hugging Face folder has them."""
    # No part of the product writes one; it looks for control tokens itself.
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())  # noqa: SLF001
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in tokenizer.special_ids])
    (folder / "tokenizer.json").write_text(backend.to_str())
    names = {token_id: name for name, token_id in tokenizer.special_ids.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        "eos_token": next(names[token_id] for token_id in sorted(tokenizer.eos_ids)),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@dataclass(frozen=True)
class Talk:
    """A chat: how long its system prompt is, how many turns it has, how long each reply is."""

    tokenizer: Tokenizer
    system_tokens: int
    turns: int
    reply_tokens: int


def converse(contestants: list[Server], talk: Talk) -> None:
    """Have every server answer each turn of one chat; the replies in it are those of the first server.

    Raises:
        BenchError: a server fails, or its prompt is not as long as the others'.
    """
    for server in contestants:
        server.wait()
    replies: list[str] = []
    for turn in range(talk.turns):
        asked = messages(talk.tokenizer, talk.system_tokens, turn, replies)
        texts = [server.ask(asked, talk.reply_tokens) for server in contestants]
        replies.append(texts[0])
        lengths = {server.name: server.answers[-1]["prompt"] for server in contestants}
        # Who counts no tokens says 0.
        counted = [length for length in lengths.values() if length]
        if max(counted) - min(counted) > LENGTH_SLACK:
            raise BenchError(f"the same messages have other lengths: {lengths}")
