from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linpix.model import philox
from linpix.model.philox import MAX_SEED, philox4x32, uniforms


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_published_answers_of_random123_come_out(counter, key, expected):
    assert philox4x32(words(counter), words(key)).tolist() == words(expected).tolist()


@given(st.integers(0, MAX_SEED), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_the_key_is_the_seeds_two_words_and_the_counter_position_and_stream(seed, t, stream):
    counter, key = (
        np.array([t, 0, stream, 0], np.uint64),
        np.array([seed % 2**32, seed // 2**32], np.uint64),
    )
    expected = [(int(word) // 2**9 + 0.5) / 2**23 for word in philox4x32(counter, key)]
    assert uniforms(np.array(seed), np.array(t), stream).tolist() == expected


def test_uniforms_are_exact_and_never_0_or_1(monkeypatch):
    extremes = np.array([0, 1, 2**9 - 1, 2**9, 2**31, 2**32 - 2**9 - 1, 2**32 - 1], np.uint64)
    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: extremes)
    u = uniforms(np.array(0), np.array(0))
    assert u.dtype == np.float32
    for word, found in zip(extremes.tolist(), u, strict=True):
        exact = Fraction(2 * (word // 512) + 1, 2**24)
        assert 0 < exact < 1
        assert Fraction(float(found)) == exact
        assert Fraction(float(np.float32(1) - found)) == 1 - exact


def test_seeds_and_positions_are_broadcast_and_each_stands_alone():
    seeds, t = np.array([[3], [2**40 + 3], [MAX_SEED]]), np.arange(5)
    together = uniforms(seeds, t)
    assert together.shape == (3, 5, 4)
    for row in range(3):
        for position in range(5):
            np.testing.assert_array_equal(
                together[row, position], uniforms(seeds[row, 0], t[position])
            )
    assert len(np.unique(together)) == together.size
