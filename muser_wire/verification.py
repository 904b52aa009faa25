"""What `muser model verify` hands to each contestant, and what it gets back: a job as JSON, evidence as .npz.

A contestant is a process of its own, because no process has both torch and MLX: a decoder, or a reference
implementation where one is installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class VerifyJob:
    """What to compute, in f32 and with keys and values unrounded: the planes of a prompt, chunk by chunk; the logits
    after each of its tokens from `logits_from` on; then `greedy_tokens` tokens.
    """

    model: Path
    token_ids: tuple[int, ...]
    logits_from: int
    chunk_tokens: int
    greedy_tokens: int

    def write(self, file: Path) -> None:
        """Write the job as JSON."""
        file.write_text(json.dumps({**asdict(self), "model": str(self.model)}), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> VerifyJob:
        """Return the job that a file holds."""
        plain = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**plain, "model": Path(plain["model"]), "token_ids": tuple(plain["token_ids"])})

    def chunks(self) -> list[tuple[int, ...]]:
        """Return the tokens before `logits_from`, cut into chunks."""
        starts = range(0, self.logits_from, self.chunk_tokens)
        return [self.token_ids[start : min(start + self.chunk_tokens, self.logits_from)] for start in starts]


@dataclass(frozen=True)
class Greedy:
    """Tokens chosen greedily, and by how much each one's logit led the next best: a lead near 0 is a coin's toss."""

    tokens: tuple[int, ...]
    leads: tuple[float, ...]

    @classmethod
    def choose(cls, logits: Array, step: Callable[[int], Array], count: int) -> Greedy:
        """Return `count` tokens, the first by `logits` `[vocab]`; `step(token)` gives the logits after a token."""
        tokens: list[int] = []
        leads: list[float] = []
        for left in range(count, 0, -1):
            second, first = np.partition(logits, -2)[-2:]
            tokens.append(int(np.argmax(logits)))
            leads.append(float(first - second))
            if left > 1:
                logits = step(tokens[-1])
        return cls(tuple(tokens), tuple(leads))


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a contestant computed. `planes` are each layer's keys and values of the prompt, `[tokens, kv_heads,
    head_dim]`: of a sliding layer perhaps its last tokens only. `logits` is `[T - logits_from, vocab]`.
    """

    planes: tuple[tuple[Array, Array], ...]
    logits: Array
    greedy: Greedy

    def write(self, file: Path) -> None:
        """Write everything as one .npz."""
        arrays: dict[str, Any] = {
            "logits": self.logits,
            "tokens": np.asarray(self.greedy.tokens),
            "leads": np.asarray(self.greedy.leads),
        }
        for i, (keys, values) in enumerate(self.planes):
            arrays[f"k{i}"], arrays[f"v{i}"] = keys, values
        np.savez(file, **arrays)

    @classmethod
    def read(cls, file: Path) -> Evidence:
        """Return what a file holds."""
        with np.load(file, allow_pickle=False) as held:
            layers = sum(name.startswith("k") for name in held.files)
            planes = tuple((held[f"k{i}"], held[f"v{i}"]) for i in range(layers))
            greedy = Greedy(tuple(held["tokens"].tolist()), tuple(held["leads"].tolist()))
            return cls(planes, held["logits"], greedy)


def contestant(argv: Sequence[str] | None, compute: Callable[[VerifyJob], Evidence]) -> int:
    """Do the job in the file that a command line names first, and write the evidence into the one named second."""
    job, out = argv if argv is not None else sys.argv[1:]
    compute(VerifyJob.read(Path(job))).write(Path(out))
    return 0
