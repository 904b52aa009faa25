"""The chat and status page in a real browser, in front of real nodes."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from local_backend import LocalBackend, local_backend, served
from made_serve import made_serve
from playwright.sync_api import Page, Request, expect

from muser_decode.api.keys import ApiKeys
from muser_decode.decoder import MlxDecoder
from muser_decode.engine.cache import KVCache
from muser_decode.entrance import Entrance
from muser_wire.model.tiny import write_tiny_llama

KEY = "a-key-0123456789abcdef"
SEND, STOP = "Send", "Stop"
QUESTION = "Where do the ships go when the harbour is closed? " * 12
WAIT_S = 30.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A producer and a decode node, whose context takes several answers of a model that seldom ends one."""
    folder = tmp_path_factory.mktemp("served")
    write_tiny_llama(folder / "tiny", max_positions=16384)
    with made_serve(folder / "tiny", folder / "log", flags="--route remote") as url:
        yield url


@pytest.fixture
def backend(tiny_llama: Path) -> Iterator[LocalBackend]:
    """A decode node alone, in this process."""
    with local_backend(tiny_llama) as backend:
        yield backend


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name=SEND).click()


def answered(page: Page, count: int) -> Any:
    """The last of so many answers, once it is complete."""
    expect(page.locator(".turn.assistant")).to_have_count(count)
    # A model that seldom ends an answer takes its time.
    expect(page.get_by_role("button", name=SEND)).to_be_visible(timeout=90_000)
    return page.locator(".turn.assistant").last


def events(body: str) -> list[Any]:
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]


COUNT_CHANGES = """
() => { window.changes = 0;
        new MutationObserver((all) => { window.changes += all.length; })
          .observe(document.getElementById("talk"), { subtree: true, childList: true, characterData: true }); }
"""


@pytest.mark.slow
def test_a_conversation_over_both_nodes(seen: Any, nodes: str, tmp_path: Path) -> None:
    page: Page = seen.page
    bodies: list[Any] = []
    streams: list[Request] = []

    def note(request: Request) -> None:
        if request.url.endswith("/v1/chat/completions"):
            bodies.append(request.post_data_json)
            streams.append(request)

    page.on("request", note)
    page.goto(nodes)
    expect(page.locator("#model")).to_have_text("tiny")
    seen.shot(tmp_path, "empty")
    page.evaluate(COUNT_CHANGES)
    ask(page, QUESTION)
    turn = answered(page, 1)
    seen.shot(tmp_path, "answered")
    # The text came in pieces: more changes of the page than there are elements to add.
    assert page.evaluate("window.changes") > 20
    response = streams[0].response()
    assert response is not None
    told = events(response.text())
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in told if e["choices"])
    assert turn.locator("> span").text_content() == text
    (muser,) = [e["muser"] for e in told if "route" in e.get("muser", {})]
    usage = next(e["usage"] for e in told if e.get("usage"))
    assert (turn.locator(".route").text_content(), muser["route"]) == ("remote", "remote")
    line = turn.locator(".facts > div").first.text_content()
    assert f"{usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']:,} answered" in line
    check_bar(turn, muser["timings"])
    ask(page, "And then?")
    answered(page, 2)
    assert [len(body["messages"]) for body in bodies] == [1, 3]
    assert bodies[1]["messages"] == [
        {"role": "user", "content": QUESTION.strip()},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And then?"},
    ]
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, "Anew")
    answered(page, 1)
    assert len(bodies[2]["messages"]) == 1
    assert seen.wrong == []
    assert {re.sub(r"(?<=\d)/.*", "", url) for url in seen.asked} == {nodes}


def check_bar(turn: Any, timings: dict[str, float]) -> None:
    """The bar is cut as the time to the first token was: the producer's beginning, its stream, the first step here."""
    wire = min(timings["wire_s"], timings["prefill_s"])
    parts = [timings["prefill_s"] - wire, wire, timings["first_token_s"] - timings["prefill_s"]]
    pieces = turn.locator(".bar i")
    assert pieces.count() == turn.locator(".key span").count() == sum(part > 0 for part in parts)
    whole = turn.locator(".bar").bounding_box()["width"]
    widths = [pieces.nth(place).bounding_box()["width"] / whole for place in range(pieces.count())]
    assert widths == pytest.approx([part / timings["first_token_s"] for part in parts if part > 0], abs=0.02)
    assert "First token after" in turn.locator(".facts").text_content()


