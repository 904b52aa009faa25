"""Prompts that begin alike: chats and questions on documents, as token ids and as messages, the same for everyone."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.decode import TEXT
from muser_wire.model.tokenizer import Tokenizer

USER_TOKENS = 24
"""Tokens of each message of a user."""

QUESTIONS = 5
CHUNK_TOKENS = 2048
COLD = "muser cold"

Ask = Callable[[list[int]], dict[str, Any]]
"""Answers a prompt without any cache: greedy tokens under "tokens", and times."""


@dataclass
class Scenario:
    """Prompts in order. `warm_from` is the first of which something should be held. Answers by contestant."""

    name: str
    warm_from: int
    prompts: list[list[int]] = field(default_factory=list)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def median_s(self, name: str) -> float:
        """Return the median time to the first token of the prompts that should be warm."""
        return statistics.median(answer["first_s"] for answer in self.answers[name][self.warm_from :])

    def cached_share(self, name: str) -> float:
        """Return how much of those prompts was held."""
        answers = self.answers[name][self.warm_from :]
        return sum(answer["cached"] for answer in answers) / sum(map(len, self.prompts[self.warm_from :]))

    def extend(self, prompt: list[int], ask: Ask) -> list[int]:
        """Add a prompt, answered cold; return the prompt with its reply."""
        answer = ask(prompt)
        self.prompts.append(prompt)
        self.answers.setdefault(COLD, []).append(answer)
        return [*prompt, *answer["tokens"]]


def words(tokenizer: Tokenizer, tokens: int, salt: str) -> list[int]:
    """Return `tokens` ids of text that no other salt gives."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += tokenizer.encode(f"{salt} {len(ids)}. {TEXT}\n")
    return ids[:tokens]


def chat(tokenizer: Tokenizer, ask: Ask, system_tokens: int, turns: int, prefix: str = "") -> Scenario:
    """One chat: every prompt is the one before, its reply and a new message."""
    scenario = Scenario(f"{prefix}chat of {turns} turns", 1)
    ids = words(tokenizer, system_tokens, "chat")
    for turn in range(turns):
        ids = scenario.extend([*ids, *words(tokenizer, USER_TOKENS, f"message {turn}")], ask)
    return scenario


def alternating(tokenizer: Tokenizer, ask: Ask, system_tokens: int, turns: int) -> Scenario:
    """Two chats with systems of their own, turn by turn."""
    scenario = Scenario("two chats in turn", 2)
    chats = [words(tokenizer, system_tokens, f"chat {name}") for name in ("one", "two")]
    for turn in range(turns):
        for index, ids in enumerate(chats):
            chats[index] = scenario.extend([*ids, *words(tokenizer, USER_TOKENS, f"turn {turn}")], ask)
    return scenario


@dataclass(frozen=True)
class Document:
    """A text of so many tokens, and questions of so many each."""

    name: str = "document"
    tokens: int = CHUNK_TOKENS
    questions: int = QUESTIONS
    question_tokens: int = USER_TOKENS


def document(tokenizer: Tokenizer, ask: Ask, asked: Document) -> Scenario:
    """One document with several questions, each asked afresh."""
    scenario = Scenario(f"{asked.name}, {asked.questions} questions", 1)
    text = words(tokenizer, asked.tokens, asked.name)
    for question in range(asked.questions):
        scenario.extend([*text, *words(tokenizer, asked.question_tokens, f"question {question}")], ask)
    return scenario


def messages(tokenizer: Tokenizer, system_tokens: int, turn: int, replies: list[str]) -> list[dict[str, str]]:
    """Return a chat's messages at turn `turn`, after so many replies."""
    system = tokenizer.decode(words(tokenizer, system_tokens, "served chat"))
    made = [{"role": "system", "content": system}]
    for index in range(turn + 1):
        text = tokenizer.decode(words(tokenizer, USER_TOKENS, f"served message {index}"))
        made.append({"role": "user", "content": text})
        if index < turn:
            made.append({"role": "assistant", "content": replies[index]})
    return made
