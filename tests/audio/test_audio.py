"""Clips of audio: reading them, and the rows they become, against the formula in float64."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader

import rlx
from rlx.audio.audio import RATE, Audio
from rlx.engine.kv.prompt_embeddings import EmbeddedSpan, PromptEmbeddings
from rlx.errors import AudioError, MultimodalError, PromptError
from rlx.export.convert import convert
from rlx.runners import LmRunner
from rlx.runners.session import recomputed

TOKEN = 13  # of a row of audio in the golden model
IDS = [2, 5, 60, 61, 11, TOKEN, 12, 62, 63, 6]
CLIP = (np.random.default_rng(0).standard_normal(300) * 0.1).astype(np.float32)


def wav(samples: Any, width: int = 2, channels: int = 1, rate: int = RATE) -> bytes:
    """A WAV file of integers [count * channels]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setsampwidth(width)
        out.setnchannels(channels)
        out.setframerate(rate)
        out.writeframes(b"".join(int(each).to_bytes(width, "little", signed=width > 1) for each in samples))
    return file.getvalue()


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "samples", "expected"), [
    (1, [0, 128, 255], [-1, 0, 127 / 128]),
    (2, [-32768, 0, 16384], [-1, 0, 0.5]),
    (3, [-(1 << 23), 1, 1 << 22], [-1, 2**-23, 0.5]),
    (4, [-(1 << 31), 0, 1 << 30], [-1, 0, 0.5]),
])  # fmt: skip
def test_wav_files(tmp_path: Path, width: int, samples: list[int], expected: list[float]) -> None:
    (tmp_path / "a.wav").write_bytes(wav(samples, width))
    for value in (tmp_path / "a.wav", str(tmp_path / "a.wav"), wav(samples, width)):
        assert Audio.of(value).samples.tolist() == expected


def test_channels_become_their_mean() -> None:
    assert Audio.of(wav([0, 16384, -16384, 0], channels=2)).samples.tolist() == [0.25, -0.25]


def test_equal_clips_have_equal_digests() -> None:
    assert Audio.of(CLIP).digest == Audio.of(CLIP.astype(np.float64)).digest != Audio.of(CLIP[:-1]).digest


@pytest.mark.parametrize(("value", "said"), [
    (wav([1, 2], rate=44_100), r"44100 samples a second, expected 16000.*ffmpeg"),
    (wav(range(100))[:-50], "ends after 75 of 100 samples"),
    (b"RIFF\0\0\0\0WAVE", "no WAV file"),
    (b"ID3 of an MP3", "no WAV file with PCM samples"),
    (wav([]), "no samples"),
    (np.array([0.0, np.nan], np.float32), "NaN"),
    (np.zeros((2, 5), np.float32), r"expected float samples \[count\], found an array of float32 \[2, 5\]"),
    (np.zeros(5, np.int16), "found an array of int16"),
    (None, "expected float samples"),
    ("/nowhere/a.wav", "cannot be read"),
])  # fmt: skip
def test_what_is_no_clip(value: Any, said: str) -> None:
    with pytest.raises(AudioError, match=said):
        rlx.Prompt(IDS, audio=[value])


def test_clips_come_in_a_list() -> None:
    with pytest.raises(PromptError, match=r"expected a list of clips, found a ndarray. Give \[clip\]"):
        rlx.Prompt(IDS, audio=CLIP)  # type: ignore[arg-type]


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LmRunner]:
    """A Gemma 4 with the tower and the matrix of the golden Gemma 4 unified, whose frames have 64 samples."""
    text = convert(goldens / "gemma4-moe" / "hf", tmp_path_factory.mktemp("audio") / "model.gguf").path
    mmproj = goldens / "gemma4-unified-mm" / "mmproj-f16.gguf"
    profile = {"buckets": {"seq": [1, 32]}}
    with rlx.auto_runner(text, mmproj=mmproj, precision="exact", kv_dtype="f32", profile=profile) as opened:
        yield opened


