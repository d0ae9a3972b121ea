"""Room and deadlines of one model on the event loop, without a thread: quanta are run and reported
by the test.
"""

import contextlib
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from linpix.model import checkpoint
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.image import images_of, next_or_best
from linpix.server.engine.job import Job
from linpix.server.engine.model import Model
from linpix.server.engine.request import Request, Started
from linpix.server.errors import ServiceError


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> SimpleNamespace:
    """What time.monotonic reads: a microsecond more each time, and what a test adds."""
    clock = SimpleNamespace(now=1000.0)

    def monotonic() -> float:
        clock.now += 1e-6
        return clock.now

    monkeypatch.setattr(time, "monotonic", monotonic)
    return clock


@pytest.fixture
def one_slot(tiny) -> Model:
    return served(tiny, 1, 8)


def served(tiny, slots: int, max_queue: int) -> Model:
    return Model(Engine(new_decoder(checkpoint.read(tiny), slots, "eager")), max_queue)


def ask(model: Model, name: str, images: int = 1, within_s: float = math.inf, **options) -> Request:
    """Admit a request, and submit it."""
    job, began = Job(count=images, **options), time.monotonic()
    asked = Request(name, "generations", "somebody", job, model, within_s, began)
    model.check_room(images, bulk=job.bulk)
    model.check_time(asked)
    model.requests[name] = asked
    if not asked.job.scored:
        asked.images = images_of(asked.job, name)
        model.engine.scheduler.submit(asked.images)
    return asked


def room(model):
    """The largest number of images that a request could have now."""
    images = 0
    with contextlib.suppress(ServiceError):
        while True:
            model.check_room(images + 1)
            images += 1
    return images


def run(model: Model) -> list[str]:
    """Run a quantum and report it, as admission does; returns a request for each finished image."""
    report = model.engine.run_quantum()
    for image in report.joined:
        begun = model.requests[image.request].begun
        begun[image.index] = Started(report.joined_at, model.quanta_s, model.images_s)
    passed_s = time.monotonic() - report.joined_at
    model.quanta_s += passed_s
    model.images_s += passed_s * report.running
    for image in report.finished:
        assert next_or_best(image) is image
        request = model.requests[image.request]
        model.measure(request, image)
        request.undone -= 1
        if not request.undone:
            del model.requests[request.id]
    for late in model.too_late():
        model.engine.scheduler.cancel(late.id)
        del model.requests[late.id]
    return [image.request for image in report.finished]


def image_takes(model: Model, seconds: float) -> None:
    for _ in range(100):
        model.pace.learn(1, seconds / 64)


def test_the_queue_is_counted_in_images_and_free_slots_do_not_count(tiny):
    model = served(tiny, slots=2, max_queue=4)
    ask(model, "a", 6)
    with pytest.raises(
        ServiceError, match="6 images are already waiting, and 1 more would exceed the limit of 4"
    ):
        ask(model, "b")


def test_bulk_that_fills_its_part_of_the_queue_is_refused_and_leaves_room_for_others(tiny):
    model = served(tiny, slots=1, max_queue=8)
    ask(model, "running", bulk=True)
    run(model)
    ask(model, "waiting", 6, bulk=True)  # three quarters of eight
    with pytest.raises(
        ServiceError, match="6 images are already waiting, and 1 more would exceed the limit of 6"
    ):
        ask(model, "more", bulk=True)
    ask(model, "interactive", 2)
    with pytest.raises(ServiceError, match=r"8 images .* limit of 8"):
        ask(model, "another")


def test_a_request_that_finds_the_queue_full_is_given_the_time_until_there_is_room(tiny):
    model = served(tiny, slots=1, max_queue=1)
    ask(model, "a")
    run(model)
    image_takes(model, 6.4)
    ask(model, "b")
    with pytest.raises(ServiceError, match="already waiting") as refused:
        ask(model, "c")
    [running, _] = [request.images[0] for request in model.requests.values()]
    left = int(model.engine.slots.left[running.slot])
    assert refused.value.retry_after_s == pytest.approx(0.1 * left) and refused.value.status == 429


def test_what_leaves_in_a_slot_or_in_the_queue_gives_back_its_room(tiny):
    model = served(tiny, slots=1, max_queue=1)
    ask(model, "a", 2)
    run(model)
    assert (model.waiting(), room(model)) == (1, 0)
    model.engine.scheduler.cancel("a")
    del model.requests["a"]
    assert room(model) == 2
    run(model)
    assert not model.engine.slots.running


def test_a_picture_to_be_scored_needs_room_in_the_queue_but_no_slot(tiny):
    model = served(tiny, slots=1, max_queue=4)
    ask(model, "scored", scored=True)
    image_takes(model, 6.4)
    assert (model.waiting(), room(model)) == (1, 4)
    ask(model, "drawn")
    assert model.ends() == [(pytest.approx(6.4), "drawn")], "it waits for nothing"


def test_a_deadline_is_refused_once_the_pace_says_that_it_cannot_be_met(one_slot):
    ask(one_slot, "runs")
    image_takes(one_slot, 6.4)
    ask(one_slot, "first", within_s=20.0)
    with pytest.raises(ServiceError, match="2 images are ahead of it, and it needs about 32"):
        ask(one_slot, "too many", 2, within_s=20.0)
    image_takes(one_slot, 64.0)
    with pytest.raises(ServiceError, match="cannot be finished within"):
        ask(one_slot, "later", within_s=20.0)
    assert one_slot.waiting() == 2, "a refused request has no room"


