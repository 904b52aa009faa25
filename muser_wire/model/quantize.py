"""A checkpoint written again as a GGUF file whose matrices are integers with scales: `muser model quantize`.

From a GGUF file everything but the matrices is copied as it stands. From a folder the metadata follows the family's
conventions; the file is read back, and one that means another model is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from muser_wire.errors import CheckpointError
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.container import Container, ContainerKind, StoredTensor, Tensor
from muser_wire.model.encoding import BLOCKS, encode
from muser_wire.model.families import FAMILIES
from muser_wire.model.fields import Fields
from muser_wire.model.gguf import is_gguf, open_gguf, read_typed_fields
from muser_wire.model.gguf_conventions import add_conventions, add_geometry, interleaved
from muser_wire.model.gguf_tokenizer import FolderTokenizer
from muser_wire.reference.blocks import DECODERS

TARGETS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k": "Q4_K"}
FINEST = "Q8_0"
"""For the embedding and the head, whose errors reach every token, and for rows that no block of the target divides."""
OUTER_TENSORS = ("token_embd.weight", "output.weight")
FILE_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K": 15}
"""What GGUF calls a file whose matrices are mostly stored so."""
WRITTEN_HERE = {"general.architecture", "general.file_type", "general.quantization_version"}
QUANTIZATION_VERSION = 2

Counts = Counter[str]


def quantize_model(source: Path, out: Path, target: str) -> Counts:
    """Write the model `source` as the file `out`, which must not exist; return how many tensors have which encoding.

    `target` is a key of `TARGETS`. Matrices that are integers with scales already stay as they are.

    Raises:
        CheckpointError: the source cannot be read or has nothing to quantise, `out` exists, a matrix has rows of no
            multiple of 32, or a folder's tokenizer does not fit into a GGUF file.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists; quantize overwrites nothing")
    checkpoint = open_checkpoint(source)
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        if source.is_file() and is_gguf(source):
            counts = _from_gguf(checkpoint, unfinished, TARGETS[target])
        else:
            counts = _from_folder(checkpoint, unfinished, TARGETS[target])
        _check(unfinished, checkpoint)
        unfinished.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return counts


def _check(written: Path, source: Checkpoint) -> None:
    """Check that a file means the model that it was made of."""
    try:
        same = open_checkpoint(written).spec == source.spec
    except CheckpointError as error:
        raise CheckpointError(f"{source.path} cannot be said in a GGUF file: {error}") from error
    if not same:
        raise CheckpointError(f"{source.path} cannot be said in a GGUF file: it would be read as another model")


def _from_gguf(checkpoint: Checkpoint, out: Path, encoding: str) -> Counts:
    container = open_gguf(checkpoint.path)
    chosen = [name for name, tensor in container.tensors.items() if _needs(tensor)]
    if not chosen:
        raise CheckpointError(f"{checkpoint.path}: every matrix is integers with scales already; use it as it is")
    writer = GGUFWriter(out, container.fields.text("general.architecture"))
    for field in read_typed_fields(checkpoint.path):
        # The writer has no empty arrays, which say nothing either.
        if field.name not in WRITTEN_HERE and field.value != []:
            item = None if field.item_kind is None else GGUFValueType(field.item_kind)
            writer.add_key_value(field.name, field.value, GGUFValueType(field.kind), item)
    counts: Counts = Counter()
    for name, tensor in container.tensors.items():
        if name in chosen:
            counts[_add_matrix(writer, checkpoint.path, name, tensor.f32(0, tensor.shape[0]), encoding)] += 1
        else:
            counts[_add_stored(writer, tensor)] += 1
    _finish(writer, encoding)
    return counts


def _from_folder(checkpoint: Checkpoint, out: Path, encoding: str) -> Counts:
    spec = checkpoint.spec
    family = next(family for family in FAMILIES if family.name == spec.family)
    tokenizer = FolderTokenizer(checkpoint.path, spec.vocab_size)
    writer = GGUFWriter(out, family.gguf_architecture)
    add_geometry(writer, spec)
    add_conventions(writer, spec)
    tokenizer.add_to(writer)
    counts: Counts = Counter()
    for entry in family.entries(spec, Container(out, ContainerKind.GGUF, Fields(out, {}), {})):
        values = checkpoint.weight(entry.name).f32()
        if entry.interleaved_heads:
            values = interleaved(values, entry.interleaved_heads)
        if values.ndim == 2:
            counts[_add_matrix(writer, checkpoint.path, entry.source, values, encoding)] += 1
        else:
            writer.add_tensor(entry.source, values - np.float32(entry.centred))
            counts["F32"] += 1
    _finish(writer, encoding)
    return counts


def _needs(tensor: Tensor) -> bool:
    """Tell whether a tensor is a matrix that the reference lane cannot take."""
    return len(tensor.shape) == 2 and tensor.encoding not in DECODERS


def _add_matrix(writer: GGUFWriter, path: Path, name: str, values: npt.NDArray[np.float32], encoding: str) -> str:
    """Add a matrix and return its encoding."""
    columns = values.shape[1]
    if name in OUTER_TENSORS or columns % BLOCKS[encoding]:
        encoding = FINEST
    if columns % BLOCKS[encoding]:
        raise CheckpointError(f"{path}: tensor {name} has rows of {columns}, which no block of {encoding} divides")
    writer.add_tensor(name, encode(values, encoding), raw_dtype=GGMLQuantizationType[encoding])
    return encoding


def _add_stored(writer: GGUFWriter, tensor: Tensor) -> str:
    """Add a tensor as it is stored and return its encoding."""
    if not isinstance(tensor, StoredTensor):
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} is stored as {tensor.encoding}; it cannot be copied"
        )
    rows = math.prod(tensor.shape[:-1])
    kind = GGMLQuantizationType[tensor.encoding]
    if kind is GGMLQuantizationType.F32:
        writer.add_tensor(tensor.name, tensor.data.view("<f4").reshape(tensor.shape))
    else:
        shape = (*tensor.shape[:-1], tensor.nbytes // rows)
        writer.add_tensor(tensor.name, tensor.data.reshape(shape), raw_dtype=kind)
    return tensor.encoding


def _finish(writer: GGUFWriter, encoding: str) -> None:
    writer.add_file_type(FILE_TYPES[encoding])
    writer.add_quantization_version(QUANTIZATION_VERSION)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
