"""Rows of a text model from audio: frames of samples, normalized, times a matrix.

Second step of the audio stage. Source: `Gemma4UnifiedAudioFeatureExtractor` and `Gemma4UnifiedMultimodalEmbedder` of
transformers. A frame x of 640 samples (40 ms) becomes one row:

    row = W (x / sqrt(mean(x^2) + eps))
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlx.audio.audio import Audio
from rlx.errors import MultimodalError
from rlx.ir.stored import dequantize
from rlx.models.keys import EPS, Keys
from rlx.weights.loader import TensorInfo, WeightLoader
from rlx.weights.mapped import Bytes

Rows: TypeAlias = NDArray[np.float32]

FAMILY = "gemma4_unified"
MATRIX = "mm.a.input_projection.weight"
TOKENS = ("<|audio|>", "<|audio>", "<audio|>")  # placeholder, before a clip, and after it
_TOKEN = 258881  # id of the placeholder in published models
_EPS = 1e-6
_PIECE = 256  # rows that are computed between two pauses: a few milliseconds


class Tensors(Protocol):
    """The tensors of a model's towers; `rlx.vision.weights.TowerWeights` implements it."""

    @property
    def loader(self) -> WeightLoader: ...
    def has(self, name: str) -> bool: ...
    def info(self, name: str) -> TensorInfo: ...
    def raw(self, name: str) -> Bytes: ...


@dataclass(frozen=True, eq=False)
class AudioProjection:
    """Makes rows of clips. The matrix is read with the first one.

    Attributes:
        weights: the tensors of the model's towers.
        frame: samples of a row.
        eps: of the norm.
        token: id that stands for a row of a clip in a prompt.
        begin, end: ids before and after a clip; None if unknown.
    """

    weights: Tensors
    frame: int
    eps: float
    token: int
    begin: int | None
    end: int | None

    @cached_property
    def matrix(self) -> Rows:
        """float32 [frame, hidden]."""
        info = self.weights.info(MATRIX)
        return np.ascontiguousarray(dequantize(self.weights.raw(MATRIX), info.dtype, info.shape).T)

    def count(self, audio: Audio) -> int:
        """How many rows a clip becomes."""
        return -(-len(audio.samples) // self.frame)

    def pieces(self, audio: Audio) -> Generator[None, None, Rows]:
        """The rows of a clip, float32 [rows, hidden], piece by piece: a generator that returns them."""
        samples = np.zeros(self.count(audio) * self.frame, np.float32)
        samples[: len(audio.samples)] = audio.samples  # zeros behind the last one
        frames = samples.reshape(-1, self.frame)
        rows = np.empty((len(frames), self.matrix.shape[1]), np.float32)
        for begin in range(0, len(frames), _PIECE):
            x = frames[begin : begin + _PIECE]
            scale = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(self.eps))
            np.matmul(x * scale, self.matrix, out=rows[begin : begin + _PIECE])
            yield
        return rows


def audio_projection(text: WeightLoader, hidden: int, family: str, weights: Tensors) -> AudioProjection:
    """The projection of a model that takes audio; reads headers only.

    Args:
        text: the open file of the text model.
        hidden: its hidden size.
        family: of its towers.
        weights: their tensors.

    Raises:
        MultimodalError: the model takes no audio, or through a tower, which rlx does not support.
    """
    where = weights.loader.path
    if family != FAMILY or not weights.has(MATRIX):
        hint = "Gemma 4 unified does; the towers for audio of Gemma 4 E2B and E4B and of Gemma 3n are not supported"
        raise MultimodalError("the model takes no audio, or through a tower", where=where, hint=hint)
    shape = weights.info(MATRIX).shape
    if len(shape) != 2 or shape[0] != hidden:
        raise MultimodalError(f"{MATRIX} has the shape {list(shape)}, expected {hidden} rows", where=where)
    return AudioProjection(weights, shape[1], _eps(weights.loader), *_ids(text))


def _eps(loader: WeightLoader) -> float:
    if loader.format == "gguf":
        return _EPS  # readers of mmproj files take no other
    audio = Keys(loader.metadata, loader.path).nested("audio_config", optional=True)
    return audio.number("rms_norm_eps", EPS, _EPS)


def _ids(text: WeightLoader) -> tuple[int, int | None, int | None]:
    """The ids of the placeholder, and of the tokens around a clip."""
    if text.format == "gguf":
        names = list(text.metadata.get("tokenizer.ggml.tokens") or ())
        token, begin, end = (names.index(name) if name in names else None for name in TOKENS)
    else:
        keys = Keys(text.metadata, text.path)
        token, begin, end = (_id(keys, stem) for stem in ("audio", "boa", "eoa"))
    return (_TOKEN if token is None else token), begin, end


def _id(keys: Keys, stem: str) -> int | None:
    key = next((key for key in (f"{stem}_token_id", f"{stem}_token_index") if key in keys), None)
    return None if key is None else keys.integer(key, (0, 1 << 31))
