"""The error tree of `muser_prefill`. Each class has a stable `code` for logs and refusals."""

from __future__ import annotations


class PrefillError(Exception):
    """Base of every error that this package raises."""

    code = "prefill_error"


class CacheFull(PrefillError):
    """A caller asked for more positions than the cache, or the model, has."""

    code = "cache_full"


class CacheRangeError(PrefillError):
    """A caller asked for keys and values that have not been computed."""

    code = "cache_range"


class TokenOutOfRange(PrefillError):
    """A token id lies outside the model's vocabulary."""

    code = "token_out_of_range"


class UnknownComputeType(PrefillError):
    """A compute type was named that the decoder does not have."""

    code = "unknown_compute_type"


class ProducerBusy(PrefillError):
    """As many handoffs as the producer takes are computing or waiting."""

    code = "busy"


class JobCancelled(PrefillError):
    """The reader of a handoff has gone, so its computation was stopped."""

    code = "cancelled"


class JobFailed(PrefillError):
    """A handoff's computation failed; the producer's log says how."""

    code = "prefill_failed"


class DeviceUnavailable(PrefillError):
    """The configured device is unknown, or not on this machine."""

    code = "device_unavailable"
