"""Models that see, end to end: answers, what is computed again, and `rlx run` and `rlx chat` with images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from golden_folder import goldens
from PIL import Image as Pillow

import rlx
from rlx import demo
from rlx.cli.chat.commands import obey
from rlx.cli.chat.conversation import Conversation, load
from rlx.cli.chat.session import Session, Settings
from rlx.cli.interrupts import Interrupts
from rlx.cli.output import Bars
from rlx.errors import ChatError, ImageError, MultimodalError, RlxError
from rlx.export.convert import convert
from rlx.ir.stored import dequantize
from rlx.runners import Model
from rlx.weights import open_weights

SIDE = 96


def circle() -> np.ndarray[Any, Any]:
    """A yellow circle, as the demo model was trained to see them."""
    image = np.full((SIDE, SIDE, 3), 30, np.uint8)
    row, column = np.mgrid[:SIDE, :SIDE]
    image[(row - 48) ** 2 + (column - 30) ** 2 < 18**2] = 230, 210, 40
    return image


def asked(text: str, *images: Any) -> dict[str, Any]:
    parts = [{"type": "image", "image": each} for each in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def seeing() -> Iterator[Model]:
    with rlx.auto_runner(demo.VISION, max_seq=256) as runner:
        yield runner


#: The same answers alone, after what is known, and beside others.
SAME: dict[str, Any] = {"profile": {"buckets": {"seq": [1, 32]}}, "max_seq": 128, "deterministic": True}


@pytest.fixture(scope="module", params=["qwen35", "qwen3vl-mm"])
def qwen(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Model]:
    """A text model with recurrent layers beside a tower of the same width, or one with a tower of its own; the weights
    are random.
    """
    folder, tower = tmp_path_factory.mktemp("qwen"), f"{request.param.removesuffix('-mm')}-mm"
    shutil.copy(goldens() / request.param / "model-f16.gguf", folder / "model.gguf")
    shutil.copy(next((goldens() / tower).glob("mmproj-*.gguf")), folder / "mmproj.gguf")
    with rlx.auto_runner(folder / "model.gguf", **SAME) as runner:
        yield runner


def test_a_model_that_sees_answers(seeing: Model) -> None:
    assert seeing.supports_multimodal
    assert seeing.chat([asked("What colour is the circle?", circle())]).text == "The circle is yellow."
    answer = seeing.generate_multimodal("What colour is the circle?", [circle()], 40)
    assert answer.text == "The circle is yellow."


def counts(runner: Model) -> tuple[int, int, int]:
    """Images that were encoded; rows of prompts that were computed, and that were known."""
    stats = runner.stats()
    return stats["images"]["encoded"], stats["requests"]["prompt_tokens"], stats["reused_tokens"]


def test_a_second_question_computes_its_own_words(qwen: Model) -> None:
    tokens = qwen._images.encoder.config  # type: ignore[union-attr]
    seen = np.random.default_rng(3).integers(0, 256, (64, 64, 3), np.uint8)
    rows, start = len(qwen.image_features(seen)), [40, 41, 42, int(tokens.begin_token or 0), tokens.image_token]
    qwen.generate(rlx.Prompt([*start, 50, 51, 52], [seen]), 3, stop_at_eog=False)
    before = counts(qwen)
    found = qwen.generate(rlx.Prompt([*start, 60, 61], [seen.copy()]), 3, stop_at_eog=False)
    after = counts(qwen)
    assert after[0] == before[0], "nothing is encoded"
    assert after[2] - before[2] == len(start) - 1 + rows, "what stands before the question is known"
    assert after[1] - before[1] == 2, "the words of the question are computed"
    other = qwen.generate(rlx.Prompt([*start, 60, 61], [255 - seen]), 3, stop_at_eog=False)
    assert counts(qwen)[2] - after[2] < len(start), "another image is another prompt"
    with rlx.auto_runner(qwen._engine._path, **SAME) as alone:  # type: ignore[attr-defined]
        prompts = [rlx.Prompt([*start, 60, 61], [each]) for each in (seen, 255 - seen)]
        assert [list(alone.generate(each, 3, stop_at_eog=False)) for each in prompts] == [found, other]


def test_prompts_with_images_together_and_alone(qwen: Model) -> None:
    token = qwen._images.encoder.config.image_token  # type: ignore[union-attr]
    seen = [np.random.default_rng(i).integers(0, 256, (48, 80, 3), np.uint8) for i in range(3)]
    prompts = [rlx.Prompt([10 + i, token, 20, 21], [each]) for i, each in enumerate(seen)]
    alone = [list(qwen.generate(each, 5, stop_at_eog=False)) for each in prompts]
    assert qwen.generate_batch(prompts, 5, stop_at_eog=False) == alone
    text = list(qwen.generate([5, 6, 7], 5, stop_at_eog=False))
    assert qwen.generate_batch([prompts[0], [5, 6, 7]], 5, stop_at_eog=False) == [alone[0], text]
    qwen.prefill_logits(prompts[0])
    kept = qwen.snapshot()
    expected = qwen.decode_logits(9)
    qwen.restore(kept)
    np.testing.assert_array_equal(qwen.decode_logits(9), expected)


def test_qwen3_vl_as_transformers() -> None:
    folder = goldens() / "qwen3vl-mm"
    with (
        np.load(folder / "golden.npz") as golden,
        rlx.auto_runner(folder / "model-f16.gguf", precision="exact", kv_dtype="f32", max_seq=128) as runner,
    ):
        prompt = rlx.Prompt(golden["tokens"].tolist(), [golden["image"]])
        found = runner.predict_logits(prompt, all_positions=True)[golden["positions"]]
        assert np.abs(found - golden["logits"]).max() < 2e-5 * np.abs(golden["logits"]).max()
        assert list(runner.generate(prompt, 12, stop_at_eog=False)) == golden["greedy"].tolist()
        features = runner.image_features(golden["image"])
        assert np.abs(features - golden["image_features"]).max() < 2e-5 * np.abs(features).max()


# --------------------------------------------------------------------------------------------------------------- video

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def film(*frames: Any, **more: Any) -> dict[str, Any]:
    return {"type": "video", "video": list(frames), **more}


def test_a_video_as_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five frames are three pairs, the last of them twice the last frame."""
    folder = goldens() / "qwen3vl-mm"
    with (
        np.load(folder / "video.npz") as golden,
        rlx.auto_runner(folder / "model-f16.gguf", precision="exact", kv_dtype="f32", max_seq=128) as runner,
    ):
        frames = list(golden["frames"])
        template = replace(runner.tokenizer, chat_templates={"default": TEMPLATE})
        monkeypatch.setitem(vars(runner), "tokenizer", template)
        asked: Any = runner.chat_ids(
            [{"role": "user", "content": [film(*frames, fps=2), {"type": "text", "text": "?"}]}]
        )
        assert isinstance(asked, rlx.Prompt)
        texts = [template.encode(f"<{time} seconds>", add_special_tokens=False) for time in ("0.2", "1.2", "2.0")]
        assert len(asked.images) == 3
        for text in texts:
            assert any(list(asked.ids[at : at + len(text)]) == text for at in range(len(asked.ids)))
        prompt = rlx.Prompt(golden["ids"].tolist(), asked.images)
        found = runner.predict_logits(prompt, all_positions=True)[golden["positions"]]
        assert np.abs(found - golden["logits"]).max() < 2e-5 * np.abs(golden["logits"]).max()
        answer = runner.generate_multimodal("?", [film(*frames, fps=2)], 4, stop_at_eog=False)
        assert answer == runner.generate(asked, 4, stop_at_eog=False)
        for wrong, message in (
            (film(), "a video has no frame"),
            (film(frames[0], frames[0][:32]), r"frames of 64 x 32 and 64 x 48 pixels are in one video"),
            (film(frames[0], fps=0), "fps is 0, expected frames in a second"),
            ({"type": "video", "video": "film.mp4"}, r"messages\[0\]\.content\[0\]: rlx reads no video files"),
            ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}}, "rlx reads no video files"),
        ):
            with pytest.raises(RlxError, match=message):
                runner.chat_ids([{"role": "user", "content": [wrong]}])


