from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from muser_prefill import device
from muser_prefill.kernels.exact.reference import plain_kernels
from muser_prefill.reference.decoder import TorchReferenceDecoder
from muser_wire.model.quantize import quantize_model
from muser_wire.model.tiny import write_tiny
from muser_wire.reference.conformance import ModelRun

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny("llama", folder / "llama", head_dim=32, hidden=64, ffn=96, max_positions=256)
    quantize_model(folder / "llama", folder / "tiny.gguf", "q8_0")
    return folder / "tiny.gguf"


def arguments(model: Path) -> list[str]:
    """On the CPU, whose kernels are then compared with themselves: the program is what is tried."""
    return ["--device", "cpu", "--model", str(model), "--tokens", "40", "--rounds", "2"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_an_nvidia_gpu_it_says_so_and_is_content(capsys: pytest.CaptureFixture[str]) -> None:
    assert device.main([]) == 0
    assert capsys.readouterr().out == "not run: no NVIDIA GPU\n"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_gpu_passes() -> None:
    assert device.main([]) == 0


def test_a_device_that_agrees_passes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert device.main(arguments(model)) == 0
    out = capsys.readouterr().out
    for line in (
        r"device +cpu, torch .*",
        r"native attention, f32 +ok +within its budget",
        r"exact\.products\.compiled +ok +equal bytes",
        r"conformance +ok +every golden hash",
        r"planes, 256 tokens +ok +6 of 6 layers equal the CPU's",
        r"logits +ok +512 of 512 equal the CPU's",
        r"prefill of 40, native bf16 +[\d.]+ ms, \d+ tokens/s",
        r"prefill of 40, reference +[\d.]+ ms, \d+ tokens/s",
        r"reference / native bf16 +[\d.]+ x its rate, median of 2 rounds",
    ):
        assert re.search(f"^{line}$", out, re.MULTILINE), line


def test_one_plane_and_one_logit_that_differ_fail(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = device.run_model

    def moved(decoder: TorchReferenceDecoder, chunks: Sequence[Sequence[int]]) -> ModelRun:
        result = run(decoder, chunks)
        if len(chunks) > 1:
            values = result.planes[3][1]
            values[7, 0, 5] = np.nextafter(values[7, 0, 5], np.float16(9))
            result.logits[11] += 1
        return result

    monkeypatch.setattr(device, "run_model", moved)
    assert device.main(arguments(model)) == 1
    out = capsys.readouterr().out
    assert "FAILED  5 of 6 layers equal the CPU's" in out
    assert "FAILED  511 of 512 equal the CPU's" in out


def test_a_kernel_that_a_gpu_lacks_fails() -> None:
    kernels = dataclasses.replace(plain_kernels(CPU), admitted=("exact.roots.triton", "exact.heads.triton"))
    found = {row.name: row.passed for row in device._reference_kernels(kernels, torch.device("cuda"))}
    assert found == {
        "exact.roots.triton": True,
        "exact.products.triton": False,
        "exact.heads.triton": True,
        "exact.attention.triton": False,
    }


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert device.main(["--device", "cpu", "--model", "nowhere"]) == 1
    assert "nowhere is neither a path" in capsys.readouterr().err
