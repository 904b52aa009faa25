"""What an engine has once its model is loaded: the workshop, the batch, and the memory for caches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from muser_decode.engine.batch import Batch
from muser_decode.engine.generation import Generation
from muser_decode.engine.memory import CacheMemory
from muser_decode.engine.prefilling import Workshop
from muser_decode.engine.request import GenerationRequest
from muser_decode.errors import RequestInvalid
from muser_wire.model.spec import ModelSpec

MEGABYTE = 1_000_000

OPEN_TOKENS = 2_048
"""Of an open-ended answer, memory is taken for so many tokens at a time."""


@dataclass(frozen=True)
class Floor:
    """Belongs to the engine's thread, but for `check_memory` and what is read of the model."""

    workshop: Workshop
    batch: Batch
    memory: CacheMemory
    _taken: dict[Generation, int] = field(default_factory=dict)

    @property
    def spec(self) -> ModelSpec:
        """The model's description."""
        return self.workshop.decoder.spec

    def first_tokens(self, request: GenerationRequest) -> int:
        """Return how many tokens of an answer a request takes memory for when it begins."""
        tokens = min(request.max_new_tokens, self.spec.max_positions - len(request.prompt_ids))
        return min(tokens, OPEN_TOKENS) if request.open_ended else tokens

    def need_nbytes(self, request: GenerationRequest, tokens: int) -> int:
        """Return the memory of a request's cache with so many tokens of an answer."""
        return self.workshop.decoder.cache_nbytes(len(request.prompt_ids) + tokens)

    @cached_property
    def context_tokens(self) -> int:
        """Return how many tokens a prompt and its answer may have together: the model's, or what memory holds."""
        fits, most = 0, self.spec.max_positions
        while fits < most:
            middle = (fits + most + 1) // 2
            if self.workshop.decoder.cache_nbytes(middle) <= self.memory.total_nbytes:
                fits = middle
            else:
                most = middle - 1
        return fits

    def check_memory(self, request: GenerationRequest) -> None:
        """Check that a request fits when it is alone.

        Raises:
            RequestInvalid: it never will; the message has both numbers.
        """
        tokens, total = self.first_tokens(request), self.memory.total_nbytes
        need = self.need_nbytes(request, tokens)
        if need > total:
            raise RequestInvalid(
                f"{len(request.prompt_ids)} prompt tokens and {tokens} of an answer need "
                f"{need / MEGABYTE:.0f} MB for keys and values; this node has {total / MEGABYTE:.0f} MB (--memory-mb)"
            )

    def take_memory(self, generation: Generation) -> bool:
        """Take the memory of a generation that is about to begin; return whether there was enough."""
        request = generation.request
        need = self.need_nbytes(request, self.first_tokens(request))
        if not self.memory.take(need):
            return False
        self._taken[generation] = need
        return True

    def more_tokens(self, generation: Generation, tokens: int) -> int:
        """Return for how many tokens there is memory now that those of an open-ended answer are used up, 0 for none."""
        request = generation.request
        more = min(
            OPEN_TOKENS, request.max_new_tokens - tokens, self.spec.max_positions - len(request.prompt_ids) - tokens
        )
        need = self.need_nbytes(request, tokens + max(0, more)) - self._taken[generation]
        if more <= 0 or not self.memory.take(need):
            return 0
        self._taken[generation] += need
        return more

    def give_memory_back(self, generation: Generation) -> None:
        """Give back what a generation took, if it took any."""
        self.memory.give_back(self._taken.pop(generation, 0))
