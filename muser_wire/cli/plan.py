"""`muser plan`: what a model and a prompt cost, and which way is sooner, from the description alone."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from muser_wire.errors import FetchError, WireError
from muser_wire.geometry import ElementType
from muser_wire.home import muser_home
from muser_wire.model.catalogue import CATALOGUE, catalogue_spec
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.cost import (
    PlanRequest,
    active_weights,
    full_layer_token_nbytes,
    local_s,
    plan_schedule,
    remote_s,
    token_flops,
    windows_nbytes,
)
from muser_wire.model.fetch import fetched_path
from muser_wire.model.spec import ModelSpec
from muser_wire.schedule import DEFAULT_CHUNK_TOKENS, WindowPolicy

DEFAULT_LINK_GB_S = 1.06
"""What one 10 Gbit/s link carries of sealed frames, in GB/s, as measured."""


class PlanError(WireError):
    """The numbers given make no plan."""

    code = "plan"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `muser plan`."""
    parser = commands.add_parser("plan", help="predict costs and the time to the first token, without a model file")
    parser.add_argument("--model", required=True, help=f"{', '.join(CATALOGUE)}, or a checkpoint's path")
    parser.add_argument("--prompt", type=int, metavar="TOKENS", help="size of the prompt to hand over")
    parser.add_argument("--held", type=int, default=0, metavar="TOKENS", help="of it, already at the decode node")
    parser.add_argument("--prefill-rate", type=float, metavar="TOK/S", help="of the prefill node")
    parser.add_argument("--local-rate", type=float, metavar="TOK/S", help="of the decode node's own prefill")
    parser.add_argument("--link", type=float, default=DEFAULT_LINK_GB_S, metavar="GB/S", help="default: %(default)s")
    parser.add_argument("--chunk", type=int, default=DEFAULT_CHUNK_TOKENS, metavar="TOKENS", help="the grid")
    policies = [policy.value for policy in WindowPolicy]
    parser.add_argument(
        "--windows", choices=policies, default="rolling", help="what sliding layers send; nodes use rolling"
    )
    parser.add_argument("--element", choices=[e.value for e in ElementType], default=ElementType.F16.value)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    spec = _spec(arguments.model)
    plan = {"model": arguments.model, **model_costs(spec, ElementType(arguments.element))}
    if arguments.prompt is not None:
        plan |= _prompt_costs(spec, arguments)
    elif arguments.prefill_rate is not None or arguments.local_rate is not None:
        raise PlanError("a time needs --prompt: how many tokens there are to prefill")
    if arguments.json:
        print(json.dumps(plan, indent=2))
    else:
        print("\n".join(f"{label:<22} {text}" for label, text in _rows(plan)))
    return 0


def _spec(model: str) -> ModelSpec:
    """Return the spec of a described model, or of a checkpoint that is there."""
    if model in CATALOGUE:
        return catalogue_spec(model)
    try:
        path = fetched_path(model, muser_home())
    except FetchError as error:
        raise PlanError(f"{error}; described without a file are {', '.join(CATALOGUE)}") from error
    return open_checkpoint(path).spec


def model_costs(spec: ModelSpec, element: ElementType) -> dict[str, Any]:
    """Return what does not depend on a prompt."""
    return {
        "active_weights": active_weights(spec),
        "token_flops": token_flops(spec),
        "full_layer_token_nbytes": full_layer_token_nbytes(spec, element),
        "windows_nbytes": windows_nbytes(spec, element),
        "spec_digest": spec.digest().hex(),
    }


def _prompt_costs(spec: ModelSpec, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the payload of a handoff, and the times for which a rate was given."""
    for name in ("prefill_rate", "local_rate", "link"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"--{name.replace('_', '-')} is {value}; expected a positive number")
    policy, element = WindowPolicy(arguments.windows), ElementType(arguments.element)
    schedule = plan_schedule(spec, PlanRequest(arguments.prompt, arguments.held, arguments.chunk, policy, element))
    found: dict[str, Any] = {
        "prompt_tokens": arguments.prompt,
        "held_tokens": arguments.held,
        "payload_nbytes": schedule.payload_nbytes,
        "chunks": len(schedule.chunks),
        "segments": len(schedule.segments),
        "link_s": schedule.payload_nbytes / (arguments.link * 1e9),
    }
    if arguments.prefill_rate is not None:
        found["remote_s"] = remote_s(spec, schedule, arguments.prefill_rate, arguments.link * 1e9)
    if arguments.local_rate is not None:
        found["local_s"] = local_s(schedule, arguments.local_rate)
    return found


def _rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the plan as labels and text for a person."""
    rows = [
        ("model", plan["model"]),
        ("active weights", f"{plan['active_weights'] / 1e9:.2f}e9"),
        ("arithmetic", f"{plan['token_flops'] / 1e9:.1f} GFLOP a token, attention's own products apart"),
        ("KV of full layers", f"{plan['full_layer_token_nbytes']:,} bytes a token"),
        ("KV of full windows", f"{plan['windows_nbytes']:,} bytes"),
    ]
    if "payload_nbytes" in plan:
        held = f", {plan['held_tokens']:,} held" if plan["held_tokens"] else ""
        rows += [
            ("prompt", f"{plan['prompt_tokens']:,} tokens{held}"),
            ("payload", f"{plan['payload_nbytes']:,} bytes in {plan['segments']:,} segments"),
            ("link alone", f"{plan['link_s']:.3f} s"),
        ]
    for name, label in (("remote_s", "first token, remote"), ("local_s", "first token, local")):
        if name in plan:
            rows.append((label, f"{plan[name]:.3f} s and one decode step"))
    if "remote_s" in plan and "local_s" in plan:
        rows.append(("remote is", f"{plan['local_s'] / plan['remote_s']:.2f} times as fast"))
    return rows
