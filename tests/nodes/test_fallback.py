"""Whatever the producer does, the answer is the one that this node gives alone, and says which way it came."""

from __future__ import annotations

import dataclasses
import json
import queue
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stream_faults import die, end, flip

from muser_decode.client import ProducerState
from muser_decode.engine.request import Route
from muser_wire.model.tiny import write_tiny, write_tiny_llama

FRAMES = 1 + 4 + 1
"""A legal handoff of the prompt: begin, one segment for each of the four chunks, seal."""


def test_a_remote_answer_equals_a_local_one(pair: Any, local_answer: Any) -> None:
    answer = pair.ask()
    assert answer.tokens == local_answer.tokens
    assert answer.report.route is Route.REMOTE
    assert (answer.report.remote_tokens, answer.report.local_tokens) == (199, 0)
    assert answer.report.segments_verified == FRAMES - 2
    assert answer.report.reason == ""
    # 6 layers, keys and values, 2 heads of 16, 2 bytes: 199 tokens of 768 bytes.
    assert answer.report.payload_nbytes == 199 * 6 * 2 * 2 * 16 * 2
    assert local_answer.report.route is Route.LOCAL


@pytest.mark.parametrize("place", range(FRAMES))
@pytest.mark.parametrize("byte", [-1, -200])
def test_one_wrong_byte_is_caught_wherever_it_is(pair: Any, local_answer: Any, place: int, byte: int) -> None:
    answer = pair.ask(fault=flip(place, max(byte, -100) if place in (0, FRAMES - 1) else byte))
    assert answer.tokens == local_answer.tokens
    assert answer.report.route is (Route.LOCAL if place <= 1 else Route.SALVAGED)
    assert "not authentic" in answer.report.reason
    # Whole chunks before the fault stay; the rest is computed here.
    kept = {0: 0, 1: 0, 2: 64, 3: 128, 4: 192, 5: 199}[place]
    assert (answer.report.remote_tokens, answer.report.local_tokens) == (kept, 199 - kept)


@pytest.mark.parametrize("fault", [end, die])
@pytest.mark.parametrize("place", range(FRAMES))
def test_a_handoff_that_ends_early_is_finished_here(pair: Any, local_answer: Any, fault: Any, place: int) -> None:
    answer = pair.ask(fault=fault(place))
    assert answer.tokens == local_answer.tokens
    assert answer.report.route is (Route.LOCAL if place <= 1 else Route.SALVAGED)
    assert ("without a seal" if fault is end else "Socket closed") in answer.report.reason


def test_a_stalled_producer_is_given_up(pair: Any, local_answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muser_wire.session.PROGRESS_GRACE_S", 0.2)
    released = threading.Event()

    def stall(frames: Iterator[bytes]) -> Iterator[bytes]:
        yield next(frames)
        yield next(frames)
        released.wait(30.0)
        yield from frames

    # In memory a cancel cannot interrupt the stalled iterator, so the test lets it go after the bound.
    threading.Timer(1.0, released.set).start()
    answer = pair.ask(fault=stall)
    assert answer.tokens == local_answer.tokens
    assert answer.report.route is Route.SALVAGED
    assert answer.report.remote_tokens == 64
    assert "no frame came for" in answer.report.reason


def test_after_every_fault_the_next_request_is_remote_again(pair: Any, local_answer: Any) -> None:
    for place in range(FRAMES):
        pair.ask(fault=die(place))
        again = pair.ask()
        assert again.report.route is Route.REMOTE
        assert again.tokens == local_answer.tokens


def test_short_prompts_stay_local(pair: Any) -> None:
    report = pair.ask(prompt=(5, 6, 7)).report
    assert (report.route, report.reason) == (Route.LOCAL, "the prompt is shorter than 32 tokens")


def test_a_draining_producer_refuses_and_the_answer_is_local(tiny_llama: Path, started: Any, local_answer: Any) -> None:
    new_pair, new_producer = started
    pair = new_pair(tiny_llama, new_producer(tiny_llama))
    pair.producer.service.drain()
    answer = pair.ask()
    assert answer.tokens == local_answer.tokens
    assert answer.report.route is Route.LOCAL
    assert "draining" in answer.report.reason


def test_a_restarted_producer_is_noticed_on_the_next_call(tiny_llama: Path, started: Any, local_answer: Any) -> None:
    new_pair, new_producer = started
    pair = new_pair(tiny_llama, new_producer(tiny_llama))
    service = pair.service.inner
    service._facts = dataclasses.replace(service._facts, incarnation=b"restarted-16-byt")
    answer = pair.ask()
    assert answer.report.route is Route.REMOTE
    assert answer.tokens == local_answer.tokens


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("layers", "layers differs: 6 here, 7 at the peer"),
        ("weights", "weights_digest differs"),
        ("vocab", "vocab_size differs: 512 here, 520 at the peer"),
        ("grid", "chunk_tokens differs: 64 here, 32 at the peer"),
    ],
)
def test_another_producer_is_refused_by_name_with_both_values(
    tmp_path: Path, tiny_llama: Path, started: Any, local_answer: Any, change: str, named: str
) -> None:
    new_pair, new_producer = started
    other = tiny_llama
    if change != "grid":
        other = tmp_path / "other"
        write_tiny_llama(other, **{"layers": {"layers": 7}, "weights": {"seed": 1}, "vocab": {"vocab": 520}}[change])
    pair = new_pair(tiny_llama, new_producer(other, chunk_tokens=32 if change == "grid" else 64))
    assert pair.client.status.state is ProducerState.REFUSED
    answer = pair.ask()
    assert answer.tokens == local_answer.tokens
    assert answer.report.route is Route.LOCAL
    assert named in answer.report.reason