@pytest.mark.slow
def test_the_state_of_both_nodes(seen: Any, nodes: str, tmp_path: Path) -> None:
    page: Page = seen.page
    page.goto(nodes)
    expect(page.locator("#decode")).to_have_class("state good")
    expect(page.locator("#decode")).to_have_text("ready")
    expect(page.locator("#producers .state")).to_have_class("state good")
    # Of two chunks: the link's rate is that of what comes after the first.
    ask(page, "Another one. " + QUESTION * 7)
    answered(page, 1)
    # The link, the rates and the kept blocks are known after a handoff.
    expect(page.locator("#producers")).to_contain_text(re.compile(r"link [\d.,]+ [kMG]B/s"))
    expect(page.locator("#rates")).to_contain_text("remote")
    expect(page.locator("#cache")).to_contain_text("memory blocks")
    expect(page.locator("#node")).to_contain_text("native")
    seen.shot(tmp_path, "state")
    page.set_viewport_size({"width": 390, "height": 780})
    seen.shot(tmp_path, "narrow")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert seen.wrong == []


def test_producers_in_every_state(seen: Any, backend: LocalBackend, tmp_path: Path) -> None:
    base = {"reason": "", "resting_s": 0.0, "wait_s": None, "tokens_per_s": None, "link_bytes_per_s": None}
    told: list[dict[str, Any]] = [
        {**base, "name": "gx10-a", "state": "ready", "tokens_per_s": 1234.5, "link_bytes_per_s": 1_910_000_000},
        {**base, "name": "gx10-b", "state": "ready", "resting_s": 8.0},
        {**base, "name": "gx10-c", "state": "unreachable", "reason": "connection refused"},
        {**base, "name": "gx10-d", "state": "refused", "reason": "weights_digest: ours 1234, theirs 5678"},
    ]
    backend.describe_status = lambda: {"producers": told, "requests": 0}  # type: ignore[method-assign]
    page: Page = seen.page
    with served(backend) as url:
        page.goto(url)
        states = page.locator("#producers .state")
        expect(states).to_have_text(
            [
                "gx10-a ready",
                "gx10-b ready: failed lately, left alone for 8 s",
                "gx10-c unreachable: connection refused",
                "gx10-d refused: weights_digest: ours 1234, theirs 5678",
            ]
        )
        kinds = ["state good", "state poor", "state bad", "state bad"]
        assert [state.get_attribute("class") for state in states.all()] == kinds
        expect(page.locator("#producers")).to_contain_text("prefills 1,234.5 tokens/s, link 1.91 GB/s")
        seen.shot(tmp_path, "producers")
        told.clear()
        expect(page.locator("#producers")).to_have_text("none configured")
    # The node is gone now, which the page says by itself.
    expect(page.locator("#decode")).to_have_text("not reachable")
    expect(page.locator("#decode")).to_have_class("state bad")


def test_a_key_is_asked_for_and_kept_for_the_tab(seen: Any, backend: LocalBackend, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"{KEY}\n")
    page: Page = seen.page
    with served(backend, entrance=Entrance(ApiKeys(keys), None, frozenset({"127.0.0.1"}))) as url:
        page.goto(url)
        expect(page.get_by_role("dialog")).to_contain_text("This node asks for an API key.")
        seen.shot(tmp_path, "key")
        page.locator("#key").fill("another-key-0123456789")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#wrong")).to_have_text("This node does not know that key.")
        seen.shot(tmp_path, "wrong-key")
        page.locator("#key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#decode")).to_have_text("ready")
        ask(page, "Hello")
        expect(answered(page, 1).locator(".route")).to_have_text("local")
        page.reload()
        expect(page.locator("#decode")).to_have_text("ready")
        assert KEY not in page.url
        assert page.evaluate("Object.values(localStorage).concat(document.cookie).join('')") == ""


def posted(page: Page) -> list[Any]:
    """The bodies that the page sends from now on."""
    bodies: list[Any] = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.method == "POST" else None)
    return bodies


