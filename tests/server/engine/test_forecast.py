"""Forecasts against what a scheduler then does: no engine, no clock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linpix.server.engine.model import CONFIDENT, Pace, Remaining, ends, queue_order
from tests.server.engine.decode.test_scheduler import (
    advance,
    arrive,
    crowds,
    join,
    left,
    scheduler,
    turn,
)


def forecast(s, pace=lambda images: 1.0):
    """Of a scheduler's images, as admission forecasts them."""

    def remaining(images):
        return [Remaining(image.request, left(s, image)) for image in images]

    return ends(
        s.slots.count,
        remaining(s.slots.running.values()),
        queue_order(remaining(s.interactive), remaining(s.bulk)),
        pace,
    )


def test_a_forecast_uses_the_pace_of_each_number_of_images():
    s = scheduler(slots=2)
    arrive(s, "a", position=4)
    arrive(s, "b")
    join(s)
    assert forecast(s, lambda images: images) == [(6 * 2, "a"), (6 * 2 + 4 * 1, "b")]


@settings(max_examples=200)
@given(crowds(), st.integers(1, 3))
def test_forecasts_come_true_when_no_other_request_arrives(crowd, slots):
    """In quanta of one step, images end in exactly the step that was foretold, in either class
    alone.
    """
    bulk = any(kind for *_, kind in crowd)
    s = scheduler(slots=slots)
    for number, (_, count, position, kind) in enumerate(crowd):
        if kind == bulk:
            arrive(s, f"r{number}", count, position, kind)
        turn(s, 1)
    join(s)
    foretold = forecast(s)
    images = [*s.slots.running.values(), *s.interactive, *s.bulk]
    bound = s.slots.length + s.slots.length * len(images) / slots  # as admission computes it
    steps, found = 0, []
    while s.slots.running:
        finished = advance(s, s.plan(1))
        steps += 1
        found += [(steps, image.request) for image in finished]
        join(s)
    assert sorted(foretold) == sorted(found)
    assert not foretold or max(foretold)[0] <= bound


def test_one_slot_of_four_is_for_bulk_images():
    order = queue_order(
        [Remaining(f"i{at}", 1) for at in range(5)], [Remaining(f"b{at}", 1) for at in range(2)]
    )
    assert [image.request for image in order] == ["i0", "i1", "i2", "b0", "i3", "i4", "b1"]


def test_a_pace_is_smoothed_by_number_of_images_and_guessed_from_the_nearest():
    pace = Pace()
    assert pace(1) == 0 and not pace.measured
    for seconds in (1.0, 2.0):
        pace.learn(1, seconds)
    assert pace(1) == pytest.approx(1.2)
    assert pace(4) == pytest.approx(1.2 * 2), "twice the images take 1.4 times as long"
    pace.learn(16, 8.0)
    assert (pace(16), pace(8)) == (8.0, pytest.approx(8.0 / 2**0.5))
    assert pace.measured == 3 > CONFIDENT
    pace.learn(15.5, 3.0)
    assert pace(16) == pytest.approx(7.0), (
        "a mean number, to the nearest power of the square root of two"
    )
