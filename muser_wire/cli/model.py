"""`muser model`: fetch, inspect, find, quantise a model, write a tiny one, verify the decoders on one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from muser_wire.cli import verify
from muser_wire.cli.progress import Meter
from muser_wire.errors import CheckpointError
from muser_wire.home import muser_home
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.fetch import fetch, fetched_path
from muser_wire.model.published import PUBLISHED
from muser_wire.model.quantize import TARGETS, quantize_model
from muser_wire.model.report import report
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tiny_families import TINY_FAMILIES

NAME_HELP = f"{', '.join(PUBLISHED)}, hf:OWNER/NAME, or a path"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `muser model` and its subcommands."""
    parser = commands.add_parser(
        "model", help="fetch a model, look into it, verify the decoders on it, write a tiny one"
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    fetcher = actions.add_parser("fetch", help="fetch a model into MUSER_HOME (default: ~/.muser) and print its path")
    fetcher.add_argument("name", help=NAME_HELP)
    fetcher.add_argument("--verify", action="store_true", help="read again in full what is already there")
    fetcher.set_defaults(run=run_fetch)
    inspector = actions.add_parser("inspect", help="print architecture, geometry, sizes and digests")
    inspector.add_argument("name", metavar="PATH", help=NAME_HELP)
    inspector.add_argument("--json", action="store_true", help="print one JSON object")
    inspector.set_defaults(run=run_inspect)
    locator = actions.add_parser("path", help="print where a model lies, or will lie once fetched")
    locator.add_argument("name", help=NAME_HELP)
    locator.set_defaults(run=run_path)
    _add_tiny(actions)
    _add_quantize(actions)
    verify.add_parser(actions)


def _add_tiny(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser("tiny", help="write a small random checkpoint in the Hugging Face format, for tests")
    parser.add_argument("family", choices=tuple(TINY_FAMILIES), metavar="FAMILY", help=", ".join(TINY_FAMILIES))
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, which must not exist or be empty")
    parser.add_argument("--layers", type=int, default=6, help="default: 6")
    parser.add_argument("--window", type=int, default=64, help="of sliding layers, in tokens (default: 64)")
    parser.add_argument("--vocab", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--dtype", choices=("F32", "F16", "BF16"), default="F32", help="default: F32")
    parser.set_defaults(run=run_tiny)


def _add_quantize(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser("quantize", help="write a model as a GGUF file that the reference lane can use")
    parser.add_argument("name", metavar="SOURCE", help=NAME_HELP)
    parser.add_argument("out", type=Path, metavar="OUT", help="the GGUF file to write, which must not exist")
    parser.add_argument("--to", choices=tuple(TARGETS), default="q8_0", help="encoding of matrices (default: q8_0)")
    parser.set_defaults(run=run_quantize)


def run_fetch(arguments: argparse.Namespace) -> int:
    """Fetch a model; its path alone goes to standard output."""
    print(fetch(arguments.name, muser_home(), Meter(sys.stderr), verify=arguments.verify))
    return 0


def run_path(arguments: argparse.Namespace) -> int:
    """Print where a model lies."""
    print(fetched_path(arguments.name, muser_home()))
    return 0


def run_tiny(arguments: argparse.Namespace) -> int:
    """Write a tiny checkpoint and print its folder."""
    out: Path = arguments.out
    names = ("layers", "window", "vocab", "seed", "dtype")
    try:
        if out.exists() and any(out.iterdir()):
            raise CheckpointError(f"{out} is not empty; a tiny checkpoint overwrites nothing")
        write_tiny(arguments.family, out, **{name: getattr(arguments, name) for name in names})
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{out} cannot be written: {error}") from error
    print(out)
    return 0


def run_quantize(arguments: argparse.Namespace) -> int:
    """Quantise a model; the file alone goes to standard output, what is in it to standard error."""
    counts = quantize_model(fetched_path(arguments.name, muser_home()), arguments.out, arguments.to)
    print(", ".join(f"{count} x {encoding}" for encoding, count in counts.most_common()), file=sys.stderr)
    print(arguments.out)
    return 0


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print what a model is."""
    found = report(open_checkpoint(fetched_path(arguments.name, muser_home())))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{label:<16} {value}" for label, value in _rows(found)))
    return 0


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the report as labels and text for a person."""
    windows = ", ".join(f"{count} x {window}" for window, count in found["windows"].items())
    encodings = ", ".join(f"{count} x {encoding}" for encoding, count in found["encodings"].items())
    head = "tied to the embedding" if found["tied_embeddings"] else "its own"
    return [
        ("path", found["path"]),
        ("family", found["family"]),
        ("layers", f"{found['layers']} ({windows})"),
        ("heads", f"{found['heads']} for queries, {found['kv_heads']} for keys and values, {found['head_dim']} wide"),
        ("hidden, ffn", f"{found['hidden_size']}, {found['ffn_size']}"),
        ("vocabulary", f"{found['vocab_size']} tokens, head {head}"),
        ("context", f"{found['max_positions']} tokens"),
        ("parameters", f"{found['parameters']:,}"),
        ("encodings", f"{encodings}; most weights are {found['encoding']}"),
        ("weights", f"{found['weights_nbytes']:,} bytes"),
        ("KV cache", f"{found['kv_token_nbytes']:,} bytes a token in f16"),
        ("decode reads", f"{found['decode_token_nbytes']:,} bytes of weights a token"),
        ("spec", found["spec_digest"]),
        ("tokenizer", found["tokenizer_digest"]),
        ("weights digest", found["weights_digest"]),
        *(("left aside", f"{count} tensors: {what}") for what, count in found["asides"].items()),
    ]
