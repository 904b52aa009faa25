"""The batch: one step of every decoding generation at once, the device always one step ahead.

Generations join and leave between steps. A step is launched before the tokens of the one before it are read:
they are its input on the device. So of a generation that a stop token ends, one step at most is computed in
vain. Only a generation's first token is read before the next launch: somebody waits for it, and where mlx
computes on a CPU, launching a step waits for nearly all of it. Under a constraint a token must be known before
the next one is drawn, though not before its logits are launched: the grammar works while the device does, and
nobody else's draw waits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from muser_decode.engine.contract import Decoder
from muser_decode.engine.decoding import Decoding, Draw
from muser_decode.engine.request import Likelihood

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a step gave one generation: a token, or the error that ends it."""

    decoding: Decoding
    token: int = 0
    likelihood: Likelihood | None = None
    error: Exception | None = None


class Batch:
    """The decoding generations. Belongs to the engine's thread."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._rows: list[Decoding] = []
        self._launched: list[tuple[Decoding, Draw | Exception]] = []
        self._unheard: list[Decoding] = []

    @property
    def begins(self) -> bool:
        """Whether the launched step gives some generation its first token: then `settle` it before `advance`."""
        return any(row in self._unheard for row, _ in self._launched)

    @property
    def rows(self) -> tuple[Decoding, ...]:
        """Those that take part."""
        return tuple(self._rows)

    def join(self, decoding: Decoding) -> None:
        """Take part from the next step on."""
        self._rows.append(decoding)
        self._unheard.append(decoding)

    def leave(self, decoding: Decoding) -> None:
        """Take part no more; what is launched is never read. Harmless for one that is not here."""
        self._rows = [row for row in self._rows if row is not decoding]
        self._unheard = [row for row in self._unheard if row is not decoding]

    def clear(self) -> list[Decoding]:
        """Have all leave; return them."""
        rows, self._rows, self._launched, self._unheard = self._rows, [], [], []
        return rows

    def advance(self) -> list[Outcome]:
        """Launch the next step of everyone who has one, then return what the step before gave.

        Raises:
            Exception: the step failed for all of them; none can go on.
        """
        before = self._launched
        self._launched = self._launch([row for row in self._rows if row.wants_step])
        return self._read(before)

    def settle(self) -> list[Outcome]:
        """Return what the last step gave, without launching another: the device is about to do something long."""
        before, self._launched = self._launched, []
        return self._read(before)

    def _launch(self, rows: Sequence[Decoding]) -> list[tuple[Decoding, Draw | Exception]]:
        if not rows:
            return []
        inputs = [row.feed() for row in rows]
        tokens = inputs[0].reshape(1) if len(inputs) == 1 else mx.stack(inputs)
        logits = self._decoder.steps(tokens, [row.cache for row in rows])
        each = [logits[at] for at in range(len(rows))]
        draws = {row: _drawn(row, own) for row, own in zip(rows, each, strict=True) if not row.constrained}
        free = [array for draw in draws.values() if isinstance(draw, Draw) for array in draw.arrays()]
        mx.async_eval(*free, logits)
        for row, own in zip(rows, each, strict=True):
            if row.constrained:
                draw = draws[row] = _drawn(row, own)
                if isinstance(draw, Draw):
                    mx.async_eval(*draw.arrays())
        return [(row, draws[row]) for row in rows]

    def _read(self, launched: Sequence[tuple[Decoding, Draw | Exception]]) -> list[Outcome]:
        given = [row for row, _ in launched]
        self._unheard = [row for row in self._unheard if row not in given]
        outcomes = []
        for row, draw in launched:
            if not any(row is present for present in self._rows):
                continue
            if isinstance(draw, Draw):
                outcomes.append(Outcome(row, *draw.read()))
            else:
                outcomes.append(Outcome(row, error=draw))
        return outcomes


def _drawn(row: Decoding, logits: mx.array) -> Draw | Exception:
    try:
        return row.draw(logits)
    except Exception as error:  # outermost loop of one generation: the others go on
        log.exception("draw_failed")
        return error