def test_what_takes_no_video(seeing: Model) -> None:
    with pytest.raises(MultimodalError, match=r"models of gemma3 take no videos\. Give the frames as images"):
        seeing.chat([{"role": "user", "content": [film(circle(), circle())]}])


@pytest.mark.parametrize("form", ["published", "by newer transformers", "GGUF"])
def test_qwen3_vl_with_experts_as_transformers(tmp_path: Path, form: str) -> None:
    """Checkpoints have the inputs of experts first, or last where transformers 5 wrote a model that it did not load."""
    source, path = goldens() / "qwen3vl-moe", tmp_path / "hf"
    shutil.copytree(source / "hf", path)
    if form == "by newer transformers":
        turn_experts(path / "model.safetensors")
    elif form == "GGUF":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            text = (goldens() / "qwen3" / "hf" / name).read_text()
            (path / name).write_text(text.replace("<|im_end|>", "<|image_pad|>"))
        path = convert(path, tmp_path / "model.gguf", "F32").path
    with (
        np.load(source / "golden.npz") as golden,
        rlx.auto_runner(path, precision="exact", kv_dtype="f32", max_seq=128) as runner,
    ):
        prompt = rlx.Prompt(golden["tokens"].tolist(), [golden["image"]])
        found = runner.predict_logits(prompt, all_positions=True)[golden["positions"]]
        assert np.abs(found - golden["logits"]).max() < 2e-5 * np.abs(golden["logits"]).max()
        if form == "published":  # the weights are the same in all forms
            assert list(runner.generate(prompt, 6, stop_at_eog=False)) == golden["greedy"].tolist()


