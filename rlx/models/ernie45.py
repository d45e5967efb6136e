"""ERNIE 4.5, dense: llama whose checkpoints have rope over neighbouring pairs.

A family file: the equations are those of llama. Source: the published implementation in transformers.
"""

from __future__ import annotations

from rlx.models import llama
from rlx.models.architectures import FFN, QKVO, Architecture
from rlx.models.names import LAYER, PRE_NORMS, Table

ARCHITECTURES = {
    "ernie4_5": Architecture(
        llama.build,
        Table((*LAYER, *PRE_NORMS)),
        ("ernie4_5",),
        gguf_rope="interleaved",
        hf_rope="interleaved",
        hf_base=500_000.0,
        hf_biases={"use_bias": (*QKVO, *FFN)},
    )
}
