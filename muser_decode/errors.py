"""The error tree of `muser_decode`. Each class has a stable `code` for logs and answers."""

from __future__ import annotations


class DecodeError(Exception):
    """Base of every error that this package raises."""

    code = "decode_error"


class ModelNotSupported(DecodeError):
    """The decoder cannot run this model spec as it should be run. The message names what is missing."""

    code = "model_not_supported"


class RequestInvalid(DecodeError):
    """A generation request that cannot be run: the caller's fault. The message names what is out of range."""

    code = "request_invalid"


class EngineBusy(DecodeError):
    """The queue of waiting requests is full; the same request may be accepted a little later."""

    code = "engine_busy"


class EngineStopped(DecodeError):
    """The engine does not take requests: not started, stopping, or its thread ended."""

    code = "engine_stopped"


class CacheError(DecodeError):
    """A caller asked the KV cache for positions that it cannot hold or does not have."""

    code = "cache"


class StagedChunkInvalid(DecodeError):
    """A source staged a chunk that does not continue the cache or does not cover its layers: the source's fault."""

    code = "staged_chunk_invalid"


class HttpServerFailed(DecodeError):
    """The HTTP server ended although nobody asked it to."""

    code = "http_server_failed"
