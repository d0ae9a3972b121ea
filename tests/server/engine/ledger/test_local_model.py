"""Room and deadlines of one model on the event loop, without a thread: quanta are run and reported by the test."""

import contextlib
import dataclasses
import math
import time

import pytest

from linpix.model import checkpoint
from linpix.server.engine.batch import Batcher
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.image_spec import ImageSpec
from linpix.server.engine.decode.prefill import Prefilled
from linpix.server.engine.ledger.local_model import LocalModel
from linpix.server.engine.ledger.ticket import Demand, Ticket
from linpix.server.engine.messages import Submission
from linpix.server.errors import DeadlineUnreachable, QueueFull


@pytest.fixture
def one_slot(tiny) -> LocalModel:
    return served(tiny, 1, 8)


def served(tiny, slots: int, max_queue: int) -> LocalModel:
    return LocalModel(Batcher(new_decoder(checkpoint.read(tiny), slots, "eager")), max_queue)


def ticket(name: str, within_s: float = math.inf) -> Ticket:
    return Ticket(name, "generations", "somebody", within_s)


def ask(model: LocalModel, name: str, images: int = 1, within_s: float = math.inf, bulk: bool = False
        ) -> Ticket:
    """Admit a request, and submit it."""
    asked = ticket(name, within_s)
    model.admit(asked, Demand(images, bulk=bulk, known=0))
    model.batcher.submit(Submission(name, [ImageSpec(seed=seed) for seed in range(images)], bulk))
    return asked


def run(model: LocalModel) -> list[str]:
    """Run a quantum and report it; returns a request for each finished image."""
    report = model.batcher.run_quantum()
    for request in report.joined:
        model.joined(model.queued[request])
    for image in report.finished:
        model.finished(model.queued[image.request])
    model.apply(report)
    for late in model.too_late():
        model.batcher.cancel(late.id)
        model.settle(late)
        model.leave(late)
    return [image.request for image in report.finished]


def steps_take(model: LocalModel, seconds: float, times: int = 2) -> None:
    for _ in range(times):
        model.step_time.learn(1, 64, 64 * seconds)  # 64 steps are an image


def test_the_queue_is_counted_in_images_and_free_slots_do_not_count(tiny):
    model = served(tiny, slots=2, max_queue=4)
    ask(model, "a", 6)
    with pytest.raises(QueueFull):
        ask(model, "b")


def test_a_reservation_holds_its_room_until_it_leaves(tiny):
    model, upload = served(tiny, slots=1, max_queue=0), ticket("upload")
    model.admit(upload, Demand(1))
    with pytest.raises(QueueFull):
        ask(model, "other")
    model.leave(upload)
    ask(model, "other")


def test_a_reservation_grows_or_is_lost_and_its_own_images_do_not_count_against_it(tiny):
    model, upload = served(tiny, slots=2, max_queue=2), ticket("upload")
    model.admit(upload, Demand(1))
    model.admit(upload, Demand(4))
    assert model.waiting() == 4
    with pytest.raises(QueueFull):
        model.admit(upload, Demand(5))
    assert model.waiting() == 0 and model.idle


def test_bulk_that_fills_its_part_of_the_queue_is_refused_and_leaves_room_for_others(tiny):
    model = served(tiny, slots=1, max_queue=8)
    ask(model, "running", bulk=True)
    run(model)
    ask(model, "waiting", 6, bulk=True)  # three quarters of eight
    with pytest.raises(QueueFull, match="6 images are already waiting, and 1 more would exceed the limit of 6"):
        ask(model, "more", bulk=True)
    ask(model, "interactive", 2)
    with pytest.raises(QueueFull, match=r"8 images .* limit of 8"):
        ask(model, "another")


def test_an_upload_counts_as_whole_images_for_others_and_for_itself_as_if_all_of_it_were_known(one_slot):
    ask(one_slot, "running")
    run(one_slot)
    upload = ticket("upload")
    one_slot.admit(upload, Demand(2))
    left = one_slot._running()[0].steps
    assert one_slot._outlook().until_done("upload") == left + 2 * 64
    assert one_slot._outlook(upload).until_done("upload") == left


def test_a_request_that_finds_the_queue_full_is_given_the_time_until_there_is_room(tiny):
    model = served(tiny, slots=1, max_queue=1)
    ask(model, "a")
    for _ in range(3):  # the first quantum says nothing about the time of a step
        run(model)
    ask(model, "b")
    with pytest.raises(QueueFull) as refused:
        ask(model, "c")
    assert refused.value.retry_after_s > 0
    assert refused.value.status == 429


