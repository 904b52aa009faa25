"""Every implementation against the reference, and the reference against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import oracle_decoder
import pytest
import torch

from muser_prefill.kernels import attention
from muser_prefill.kernels.attention.chunked import ChunkedAttention
from muser_prefill.kernels.attention.reference import reference_attention
from muser_prefill.kernels.attention.sdpa import sdpa_attention
from muser_wire.numerics import budget

HEAD_DIM = 16
CPU = torch.device("cpu")
WINDOWS = [None, 1, 5, 127, 128, 129, 300]
IMPLEMENTATIONS = {
    "chunked": ChunkedAttention(),
    # A bound of 40 KB leaves fewer rows to a block as the keys grow.
    "chunked-small-buffer": ChunkedAttention(scores_nbytes=40_000),
    "sdpa": sdpa_attention,
}


@dataclass(frozen=True)
class Case:
    """Inputs in float64: `q` `[T, heads, head_dim]`, not yet scaled, `k` and `v` `[start + T, kv_heads, head_dim]`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    start: int

    @classmethod
    def random(cls, tokens: int, start: int, kv_heads: int, group: int) -> Case:
        rng = np.random.default_rng(tokens)
        q = rng.normal(size=(tokens, kv_heads * group, HEAD_DIM))
        k, v = rng.normal(size=(2, start + tokens, kv_heads, HEAD_DIM))
        return cls(q, k, v, start)

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scaled = (self.q / np.sqrt(HEAD_DIM), self.k, self.v)
        q, k, v = (torch.from_numpy(x).to(dtype) for x in scaled)
        return q, k, v

    def expected(self, window: int | None) -> np.ndarray:
        """The oracle knows whole prompts only: queries of the prefix are made up and left out of the result."""
        prefix = np.zeros((self.start, *self.q.shape[1:]))
        out = oracle_decoder.attend(np.concatenate([prefix, self.q]), self.k, self.v, window, HEAD_DIM**-0.5)
        return out.reshape(len(self.k), -1, HEAD_DIM)[self.start :]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (1, 9), (40, 0), (33, 150)])
def test_reference_is_the_definition(tokens: int, start: int, window: int | None) -> None:
    case = Case.random(tokens, start, kv_heads=2, group=3)
    got = reference_attention(*case.tensors(), start, window)
    assert np.abs(got.numpy() - case.expected(window)).max() <= budget("attention_f32")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("tokens", "start", "kv_heads", "group"),
    [(1, 0, 1, 1), (1, 200, 2, 4), (127, 0, 2, 1), (128, 3, 1, 3), (129, 0, 2, 3), (301, 77, 2, 4), (131, 256, 3, 3)],
)
def test_odd_lengths_prefixes_windows_and_groups(
    name: str, tokens: int, start: int, kv_heads: int, group: int, window: int | None
) -> None:
    q, k, v = Case.random(tokens, start, kv_heads, group).tensors()
    got = IMPLEMENTATIONS[name](q, k, v, start, window)
    assert got.shape == q.shape
    assert (got - reference_attention(q, k, v, start, window)).abs().max() <= budget("attention_f32")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 150])
def test_bf16(name: str, window: int | None) -> None:
    q, k, v = Case.random(201, 70, kv_heads=3, group=3).tensors(torch.bfloat16)
    got = IMPLEMENTATIONS[name](q, k, v, 70, window)
    assert got.dtype == torch.bfloat16
    assert (got - reference_attention(q, k, v, 70, window)).abs().max() <= budget("attention_bf16")


@pytest.mark.parametrize("window", [None, 100])
def test_chunked_touches_only_what_some_query_sees(window: int | None) -> None:
    """Keys and values are views into a poisoned cache: before the first query's window and after the last query."""
    tokens, start, capacity = 150, 230, 500
    case = Case.random(tokens, start, kv_heads=2, group=3)
    q, k, v = case.tensors()
    k_cache, v_cache = (torch.full((capacity, 2, HEAD_DIM), float("nan")) for _ in range(2))
    first = 0 if window is None else start - window + 1
    k_cache[first : start + tokens], v_cache[first : start + tokens] = k[first:], v[first:]
    stop = start + tokens
    got = ChunkedAttention()(q, k_cache[:stop], v_cache[:stop], start, window)
    assert np.abs(got.numpy() - case.expected(window)).max() <= budget("attention_f32")


def test_chunked_keeps_nothing_from_call_to_call() -> None:
    """A long call leaves its scores in the buffer; a short one after it must not see them, nor another type's."""
    chunked = ChunkedAttention()
    long, short = Case.random(300, 0, 2, 3), Case.random(5, 0, 1, 2)
    chunked(*long.tensors(), 0, None)
    chunked(*long.tensors(torch.bfloat16), 0, None)
    assert np.abs(chunked(*short.tensors(), 0, None).numpy() - short.expected(None)).max() <= budget("attention_f32")


def test_scores_stay_under_their_bound() -> None:
    bound = 100_000
    chunked = ChunkedAttention(scores_nbytes=bound)
    chunked(*Case.random(400, 100, 2, 4).tensors(), 100, None)
    assert 0 < chunked._buffer.nbytes <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_is_admitted_here(dtype: torch.dtype) -> None:
    chosen, names = attention.choose_attention(64, dtype, CPU)
    assert isinstance(chosen, ChunkedAttention)
    assert names == (attention.CHUNKED,)


def wrong_window(*args: object) -> torch.Tensor:
    *inputs, window = args
    return reference_attention(*inputs, None if window is None else window + 1)


def wrong_position(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    return reference_attention(q, k[1:], v[1:], start - 1, window)


@pytest.mark.parametrize("broken", [wrong_window, wrong_position])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_off_by_one_is_not_admitted(broken: attention.Attention, dtype: torch.dtype) -> None:
    assert not attention.admit_attention("broken", broken, 64, dtype, CPU)


def test_the_reference_stands_in_for_a_refused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ChunkedAttention", lambda: wrong_position)
    assert attention.choose_attention(64, torch.float32, CPU) == (reference_attention, ())
