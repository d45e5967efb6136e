"""OpenVINO as one side of `versus.py`, through `openvino_genai.LLMPipeline`; it measures itself.

A prompt's time is that to its first token, a step's the mean time of a token after the first, both as the pipeline
reports them (`perf_metrics`). The weights are those of a folder that `openvino_model.py` wrote. Needs openvino-genai;
rlx need not be there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from sides import Missing, TimedCommands, main, token_ids


class OpenvinoSide:
    """See `sides.TimedSide`; `use` chooses among what OpenVINO leaves to the user."""

    def __init__(self) -> None:
        try:
            import openvino  # type: ignore[import-not-found,unused-ignore]
            import openvino_genai  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise Missing(f"openvino_genai cannot be imported: {error}") from error
        self.openvino, self.genai = openvino, openvino_genai
        self.choice: dict[str, Any] | None = None
        self.running: list[dict[str, Any]] = []  # the variants that run on this machine

    def open(self, model: str, threads: int, context: int) -> dict[str, Any]:
        folder = Path(model)
        if not (folder / "openvino_model.xml").is_file():
            raise Missing(f"{folder} holds no openvino_model.xml; openvino_model.py writes one")
        self.folder, self.threads = folder, threads
        shape = self.openvino.Core().read_model(folder / "openvino_model.xml").output("logits").partial_shape
        self.vocab = shape[2].get_length()
        if not self.variants(True):
            raise Missing(f"OpenVINO multiplies the weights of {folder} in no way with the instructions it may use")
        return {"version": f"{self.openvino.__version__}, model {folder.name}", "vocab": self.vocab, "context": context}

    def variants(self, prompt: bool) -> list[dict[str, Any]]:
        """Both implementations of attention, activations in int8 or not; those that run here.

        In f32 where nothing runs otherwise: bf16 is the default where the processor has it, also if oneDNN lacks it.
        """
        if not self.running:
            plain = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
            every = [{"ATTENTION_BACKEND": backend, **more} for backend in ("SDPA", "PA") for more in ({}, plain)]
            exact = [{**choice, "INFERENCE_PRECISION_HINT": "f32"} for choice in every]
            self.running = [choice for choice in every if self._runs(choice)]
            self.running = self.running or [choice for choice in exact if self._runs(choice)]
        return self.running

    def _runs(self, choice: dict[str, Any]) -> bool:
        """Whether the pipeline computes a token; int8 activations take VNNI, for instance."""
        self.use(**choice)
        try:
            self.prefill(4)
        except RuntimeError:
            return False
        return True

    def use(self, **choice: Any) -> dict[str, Any]:
        """Another pipeline with these properties, unless it is the present one."""
        if self.choice != choice:
            self.pipeline = None
            usual: dict[str, Any] = {
                "INFERENCE_NUM_THREADS": self.threads,
                "PERFORMANCE_HINT": "LATENCY",
                "NUM_STREAMS": 1,
            }
            if choice["ATTENTION_BACKEND"] == "PA":
                usual["scheduler_config"] = self._without_prefix_cache()
            try:
                self.pipeline = self.genai.LLMPipeline(self.folder, "CPU", **usual, **choice)
            except RuntimeError as error:
                raise Missing(f"OpenVINO does not open {self.folder}: {error}") from error
            self.choice = choice
        return {}

    def _without_prefix_cache(self) -> Any:
        """Each turn has the same prompt, which must be computed each time."""
        config = self.genai.SchedulerConfig()
        config.enable_prefix_caching = False
        return config

    def prefill(self, tokens: int) -> float:
        """Seconds to the first token after so many."""
        return float(self._generate(tokens, 1).get_ttft().mean) / 1e3

    def decode(self, tokens: int, depth: int) -> float:
        """Seconds a token; the cache is filled anew each time, which does not count."""
        return float(self._generate(max(1, depth), tokens + 1).get_tpot().mean) / 1e3

    def _generate(self, prompt: int, tokens: int) -> Any:
        assert self.pipeline is not None
        numbers = np.array([token_ids(prompt, self.vocab)], np.int64)
        inputs = self.genai.TokenizedInputs(*map(self.openvino.Tensor, (numbers, np.ones_like(numbers))))
        usual = self.genai.GenerationConfig()
        usual.max_new_tokens, usual.ignore_eos, usual.do_sample = tokens, True, False
        return self.pipeline.generate(inputs, usual).perf_metrics


if __name__ == "__main__":
    main(OpenvinoSide, TimedCommands)
