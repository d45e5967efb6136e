"""llama.cpp as one side of `versus.py`, at its best: the library's own functions, no Python wrapper, no sampling; and
for the Python API its class `Llama`.

Runs in any environment that has `llama_cpp`; rlx need not be there.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
from sides import Ids, Missing, main

ON_CARD = os.environ.get("VERSUS_DEVICE") == "cuda"
BATCH = 2048  # most tokens that one call of llama_decode takes


def quiet(level: int, text: bytes, data: Any) -> None:
    pass


class LlamaSide:
    """See `sides.Side`; `use` chooses among what llama.cpp leaves to the user."""

    vocab: int
    threads: int
    room: int  # tokens of a context
    recurrent: bool
    kept: int

    def __init__(self) -> None:
        try:
            import llama_cpp  # type: ignore[import-not-found,unused-ignore]
        except (ImportError, OSError, RuntimeError) as error:
            raise Missing(f"llama_cpp cannot be imported: {error}") from error
        if ON_CARD and not llama_cpp.llama_supports_gpu_offload():
            raise Missing("this build of llama_cpp has no CUDA: CMAKE_ARGS=-DGGML_CUDA=on pip install llama-cpp-python")
        self.lib: Any = llama_cpp
        self.log = llama_cpp.llama_log_callback(quiet)  # held, because the library keeps only its address
        llama_cpp.llama_log_set(self.log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model: Any = None
        self.context: Any = None
        self.memory_of: Any = None
        self.state: Any = None
        self.choice: tuple[bool, int] | None = None
        self.length = 0

    def open(self, model: str, threads: int, context: int) -> dict[str, Any]:
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers = 999 if ON_CARD else 0
        self.model = self.lib.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise Missing(f"llama.cpp does not load {model}")
        self.threads, self.room = threads, -(-context // 256) * 256
        self.vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        hybrid = self.lib.llama_model_is_hybrid(self.model) or self.lib.llama_model_is_recurrent(self.model)
        self.recurrent = bool(hybrid)
        self.use(flash=True, ubatch=512)
        info = self.lib.llama_print_system_info().decode().strip(" |")
        trained = self.lib.llama_model_n_ctx_train(self.model)
        return {"version": self.lib.__version__, "vocab": self.vocab, "context": trained, "built_with": info}

    def use(self, flash: bool, ubatch: int) -> dict[str, Any]:
        """Another context: flash attention or not, and how many tokens are computed at a time."""
        if self.choice == (flash, ubatch):
            return {}
        if self.context:
            self.lib.llama_free(self.context)
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = self.room, BATCH, ubatch, 1
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = int(flash)
        params.swa_full = False  # windowed layers keep their window only, as llama.cpp's own tools have it
        params.offload_kqv = params.op_offload = ON_CARD
        params.no_perf = True
        self.context = self.lib.llama_init_from_model(self.model, params)
        if not self.context:
            self.choice = None
            raise Missing(f"llama.cpp makes no context with flash={flash}, ubatch={ubatch}")
        self.choice, self.memory_of = (flash, ubatch), self.lib.llama_get_memory(self.context)
        return {}

    def clear(self) -> None:
        self.lib.llama_memory_clear(self.memory_of, True)
        self.length = 0

    def feed(self, ids: Ids) -> None:
        for at in range(0, len(ids), BATCH):
            part = ids[at : at + BATCH]
            tokens = (self.lib.llama_token * len(part))(*part)
            code = self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(tokens, len(part)))
            if code:
                raise RuntimeError(f"llama_decode returns {code} for {len(part)} tokens after {self.length}")
            self.length += len(part)
        self.lib.llama_synchronize(self.context)

    def keep(self) -> None:
        self.kept, self.state = self.length, None
        if self.recurrent and self.length:  # recurrent states cannot go back: the whole is copied
            size = self.lib.llama_state_seq_get_size(self.context, 0)
            self.state = (ctypes.c_uint8 * size)()
            self.lib.llama_state_seq_get_data(self.context, self.state, size, 0)

    def back(self) -> None:
        if not self.kept:
            self.clear()
            return
        if self.state is not None:
            self.clear()
            done = self.lib.llama_state_seq_set_data(self.context, self.state, len(self.state), 0) > 0
        else:
            done = self.lib.llama_memory_seq_rm(self.memory_of, 0, self.kept, -1)
        if not done:
            raise RuntimeError(f"llama.cpp does not go back to {self.kept} tokens")
        self.length = self.kept

    def logits(self) -> np.ndarray:
        return np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, -1), (self.vocab,)).copy()

    def open_api(self, model: str, threads: int, context: int) -> None:
        both = {"n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": -1 if ON_CARD else 0}
        self.api = self.lib.Llama(model_path=model, n_ctx=context, n_gpu_layers=0, verbose=False, **both)

    def generate(self, ids: Ids, tokens: int) -> list[int]:
        self.api.reset()
        more = self.api.generate(list(ids), temp=0.0)
        return [int(next(more)) for _ in range(tokens)]


if __name__ == "__main__":
    main(LlamaSide)