def test_another_tokenizer_is_refused_by_name_with_both_values(
    tmp_path: Path, tiny_llama: Path, started: Any, local_answer: Any
) -> None:
    new_pair, new_producer = started
    other = tmp_path / "other"
    shutil.copytree(tiny_llama, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    pair = new_pair(tiny_llama, new_producer(other))
    assert pair.client.status.state is ProducerState.REFUSED
    assert re.search(
        r"tokenizer_digest differs: [0-9a-f]{16} here, [0-9a-f]{16} at the peer", pair.client.status.reason
    )
    answer = pair.ask()
    assert answer.tokens == local_answer.tokens
    assert answer.report.route is Route.LOCAL


def test_the_producer_refuses_identities_that_differ_too(tiny_llama: Path, started: Any) -> None:
    new_pair, new_producer = started
    pair = new_pair(tiny_llama, new_producer(tiny_llama))
    consumer = pair.client._consumer
    changed = dataclasses.replace(consumer.identities, chunk_tokens=32)
    pair.client._consumer = dataclasses.replace(consumer, identities=changed)
    report = pair.ask().report
    assert report.route is Route.LOCAL
    assert "refused (identity_mismatch): chunk_tokens differs: 64 here, 32 at the peer" in report.reason


def test_a_cancel_stops_the_producer_and_frees_its_place(pair: Any, local_answer: Any) -> None:
    from muser_decode.engine.request import GenerationRequest

    entered, released = threading.Event(), threading.Event()

    def hold(frames: Iterator[bytes]) -> Iterator[bytes]:
        yield next(frames)
        entered.set()
        released.wait(30.0)
        yield from frames

    pair.service.fault = hold
    ended = threading.Event()
    generation = pair.node.submit(
        GenerationRequest("gone", tuple(range(5, 205)), 4),
        lambda event: ended.set() if type(event).__name__ == "Finished" else None,
    )
    assert entered.wait(10.0)
    generation.cancel()
    assert ended.wait(10.0)
    released.set()
    deadline = time.monotonic() + 10.0
    while pair.producer.scheduler._pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not pair.producer.scheduler._pending
    for _ in range(3):
        assert pair.ask().report.route is Route.REMOTE


def test_requests_that_arrive_together_wait_their_turn_and_blame_nobody(pair: Any) -> None:
    from muser_decode.engine.request import GenerationRequest

    prompts = [tuple(5 + (index * 37 + shift) % 200 for index in range(1200)) for shift in range(4)]
    alone = [pair.ask(prompt, tokens=2).tokens for prompt in prompts]
    events: list[queue.Queue[Any]] = [queue.Queue() for _ in prompts]
    for number, prompt in enumerate(prompts):
        pair.node.submit(GenerationRequest(f"together-{number}", prompt, 2), events[number].put)
    answers = [pair.collect(each) for each in events]
    assert [answer.tokens for answer in answers] == alone
    assert [answer.report.route for answer in answers] == [Route.REMOTE] * len(prompts)


def test_two_requests_with_one_id_do_not_meet(pair: Any) -> None:
    """A handoff's id is made for it, so what a client calls its requests names nothing on the wire."""
    from muser_decode.engine.request import GenerationRequest

    prompts = [tuple(5 + (index * 37 + shift) % 200 for index in range(300)) for shift in range(2)]
    alone = [pair.ask(prompt, tokens=4).tokens for prompt in prompts]
    assert alone[0] != alone[1]
    events: list[queue.Queue[Any]] = [queue.Queue() for _ in prompts]
    for prompt, each in zip(prompts, events, strict=True):
        pair.node.submit(GenerationRequest("same", prompt, 4), each.put)
    answers = [pair.collect(each) for each in events]
    assert [answer.tokens for answer in answers] == alone
    assert [answer.report.route for answer in answers] == [Route.REMOTE] * 2
    assert len({answer.report.handoff_id for answer in answers}) == 2


@pytest.mark.parametrize("transport", ["memory", "grpc"])
@pytest.mark.parametrize("family", ["gemma3", "muse_glimmer"])
def test_sliding_windows_are_salvaged_at_every_chunk(tmp_path: Path, started: Any, family: str, transport: str) -> None:
    new_pair, new_producer = started
    write_tiny(family, tmp_path / family, layers=6)
    pair = new_pair(tmp_path / family, new_producer(tmp_path / family), transport)
    prompt = tuple(5 + (index * 37) % 90 for index in range(300))
    pair.client._status = dataclasses.replace(pair.client.status, description=None, state=ProducerState.UNREACHABLE)
    alone = pair.ask(prompt, tokens=8)
    assert alone.report.route is Route.LOCAL
    pair.client.refresh()
    whole = pair.ask(prompt, tokens=8)
    assert whole.report.route is Route.REMOTE
    assert whole.tokens == alone.tokens
    for place in range(2, 1 + whole.report.segments_verified):
        broken = pair.ask(prompt, tokens=8, fault=die(place))
        assert broken.tokens == alone.tokens
        assert broken.report.remote_tokens % 64 == 0 or broken.report.remote_tokens == 299
