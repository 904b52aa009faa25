from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.cache import KVCache
from muser_prefill.engine.reuse import ComputedPrompts
from muser_prefill.engine.runner import prefill
from muser_prefill.engine.scheduler import PrefillJob, Scheduler
from muser_prefill.errors import JobCancelled
from muser_wire.geometry import ElementType, Geometry
from muser_wire.identities import Digest, Identities
from muser_wire.kvpack.naming import Namer
from muser_wire.kvpack.store import BlockStore
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny import write_tiny
from muser_wire.schedule import ScheduleRequest, WindowPolicy, build_schedule

CHUNK = 32
IDS = [5 + (index * 37) % 200 for index in range(120)]
OTHER = [7 + (index * 53) % 190 for index in range(40)]
WINDOWS = {"llama": 0, "gemma3": 20, "muse_glimmer": 48}
DIGEST = Digest(b"d" * 32)


class CountingDecoder(TorchDecoder):
    """Counts the tokens that it computes."""

    computed = 0

    def prefill_chunk(self, token_ids: list[int], cache: KVCache, on_layer: Callable[[int], None]) -> None:
        super().prefill_chunk(token_ids, cache, on_layer)
        self.computed += len(token_ids)


@dataclasses.dataclass
class Bench:
    """A decoder, its scheduler, and what it keeps."""

    decoder: CountingDecoder
    scheduler: Scheduler
    geometry: Geometry
    store: BlockStore
    reused_tokens: int = 0

    def job(self, ids: list[int], held: int, policy: WindowPolicy) -> PrefillJob:
        schedule = build_schedule(ScheduleRequest(self.geometry, len(ids) + 1, held, CHUNK, policy))
        place, _ = self.scheduler.reserve(len(ids))
        return PrefillJob(place, b"h" * 16, ids, schedule)

    def sent(self, ids: list[int], held: int = 0, policy: WindowPolicy = WindowPolicy.ROLLING) -> dict[tuple, bytes]:
        """The planes that a handoff of this prompt carries, by layer and first token."""
        job = self.job(ids, held, policy)
        self.scheduler.submit(job)
        planes = {}
        for ready in job.segments():
            payload = b"".join(bytes(part) for part in ready.parts)
            for piece in ready.segment.slices:
                planes[piece.layer, piece.start, piece.stop] = payload[piece.offset : piece.offset + piece.nbytes]
        assert len(planes) == sum(len(segment.slices) for segment in job.schedule.segments)
        self.settle()
        self.reused_tokens = job.reused_tokens
        return planes

    def settle(self) -> None:
        while self.scheduler.load:
            torch.zeros(1).item()


