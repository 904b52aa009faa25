"""Tiny models of every family against transformers and mlx-lm, in float32: logits, planes and 120 greedy tokens.

Both references are part of the environment that `make setup` installs: where one is missing, these tests fail.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import muser_decode.verify
import muser_prefill.verify
from muser_decode.engine.request import Event, GenerationRequest, Route
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny import write_tiny
from muser_wire.numerics import budget
from muser_wire.verification import Evidence, VerifyJob

WINDOW = 24
PROMPT_TOKENS = 200
"""Eight windows; three chunks of the nodes' grid in these tests, and a part of one."""

LOGITS_FROM = PROMPT_TOKENS - 32
CHUNK_TOKENS = 17
"""Divides neither the prompt nor the window."""

GREEDY_TOKENS = 120
CLEAR_LEAD = 5e-3
"""How far ahead of the next best each greedy token of these models is at least: fifty times what implementations
differ by in f32, so equal tokens are no luck. Seeds were chosen for it."""

MODELS = {
    "llama": ("llama", 6, 20),
    "llama3": ("llama3", 6, 27),
    "mistral": ("mistral", 6, 38),
    "qwen3": ("qwen3", 6, 23),
    "gemma3": ("gemma3", 7, 14),
    "muse_glimmer-6": ("muse_glimmer", 6, 25),
    "muse_glimmer-7": ("muse_glimmer", 7, 39),
    "muse_glimmer-8": ("muse_glimmer", 8, 31),
}
"""Family, layers and seed of each checkpoint."""

Compute = Callable[[VerifyJob], Evidence]


def references() -> dict[str, Compute]:
    """The two references. Importing them here makes their absence an error of these tests alone."""
    import muser_decode.oracle
    import muser_prefill.oracle

    return {"transformers": muser_prefill.oracle.compute, "mlx-lm": muser_decode.oracle.compute}


@dataclass(frozen=True)
class Model:
    """What the references and both decoders compute of one checkpoint, all in f32, keys and values too."""

    job: VerifyJob
    theirs: dict[str, Evidence]
    ours: dict[str, Evidence]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, layers, seed = MODELS[request.param]
    path = tmp_path_factory.mktemp("references") / family
    write_tiny(family, path, layers=layers, window=WINDOW, seed=seed)
    ids = np.random.default_rng(3).integers(10, 512, PROMPT_TOKENS).tolist()
    job = VerifyJob(path, tuple(ids), LOGITS_FROM, CHUNK_TOKENS, GREEDY_TOKENS)
    theirs = {name: compute(job) for name, compute in references().items()}
    ours = {"prefill": muser_prefill.verify.compute(job), "decode": muser_decode.verify.compute(job)}
    return Model(job, theirs, ours)


def test_greedy_tokens_of_these_models_say_something(model: Model) -> None:
    for evidence in model.theirs.values():
        assert len(evidence.greedy.tokens) == GREEDY_TOKENS
        assert min(evidence.greedy.leads) > CLEAR_LEAD
        assert len(set(evidence.greedy.tokens)) > 30
    spec = open_checkpoint(model.job.model).spec
    assert {layer.window for layer in spec.layers} <= {WINDOW, None}


@pytest.mark.parametrize("reference", ["transformers", "mlx-lm"])
@pytest.mark.parametrize("node", ["prefill", "decode"])
def test_both_decoders_compute_what_the_references_do(model: Model, node: str, reference: str) -> None:
    """In chunks that divide nothing, past the window, and a token at a time after that."""
    ours, theirs = model.ours[node], model.theirs[reference]
    assert 0.8 < np.sqrt(np.mean(theirs.logits**2)) < 1.25, "logits are of unit scale"
    assert ours.logits.shape == theirs.logits.shape == (PROMPT_TOKENS - LOGITS_FROM, 512)
    assert np.abs(ours.logits - theirs.logits).max() <= budget("logits_f32")
    for got, expected in zip(ours.planes, theirs.planes, strict=True):
        for mine, other in zip(got, expected, strict=True):
            rows = min(len(mine), len(other))
            assert rows >= WINDOW - 1
            size = np.sqrt(np.mean(np.square(other[-rows:])))
            assert np.abs(mine[-rows:] - other[-rows:]).max() <= budget("verify_planes") * max(1.0, size)
    assert ours.greedy.tokens == theirs.greedy.tokens


def test_a_node_alone_and_after_a_handoff_decodes_the_references_tokens(
    model: Model, started: tuple[Callable[..., Any], Callable[..., Any]]
) -> None:
    """Both nodes, joined in memory, keys and values in f16: remote prefill, then local prefill of the same prompt."""
    start_pair, start_producer = started
    path, ids = model.job.model, model.job.token_ids
    pair = start_pair(path, start_producer(path))
    remote = pair.ask(ids, GREEDY_TOKENS)
    assert remote.report.route is Route.REMOTE
    events: queue.Queue[Event] = queue.Queue()
    pair.engine.submit(GenerationRequest("alone", ids, GREEDY_TOKENS), events.put)
    local = pair.collect(events)
    assert local.report.route is Route.LOCAL
    assert remote.tokens == local.tokens
    for reference in model.theirs.values():
        assert remote.tokens == list(reference.greedy.tokens)
