"""One generation's place in the batch: its cache, its sampler, and the token that its next step runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from muser_decode.engine.contract import Cache
from muser_decode.engine.request import Likelihood, TokenConstraint
from muser_decode.engine.sampling import Evidence, Sampler, allowed_tokens


@dataclass(frozen=True)
class Draw:
    """A token on the device, and what its likelihood is read from where one is reported."""

    token: mx.array
    evidence: Evidence | None

    def arrays(self) -> tuple[mx.array, ...]:
        """Return what is to be evaluated."""
        return (self.token,) if self.evidence is None else (self.token, *self.evidence.arrays())

    def read(self) -> tuple[int, Likelihood | None]:
        """Return the token's id and its likelihood; waits for the device."""
        likelihood = None if self.evidence is None else self.evidence.read()
        return cast(int, self.token.item()), likelihood


class Decoding:
    """Up to `tokens` tokens after `last_prompt_id`, which is the first that a step runs.

    Each draw stays on the device as the input of the next step, which is launched before the draw is read.
    Only a `constraint` must know each token before the next one is drawn. `alternatives` is how many likely
    tokens are reported beside each; None reports no likelihood.
    """

    def __init__(
        self,
        cache: Cache,
        sampler: Sampler,
        last_prompt_id: int,
        tokens: int,
        *,
        alternatives: int | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        self.cache = cache
        self._sampler = sampler
        self._left = tokens
        self._alternatives, self._constraint = alternatives, constraint
        self._input, self._drawn = mx.array(last_prompt_id), False

    @property
    def wants_step(self) -> bool:
        """Whether there is a step to launch."""
        return self._left > 0

    @property
    def constrained(self) -> bool:
        """Whether the next draw waits for the last one."""
        return self._constraint is not None

    def extend(self, tokens: int) -> None:
        """Go on for so many more tokens."""
        self._left += tokens

    def feed(self) -> mx.array:
        """Return the next step's input, a scalar, perhaps unevaluated. A draw from that step's logits must follow."""
        self._left -= 1
        return self._input

    def draw(self, logits: mx.array) -> Draw:
        """Draw from a step's logits `[vocab]`. Evaluates nothing, but for the last draw where a constraint needs it."""
        mask = None
        if self._constraint is not None:
            if self._drawn:
                self._constraint.accept(cast(int, self._input.item()))
            mask = self._constraint.mask()
        token = self._sampler.next(logits, None if mask is None else allowed_tokens(mask, logits.size))
        self._input, self._drawn = token, True
        evidence = None if self._alternatives is None else Evidence.of(logits, token, self._alternatives)
        return Draw(token, evidence)
