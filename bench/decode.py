"""Decode speed beside mlx-lm: same weights in f32, same prompt, BLAS and threads, rounds that interleave.

`python -m bench.decode --help` lists the options. The result is refused when the greedy tokens differ.
With `--count` it times nothing and counts the operations of a step of a model with that family's layers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from bench.driver import (
    BenchError,
    Goal,
    Peer,
    Samples,
    add_run_arguments,
    interleave,
    judge,
    machine,
    peer_python,
    table,
    write_result,
)
from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.fetch import fetched_path
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tokenizer import load_tokenizer

REQUIREMENTS = ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2") if sys.platform == "linux" else ("mlx-lm==0.32.2",)
GOAL_MLX_LM = 1.0
"""How many times as fast as mlx-lm this shall be."""
OURS = "muser f32"
MLX_LM = "mlx-lm f32"
PROMPT_TOKENS = 128

COUNTED = {"muse-glimmer": ("muse_glimmer", 52), "gemma3-270m": ("gemma3", 18)}
"""What `--count` takes: a family and its real number of layers. Widths are tiny: no operation depends on them."""

MOST_OPERATIONS = {"muse-glimmer": 900}
"""What a token may at most take."""

COUNT_PROMPT_TOKENS = 200
"""Well past the window of a tiny model, so that its sliding layers have forgotten what they may."""

TEXT = """A lighthouse keeper wrote to his sister every winter. The letters told of storms, of ships that passed far
out and never answered his lamp, and of the gulls that slept in the lee of the tower. In the spring she wrote back,
and her letters were about the town: who had married, who had left, what the bakery sold now that the old baker was
gone, and how the harbour had been dredged so that larger boats could come in. He read each of them aloud to the dog.
One year no letter came. He waited until the days were long, then he rowed across the bay, walked up the hill to her
house, and knocked at the green door, which had been painted since he saw it last. A girl of ten or so opened it and
said that"""

HF_NAMES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Options:
    """One run, as the command line describes it."""

    model: Path
    tokens: int
    rounds: int
    threads: int
    venv: Path
    out: Path | None
    count: str | None

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> Options:
        """Return the options of a command line."""
        parser = argparse.ArgumentParser(prog="bench.decode", description=__doc__)
        parser.add_argument("--model", type=Path, help="GGUF file or folder; without it the fetched smollm2")
        parser.add_argument("--tokens", type=int, default=64, help="tokens decoded in a round")
        parser.add_argument("--rounds", type=int, default=7, help="measurements of each contestant")
        parser.add_argument("--count", choices=sorted(COUNTED), help="count a step's operations and time nothing")
        add_run_arguments(parser)
        args = parser.parse_args(argv)
        model = args.model or fetched_path("smollm2", muser_home())
        return cls(model, args.tokens, args.rounds, args.threads, args.venv, args.out, args.count)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    options = Options.parse(argv)
    try:
        with ExitStack() as stack:
            return judge(run(options, stack) if options.count is None else count(options, options.count, stack))
    except (BenchError, WireError) as error:
        print(f"bench.decode: {error}", file=sys.stderr)
        return 1


def run(options: Options, stack: ExitStack) -> list[Goal]:
    """Start both, measure while comparing tokens, count, print; return what shall hold."""
    host = machine()
    ids = prompt(options.model)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_folder(open_checkpoint(options.model), folder)
    python = peer_python(options.venv, REQUIREMENTS)
    peers = [
        Peer(OURS, "ours_decode.py", Path(sys.executable), options.threads),
        Peer(MLX_LM, "mlxlm_decode.py", python, options.threads),
    ]
    for peer in peers:
        stack.callback(peer.close)
    facts = {
        OURS: peers[0].call("load", model=str(options.model.absolute())),
        MLX_LM: peers[1].call("load", folder=str(folder)),
    }
    samples = interleave(peers, options.rounds, Timer(ids, options.tokens))
    # Last, because counting replaces a contestant's kernels.
    operations = {peer.name: peer.call("count", ids=ids) for peer in peers}
    report(samples, operations, options)
    if options.out is not None:
        write_result(
            options.out,
            host,
            unit=f"seconds for {options.tokens - 1} steps",
            model=options.model.name,
            threads=options.threads,
            contestants=facts,
            samples=samples,
            operations=operations,
            ratios={MLX_LM: samples.ratio(MLX_LM, OURS)},
        )
    return [Goal(f"times as fast as {MLX_LM}", GOAL_MLX_LM, samples.ratio(MLX_LM, OURS))]


def count(options: Options, name: str, stack: ExitStack) -> list[Goal]:
    """Count a step's operations in a random model, ours and, where the peers' environment is, mlx-lm's; print them.

    Returns what shall hold: an operation more than allowed brings the ratio below 1.
    """
    family, layers = COUNTED[name]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_tiny(family, folder, layers=layers, hidden=32, ffn=48)
    ids = [7 + i % 100 for i in range(COUNT_PROMPT_TOKENS)]
    peers = [(Peer(OURS, "ours_decode.py", Path(sys.executable), 1), {"model": str(folder)})]
    python = options.venv / "bin" / "python"
    if python.exists():
        peers.append((Peer(MLX_LM, "mlxlm_decode.py", python, 1), {"folder": str(folder)}))
    operations = {}
    for peer, load in peers:
        stack.callback(peer.close)
        peer.call("load", **load)
        operations[peer.name] = peer.call("count", ids=ids)
    print(table(["", "operations a token"], [[name, str(sum(kinds.values()))] for name, kinds in operations.items()]))
    print_kinds(operations)
    allowed, ours = MOST_OPERATIONS.get(name), sum(operations[OURS].values())
    return [] if allowed is None else [Goal(f"operations a token, {allowed} allowed over {ours}", 1.0, allowed / ours)]


def prompt(model: Path) -> list[int]:
    """Return the first PROMPT_TOKENS tokens of TEXT.

    Raises:
        BenchError: this vocabulary makes fewer of it.
    """
    ids = load_tokenizer(model).encode(TEXT)[:PROMPT_TOKENS]
    if len(ids) < PROMPT_TOKENS:
        raise BenchError(f"the prompt has {len(ids)} tokens in this vocabulary, {PROMPT_TOKENS} are needed")
    return ids


class Timer:
    """Measures one decoding, and refuses it when its tokens are not those of all others."""

    def __init__(self, ids: list[int], tokens: int) -> None:
        self._ids, self._tokens = ids, tokens
        self._expected: list[int] | None = None

    def __call__(self, peer: Peer) -> float:
        """Return the seconds from the first token to the last.

        Raises:
            BenchError: the greedy tokens differ: the contestants do not compute the same.
        """
        answer = peer.call("decode", ids=self._ids, tokens=self._tokens)
        if self._expected is None:
            self._expected = answer["tokens"]
        if answer["tokens"] != self._expected:
            raise BenchError(f"{peer.name} decodes {answer['tokens']}, not {self._expected}")
        return float(answer["seconds"])


def write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint's f32 values as a Hugging Face folder, so that both multiply the same numbers."""
    spec = checkpoint.spec
    rope = spec.layers[0].rope
    if rope is None or any(layer.rope != rope or layer.window for layer in spec.layers):
        raise BenchError("only plain llama models have peers here")
    tensors = {hf_name(name): mx.array(checkpoint.weight(name).f32()) for name in checkpoint.names()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(spec.layers),
        "intermediate_size": spec.ffn_size,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": rope.theta,
        "rope_traditional": False,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(config))


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a canonical one.

    >>> hf_name("layers.3.attn.q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    parts = name.removesuffix(".weight").split(".", 2)
    if parts[0] == "layers":
        return f"model.layers.{parts[1]}.{HF_NAMES[parts[2]]}.weight"
    return f"{HF_NAMES['.'.join(parts)]}.weight"


def report(samples: Samples, operations: dict[str, dict[str, int]], options: Options) -> None:
    """Print tokens a second by median, our ratio, and the operations of a step with their kinds."""
    rows = []
    for name in samples.by_name:
        rate = f"{(options.tokens - 1) / samples.median(name):.1f}"
        faster = "" if name == OURS else f"{samples.ratio(name, OURS):.2f}x"
        rows.append([name, rate, faster, str(sum(operations[name].values()))])
    print(table(["", "tokens a second", "ours", "operations a token"], rows))
    print(f"""
{PROMPT_TOKENS} prompt tokens, {options.tokens} decoded and equal, {options.threads} BLAS threads each.""")
    print_kinds(operations)


def print_kinds(operations: dict[str, dict[str, int]]) -> None:
    """Print what operations are, and how many of each kind a step has."""
    print("""Operations are the primitives of a step's graph without views, functions of mx.fast and compiled groups as
one each: what a GPU is given.""")
    for name, counts in operations.items():
        kinds = sorted(counts.items(), key=lambda item: -item[1])
        print(f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in kinds))


if __name__ == "__main__":
    sys.exit(main())
