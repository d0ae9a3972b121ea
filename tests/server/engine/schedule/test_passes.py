"""Predictions of how many passes an image still needs, learned from finished images."""

import pytest

from linpix.server.engine.schedule.passes import PassesLearned, expected_passes


def draw(learned: PassesLearned, *passes: int, slot: int = 1, conditioned: bool = False) -> None:
    """An image of 64 sub-pixels in quanta of equal length, each with so many passes."""
    learned.begin(slot)
    for quantum, count in enumerate(passes):
        learned.add(slot, 64 - quantum * 64 // len(passes), count)
    learned.finish(slot, conditioned)


def test_every_subpixel_is_a_pass_until_an_image_has_finished():
    learned = PassesLearned(64)
    learned.begin(1)
    learned.add(1, 64, 3)
    for left in (64, 7):
        assert [expected_passes(learned.ratios, left, 64, told) for told in (False, True)] == [left, left]


def test_what_is_left_counts_as_that_of_images_before():
    learned = PassesLearned(64)
    for slot in (1, 2):
        draw(learned, 0, 8, 24, 0, slot=slot)
    expected = [expected_passes(learned.ratios, left, 64, False) for left in (64, 48, 32, 16)]
    assert expected == pytest.approx([32, 32, 24, 0])
    assert expected_passes(learned.ratios, 40, 64, False) == pytest.approx(40 * 24 / 32), "as the nearest that was seen"
    assert expected_passes(learned.ratios, 64, 64, True) == 64, "completions are learned for themselves"


def test_a_mean_follows_what_is_drawn():
    learned = PassesLearned(64)
    draw(learned, 10, 10)
    for _ in range(200):
        draw(learned, 20, 20)
    assert expected_passes(learned.ratios, 64, 64, False) == pytest.approx(40, rel=0.01)


def test_an_image_of_which_all_was_known_tells_nothing():
    learned = PassesLearned(64)
    learned.begin(1)
    learned.finish(1, True)
    assert learned.ratios == PassesLearned(64).ratios
