"""Images in prompts: placeholders, errors by name, and how the engine loop encodes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from fake_tower import BEGIN, END, HIDDEN, PIECES, PLACEHOLDER, FakeTower, image, images
from toy_engine import ToyEngine, answer, asked, executor, give
from toy_engine import job as toy_job

import rlx
from rlx.engine.images import ImageInput
from rlx.engine.loop.executor import Executor
from rlx.engine.loop.job import Job
from rlx.engine.request import checked_prompt
from rlx.errors import ArgumentError, ConfigError, ImageError, MultimodalError, PromptError
from rlx.prompt import Prompt
from rlx.runners import Model
from rlx.sampling import SampleOpts, Sampler

IDS = [1, 2, BEGIN, PLACEHOLDER, END, 3]
ROWS = 6  # of `image`


def context(prompt: Any, tower: FakeTower | None = None, max_seq: int | None = None) -> Any:
    return checked_prompt(prompt, images(tower or FakeTower()), 29, max_seq, "prompt", "qwen35 model")


# ---------------------------------------------------------------------------------------------------- placeholders


def test_a_placeholder_stands_once_or_as_often_as_the_image_has_rows() -> None:
    long = [1, 2, BEGIN, *[PLACEHOLDER] * ROWS, 3]
    short = [1, 2, BEGIN, PLACEHOLDER, 3]
    for ids in (long, short, np.array(short)):
        found = context(Prompt(ids, [image()]))
        assert found.ids == [1, 2, BEGIN, *[0] * ROWS, 3], "rows are looked up as pad"
        assert found.images.spans == [(3, 3 + ROWS)]
        assert found.images.without_rows(found.ids) == [1, 2, BEGIN, 3]


@pytest.mark.parametrize(
    ("ids", "count", "said"),
    [
        ([1, PLACEHOLDER], 0, "prompt: the number of images is 0, and that of placeholders is 1"),
        ([1, PLACEHOLDER], 2, "the number of images is 2, and that of placeholders is 1. A run of the id 30"),
        ([1, 2], 1, "the number of images is 1, and that of placeholders is 0"),
        ([1, PLACEHOLDER, PLACEHOLDER], 2, "the number of images is 2, and that of placeholders is 1"),
        ([1, *[PLACEHOLDER] * 4], 1, "image 0: the image has 6 rows, and its placeholder stands there 4 times"),
    ],
)
def test_placeholders_and_images_must_match(ids: list[int], count: int, said: str) -> None:
    with pytest.raises(MultimodalError, match=said):
        context(Prompt(ids, [image()] * count))


# ---------------------------------------------------------------------------------------------------- the engine loop


def job(prompt: list[int], made: ImageInput | None = None, seed: int = 0, limit: int = 6) -> Job:
    if made is None:
        return toy_job(prompt, limit)
    found = checked_prompt(Prompt([*prompt, PLACEHOLDER, 7], [image(seed)]), made, 29, None, "prompt", "model")
    return Job(replace(asked(found.ids, limit), ids=found), Sampler(SampleOpts.greedy()), streaming=False)


def run(made: Executor) -> None:
    for _ in range(500):
        if not made.turn():
            return
    raise AssertionError("it goes round in circles")


def test_others_decode_between_the_pieces_of_an_image() -> None:
    tower = FakeTower()
    loop, given = executor(ToyEngine()), images(tower)
    talking, seeing = job([1, 2, 3], limit=40), job([1], given)
    seen: list[int] = []
    give(loop, talking)
    loop.turn()
    give(loop, seeing)
    while not seeing.tokens:
        seen.append(len(talking.tokens))
        loop.turn()
    assert seen == list(range(seen[0], seen[0] + len(seen))), "a token for each piece"
    assert len(seen) > PIECES
    run(loop)
    assert talking.tokens == answer(talking.prompt, 40) and seeing.tokens == answer(seeing.prompt, 6)
    assert seeing.embeddings.spans[0].rows.shape == (ROWS, HIDDEN) and seeing.embeddings.spans[0].start == 1


def test_two_requests_with_one_image_encode_it_once() -> None:
    tower = FakeTower()
    loop, given = executor(ToyEngine()), images(tower)
    jobs = [job([1], given), job([2, 3], given), job([1], given, seed=5)]
    for each in jobs:
        give(loop, each)
    run(loop)
    assert all(each.tokens == answer(each.prompt, 6) for each in jobs)
    assert tower.begun == 2 and given.stats()["images"]["encoded"] == 2


def test_an_aborted_request_gives_its_image_up_and_others_go_on() -> None:
    tower = FakeTower()
    loop, given = executor(ToyEngine()), images(tower)
    gone, other = job([1], given), job([2], given, seed=3)
    give(loop, gone)
    give(loop, other)
    for _ in range(3):
        loop.turn()
    gone.stopped_at = 0
    give(loop, gone)
    run(loop)
    assert (gone.ended, gone.tokens, tower.closed) == (True, [], 1)
    assert other.tokens == answer(other.prompt, 6)


def test_a_broken_image_ends_its_own_request_only() -> None:
    tower = FakeTower()
    loop, given = executor(ToyEngine()), images(tower)
    tower.trouble = ConfigError("broken")
    bad, good = job([1], given), job([2], given, seed=3)
    give(loop, bad)
    give(loop, good)
    run(loop)
    assert isinstance(bad.error, ConfigError) and bad.ended
    assert good.tokens == answer(good.prompt, 6)


# ---------------------------------------------------------------------------------------------------- runners


def runner(tower: FakeTower | None = None, **options: Any) -> tuple[Model, FakeTower]:
    made: Any = FakeEngine(max_seq=40, **options)
    tower = tower or FakeTower()
    made.images = images(tower)
    return Model(made), tower


def test_every_call_takes_a_prompt_with_images_and_the_tower_works_once() -> None:
    made, tower = runner()
    prompt = Prompt(IDS, [image()])
    expanded = [1, 2, BEGIN, *[0] * ROWS, END, 3]
    assert made.supports_multimodal and made.count_tokens(prompt) == len(expanded)
    options: dict[str, Any] = {"stop_at_eog": False}
    same = list(made.generate(expanded, 3, **options))  # the engine knows ids only
    assert list(made.generate(prompt, 3, **options)) == same
    assert [step.token for step in made.stream(prompt, 3, **options)] == same
    assert list(made.submit(rlx.Request(prompt, 3, **options)).result()) == same
    assert made.generate_batch([prompt, expanded], 3, **options) == [same, same]
    np.testing.assert_array_equal(made.predict_logits(prompt), made.predict_logits(expanded))
    assert made.predict_logits(prompt, all_positions=True).shape == (len(expanded), 40)
    np.testing.assert_array_equal(made.prefill_logits(prompt), made.predict_logits(expanded))
    assert made.past_seq == len(expanded) and len(made.decode_logits(4)) == 40
    np.testing.assert_allclose(made.embed(prompt), made.embed(expanded))
    scores = made.score(prompt)
    assert np.flatnonzero(np.isnan(scores)).tolist() == list(range(2, 2 + ROWS)), "a row of an image has none"
    assert tower.begun == 1 and made.stats()["images"]["encoded"] == 1
    made.close()


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (5, "expected a sequence of token ids, found a int"),
        ("text", "expected token ids, found a str"),
        (np.array(5), "expected a sequence of token ids, found one number"),
    ],
)
def test_what_cannot_be_ids_makes_no_prompt(ids: Any, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        Prompt(ids)
    assert repr(Prompt([5, 6], [image()])) == "<Prompt of 2 ids and 1 images>"


def test_generate_multimodal_takes_questions_prompts_ids_and_raw_bytes() -> None:
    made, _ = runner()
    pixels, seen = image(), list[int]()
    expected = list(made.generate(Prompt(IDS, [pixels]), 3, stop_at_eog=False))
    assert list(made.generate_multimodal(IDS, [pixels], 3, stop_at_eog=False)) == expected
    assert list(made.generate_multimodal(IDS, pixels, n_new=3, on_token=seen.append, stop_at_eog=False)) == expected
    assert seen == expected
    raw = pixels.tobytes()
    original = made.generate_multimodal(IDS, raw, 24, 16, None, 3, None, stop_at_eog=False)
    assert list(original) == expected
    named = made.generate_multimodal(IDS, raw, width=24, height=16, n_new=3, stop_at_eog=False)
    assert list(named) == expected
    with pytest.raises(ArgumentError, match=r"1152 bytes, expected 24 x 17 x 3 = 1224"):
        made.generate_multimodal(IDS, raw, width=24, height=17, n_new=3)
    with pytest.raises(ArgumentError, match="the tokenizer is always that of the model"):
        made.generate_multimodal(IDS, raw, 24, 16, "tokenizer.json", 3, None)
    with pytest.raises(MultimodalError, match="the number of images is 2, and that of placeholders is 1"):
        made.generate_multimodal(IDS, [pixels, pixels], 3)
    assert list(made.generate(made.with_images(IDS, pixels), 3, stop_at_eog=False)) == expected
    with pytest.raises(ImageError, match=r"an image is int\. Give an array"):
        made.with_images(IDS, 7)
    made.close()