def turn_experts(file: Path) -> None:
    """Transposes the matrices of experts, which are in bf16."""
    found = {}
    with open_weights(file, config={}) as loader:
        for name, info in loader.tensors.items():
            values = dequantize(loader.raw(name), info.dtype, info.shape).reshape(info.shape)
            turned = "experts." in name and values.ndim == 3
            found[name] = np.ascontiguousarray(values.swapaxes(1, 2) if turned else values)
    safetensors.numpy.save_file(found, file)


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "a circle.png"
    Pillow.fromarray(circle()).save(path)
    return path


def test_chat_attaches_images_and_saves_their_paths(
    seeing: Model, png: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    session = Session(seeing, None, Settings(None), Interrupts(), Bars(), Conversation())
    for line in (
        "/image",
        f"/image '{png}'",
        f"/image {png}",
        "/image -",
        f"/image {str(png).replace(' ', chr(92) + ' ')}",
    ):
        obey(session, line)
    session.ask("What colour is the circle?")
    assert not session.attached and session.conversation.exchanges[0][1] == "The circle is yellow."
    session.ask("Where is the yellow circle?")
    said = capfd.readouterr().err
    assert "no image is attached" in said and "with the next message: a circle.png, a circle.png" in said
    file = tmp_path / "talk.json"
    obey(session, f"/save {file}")
    saved = json.loads(file.read_text())["messages"]
    assert saved[0]["content"][0] == {"type": "image", "path": str(png)} and len(saved) == 4
    again, _ = load(str(file))
    assert again == session.conversation
    obey(session, "/undo")
    obey(session, "/undo")
    assert "taken back: [a circle.png] What colour is the circle?" in capfd.readouterr().err
    png.unlink()
    with pytest.raises(ChatError, match=r"message 0: an image cannot be used.*a circle\.png"):
        load(str(file))
    with pytest.raises(ImageError, match="gone"):
        obey(session, "/image gone.png")
