"""Encoding of images: each once, one at a time, in pieces; and the cache of what they became."""

from __future__ import annotations

import numpy as np
import pytest
from fake_tower import FakeTower, image, images

from rlx.errors import ConfigError, NumericalError
from rlx.vision.encoder import Encoder, Encoding, FeatureCache, Features
from rlx.vision.image import Image


def encoder(tower: FakeTower, capacity: int = 1 << 20) -> Encoder:
    return images(tower, capacity).encoder


def taken(made: Encoder, seed: int = 0) -> Encoding:
    found = made.encoding(Image.of(image(seed)))
    made.take(found)
    return found


def finish(made: Encoder, *encodings: Encoding) -> int:
    """Advances in turns until all are ready; how many turns that took."""
    turns = 0
    while not all(each.is_ready for each in encodings):
        for each in encodings:
            made.advance(each)
        turns += 1
        assert turns < 100
    return turns


def test_an_image_is_encoded_once_for_all_who_want_it_at_the_same_time_or_later() -> None:
    tower = FakeTower()
    made = encoder(tower)
    first, second = taken(made), taken(made)
    assert first is second
    finish(made, first)
    made.drop(first)
    made.drop(second)
    del first, second
    later = made.encoding(Image.of(image()))
    assert later.is_ready and tower.begun == 1 and made.stats()["found"] == 1


def test_images_are_encoded_one_after_the_other_whoever_advances() -> None:
    tower = FakeTower()
    made = encoder(tower)
    first, second = taken(made, 1), taken(made, 2)
    made.advance(first)
    made.advance(second)
    assert tower.begun == 1, "the second waits: the memory of an encoding is there once"
    finish(made, first, second)
    assert tower.begun == 2


def test_what_nobody_waits_for_is_given_up() -> None:
    tower = FakeTower()
    made = encoder(tower)
    first, other = taken(made, 1), taken(made, 2)
    made.advance(first)
    made.advance(first)
    made.drop(first)
    assert (tower.closed, made.abandoned, first.is_ready) == (1, 1, False)
    finish(made, other)
    made.take(first)
    finish(made, first)
    assert tower.begun == 3, "it begins anew"


def test_after_an_error_the_next_one_begins_anew() -> None:
    tower = FakeTower()
    made = encoder(tower)
    found = taken(made)
    tower.trouble = ConfigError("broken")
    with pytest.raises(ConfigError):
        finish(made, found)
    tower.value = np.nan
    with pytest.raises(NumericalError, match="vision tower: a row of an image is not finite"):
        finish(made, found)
    assert len(made.cache) == 0
    tower.value = 1.0
    finish(made, found)
    assert made.encoded == 1


def rows(count: int) -> Features:
    return Features(np.zeros((count, 4), np.float32), (1, count))


def test_the_cache_holds_its_bytes_and_drops_what_was_not_used() -> None:
    cache = FeatureCache(10 * 16)
    for key, count in ((b"a", 4), (b"b", 5)):
        cache.put(key, rows(count))
    assert cache.get(b"a") is not None
    cache.put(b"c", rows(3))
    assert (cache.get(b"b"), len(cache), cache.nbytes, cache.evicted) == (None, 2, 7 * 16, 1)
    cache.put(b"d", rows(11))
    assert len(cache) == 2, "one that is larger than the cache drops no other"
    cache.put(b"a", rows(4))
    assert cache.nbytes == 7 * 16, "the same twice counts once"
