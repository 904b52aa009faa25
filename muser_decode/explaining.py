"""Says of a prompt where its tokens would come from, block by block, and why no more is held; nothing is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from muser_decode.keeper import Keeper
from muser_wire.kvpack.block import pack_ids
from muser_wire.kvpack.files import Files
from muser_wire.kvpack.listing import explain, ignored_stores
from muser_wire.kvpack.naming import Namer


def explain_held(keeper: Keeper | None, prompt_ids: Sequence[int]) -> dict[str, object]:
    """Return what this node holds of a prompt, as JSON values."""
    if keeper is None:
        nothing = "nothing is kept: memory and disk are both 0 MB"
        return _answer(prompt_ids, [], nothing, [], [])
    store = keeper.store
    # The last prompt token is left to the first decode step.
    ids = pack_ids(prompt_ids[:-1])
    blocks = [asdict(account) for account in store.accounts(ids)]
    reason = next((str(block["reason"]) for block in blocks if block["reason"]), "all held")
    elsewhere, ignored = _beside(store.files, store.namer, ids) if store.files is not None else ([], [])
    return _answer(prompt_ids, blocks, reason, elsewhere, ignored)


def _answer(
    prompt_ids: Sequence[int],
    blocks: list[dict[str, object]],
    reason: str,
    elsewhere: list[dict[str, object]],
    ignored: list[str],
) -> dict[str, object]:
    return {
        "prompt_tokens": len(prompt_ids),
        "held_tokens": sum(int(str(block["held"])) for block in blocks),
        "reason": reason,
        "blocks": blocks,
        "elsewhere": elsewhere,
        "ignored_stores": ignored,
    }


def _beside(files: Files, namer: Namer, ids: bytes) -> tuple[list[dict[str, object]], list[str]]:
    """Return what blocks of other models, lanes or grids in this directory hold of the prompt; and other stores."""
    try:
        prefixes = explain(files, ids)
    except OSError as error:
        return [{"held_tokens": 0, "differs": [], "error": str(error)}], []
    own = next((prefix.facts for prefix in prefixes if prefix.facts.state == namer.state), None)
    elsewhere: list[dict[str, object]] = [
        {"held_tokens": prefix.tokens, "differs": own.differences(prefix.facts), **prefix.facts.named()}
        for prefix in prefixes
        if own is not None and prefix.facts.state != namer.state and prefix.tokens
    ]
    return elsewhere, ignored_stores(files)
