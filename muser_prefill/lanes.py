"""What a node loads for its lane: the decoder, and the identities that follow from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from muser_prefill.config import PrefillConfig
from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.runner import Decoder
from muser_prefill.kernels.exact.choice import choose_exact
from muser_prefill.numerics import compute_dtype
from muser_prefill.reference.conform import require_conformance
from muser_prefill.reference.decoder import TorchReferenceDecoder
from muser_wire.identities import Digest, Identities
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.reference.canonical import CanonicalWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to compute, and what a handoff depends on."""

    decoder: Decoder
    identities: Identities


def load(config: PrefillConfig, device: torch.device) -> Loaded:
    """Open the configured model and return it in the configured lane.

    Raises:
        WireError: the model cannot be opened, or not in this lane, or the device does not conform to it.
    """
    checkpoint = open_checkpoint(config.model)
    tokenizer = load_tokenizer(config.model)
    decoder, conformance = _decoder(config, checkpoint, device)
    identities = node_identities(
        checkpoint,
        tokenizer,
        element=config.kv_element,
        lane=config.lane,
        chunk_tokens=config.chunk_tokens,
        conformance=conformance,
    )
    _log.info(
        "loaded model=%s encoding=%s lane=%s dtype=%s device=%s kernels=%s",
        config.model.name,
        checkpoint.encoding,
        config.lane.value,
        config.dtype or "integer",
        device,
        ",".join(decoder.admitted),
    )
    return Loaded(decoder, identities)


def _decoder(config: PrefillConfig, checkpoint: Checkpoint, device: torch.device) -> tuple[Decoder, Digest | None]:
    """Return the lane's decoder, and the digest of the device's conformance where the lane has one."""
    if config.dtype is not None:
        dtype = compute_dtype(config.dtype)
        return TorchDecoder(checkpoint, dtype=dtype, kv_element=config.kv_element, device=device), None
    weights = CanonicalWeights(checkpoint)
    kernels = choose_exact(weights.spec.head_dim, device)
    # Before minutes of loading.
    conformance = require_conformance(device, kernels)
    return TorchReferenceDecoder(weights, device=device, kernels=kernels), conformance
