"""What this producer would be if it were started now: configuration, device, kernels, model. See `muser doctor`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch

from muser_prefill.config import PrefillConfig, from_arguments, parser
from muser_prefill.errors import PrefillError
from muser_prefill.kernels.attention import choose_attention
from muser_prefill.kernels.exact.choice import choose_exact
from muser_prefill.kernels.linear import choose_linear
from muser_prefill.numerics import compute_dtype
from muser_prefill.reference.conform import require_conformance
from muser_prefill.serve import choose_device
from muser_wire.doctor.facts import Node, RefusedKernels, model_facts, system_memory
from muser_wire.identities import Digest
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tokenizer import load_tokenizer


def configuration(config: PrefillConfig) -> Mapping[str, Any]:
    """Return what the checks of other things need to know."""
    return {
        "model": str(config.model),
        "ports": ports(config),
        "producers": [],
        "allow_unqualified": False,
        "cache_disk_mb": 0,
        "needs_gpu": True,
    }


def ports(config: PrefillConfig) -> dict[str, list[Any]]:
    """Return host and number of each port that the node binds, by its name in the configuration."""
    bound: dict[str, list[Any]] = {
        "control_port": [config.host, config.control_port],
        "data_port": [config.host, config.data_port],
    }
    if config.metrics_port is not None:
        bound["metrics_port"] = [config.metrics_host, config.metrics_port]
    return bound


def device(config: PrefillConfig) -> Mapping[str, Any]:
    """Return what computes here and its memory, in bytes."""
    chosen, memory = choose_device(config.device), system_memory()
    if chosen.type != "cuda":
        return {"name": f"CPU, torch {torch.__version__}", "is_gpu": False, "system": memory, **memory}
    free, total = torch.cuda.mem_get_info(chosen)
    major, minor = torch.cuda.get_device_capability(chosen)
    name = f"{torch.cuda.get_device_name(chosen)}, sm_{major}{minor}, torch {torch.__version__}"
    return {"name": name, "is_gpu": True, "system": memory, "total_nbytes": total, "available_nbytes": free}


def model(config: PrefillConfig) -> Mapping[str, Any]:
    """Return what the model is on this device: the kernels that are admitted, and its identities."""
    checkpoint, tokenizer = open_checkpoint(config.model), load_tokenizer(config.model)
    refused = RefusedKernels()
    logging.getLogger("muser_prefill").addHandler(refused)
    kernels, conformance = admitted(config, checkpoint, choose_device(config.device))
    identities = node_identities(
        checkpoint,
        tokenizer,
        element=config.kv_element,
        lane=config.lane,
        chunk_tokens=config.chunk_tokens,
        conformance=conformance,
    )
    return model_facts(checkpoint, identities, kernels, refused.seen)


def admitted(
    config: PrefillConfig, checkpoint: Checkpoint, chosen: torch.device
) -> tuple[tuple[str, ...], Digest | None]:
    """Return the kernels that pass their check here, and what the device gives for its lane's conformance."""
    spec = checkpoint.spec
    if config.dtype is None:
        exact = choose_exact(spec.head_dim, chosen)
        return exact.admitted, require_conformance(chosen, exact)
    dtype = compute_dtype(config.dtype)
    _, attention = choose_attention(spec.head_dim, dtype, chosen)
    _, linear = choose_linear(spec.activation, dtype, chosen)
    return attention + linear, None


if __name__ == "__main__":
    keys = parser().parse_args(["serve"]).keys
    sys.exit(Node(keys, from_arguments, configuration, device, model, (PrefillError, RuntimeError)).tell(None))