class Steps:
    """Lets so many decode steps pass, and holds the others until they are freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.free = threading.Event()
        self.reached = threading.Event()
        whole = MlxDecoder.steps
        left = iter(range(count))

        def steps(decoder: MlxDecoder, tokens: mx.array, caches: Sequence[KVCache]) -> mx.array:
            if next(left, None) is None:
                self.reached.set()
                assert self.free.wait(WAIT_S)
            return whole(decoder, tokens, caches)

        monkeypatch.setattr(MlxDecoder, "steps", steps)


def test_stopping_cancels_the_answer_and_the_chat_goes_on(
    seen: Any, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = Steps(monkeypatch, 12)
    page: Page = seen.page
    bodies = posted(page)
    with served(backend) as url:
        page.goto(url)
        expect(page.locator("#model")).to_have_text("tiny")
        ask(page, "Tell me everything.")
        assert steps.reached.wait(WAIT_S)
        turn = page.locator(".turn.assistant")
        expect(turn.locator("> span")).not_to_be_empty()
        assert backend.engine.load == 1
        seen.shot(tmp_path, "answering")
        page.get_by_role("button", name=STOP).click()
        expect(turn).to_contain_text("Stopped.")
        steps.free.set()
        expect(page.get_by_role("button", name=SEND)).to_be_visible()
        page.wait_for_function("() => fetch('/v1/models').then((a) => a.json()).then((a) => !a.data[0].muser.requests)")
        assert backend.engine.load == 0
        kept = turn.locator("> span").text_content()
        seen.shot(tmp_path, "stopped")
        ask(page, "Go on.")
        answered(page, 2)
        # What was said before the stop is part of the conversation.
        assert bodies[1]["messages"][1] == {"role": "assistant", "content": kept}


def test_a_new_chat_knows_nothing_of_the_answer_that_it_stopped(
    seen: Any, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, 12)
    page: Page = seen.page
    bodies = posted(page)
    with served(backend) as url:
        page.goto(url)
        expect(page.locator("#model")).to_have_text("tiny")
        ask(page, "Tell me everything.")
        assert steps.reached.wait(WAIT_S)
        expect(page.locator(".turn.assistant > span")).not_to_be_empty()
        page.get_by_role("button", name="New chat").click()
        steps.free.set()
        expect(page.get_by_role("button", name=SEND)).to_be_visible()
        ask(page, "Anew")
        answered(page, 1)
    assert bodies[1]["messages"] == [{"role": "user", "content": "Anew"}]


def test_a_refusal_is_shown_and_the_chat_goes_on(seen: Any, backend: LocalBackend, tmp_path: Path) -> None:
    page: Page = seen.page
    bodies = posted(page)
    with served(backend) as url:
        page.goto(url)
        expect(page.locator("#model")).to_have_text("tiny")
        ask(page, "word " * backend.context_tokens)
        expect(answered(page, 1)).to_contain_text(f"the context here holds {backend.context_tokens}")
        seen.shot(tmp_path, "refused")
        ask(page, "<img src=x onerror='document.title=1'><script>document.title=2</script>")
        answered(page, 2)
        assert [message["role"] for message in bodies[1]["messages"]] == ["user"]
        # Markup in a message is text, and shown as it was typed.
        assert page.locator(".turn.user").last.text_content() == bodies[1]["messages"][0]["content"]
        assert (page.locator(".turn img").count(), page.title()) == (0, "Muser")


def test_no_other_host_can_be_asked(seen: Any, backend: LocalBackend) -> None:
    page: Page = seen.page
    with served(backend) as url, socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(1.0)
        page.goto(url)
        expect(page.locator("#model")).to_have_text("tiny")
        address = f"http://127.0.0.1:{other.getsockname()[1]}/"
        assert page.evaluate("(url) => fetch(url).then(() => 'asked', (error) => error.name)", address) == "TypeError"
        image = """(url) => new Promise((end) => {
            const image = new Image(); image.onload = image.onerror = (event) => end(event.type); image.src = url; })"""
        assert page.evaluate(image, address) == "error"
        with pytest.raises(TimeoutError):
            other.accept()
