"""transformers on torch as one side of `versus.py`, in bfloat16: what a model in Python without a compiler does.

Needs torch, transformers and gguf (transformers reads a GGUF file by turning it into bfloat16 first); rlx need not be
there.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
from sides import Ids, Missing, main


class TorchSide:
    """See `sides.Side`."""

    def __init__(self) -> None:
        try:
            import torch  # type: ignore[import-not-found,unused-ignore]
            import transformers  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise Missing(f"torch and transformers cannot be imported: {error}") from error
        self.torch, self.transformers = torch, transformers

    def open(self, model: str, threads: int, context: int) -> dict[str, Any]:
        self.torch.set_num_threads(threads)
        path = Path(model)
        try:
            self.model = self.transformers.AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=self.torch.bfloat16
            )
        except (ValueError, ImportError, KeyError, RuntimeError, NotImplementedError, AttributeError) as error:
            raise Missing(f"transformers does not load {path.name}: {error}") from error
        self.model.eval()
        self.clear()
        config = self.model.config
        versions = f"transformers {self.transformers.__version__}, torch {self.torch.__version__}"
        return {"version": versions, "vocab": config.vocab_size, "context": config.max_position_embeddings}

    def clear(self) -> None:
        self.cache = self.kept = None

    def feed(self, ids: Ids) -> None:
        with self.torch.inference_mode():
            given = self.torch.tensor([list(ids)])
            out = self.model(input_ids=given, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache, self._logits = out.past_key_values, out.logits

    def keep(self) -> None:
        self.kept = copy.deepcopy(self.cache)

    def back(self) -> None:
        self.cache = copy.deepcopy(self.kept)

    def logits(self) -> np.ndarray:
        found: np.ndarray = self._logits[0, -1].float().numpy()
        return found


if __name__ == "__main__":
    main(TorchSide)
