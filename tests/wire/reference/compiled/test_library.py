from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from muser_wire.errors import KernelUnavailable
from muser_wire.reference.compiled import build
from muser_wire.reference.compiled.library import (
    AttentionCall,
    HeadsCall,
    IntegersCall,
    LinearCall,
    QuantisedCall,
    load,
)

SOURCES = {
    LinearCall: "linear.h",
    HeadsCall: "heads.h",
    AttentionCall: "attention.h",
    IntegersCall: "attention.h",
    QuantisedCall: "rows.h",
}


def test_what_is_no_shared_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "exact.so"
    path.write_bytes(b"not a shared object")
    with pytest.raises(KernelUnavailable, match=str(path)):
        load(path)


@pytest.mark.parametrize("call", SOURCES)
def test_fields_are_those_of_the_source_in_their_order(call: type[ctypes.Structure]) -> None:
    text = (build.SOURCE / SOURCES[call]).read_text()
    body = text.split(f"struct {call.__name__.removesuffix('Call')} {{")[1].split("};")[0]
    declared = []
    for line in body.splitlines():
        kind, _, names = line.strip().removesuffix(";").removeprefix("const ").partition(" ")
        if line.strip().endswith(";") and "(" not in line:
            declared += [(name, kind) for name in names.split(", ")]
    sizes = {"int64_t": 8, "int32_t": 4, "float": 4}
    kinds = [(name, 8 if kind.endswith("*") else sizes[kind]) for name, kind in declared]
    assert kinds == [(name.rstrip("_"), ctypes.sizeof(field)) for name, field, *_ in call._fields_]
