"""What is the compiled decoder's own; the rest is tested for both decoders of the lane at once."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from decoded_lane import compiled_operations, oracle, prefilled, prompt, random_weights, same_bits, same_planes

from muser_decode.reference.compiled.decoder import CompiledDecoder
from muser_decode.reference.decoder import ReferenceDecoder


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_row_of_a_batch_is_what_plain_operations_give_for_it_alone(seed: int, threads: int) -> None:
    weights = random_weights(seed)
    plain, compiled = ReferenceDecoder(weights), CompiledDecoder(weights, compiled_operations(threads))
    # More rows than the kernels take at once.
    prompts = [prompt(weights, length) for length in (3, 64, 97, 1, 130, 65, 2)]
    alone = [prefilled(plain, ids, [len(ids)]) for ids in prompts]
    together = [prefilled(compiled, ids, [len(ids)]) for ids in prompts]
    for step in range(3):
        tokens = [(7 * step + at) % weights.spec.vocab_size for at in range(len(prompts))]
        rows = np.array(compiled.steps(mx.array(tokens), together))
        for row, token, cache in zip(rows, tokens, alone, strict=True):
            same_bits(row, np.array(plain.step(mx.array(token), cache)))
    for one, other in zip(alone, together, strict=True):
        same_planes(other, [tuple(map(np.array, one.planes(at, 0, one.length))) for at in (0, 1)], weights)


def test_an_unread_token_is_read_first() -> None:
    weights = random_weights(4)
    decoder, ids = CompiledDecoder(weights, compiled_operations()), prompt(weights, 30)
    _, logits = oracle(weights, 30)
    cache = prefilled(decoder, ids, [29])
    lazy = mx.argmax(mx.arange(weights.spec.vocab_size) == ids[-1])
    same_bits(np.array(decoder.step(lazy, cache)), logits[-1])
