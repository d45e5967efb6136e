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
        self.other = {torch.float32, torch.float16}

    def open(self, model: str, threads: int, context: int) -> dict[str, Any]:
        self.torch.set_num_threads(threads)
        path = Path(model)
        try:
            self.model = self._load(path)
        except (ValueError, ImportError, KeyError, RuntimeError, NotImplementedError, AttributeError) as error:
            raise Missing(f"transformers does not load {path.name}: {error}") from error
        types = {p.dtype for p in self.model.parameters()} | {type(m).__name__ for m in self.model.modules()}
        odd = {str(t) for t in types if str(t).lower().startswith("gguf")} | {str(t) for t in types & self.other}
        if odd:
            raise Missing(f"transformers does not compute {path.name} in bfloat16 only, but with {', '.join(odd)}")
        self.model.eval()
        self.clear()
        config = self.model.config
        versions = f"transformers {self.transformers.__version__}, torch {self.torch.__version__}"
        return {"version": versions, "vocab": config.vocab_size, "context": config.max_position_embeddings}

    def _load(self, path: Path) -> Any:
        """The model in bfloat16. Some versions leave the size of heads in the file unread and take their default."""
        from gguf import GGUFReader

        found = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        config = self.transformers.AutoConfig.from_pretrained(**found)
        fields = GGUFReader(path).fields
        size = fields.get(f"{fields['general.architecture'].contents()}.attention.key_length")
        if size is not None and hasattr(config, "head_dim"):
            config.head_dim = size.contents()
        kind = self.transformers.AutoModelForCausalLM
        return kind.from_pretrained(**found, config=config, dtype=self.torch.bfloat16)

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
