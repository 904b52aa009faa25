"""What this node remembers of one producer's handoffs: failures, the link's rate, work under way, prompts it has seen.

Predictions are made of it, never correctness: a producer that has forgotten a prompt computes it again. No clock
here: `now_s` is any monotonic time in seconds.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

MAX_REST_S = 8.0
"""Most seconds between two tries of a producer that keeps failing: one that is back is used again within these."""

LINK_LIFETIME_S = 120.0
"""The fastest handoff within so many seconds is the link's rate: slower ones were held up by their computation."""

STEP_TOKENS = 128
"""Prompts are compared in steps of so many tokens."""

MAX_STEPS = 8192
"""Steps remembered of each producer, about a million tokens of prompts in 1 MB."""


class Rest:
    """How long to leave something alone that keeps failing: `first_s` seconds, then twice as long each time."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._failures = 0

    def failed(self) -> float:
        """Return the seconds to wait after one more failure.

        >>> rest = Rest(1.0)
        >>> [rest.failed() for _ in range(5)], rest.succeeded(), rest.failed()
        ([1.0, 2.0, 4.0, 8.0, 8.0], 1.0, 1.0)
        """
        wait_s = min(MAX_REST_S, self._first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return wait_s

    def succeeded(self) -> float:
        """Forget the failures; return the seconds to wait as usual."""
        self._failures = 0
        return self._first_s


class Standing:
    """Every method is thread-safe."""

    def __init__(self, first_rest_s: float = 1.0) -> None:
        self._lock = threading.Lock()
        self._rest = Rest(first_rest_s)
        self._rests_until_s = 0.0
        self._incarnation = b""
        self._keys = itertools.count()
        self._under_way: dict[int, tuple[float, int]] = {}
        self._link: tuple[float, float] | None = None
        self._steps: OrderedDict[bytes, None] = OrderedDict()

    def met(self, incarnation: bytes) -> None:
        """Note who answers: a producer that has restarted holds no prompt, and gets a new chance."""
        with self._lock:
            if incarnation != self._incarnation:
                self._incarnation = incarnation
                self._steps.clear()
                self._rests_until_s = 0.0

    def opened(self, tokens: int, now_s: float) -> int:
        """Note that a handoff of a prompt of `tokens` is on its way; return the key to end it with."""
        with self._lock:
            key = next(self._keys)
            self._under_way[key] = (now_s, tokens)
            return key

    def ended(self, key: int) -> None:
        """Note that a handoff has ended, however it did."""
        with self._lock:
            self._under_way.pop(key, None)

    def failed(self, now_s: float) -> None:
        """Note that a handoff broke, and that it was the producer or the way to it."""
        with self._lock:
            self._rests_until_s = now_s + self._rest.failed()

    def completed(self, nbytes_per_s: float | None, now_s: float) -> None:
        """Note that a handoff was whole, and how fast its bytes came, if that could be measured."""
        with self._lock:
            self._rest.succeeded()
            self._rests_until_s = 0.0
            if nbytes_per_s is not None and nbytes_per_s >= (self._link_rate(now_s) or 0.0):
                self._link = (nbytes_per_s, now_s)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Note that the producer has computed this prompt."""
        steps = prompt_steps(token_ids)
        with self._lock:
            for step in steps:
                self._steps[step] = None
                self._steps.move_to_end(step)
            while len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)

    def resting_s(self, now_s: float) -> float:
        """Return for how many more seconds it had better be left alone; 0 for one that works."""
        with self._lock:
            return max(0.0, self._rests_until_s - now_s)

    def tokens_since(self, asked_s: float) -> int:
        """Return the tokens of handoffs under way that this node began after `asked_s`."""
        with self._lock:
            return sum(tokens for began_s, tokens in self._under_way.values() if began_s > asked_s)

    def seen_tokens(self, steps: Sequence[bytes]) -> int:
        """Return how many leading tokens of a prompt with these steps were in a whole handoff of this incarnation."""
        with self._lock:
            known = itertools.takewhile(self._steps.__contains__, steps)
            return STEP_TOKENS * sum(1 for _ in known)

    def link_nbytes_per_s(self, now_s: float) -> float | None:
        """Return the link's rate in bytes a second, if it was measured lately."""
        with self._lock:
            return self._link_rate(now_s)

    def _link_rate(self, now_s: float) -> float | None:
        return self._link[0] if self._link is not None and now_s - self._link[1] < LINK_LIFETIME_S else None


def prompt_steps(token_ids: Sequence[int]) -> list[bytes]:
    """Return a name of the prompt up to each whole step: a chain of digests, of which no token can be read."""
    ids = np.asarray(token_ids, dtype="<u4").tobytes()
    names, name, width = [], b"", 4 * STEP_TOKENS
    for start in range(0, len(ids) - width + 1, width):
        name = hashlib.sha256(name + ids[start : start + width]).digest()
        names.append(name)
    return names