def test_until_images_have_finished_the_running_ones_tell_the_pace(one_slot, clock):
    asked = ask(one_slot, "runs")
    assert one_slot.seconds_per_token(1) == 0
    left = one_slot.engine.slots.left
    while (drawn := 64 - int(left[asked.images[0].slot])) < 8 or asked.images[0].slot == 0:
        clock.now += 100.0
        assert one_slot.seconds_per_token(1) == 0, "so few tokens tell nothing: the first are cold"
        clock.now -= 100.0
        run(one_slot)
    clock.now += 100.0
    assert one_slot.seconds_per_token(1) == pytest.approx(100 / drawn, rel=0.01)
    with pytest.raises(ServiceError, match="cannot be finished within"):
        ask(one_slot, "hasty", within_s=101.0)


def test_a_pace_that_was_not_used_for_long_is_forgotten(one_slot, clock):
    image_takes(one_slot, 1e6)
    one_slot._measured_at = clock.now
    with pytest.raises(ServiceError, match="cannot be finished within"):
        ask(one_slot, "hasty", within_s=100.0)
    clock.now += 6.0
    ask(one_slot, "later", within_s=100.0)


def test_a_request_without_time_left_for_its_images_makes_no_other_late(one_slot):
    for name, within_s in (("runs", 1e6), ("too late", 60.0), ("patient", 1e6)):
        ask(one_slot, name, within_s=within_s)  # nothing is known of the pace yet
    image_takes(one_slot, 120.0)
    finished = []
    while one_slot.engine.busy:
        finished += run(one_slot)
    assert finished == ["runs", "patient"]


def test_a_running_image_that_leaves_between_two_reports_is_not_waited_for(tiny):
    model = served(tiny, slots=1, max_queue=4)
    ask(model, "first")
    run(model)
    image_takes(model, 0.64)
    ask(model, "second")
    assert len(model.ends()) == 2
    del model.requests["first"]
    assert model.ends() == [(pytest.approx(0.64), "second")]


def test_a_finished_image_is_measured_from_its_slot_to_its_end(one_slot, clock):
    ask(one_slot, "a")
    while one_slot.engine.busy:
        run(one_slot)
        clock.now += 1.0
    assert one_slot.pace(1) > 0


def test_an_image_is_measured_by_the_images_beside_it_and_not_by_those_at_its_end(tiny, clock):
    model = served(tiny, slots=4, max_queue=8)
    *others, last = [ask(model, name) for name in "abc"]
    while (drawn := 64 - int(model.engine.slots.left[last.images[0].slot])) < 8 or not last.images[
        0
    ].slot:
        run(model)
    for other in others:
        model.engine.scheduler.cancel(other.id)
    # the last second alone
    model.quanta_s, model.images_s = 4.0, 10.0  # three images for 3 s, and then one
    last.begun[0] = Started(clock.now - 4.0, 0.0, 0.0)
    model.measure(last, last.images[0])
    assert model.pace(3) == pytest.approx(4 / drawn, rel=0.2)
    assert model.pace(1) == pytest.approx(model.pace(3) / math.sqrt(3)), (
        "nothing is known of one alone"
    )


def test_an_image_is_measured_even_if_another_has_its_slot_by_then(one_slot):
    """The event loop may be a quantum behind."""
    first, _ = ask(one_slot, "first"), ask(one_slot, "second")
    run(one_slot)
    while not (report := one_slot.engine.run_quantum()).finished:
        pass
    one_slot.engine.run_quantum()
    assert one_slot.engine.slots.running[1].request == "second"
    [image] = report.finished
    one_slot.quanta_s = one_slot.images_s = 1.0
    one_slot.measure(first, image)
    assert one_slot.pace.measured == 1


def test_edits_of_which_little_is_drawn_tell_nothing_of_the_pace(one_slot):
    """Their time is that of reading, checks and quanta."""
    known = np.arange(64) < 63
    for name in ("a", "b", "c"):
        ask(one_slot, name, canvas=np.zeros(64, np.uint8), known=known)
        while one_slot.engine.busy:
            run(one_slot)
    assert not one_slot.pace.measured and one_slot.seconds_per_token(1) == 0


def test_a_request_that_would_make_others_late_is_refused_unless_they_are_less_patient(tiny):
    model = served(tiny, slots=4, max_queue=8)
    ask(model, "first", within_s=3.0)
    for batch in (1, 2, 4):  # they share a processor
        for _ in range(100):
            model.pace.learn(batch, batch / 64)
    ask(model, "second", within_s=3.0)
    half = {"canvas": np.zeros(64, np.uint8), "known": np.arange(64) < 32}
    with pytest.raises(ServiceError, match="2 images are ahead of it, and it needs about 5 s"):
        ask(model, "slow", 2, within_s=3.0)
    with pytest.raises(
        ServiceError, match=r"within 2\.\d* s: it would make others miss their deadlines; allow"
    ):
        ask(model, "quick", 2, within_s=2.9, **half)
    ask(model, "patient", 2, within_s=60.0, **half)
    assert [*model.requests] == ["first", "second", "patient"]


def test_an_image_that_ends_late_in_its_slot_tells_the_pace_too(one_slot, clock):
    asked = ask(one_slot, "late")
    while (
        drawn := 64 - int(one_slot.engine.slots.left[asked.images[0].slot])
    ) < 16 or not asked.images[0].slot:
        run(one_slot)
    clock.now += 32.0
    one_slot.measure(asked, asked.images[0])
    assert one_slot.pace(1) == pytest.approx(32 / drawn, rel=0.05)