def test_what_leaves_in_a_slot_or_in_the_queue_gives_back_its_room(tiny):
    model = served(tiny, slots=1, max_queue=1)
    asked = ask(model, "a", 2)
    run(model)
    assert (model.waiting(), model.slots_used, model.room_left()) == (1, 1, 0)
    model.batcher.cancel("a")
    model.leave(asked)
    assert model.room_left() == 2 and model.idle
    run(model)
    assert (model.waiting(), model.slots_used) == (0, 0)


def test_a_deadline_is_refused_once_the_time_of_a_step_says_that_it_cannot_be_met(one_slot):
    ask(one_slot, "runs")
    steps_take(one_slot, 0.1)
    one_slot.admit(ticket("first", 20.0), Demand(1, known=0))
    with pytest.raises(DeadlineUnreachable):
        one_slot.admit(ticket("too many", 20.0), Demand(2, known=0))
    steps_take(one_slot, 1.0, times=100)
    with pytest.raises(DeadlineUnreachable):
        one_slot.admit(ticket("later", 20.0), Demand(1, known=0))
    assert one_slot.waiting() == 2, "a refused request has no room"


def test_known_sub_pixels_shorten_the_prediction_of_an_upload(one_slot):
    ask(one_slot, "runs")
    steps_take(one_slot, 0.1)
    upload = ticket("upload", 11.0)
    one_slot.admit(upload, Demand(1))
    one_slot.queue(upload, known=48)
    other = ticket("other", 11.0)
    one_slot.admit(other, Demand(1))
    with pytest.raises(DeadlineUnreachable):
        one_slot.queue(other, known=0)


def test_judging_takes_time_of_its_own(tiny):
    model = served(tiny, slots=2, max_queue=4)
    model.judged(2.0)
    ask(model, "first", 1)
    steps_take(model, 0.1)  # an image takes 6.4 s
    for name, attempts in (("plain", 0), ("judged too", 1)):
        asked = ticket(name, within_s=21.0)  # for 15.5 s of drawing, times 1.25, and 4 s of judging
        with pytest.raises(DeadlineUnreachable, match="within 21 s") if attempts else contextlib.nullcontext():
            model.admit(asked, Demand(2, known=0, attempts=attempts))
        model.leave(asked)


def test_only_the_judging_that_is_left_after_the_last_drawing_takes_time(tiny):
    model = served(tiny, slots=2, max_queue=8)
    model.judged(2.0)
    ask(model, "first", 1)
    steps_take(model, 0.1)
    asked = ticket("judged", within_s=40.0)  # for 27.2 s of drawing, times 1.25, and 4 s of judging, not 10 s
    model.admit(asked, Demand(5, known=0, attempts=1))


def test_the_time_of_judging_is_smoothed_and_forgotten_when_nothing_is_judged(tiny, monkeypatch):
    model, clock = served(tiny, slots=1, max_queue=8), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert model.judge_s == 0
    for seconds, expected in ((1.0, 1.0), (2.0, 1.3), (1.0, 1.21)):
        clock[0] += 4.0
        model.judged(seconds)
        assert model.judge_s == pytest.approx(expected)
    ask(model, "not judged")
    clock[0] += 4.0
    run(model)  # what is drawn keeps no measurement of judging
    clock[0] += 2.0
    assert model.judge_s == 0
    model.judged(3.0)
    assert model.judge_s == pytest.approx(3.0), "nothing old is left in it"


def test_a_request_without_time_left_for_its_images_makes_no_other_late(one_slot):
    late = [ask(one_slot, name, within_s=within_s) for name, within_s in
            (("runs", 1e6), ("too late", 60.0), ("patient", 1e6))][1]  # nothing is known of the time of a step yet
    for _ in range(2):
        one_slot.step_time.learn(1, 10_000, 20_000.0)  # an image of 64 steps takes two minutes
    finished = []
    while one_slot.batcher.busy:
        finished += run(one_slot)
    assert finished == ["runs", "patient"]
    assert late.late


def test_a_prediction_that_is_broken_before_there_is_a_slot_counts_as_broken(one_slot):
    ask(one_slot, "runs")
    steps_take(one_slot, 0.1)
    asked = ask(one_slot, "predicted", within_s=20.0)
    assert asked.promised < time.monotonic() + 20
    steps_take(one_slot, 1.0, times=100)
    before, finished = one_slot.safety.value, []
    while one_slot.batcher.busy:
        finished += run(one_slot)
    assert finished == ["runs"] and asked.late
    assert one_slot.safety.value > before


def test_a_running_image_that_leaves_between_two_reports_is_not_waited_for(tiny):
    model = served(tiny, slots=1, max_queue=4)
    first = ask(model, "first")
    run(model)
    steps_take(model, 0.01)
    second = ask(model, "second")
    [behind] = model.ends([second])
    model.leave(first)
    [alone] = model.ends([second])
    assert alone < behind