@pytest.fixture(scope="module", params=list(WINDOWS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / request.param
    write_tiny(request.param, path, layers=6, window=WINDOWS[request.param] or 64)
    return path


def start(path: Path, memory_nbytes: int) -> Bench:
    checkpoint = open_checkpoint(path)
    decoder = CountingDecoder(checkpoint, dtype=torch.float32, kv_element=ElementType.F16, device=torch.device("cpu"))
    geometry = Geometry.of(checkpoint.spec, ElementType.F16)
    identities = Identities(DIGEST, DIGEST, "kv1", "native", DIGEST, CHUNK, DIGEST)
    store = BlockStore(Namer(bytes(32), identities), geometry, memory_nbytes)
    scheduler = Scheduler(decoder, CHUNK, 2, ComputedPrompts(store) if memory_nbytes else None)
    scheduler.start()
    decoder.computed = 0
    return Bench(decoder, scheduler, geometry, store)


@pytest.fixture
def cold(path: Path) -> Iterator[Bench]:
    bench = start(path, 0)
    yield bench
    bench.scheduler.stop(10)


@pytest.fixture
def warm(path: Path) -> Iterator[Bench]:
    bench = start(path, 64 << 20)
    yield bench
    bench.scheduler.stop(10)


def resumes_inside(bench: Bench) -> bool:
    return all(window is None or window >= CHUNK for window in bench.geometry.windows)


@pytest.mark.parametrize("policy", list(WindowPolicy))
@pytest.mark.parametrize("common", [32, 64, 96])
def test_only_what_is_lacking_is_computed_and_every_byte_is_the_same(
    cold: Bench, warm: Bench, common: int, policy: WindowPolicy
) -> None:
    warm.sent([*IDS[:common], *OTHER])
    warm.decoder.computed = 0
    planes = warm.sent(IDS, policy=policy)
    assert warm.decoder.computed == len(IDS) - common
    assert warm.reused_tokens == common
    assert planes == cold.sent(IDS, policy=policy)


@pytest.mark.parametrize("held", [1, 31, 32, 50, 64, 96, 119])
def test_either_side_may_be_ahead(cold: Bench, warm: Bench, held: int) -> None:
    """The consumer holds `held` tokens, the producer 64: what travels is what the consumer lacks, and right."""
    expected = cold.sent(IDS, held)
    assert cold.decoder.computed == len(IDS)
    warm.sent([*IDS[:64], *OTHER])
    warm.decoder.computed = 0
    assert warm.sent(IDS, held) == expected
    assert warm.decoder.computed == len(IDS) - 64
    assert warm.reused_tokens == 64
    assert cold.reused_tokens == 0


@pytest.mark.parametrize("common", [40, 65, 110])
def test_a_prompt_that_parts_inside_a_chunk_goes_on_there_where_its_windows_allow(
    cold: Bench, warm: Bench, common: int
) -> None:
    warm.sent([*IDS[:common], *OTHER])
    warm.decoder.computed = 0
    planes, expected = warm.sent(IDS), cold.sent(IDS)
    assert warm.decoder.computed == len(IDS) - (common if resumes_inside(warm) else common // CHUNK * CHUNK)
    assert planes.keys() == expected.keys()
    for key, data in planes.items():
        # A matrix product of fewer rows may round otherwise in the last bit.
        ours, theirs = (np.frombuffer(plane, np.float16).astype(np.float32) for plane in (data, expected[key]))
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3)


def test_the_same_prompt_again_computes_nothing_or_the_last_chunk(cold: Bench, warm: Bench) -> None:
    expected = cold.sent(IDS)
    assert warm.sent(IDS) == expected
    warm.decoder.computed = 0
    assert warm.sent(IDS) == expected
    assert warm.decoder.computed == 0


def test_a_cancelled_handoff_leaves_whole_chunks(cold: Bench, warm: Bench) -> None:
    job = warm.job(IDS, 0, WindowPolicy.ROLLING)
    chunks_seen = 0
    layer_done, last = warm.decoder.prefill_chunk, len(warm.decoder.spec.layers) - 1

    def cancel_in_the_third_chunk(ids: list[int], cache: KVCache, on_layer: Callable[[int], None]) -> None:
        nonlocal chunks_seen
        chunks_seen += 1
        if chunks_seen == 3:
            job.cancel()
        layer_done(ids, cache, on_layer)

    warm.decoder.prefill_chunk = cancel_in_the_third_chunk  # type: ignore[method-assign]
    warm.scheduler.submit(job)
    with pytest.raises(JobCancelled):
        list(job.segments())
    warm.settle()
    warm.decoder.prefill_chunk = layer_done  # type: ignore[method-assign]
    warm.decoder.computed = 0
    assert warm.sent(IDS) == cold.sent(IDS)
    assert warm.decoder.computed == len(IDS) - 64
    assert last > 0


def test_what_was_loaded_is_what_was_computed(warm: Bench) -> None:
    computed = ComputedPrompts(warm.store)
    cache = warm.decoder.new_cache(len(IDS))
    prefill(warm.decoder, IDS, cache, CHUNK, lambda chunk, layer: None)
    computed.save(IDS, cache)
    loaded = warm.decoder.new_cache(len(IDS))
    assert computed.load(IDS, loaded) == len(IDS)
    for layer, window in enumerate(warm.geometry.windows):
        first = 0 if window is None else len(IDS) - min(window, 24)
        for ours, theirs in zip(
            loaded.planes(layer, first, len(IDS)), cache.planes(layer, first, len(IDS)), strict=True
        ):
            assert torch.equal(ours, theirs)
