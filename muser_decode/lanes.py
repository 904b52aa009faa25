"""What the node's lane decides: the decoder, its kernels, and what the device's conformance adds to the identities."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from muser_decode.config import DecodeConfig
from muser_decode.decoder import MlxDecoder
from muser_decode.engine.contract import Decoder
from muser_decode.numerics import DTYPES
from muser_decode.reference.compiled.choice import NAME, compiled_operations, reference_decoder
from muser_decode.reference.conform import require_conformance
from muser_wire.identities import Digest
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.numerics import Lane
from muser_wire.reference.canonical import CanonicalWeights
from muser_wire.reference.compiled.operations import Operations

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class CheckedDevice:
    """What computes the lane here, and the digest of how it follows the lane's rules. The native lane has neither.

    `operations` are the compiled kernels, where they are admitted.
    """

    conformance: Digest | None = None
    operations: Operations | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels that are admitted."""
        return () if self.operations is None else (NAME,)


def check_device(config: DecodeConfig, checkpoint: Checkpoint) -> CheckedDevice:
    """Return this node's device after trying whether it computes as the lane's rules say.

    Raises:
        NumericsMismatch: the device computes otherwise.
        CheckpointError: the lane has no form for the model's weights.
    """
    if config.lane is Lane.NATIVE:
        return CheckedDevice()
    CanonicalWeights(checkpoint)
    started = time.monotonic()
    operations = compiled_operations(checkpoint.spec)
    device = CheckedDevice(require_conformance(operations), operations)
    _log.info("conforms lane=%s seconds=%.1f", config.lane.value, time.monotonic() - started)
    return device


def load_decoder(config: DecodeConfig, checkpoint: Checkpoint, device: CheckedDevice) -> Decoder:
    """Return the lane's decoder, by what `device` was checked with.

    Called on the engine's thread, which owns mlx from then on.
    """
    started = time.monotonic()
    decoder: Decoder
    if config.dtype is None:
        decoder = reference_decoder(CanonicalWeights(checkpoint), device.operations)
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