def test_a_request_that_draws_nothing_has_no_promise_to_keep(one_slot):
    """A large upload keeps room before one can tell what it is for."""
    ask(one_slot, "runs")
    steps_take(one_slot, 0.1)
    upload = ticket("upload", within_s=20.0)
    one_slot.admit(upload, Demand(1, known=0))
    assert upload.promised < math.inf
    one_slot.admit(upload, Demand(1, known=0), check_deadline=False)
    assert upload.promised == math.inf


def test_what_is_known_takes_time_of_its_own_until_it_is_folded_in(tiny):
    for prefill_s, room in ((0.0, True), (0.05, False)):  # 32 tokens of it, at half the pace beside others: 3.2 s
        model = served(tiny, slots=2, max_queue=4)
        ask(model, "first")
        report = model.batcher.run_quantum()
        model.joined(model.queued["first"])
        model.apply(dataclasses.replace(report, prefilled=[Prefilled(64, 64 * prefill_s)] * 2))
        steps_take(model, 0.1)
        upload = ticket("upload", within_s=6.0)  # for 3.2 s of drawing, times 1.25
        model.admit(upload, Demand(1))
        with contextlib.nullcontext() if room else pytest.raises(DeadlineUnreachable):
            model.queue(upload, known=32)


def test_how_long_a_prefill_takes_is_forgotten_when_there_are_none(tiny, monkeypatch):
    model, clock = served(tiny, slots=1, max_queue=8), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    ask(model, "first")
    report = model.batcher.run_quantum()
    for seconds, expected in ((6.4, 3.2), (12.8, 0.7 * 3.2 + 0.3 * 6.4)):
        model.apply(dataclasses.replace(report, prefilled=[Prefilled(64, seconds)]))
        assert model.prefill_s(32) == pytest.approx(expected)
        assert model.prefill_s(0) == 0
    clock[0] += 6.0
    assert model.prefill_s(32) == 0


# --- images that may be drawn again ---

def drawn_again(model: LocalModel, repeats: float) -> None:
    """Tell a model that images of several attempts are drawn again so often."""
    ask(model, "first")
    while model.batcher.busy:
        run(model)
    report = model.batcher.run_quantum()
    model.apply(dataclasses.replace(report, repeats=repeats))


def test_what_is_only_scored_needs_room_but_no_steps(tiny):
    model = served(tiny, slots=1, max_queue=4)
    model.admit(ticket("scored"), Demand(1, scored_only=True))
    assert (model.room_left(), model.passes_left) == (4, 0)
    model.admit(asked := ticket("drawn"), Demand(1, known=0))
    steps_take(model, 0.1)
    assert model.ends([asked]) == [pytest.approx(6.4, rel=0.01)], "it waits for nothing"


@pytest.mark.parametrize("repeats", [0.0, 0.25, 1.5])
def test_an_image_that_may_be_drawn_again_is_forecast_so_many_times_its_passes(tiny, repeats):
    model, ends = served(tiny, slots=1, max_queue=4), {}
    drawn_again(model, repeats)
    steps_take(model, 0.1)
    for attempts in (0, 1, 3):
        asked = ticket("asked")
        model.admit(asked, Demand(1, known=0, attempts=attempts))
        [ends[attempts]] = model.ends([asked])
        model.leave(asked)
    assert ends[0] == ends[1] > 0
    assert ends[3] == pytest.approx(ends[0] * (1 + repeats), rel=0.01)


def test_the_attempts_and_judging_of_a_request_take_time_of_their_own(tiny):
    for attempts, fits in ((0, True), (1, True), (3, False)):
        model = served(tiny, slots=1, max_queue=4)
        drawn_again(model, 1.0)
        steps_take(model, 0.1)  # an image takes 6.4 s, drawn once
        asked = ticket("asked", within_s=9.0)
        with contextlib.nullcontext() if fits else pytest.raises(DeadlineUnreachable):
            model.admit(asked, Demand(1, known=0, attempts=attempts))
    for attempts, fits in ((0, True), (1, False)):
        model = served(tiny, slots=1, max_queue=4)
        drawn_again(model, 0.0)
        steps_take(model, 0.1)
        model.judged(3.0)  # as an image that is judged is
        asked = ticket("asked", within_s=9.0)
        with contextlib.nullcontext() if fits else pytest.raises(DeadlineUnreachable):
            model.admit(asked, Demand(1, known=0, attempts=attempts))


def test_judging_is_measured_as_scoring_is(tiny):
    model = served(tiny, slots=1, max_queue=4)
    drawn_again(model, 0.0)
    assert model.judge_s == 0
    model.apply(dataclasses.replace(model.batcher.run_quantum(), judged_s=[0.5]))
    assert model.judge_s == 0.5