@pytest.fixture(scope="module")
def rows(goldens: Path) -> npt.NDArray[np.float64]:
    """The rows of the clip by the formula, in float64, with the matrix as the `gguf` package reads it."""
    tensors = GGUFReader(goldens / "gemma4-unified-mm" / "mmproj-f16.gguf").tensors
    matrix = next(t for t in tensors if t.name == "mm.a.input_projection.weight").data.astype(np.float64)
    frames = np.zeros((5, 64))
    frames.reshape(-1)[: len(CLIP)] = CLIP
    found: npt.NDArray[np.float64] = frames / np.sqrt((frames**2).mean(1, keepdims=True) + 1e-6) @ matrix.T
    return found


def test_the_rows_of_a_clip(runner: Any, rows: npt.NDArray[np.float64]) -> None:
    """300 samples are five frames, the last one filled up with zeros."""
    found = runner.audio_features(CLIP)
    assert found.shape == rows.shape
    assert np.abs(found - rows).max() < 1e-5


def test_rows_stand_in_the_prompt(runner: Any, rows: npt.NDArray[np.float64]) -> None:
    """The logits are those of the same rows as a span of the engine, which knows nothing of audio."""
    prompt = rlx.Prompt(IDS, audio=[CLIP])
    assert runner.count_tokens(prompt) == len(IDS) + 4
    ids = [*IDS[:5], *[0] * 5, *IDS[6:]]
    span = EmbeddedSpan(5, rows.astype(np.float32), b"rows by the formula"[:16], (1, 5), two_way=False)
    expected = recomputed(runner._engine, ids, PromptEmbeddings((span,)))
    assert np.abs(runner.prefill_logits(prompt) - expected).max() < 1e-4
    assert np.array_equal(
        runner.prefill_logits(rlx.Prompt(prompt.ids, audio=prompt.audio)), runner.prefill_logits(prompt)
    )
    other = rlx.Prompt(IDS, audio=[CLIP[::-1].copy()])
    assert np.abs(runner.prefill_logits(other) - expected).max() > 0.01


def test_a_placeholder_for_each_row(runner: Any) -> None:
    long = rlx.Prompt([*IDS[:5], *[TOKEN] * 5, *IDS[6:]], audio=[CLIP])
    assert list(runner.generate(long, 4)) == list(runner.generate(rlx.Prompt(IDS, audio=[CLIP]), 4))


@pytest.mark.parametrize(("ids", "clips", "said"), [
    (IDS, 0, "the number of clips of audio is 0, and that of placeholders is 1"),
    (IDS, 2, "the number of clips of audio is 2, and that of placeholders is 1"),
    ([*IDS[:5], *[TOKEN] * 3, *IDS[6:]], 1, "the clip of audio has 5 rows, and its placeholder stands there 3 times"),
])  # fmt: skip
def test_clips_and_placeholders(runner: Any, ids: list[int], clips: int, said: str) -> None:
    with pytest.raises(MultimodalError, match=said):
        runner.generate(rlx.Prompt(ids, audio=[CLIP] * clips), 1)


def test_audio_that_the_context_cannot_hold(runner: Any) -> None:
    with pytest.raises(PromptError, match="the context holds"):
        runner.generate(rlx.Prompt(IDS, audio=[np.zeros(64 * 5000, np.float32)]), 1)


def test_models_without_audio(goldens: Path, tmp_path: Path) -> None:
    prompt = rlx.Prompt([1, TOKEN, 2], audio=[CLIP])
    with (
        rlx.auto_runner(goldens / "qwen3" / "model-f16.gguf") as reads,
        pytest.raises(MultimodalError, match="text only"),
    ):
        reads.generate(prompt, 1)
    mmproj = goldens / "gemma3-mm" / "mmproj-Q8_0.gguf"
    said = r"takes no audio, or through a tower\. Gemma 4 unified does"
    with (
        rlx.auto_runner(goldens / "gemma3" / "model-f16.gguf", mmproj=mmproj) as sees,
        pytest.raises(MultimodalError, match=said),
    ):
        sees.generate(prompt, 1)
