"""Checks of one node on this machine, from what it says of itself: configuration, device, memory, model, ports."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from muser_wire.doctor.finding import Finding, bad, ok, unknown, warn

Facts = Mapping[str, Any]

COMPUTE_SHARE = 1.2
"""What a model takes beside its weights: a cache, and what one chunk needs for a moment."""

DIGEST_DIGITS = 16


def check_node(node: str, facts: Facts, answers: Callable[[str, str, int], bool], *, named: bool) -> Iterator[Finding]:
    """Yield what is found about one node.

    `answers(name, host, port)` tells whether a Muser node has that port, by its name in the configuration; `named`: a
    person says that this is one.
    """
    if "error" in facts and not named:
        # Both nodes' libraries may be installed where only one is used.
        yield unknown(
            f"{node}: configuration", str(facts["error"]), f"if this machine is one: muser doctor --node {node}"
        )
        return
    if "error" in facts:
        yield bad(
            f"{node}: configuration",
            str(facts["error"]),
            f"mend what is named; muser-{node} serve --print-config shows what is read then",
        )
        return
    settings = facts["configuration"]
    yield ok(f"{node}: configuration", settings["file"] or "flags, environment and defaults; no file")
    yield from _device(node, facts["device"], needs_gpu=settings["needs_gpu"])
    yield from _model(node, facts)
    yield from _access(node, facts.get("access", {}))
    for name, (host, port) in settings["ports"].items():
        yield check_port(f"{node}: {name}", host, port, partial(answers, name))


def _device(node: str, device: Facts, *, needs_gpu: bool) -> Iterator[Finding]:
    name = f"{node}: device"
    if "error" in device:
        yield bad(name, device["error"], "see --device; for CUDA: nvidia-smi, and a torch built with CUDA")
        return
    if device["is_gpu"] or not needs_gpu:
        yield ok(name, device["name"])
    else:
        advice = "for CUDA: nvidia-smi, and a torch built with CUDA; for Metal: an arm64 Python and mlx for macOS"
        yield warn(name, f"{device['name']}: no GPU is used", advice)
    system = device["system"]
    if system:
        yield ok(f"{node}: system memory", _amounts(system), **system)
    if device.get("total_nbytes") and device["is_gpu"]:
        yield ok(f"{node}: device memory", _amounts(device))


def _amounts(memory: Facts) -> str:
    total = f"{memory['total_nbytes'] / 1e9:.1f} GB"
    free = memory.get("available_nbytes")
    return total if free is None else f"{total}, {free / 1e9:.1f} GB free"


def _model(node: str, facts: Facts) -> Iterator[Finding]:
    model, name = facts["model"], f"{node}: model"
    path = facts["configuration"]["model"]
    if not model:
        yield unknown(name, f"{path} was not read")
        return
    if "error" in model:
        yield bad(name, f"{path}: {model['error']}", "muser model inspect PATH; muser model fetch NAME")
        return
    digest = model["identities"]["weights_digest"][:DIGEST_DIGITS]
    what = f"{model['family']}, {model['layers']} layers, {model['encoding']}, {model['nbytes'] / 1e9:.2f} GB"
    yield ok(name, f"{what}, weights {digest}", nbytes=model["nbytes"], weights_digest=digest)
    yield from _room(node, model["nbytes"], facts["device"])
    yield from _lane(node, model)


def _access(node: str, access: Facts) -> Iterator[Finding]:
    name = f"{node}: keys and certificate"
    if "error" in access:
        yield bad(name, access["error"], f"muser-{node} does not start before that is mended")
    elif access:
        yield ok(name, ", ".join(f"{what} {path}" for what, path in access.items()))


def _room(node: str, nbytes: int, device: Facts) -> Iterator[Finding]:
    total = device.get("total_nbytes")
    if total is None:
        return
    needed = nbytes * COMPUTE_SHARE
    value = f"{needed / 1e9:.1f} GB of {total / 1e9:.1f} GB"
    if needed > total:
        yield bad(f"{node}: room for the model", value, "take a smaller encoding or a smaller model")
    else:
        yield ok(f"{node}: room for the model", value)


def _lane(node: str, model: Facts) -> Iterator[Finding]:
    lane = model["lane"]
    # A reference lane that does not conform has failed before, as an error of the model's.
    yield ok(f"{node}: lane", lane + (", this device conforms" if lane == "reference" else ""))
    for refused in model["refused"]:
        advice = "the plain path is used: slower, the same answers; a newer torch or driver may help"
        yield warn(f"{node}: kernels", f"refused: {refused}", advice)
    if model["kernels"]:
        yield ok(f"{node}: kernels", "admitted: " + ", ".join(model["kernels"]))


def check_port(name: str, host: str, port: int, is_muser: Callable[[str, int], bool]) -> Finding:
    """Check that a port is free, or that the one who has it is a Muser node."""
    where = f"{host}:{port}"
    if port == 0:
        return ok(name, f"{where}: the system chooses")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(found[0], found[1]) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(found[4])
    except OSError as error:
        if error.errno == errno.EADDRINUSE and is_muser(host, port):
            return ok(name, f"{where}: a Muser node serves there")
        if error.errno == errno.EADDRINUSE:
            advice = f"another program has it: ss -ltnp 'sport = :{port}' or lsof -i :{port}; or choose another port"
            return bad(name, f"{where} is taken", advice)
        return bad(name, f"{where}: {error.strerror or error}", "give this machine that address, or choose another")
    return ok(name, f"{where} is free")
