from __future__ import annotations

import inspect

import pytest

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.cache import KVCache
from muser_decode.engine.contract import Cache, Decoder
from muser_decode.reference.cache import ReferenceCache
from muser_decode.reference.compiled.cache import CompiledCache
from muser_decode.reference.compiled.decoder import CompiledDecoder
from muser_decode.reference.decoder import ReferenceDecoder


@pytest.mark.parametrize(
    ("contract", "implementation"),
    [
        *((Decoder, decoder) for decoder in (MlxDecoder, ReferenceDecoder, CompiledDecoder)),
        *((Cache, cache) for cache in (KVCache, ReferenceCache, CompiledCache)),
    ],
)
def test_both_lanes_have_what_the_engine_calls(contract: type, implementation: type) -> None:
    for name, member in vars(contract).items():
        if name.startswith("_"):
            continue
        theirs = inspect.getattr_static(implementation, name)
        assert isinstance(theirs, property) is isinstance(member, property)
        if not isinstance(member, property):
            assert list(inspect.signature(theirs).parameters) == list(inspect.signature(member).parameters)
