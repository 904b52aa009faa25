"""What the node's lane decides: the decoder, and what the device's conformance adds to the node's identities."""

from __future__ import annotations

import logging
import time

from muser_decode.config import DecodeConfig
from muser_decode.decoder import MlxDecoder
from muser_decode.engine.contract import Decoder
from muser_decode.numerics import DTYPES
from muser_decode.reference.compiled.choice import compiled_operations, reference_decoder
from muser_decode.reference.conform import require_conformance
from muser_wire.identities import Digest
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.numerics import Lane
from muser_wire.reference.canonical import CanonicalWeights

_log = logging.getLogger(__name__)


def conformance(config: DecodeConfig, checkpoint: Checkpoint) -> Digest | None:
    """Return the digest of how this node's device follows the lane's rules; None in the native lane, which has none.

    Raises:
        NumericsMismatch: the device computes otherwise.
        CheckpointError: the lane has no form for the model's weights.
    """
    if config.lane is Lane.NATIVE:
        return None
    CanonicalWeights(checkpoint)
    started = time.monotonic()
    digest = require_conformance(compiled_operations(checkpoint.spec))
    _log.info("conforms lane=%s seconds=%.1f", config.lane.value, time.monotonic() - started)
    return digest


def load_decoder(config: DecodeConfig, checkpoint: Checkpoint) -> Decoder:
    """Return the lane's decoder; called on the engine's thread, which owns mlx from then on."""
    started = time.monotonic()
    decoder: Decoder
    if config.dtype is None:
        decoder = reference_decoder(CanonicalWeights(checkpoint), compiled_operations(checkpoint.spec))
    else:
        dtype = DTYPES[config.dtype]
        decoder = MlxDecoder(checkpoint, dtype=dtype, kv_element=config.kv_element, packed=config.packed)
    _log.info(
        "loaded model=%s encoding=%s lane=%s dtype=%s packed=%s seconds=%.1f",
        config.model.name,
        checkpoint.encoding,
        config.lane.value,
        config.dtype or "integer",
        config.packed,
        time.monotonic() - started,
    )
    return decoder


def computed(config: DecodeConfig) -> str:
    """Return what this node's keys and values depend on beside its identities, for blocks that stay."""
    if config.dtype is None:
        return config.lane.value
    return f"{config.dtype} {'packed' if config.packed else 'dense'}"
