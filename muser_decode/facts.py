"""What this decode node would be if it were started now: configuration, device, model. See `muser doctor`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from typing import Any

from muser_decode.blas import load_blas

# Before anything that imports mlx; a node has done it long before.
BLAS = load_blas()

import mlx.core as mx  # noqa: E402

from muser_decode.api.keys import ApiKeys  # noqa: E402
from muser_decode.certificate import Certificate  # noqa: E402
from muser_decode.config import DecodeConfig, from_arguments, parser  # noqa: E402
from muser_decode.engine.memory import machine_nbytes  # noqa: E402
from muser_decode.errors import DecodeError  # noqa: E402
from muser_decode.lanes import check_device  # noqa: E402
from muser_decode.numerics import on_gpu  # noqa: E402
from muser_wire.doctor.facts import Node, RefusedKernels, model_facts, system_memory  # noqa: E402
from muser_wire.model.checkpoint import open_checkpoint  # noqa: E402
from muser_wire.model.identity import node_identities  # noqa: E402
from muser_wire.model.tokenizer import load_tokenizer  # noqa: E402


def configuration(config: DecodeConfig) -> Mapping[str, Any]:
    """Return what the checks of other things need to know."""
    return {
        "model": str(config.model),
        "ports": {"port": [config.host, config.port]},
        "producers": [[producer.host, producer.control_port] for producer in config.producers],
        "allow_unqualified": config.allow_unqualified,
        "cache_disk_mb": config.cache_disk_mb,
        "needs_gpu": sys.platform == "darwin",
    }


def access(config: DecodeConfig) -> Mapping[str, Any]:
    """Return the files of the HTTP port's entrance, which are read as at a start; none is made.

    Raises:
        WireError: one cannot be used; the message names it.
    """
    told: dict[str, Any] = {}
    if config.access.api_key_file is not None:
        ApiKeys(config.access.api_key_file)
        told["keys"] = str(config.access.api_key_file)
    if config.access.tls_cert is not None and config.access.tls_key is not None:
        Certificate(config.access.tls_cert, config.access.tls_key, time.time())
        told["certificate"] = str(config.access.tls_cert)
    return told


def device(config: DecodeConfig) -> Mapping[str, Any]:
    """Return what computes here and the memory that suits it, in bytes."""
    memory = system_memory()
    version = f"mlx {metadata.version('mlx')}"
    if on_gpu():
        name = f"{mx.device_info().get('device_name', 'GPU')} with Metal, {version}"
        return {"name": name, "is_gpu": True, "system": memory, "total_nbytes": machine_nbytes()}
    return {"name": f"CPU with {BLAS}, {version}", "is_gpu": False, "system": memory, **memory}


def model(config: DecodeConfig) -> Mapping[str, Any]:
    """Return what the model is on this device: the kernels that are admitted, and its identities."""
    checkpoint, tokenizer = open_checkpoint(config.model), load_tokenizer(config.model)
    refused = RefusedKernels()
    logging.getLogger("muser_decode").addHandler(refused)
    checked = check_device(config, checkpoint)
    identities = node_identities(
        checkpoint,
        tokenizer,
        element=config.kv_element,
        lane=config.lane,
        chunk_tokens=config.chunk_tokens,
        conformance=checked.conformance,
    )
    return model_facts(checkpoint, identities, checked.kernels, refused.seen)


if __name__ == "__main__":
    keys = parser().parse_args(["serve"]).keys
    configure = partial(from_arguments, on_gpu=on_gpu())
    sys.exit(
        Node(keys, configure, configuration, device, model, (DecodeError, RuntimeError), {"access": access}).tell(None)
    )
