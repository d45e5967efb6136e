"""Images in the engine, on golden checkpoints: logits against the meanings of the ops, and the same bits alone, beside
others, and after a prefix that is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx import models
from rlx.engine.engine import Engine
from rlx.engine.kv.prompt_embeddings import EmbeddedSpan, PromptEmbeddings
from rlx.engine.model_runner import Segment
from rlx.engine.opening.setup import open_model
from rlx.ir import dims, interp
from rlx.ir.dtypes import F32
from rlx.models import variants
from rlx.models.variants import EmbeddedRows
from rlx.weights import open_weights

Array = np.ndarray[Any, Any]

FAMILIES = ("qwen35", pytest.param("gemma3", marks=pytest.mark.slow), "gemma4-e2b", "qwen3vl-mm")
TOLERANCE = 3e-5  # of the largest logit: float32 against float32
START, GRID, PLACEHOLDER = 4, (3, 4), 1 << 20
ROWS = (np.random.default_rng(2).standard_normal((2, 12, 192)) * 0.5).astype(np.float32)
WORDS = np.random.default_rng(3).integers(20, 500, 60).tolist()
IDS = [*WORDS[:START], *[PLACEHOLDER] * 12, *WORDS[4:10]]


def image(engine: Engine, number: int = 0) -> PromptEmbeddings:
    """Rows of the model's width, in Qwen 3 VL with parts for further layers."""
    rows = ROWS[number, :, : engine.model_runner.limits.widths[-1]]
    return PromptEmbeddings((EmbeddedSpan(START, rows, b"image %d" % number, GRID, True),))


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, goldens: Path) -> Iterator[Engine]:
    path = goldens / request.param / "model-f16.gguf"
    made = Engine.open(path, precision="exact", kv_dtype="f32", max_seq=96, profile={"buckets": {"seq": [1, 32]}})
    yield made
    made.close()


def reference(engine: Engine) -> Array:
    """The logits after each of `IDS`, by the meanings of the ops over the whole prompt."""
    config, weights = open_model(open_weights(engine._path))  # type: ignore[arg-type]
    graph = variants.with_embedded_rows(models.build(config, weights, F32), EmbeddedRows.of(config))
    n = len(IDS)
    env = {"SEQ": n, "PAST_SEQ": 0, "CTX": n, "WINDOW_CTX": n}
    names = [name for name in graph.leaves("weight") if name not in graph.constants]
    feeds = {name: config.value(name, weights.array(name)) for name in names}
    feeds |= {name: np.zeros([dims.value(d, env) for d in leaf.shape]) for name, leaf in graph.leaves("state").items()}
    places = np.repeat(np.arange(n)[:, None], 3, axis=1)
    if config.rope.sections:
        places[4:16] = [(4, 4 + i // 4, 4 + i % 4) for i in range(12)]
        places[16:] -= 12 - 4  # text goes on at the image's start plus its larger side
    index, visible = np.full(n, -1), np.arange(n)
    index[4:16], visible[4:16] = range(12), 15
    inputs = {
        "tokens": np.where(np.array(IDS) == PLACEHOLDER, 0, IDS),
        "positions": places if config.rope.sections else places[:, 0],
        "rows": np.pad(image(engine).spans[0].rows, ((0, n - 12), (0, 0))),
        "row_index": index,
        "visible": visible,
    }
    feeds |= {name: inputs[name] for name in graph.leaves("input")}
    found: Array = interp.run(graph, feeds, env)[0]["logits"]
    return found


def computed(engine: Engine, *segments: Segment) -> list[Array]:
    return [found.copy() for found in engine.step(segments) if found is not None]


def test_logits_of_every_position(engine: Engine) -> None:
    """In one call, and token by token behind the image."""
    want = reference(engine)
    ceiling = TOLERANCE * np.abs(want).max()
    (every,) = computed(engine, Segment(engine.open_sequence((), image(engine), shared=False), IDS, "all"))
    assert np.abs(every - want).max() <= ceiling
    sequence = engine.open_sequence((), image(engine), shared=False)
    (row,) = computed(engine, Segment(sequence, IDS[:16]))
    np.testing.assert_array_equal(row, every[15])
    for at in range(16, len(IDS)):
        (row,) = computed(engine, Segment(sequence, IDS[at : at + 1]))
        np.testing.assert_array_equal(row, every[at])
    token = int(every[-1].argmax())
    tokens = engine.greedy(sequence, token, 4)
    whole = Segment(engine.open_sequence((), image(engine), shared=False), [*IDS, token])
    assert tokens[0] == int(computed(engine, whole)[0].argmax()) and len(tokens) <= 4  # fewer where it takes 50 ms


def test_beside_other_sequences_it_is_the_same_bits(engine: Engine) -> None:
    """An image and a text in one step, then a token of two images and two texts in one step."""
    texts, prompts = [WORDS[20:27], WORDS[30:33]], [IDS, [*IDS[:16], *WORDS[40:42]]]
    alone, beside = [], []
    for several in (False, True):
        sequences = [engine.open_sequence((), image(engine, i), shared=False) for i in range(2)]
        sequences += [engine.open_sequence(shared=False) for _ in range(2)]
        segments = [Segment(s, ids) for s, ids in zip(sequences, (*prompts, *texts), strict=True)]
        more = [Segment(s, [7 + i]) for i, s in enumerate(sequences)]
        if several:
            pairs = [
                computed(engine, segments[i], segments[i + 2]) for i in range(2)
            ]  # an image and a text fill a call
            beside = [pairs[i % 2][i // 2] for i in range(4)] + computed(engine, *more)
        else:
            alone = [row for each in (segments, more) for one in each for row in computed(engine, one)]
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(one, other)
