"""Texts on which tokenizers differ, and a forward pass from the definition, for the tests of models."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from muser_wire.home import muser_home
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.model.fetch import fetched_path

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "was",
    "with",
    "his",
    "they",
    "at",
    "this",
    "from",
    "what",
]
CODE = [
    "def f(x):\n    return x**2 + 1\n",
    "for (int i = 0; i < n; ++i) {\n\ta[i] += b[i];\n}\n",
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';",
    '<div class="a">\n  <p>text</p>\n</div>',
    "x = {'a': [1, 2.5, None], \"b\": lambda y: y//3}",
    'if err != nil {\n\t\treturn nil, fmt.Errorf("%w", err)\n\t}',
    '#include <stdio.h>\r\nint main(void) { puts("hi\\n"); }\r\n',
    "const f = async (a) => { await g(`${a}`); };",
    "\\begin{equation} \\frac{a}{b} \\end{equation}",
]
SCRIPTS = [
    "\u4f60\u597d\u4e16\u754c\u4e2d\u6587\u6d4b\u8bd5\uff0c\u4eca\u5929\u3002",
    "\u3053\u3093\u306b\u3061\u306f\u30ab\u30bf\u30ab\u30ca\u6771\u4eac\u300c\u6f22\u300d",
    "\ud55c\uad6d\uc5b4 \uc548\ub155\ud558\uc138\uc694",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \u05e2\u05d1\u05e8\u05d9\u05ea",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c",
    "\u06f1\u06f2\u06f3 \u0641\u0627\u0631\u0633\u06cc",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0ba4\u0bae\u0bbf\u0bb4\u0bcd",
    "na\u00efve caf\u00e9 \u00c5ngstr\u00f6m stra\u00dfe \u0130stanbul \u01c5 \u01c8",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043a\u0430\u043a \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac",
]
EMOJI = [
    "\U0001f600",
    "\U0001f44d\U0001f3fd",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\u2764\ufe0f",
    "\U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7",
    "1\ufe0f\u20e3",
]
MARKS = "e\u0301a\u0308o\u0302\u0323n\u0303u\u030a\u0304\u1ab0\u20d7"
CONTROLS = "\x00\x01\x07\x08\x0b\x0c\x1b\x1f\x7f\x80\x85\x9f\u200b\u200e\u200f\u2028\u2029\u202e\ufeff\ufffd"
SPACES = [" ", "  ", "   ", "\t", "\t\t", " \t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", " \n", " " * 7, " " * 45]
DIGITS = [
    "0",
    "12",
    "345",
    "6789",
    "12345",
    "3.14159",
    "1,234,567",
    "2026-08-10",
    "0xFF",
    "\u0663\u0664",
    "\u00bd",
    "\u2167",
]
ENGLISH = ["it's", "WE'LL", "don't", "I'VE", "'s", "'RE", "CamelCaseWord", "HTTPServer", "iPhone", "snake_case", "XMLs"]
CONTROL_SPELLINGS = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "</s>"),
    *("<|begin_of_text|>", "<|start|>", "<|message|>", "<|eot|>", "<|eot_id|>", "<think>", "<tool_call>", "[INST]"),
]


def texts(count: int = 2400, seed: int = 11) -> list[str]:
    """Texts of code, many scripts, emoji with joiners, combining marks, controls, spaces and spelled control tokens."""
    rng = random.Random(seed)

    def part(text: str, most: int) -> str:
        start = rng.randrange(len(text))
        return text[start : start + rng.randint(1, most)]

    def around(text: str) -> str:
        return rng.choice(("", " ", "\t", "  ", "\n")) + text + rng.choice(("", " ", "\t", "  ", "\n"))

    pieces: list[Callable[[], str]] = [
        lambda: rng.choice((" ", "")) + rng.choice((str, str.title, str.upper))(rng.choice(WORDS)),
        lambda: " " + rng.choice(WORDS),
        lambda: rng.choice(CODE),
        lambda: part(rng.choice(SCRIPTS), 8),
        lambda: part(rng.choice(SCRIPTS), 8),
        lambda: rng.choice(EMOJI),
        lambda: part(MARKS, 4),
        lambda: rng.choice(CONTROLS),
        lambda: rng.choice(SPACES),
        lambda: rng.choice(("", " ")) + rng.choice(DIGITS),
        lambda: rng.choice(("", " ")) + rng.choice(ENGLISH),
        lambda: around(rng.choice(CONTROL_SPELLINGS)),
    ]
    runs = [*(" " * n for n in range(1, 50)), *("\n" * n for n in range(1, 40)), *("\t" * n for n in range(1, 35))]
    return ["".join(rng.choice(pieces)() for _ in range(rng.randint(1, 12))) for _ in range(count - len(runs))] + runs


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """2,400 texts on which tokenizers differ."""
    return texts()


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    """The fetched Gemma 3 270M. Its absence is a failure: a skip would hide the real weights."""
    path = fetched_path("gemma3-270m", muser_home())
    if not path.is_file():
        pytest.fail(f"{path} is missing: run `muser model fetch gemma3-270m` once", pytrace=False)
    return path


def forward(checkpoint: Checkpoint, ids: Sequence[int]) -> np.ndarray:
    """Logits `[tokens, vocab]` from the definition, in float64."""
    spec = checkpoint.spec
    weights = {name: checkpoint.weight(name).f32().astype(np.float64) for name in checkpoint.names()}
    count, dim = len(ids), spec.head_dim
    distance = np.arange(count)[:, None] - np.arange(count)[None]

    def norm(x: np.ndarray, eps: float, weight: np.ndarray | float = 1.0) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * weight

    x = weights["embed.weight"][list(ids)] * spec.embedding_scale
    x = norm(x, spec.norm_eps) if spec.embedding_norm else x
    for i, layer in enumerate(spec.layers):
        w = {name.split(".", 2)[2].removesuffix(".weight"): v for name, v in weights.items() if f"layers.{i}." in name}
        h = norm(x, spec.norm_eps, w["attn_norm"])
        q, k, v = ((h @ w[f"attn.{part}"].T).reshape(count, -1, dim) for part in "qkv")
        if spec.qk_norm is not None:
            q = norm(q, spec.qk_norm.eps, w.get("attn.q_norm", 1.0))
            k = norm(k, spec.qk_norm.eps, w.get("attn.k_norm", 1.0))
        if layer.rope is not None:
            turn = np.exp(1j * np.arange(count)[:, None, None] * np.array(layer.rope.inverse_frequencies()))
            q, k = (((z[..., : dim // 2] + 1j * z[..., dim // 2 :]) * turn) for z in (q, k))
            q, k = (np.concatenate((z.real, z.imag), -1) for z in (q, k))
        k, v = (np.repeat(part, spec.heads // spec.kv_heads, 1) for part in (k, v))
        seen = (distance >= 0) & (distance < (layer.window or count))
        scores = np.where(seen, np.einsum("qhd,khd->hqk", q, k) * spec.attention_scale, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(count, -1)
        if spec.attention_gate:
            mixed = mixed / (1 + np.exp(-(h @ w["attn.gate"].T)))
        out = mixed @ w["attn.o"].T
        x = x + (out if spec.post_norm_eps is None else norm(out, spec.post_norm_eps, w["attn_post_norm"]))
        h = norm(x, spec.norm_eps, w["mlp_norm"])
        gate = h @ w["mlp.gate"].T
        cubic = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        active = gate / (1 + np.exp(-gate)) if spec.activation == "silu" else gate * 0.5 * (1 + np.tanh(cubic))
        out = (active * (h @ w["mlp.up"].T)) @ w["mlp.down"].T
        x = x + (out if spec.post_norm_eps is None else norm(out, spec.post_norm_eps, w["mlp_post_norm"]))
    head = weights["embed.weight" if spec.tied_embeddings else "head.weight"]
    logits = norm(x, spec.norm_eps, weights["final_norm.weight"]) @ head.T * spec.logit_scale
    cap = spec.logit_softcap
    return logits if cap is None else cap * np.tanh(logits / cap)


@pytest.fixture(scope="session")
def logits() -> Callable[[Checkpoint, Sequence[int]], np.ndarray]:
    """`logits(checkpoint, ids)`: from the definition, in float64."""
    return forward
