from __future__ import annotations

from pathlib import Path

from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.report import report
from muser_wire.model.tiny import write_tiny_llama


def test_the_report_of_real_weights(smollm2: Path) -> None:
    found = report(open_checkpoint(smollm2))
    assert found["family"] == "llama"
    assert (found["layers"], found["heads"], found["kv_heads"], found["head_dim"]) == (30, 9, 3, 64)
    assert (found["hidden_size"], found["ffn_size"], found["vocab_size"]) == (576, 1536, 49152)
    assert found["max_positions"] == 8192
    assert found["windows"] == {"full": 30}
    assert found["encodings"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    # 30 layers, keys and values, 3 heads of 64 in two bytes.
    assert found["kv_token_nbytes"] == 30 * 2 * 3 * 64 * 2
    # Blocks of 32: 20 bytes in Q4_1, 34 in Q8_0. The tied embedding is read whole, as the head.
    layer = 2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576
    expected = 30 * layer // 32 * 20 + 49152 * 576 // 32 * 34 + 61 * 576 * 4
    assert found["decode_token_nbytes"] == found["weights_nbytes"] == expected
    assert found["parameters"] == 30 * layer + 49152 * 576 + 61 * 576
    assert {len(found[name]) for name in ("spec_digest", "tokenizer_digest", "weights_digest")} == {64}


def test_an_untied_embedding_is_read_one_row_a_token(tiny_llama: Path) -> None:
    found = report(open_checkpoint(tiny_llama))
    assert found["weights_nbytes"] - found["decode_token_nbytes"] == 511 * 64 * 4


def test_weights_without_a_tokenizer_are_reported(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, layers=1)
    (tmp_path / "tokenizer.json").unlink()
    found = report(open_checkpoint(tmp_path))
    assert found["tokenizer_digest"].startswith("(none: ")
    assert len(found["weights_digest"]) == 64
