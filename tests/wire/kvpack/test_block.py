from __future__ import annotations

import dataclasses

import pytest
from kvpack_support import CHUNK, FULL, KEY, SLIDING, WIDE, blocks_of, expected_payload, identities

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack.block import block_layout, make_block, pack_ids, payload_nbytes, resumes_inside
from muser_wire.kvpack.errors import BlockInvalid
from muser_wire.kvpack.naming import Namer
from muser_wire.schedule import ScheduleRequest, WindowPolicy, build_schedule

IDS = list(range(100, 120))


@pytest.mark.parametrize("geometry", [FULL, SLIDING, WIDE])
def test_a_block_holds_what_a_rolling_handoff_carries_for_its_chunk(geometry: Geometry) -> None:
    schedule = build_schedule(ScheduleRequest(geometry, len(IDS) + 1, 0, CHUNK, WindowPolicy.ROLLING))
    for chunk in schedule.chunks:
        carried = [(s.layer, s.start, s.stop) for segment in chunk.segments for s in segment.slices]
        assert [(p.layer, p.start, p.stop) for p in block_layout(geometry, chunk.start, chunk.stop)] == carried
        assert payload_nbytes(geometry, chunk.start, chunk.stop) == chunk.nbytes


def test_a_sliding_layer_keeps_the_window_at_the_block_s_end() -> None:
    assert [(p.layer, p.start, p.stop, p.offset) for p in block_layout(SLIDING, 8, 16)] == [
        (0, 12, 16, 0),
        (1, 8, 16, 64),
    ]


def test_a_block_can_be_resumed_inside_when_no_row_of_it_was_dropped() -> None:
    assert resumes_inside(FULL, 0, 8)
    assert resumes_inside(WIDE, 8, 16)
    assert not resumes_inside(SLIDING, 8, 16)
    assert resumes_inside(SLIDING, 8, 12), "a tail as short as the window"


def test_a_payload_of_another_size_is_refused() -> None:
    (block, *_) = blocks_of(Namer(KEY, identities()), FULL, IDS)
    with pytest.raises(BlockInvalid, match="tokens 0 to 8 have 256 bytes, not 255"):
        make_block(FULL, block.head, expected_payload(FULL, IDS, 0, 8)[1:])
    with pytest.raises(BlockInvalid, match="at least one token"):
        make_block(FULL, dataclasses.replace(block.head, ids=b""), b"")


def test_a_payload_cannot_be_written() -> None:
    (block, *_) = blocks_of(Namer(KEY, identities()), FULL, IDS)
    with pytest.raises(TypeError):
        block.payload[0] = 1


def test_a_name_depends_on_every_identity_on_the_key_and_on_every_token_before() -> None:
    changes: list[dict[str, object]] = [
        {},
        {"spec_digest": Digest(b"x" * 32)},
        {"tokenizer_digest": Digest(b"x" * 32)},
        {"kv_layout": "kv1/bf16/k,v/token,head,dim"},
        {"lane": "reference"},
        {"numerics_digest": Digest(b"x" * 32)},
        {"chunk_tokens": 16},
        {"weights_digest": Digest(b"x" * 32)},
    ]
    assert len(changes) - 1 == len(dataclasses.fields(identities()))
    namers = [Namer(KEY, identities(**change)) for change in changes] + [Namer(KEY[::-1], identities())]
    last_names = {list(namer.chain(pack_ids(IDS)))[-1][0] for namer in namers}
    assert len(last_names) == len(namers)
    others = {list(namers[0].chain(pack_ids([*IDS[:i], 1, *IDS[i + 1 :]])))[-1][0] for i in range(len(IDS))}
    assert len(others | {list(namers[0].chain(pack_ids(IDS)))[-1][0]}) == len(IDS) + 1
