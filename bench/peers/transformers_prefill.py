"""transformers in bf16 over the same weights: a forward that keeps its cache and the last position's logits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from lines import serve

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"attn.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
OTHER_NAMES = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


class Contestant:
    """Holds the model between requests."""

    model: transformers.LlamaForCausalLM

    def load(self, arrays: str, config: dict[str, Any], threads: int) -> dict[str, Any]:
        """Build the model of `config` from a folder of NAME.npy files."""
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.bfloat16)
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
        state = self.model.state_dict()
        given = set()
        for file in sorted(Path(arrays).glob("*.npy")):
            name = theirs(file.name.removesuffix(".npy"))
            state[name].copy_(torch.from_numpy(np.load(file)))
            given.add(name)
        missing = set(state) - given - ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
        if missing:
            raise ValueError(f"weights are missing: {sorted(missing)}")
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Time one forward."""
        return {"seconds": self._timed(ids)[0]}

    def planes(self, ids: list[int], out: str) -> dict[str, Any]:
        """Write the last layer's planes as f32, `[2, T, kv_heads, head_dim]`."""
        layer = self._timed(ids)[1].past_key_values.layers[-1]
        np.save(out, torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2).float().numpy())
        return {}

    def logits(self, ids: list[int], out: str) -> dict[str, Any]:
        """Write the last position's logits as f32, `[vocab]`."""
        np.save(out, self._timed(ids)[1].logits[0, -1].float().numpy())
        return {}

    @torch.inference_mode()
    def _timed(self, ids: list[int]) -> tuple[float, Any]:
        started = time.perf_counter()
        out = self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started, out


def theirs(name: str) -> str:
    """Return transformers' name of a canonical one."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("layers."):
        return f"{OTHER_NAMES[stem]}.weight"
    _, index, rest = stem.split(".", 2)
    return f"model.layers.{index}.{LAYER_NAMES[rest]}.weight"


if __name__ == "__main__":
    contestant = Contestant()
    serve({name: getattr(contestant, name) for name in ("load", "prefill", "planes", "logits")})
