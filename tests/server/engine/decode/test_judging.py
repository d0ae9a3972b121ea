"""Images that are drawn again in their slots until the model recognises their class."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from linpix.model import attempts
from linpix.model.attempts import Recognised
from linpix.server.engine.batch import Batcher
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.decoder import Decoder
from linpix.server.engine.decode.faults import Faults, with_faults
from linpix.server.engine.decode.image_spec import ImageSpec
from linpix.server.engine.decode.judging import FORGET
from linpix.server.engine.ledger.local_model import LocalModel
from linpix.server.engine.ledger.ticket import Demand, Ticket
from linpix.server.engine.messages import ImageProgress, QuantumReport, Submission
from linpix.server.engine.schedule.passes import expected_passes
from tests.server.engine.test_conditional import KNOWN, PICTURE

NOTHING = np.zeros(64, np.bool_)
WHOLE = ~NOTHING
ASKED = {"nothing": {}, "a class": {"label": 3}, "a picture": {"canvas": PICTURE, "known": KNOWN},
         "a picture and a class": {"canvas": PICTURE, "known": KNOWN, "label": 3},
         "a picture of which nothing is known": {"canvas": PICTURE, "known": NOTHING}}


@pytest.fixture
def best(source):
    """The engine that serves this model here."""
    return lambda slots: new_decoder(source, slots)


@pytest.fixture
def recognised(monkeypatch) -> Callable[[float], None]:
    """Sets the probability from which on an image is recognised."""
    return lambda probability: monkeypatch.setattr(attempts, "RECOGNISED", probability)


def ran(batcher: Batcher, **requests: list[ImageSpec]) -> list[QuantumReport]:
    """The reports of all quanta, until these requests, which come together, and earlier ones are done."""
    for name, specs in requests.items():
        batcher.submit(Submission(name, specs))
    reports = []
    while batcher.busy:
        reports.append(batcher.run_quantum())
    return reports


def finished(reports: list[QuantumReport], request: str) -> list[ImageProgress]:
    images = [image for report in reports for image in report.finished if image.request == request]
    return sorted(images, key=lambda image: image.index)


def assert_bad_failed_alone(batcher: Batcher, reports: list[QuantumReport]) -> None:
    """Of all requests, only the one named bad has failed, and it left nothing behind."""
    assert [request for report in reports for request in report.failed] == ["bad"]
    assert not finished(reports, "bad") and not batcher.scheduler.running


def drawn(batcher: Batcher, **requests: list[ImageSpec]) -> dict[str, list[ImageProgress]]:
    """The images of requests that come together, by request."""
    reports = ran(batcher, **requests)
    assert not any(report.failed for report in reports)
    return {name: finished(reports, name) for name in requests}


def each_alone(decoder: Callable[[int], Decoder], spec: ImageSpec, count: int) -> list[ImageProgress]:
    """Attempts at an image as requests of their own, which are judged once each."""
    found: list[ImageProgress] = []
    for number in range(count):
        label = spec.label
        if found and (spec.known is None or not spec.known.any()):
            label = found[0].label
        [one] = drawn(Batcher(decoder(1)), a=[dataclasses.replace(
            spec, seed=spec.seed + 2**53 * number, label=label, attempts=1)])["a"]
        found.append(one)
    return found


def surest(images: list[ImageProgress]) -> int:
    """Which of the attempts."""
    return int(np.argmax([image.recognised.log_prob for image in images]))


def assert_same(found: list[ImageProgress], expected: list[ImageProgress]) -> None:
    assert np.array_equal([image.canvas for image in found], [image.canvas for image in expected])
    assert [image.label for image in found] == [image.label for image in expected]
    if expected[0].recognised is not None:
        assert [image.recognised.log_prob for image in found] == [image.recognised.log_prob for image in expected]


def until(batcher: Batcher, true: Callable[[QuantumReport], bool]) -> None:
    """Run quanta until a report is so."""
    while not true(batcher.run_quantum()):
        assert batcher.busy


# --- which image it is ---

@pytest.mark.parametrize("asked", ["nothing", "a picture", "a picture and a class"])
def test_the_answer_is_what_the_seed_of_its_surest_attempt_draws_alone(decoder, asked):
    chosen, asked = set(), ASKED[asked]
    for seed in (40, 41):
        spec = ImageSpec(seed=seed, attempts=3, **asked)
        alone = each_alone(decoder, spec, 3)
        [found] = drawn(Batcher(decoder(1)), a=[spec])["a"]
        assert_same([found], [alone[surest(alone)]])
        assert found.recognised.attempts == 3
        assert found.recognised.label == found.label == asked.get("label", found.label)
        assert len({image.canvas.tobytes() for image in alone}) == 3
        chosen.add(surest(alone))
    assert chosen != {0}, "else this test would not see whether anything is drawn again"


def test_an_image_of_nothing_keeps_its_class_and_a_completion_draws_its_own_again(best):
    for asked, kept in (({}, True), (ASKED["a picture of which nothing is known"], True), (ASKED["a picture"], False)):
        batcher, labels = Batcher(best(1)), []
        judge = batcher.decoder.judge
        batcher.decoder.judge = lambda slots, judge=judge, labels=labels: [
            labels.append(one.label) or one for one in judge(slots)]
        drawn(batcher, a=[ImageSpec(seed=5, attempts=16, **asked)])
        assert len(labels) == 16 and (len(set(labels)) == 1) == kept


def test_a_picture_of_which_nothing_is_known_is_drawn_again_as_no_picture_is(best):
    plain = drawn(Batcher(best(4)), a=[ImageSpec(seed=seed, attempts=3) for seed in range(4)])["a"]
    given = ASKED["a picture of which nothing is known"]
    assert_same(drawn(Batcher(best(4)), a=[ImageSpec(seed=seed, attempts=3, **given) for seed in range(4)])["a"], plain)


def test_an_image_is_the_same_in_any_company_of_images_that_are_drawn_again(decoder):
    company = {"edits": [ImageSpec(seed=seed, attempts=3, **ASKED["a picture"]) for seed in range(2)],
               "others": [ImageSpec(seed=seed, attempts=2) for seed in range(2)], "once": [ImageSpec(seed=0)],
               "judged": [ImageSpec(seed=9, attempts=1, label=4)]}
    alone = {name: [drawn(Batcher(decoder(1)), a=[spec])["a"][0] for spec in specs] for name, specs in company.items()}
    for slots in (2, 6) if decoder(1).name == "compiled" else (6,):
        together = drawn(Batcher(decoder(slots)), **company)
        if decoder(1).name == "compiled":
            for name, images in together.items():
                assert_same(images, alone[name])
        else:  # batches of another size round otherwise, and then another attempt may be the surest
            same = [np.array_equal(image.canvas, one.canvas) for name, images in together.items()
                    for image, one in zip(images, alone[name], strict=True)]
            assert len(same) == 6 and sum(same) >= 4


def test_recognition_alone_changes_no_byte_and_is_not_run_without_attempts(best):
    unseen, seen = (drawn(Batcher(best(2)), a=[ImageSpec(seed=seed, attempts=count, **ASKED["a picture"])
                                               for seed in range(2)])["a"] for count in (0, 1))
    assert np.array_equal([image.canvas for image in unseen], [image.canvas for image in seen])
    assert [image.label for image in unseen] == [image.label for image in seen]
    assert [image.recognised for image in unseen] == [None, None]
    assert [image.recognised.attempts for image in seen] == [1, 1]


def test_an_image_that_is_recognised_at_once_is_that_of_one_attempt(best, recognised):
    recognised(1e-9)
    batcher = Batcher(best(4))
    batcher.submit(Submission("a", [ImageSpec(seed=seed, attempts=9) for seed in range(4)]))
    reports = ran(batcher)
    assert sum(report.again for report in reports) == 0
    found = finished(reports, "a")
    assert [image.recognised.attempts for image in found] == [1] * 4
    once = drawn(Batcher(best(4)), a=[ImageSpec(seed=seed) for seed in range(4)])["a"]
    assert np.array_equal([image.canvas for image in found], [image.canvas for image in once])
    assert [image.label for image in found] == [image.label for image in once]


def test_the_first_attempt_that_is_recognised_ends_it_and_none_is_drawn_after_it(best, recognised):
    spec = ImageSpec(seed=41, attempts=16, **ASKED["a picture"])
    alone = each_alone(best, spec, 16)
    sure = [image.recognised.confidence for image in alone]
    number = max(range(8), key=lambda index: (sure[index] == max(sure[:index + 1]), index))  # surer than all before it
    assert number > 0
    recognised(sure[number] * (1 - 1e-9))
    [found] = drawn(Batcher(best(1)), a=[spec])["a"]
    assert_same([found], [alone[number]])
    assert found.recognised.attempts == number + 1


@pytest.mark.parametrize("label", [None, 3])
def test_a_whole_picture_is_judged_once_and_never_drawn_again(decoder, label):
    batcher = Batcher(decoder(3))
    batcher.submit(Submission("other", [ImageSpec(seed=1, attempts=2)]))
    batcher.submit(Submission("whole", [ImageSpec(seed=seed, attempts=5, canvas=PICTURE, known=WHOLE, label=label)
                                        for seed in range(2)]))
    reports = ran(batcher)
    assert sum(report.again for report in reports) == 1, "the other's"
    assert sum(len(report.judged_s) for report in reports) == 2 + 2
    likeliest = int(np.argmax(_class_scores(batcher.decoder)))
    for image in finished(reports, "whole"):
        assert np.array_equal(image.canvas, PICTURE)
        assert (image.recognised.label, image.recognised.attempts) == (likeliest if label is None else label, 1)


def _class_scores(decoder: Decoder) -> list[float]:
    """Log-probabilities of PICTURE's classes."""
    found = []
    for label in range(10):
        decoder.take([1], [ImageSpec(seed=0, label=label, canvas=PICTURE, known=WHOLE)])
        found.append(decoder.judge([1])[0].log_prob)
    return found


def test_no_other_image_gets_a_slot_while_its_image_is_being_recognised(source):
    """By the engine that fills free slots with NaN after every quantum."""
    specs = [ImageSpec(seed=seed, attempts=3, **ASKED["a picture"]) for seed in range(5)]
    found = drawn(Batcher(new_decoder(source, 2, fill_freed_with_nan=True)), a=specs)["a"]
    assert_same(found, drawn(Batcher(new_decoder(source, 5)), a=specs)["a"])


# --- what ends early, or goes wrong ---

@pytest.mark.parametrize("left", ["before it is judged", "between attempts"])
@pytest.mark.parametrize("then", [0, 1, 3])
def test_what_leaves_frees_its_slot_and_the_next_image_there_knows_nothing_of_it(best, left, then):
    batcher = Batcher(best(1))
    batcher.submit(Submission("gone", [ImageSpec(seed=1, attempts=9, **ASKED["a picture"])] * 2))
    if left == "between attempts":
        until(batcher, lambda report: report.again == 1)
    else:
        until(batcher, lambda report: report.running[0].position == 64)
    batcher.cancel("gone")
    batcher.submit(Submission("next", [ImageSpec(seed=7, attempts=then)]))
    reports = ran(batcher)
    assert sum(report.again for report in reports) == max(0, then - 1)
    assert sum(len(report.judged_s) for report in reports) == then
    assert {image.request for report in reports for image in report.finished} == {"next"}
    assert_same(finished(reports, "next"), drawn(Batcher(best(1)), a=[ImageSpec(seed=7, attempts=then)])["a"])
    assert not batcher.scheduler.running


@pytest.mark.parametrize("left", ["before it is judged", "between attempts"])
def test_an_engine_that_lost_its_batch_goes_on_with_empty_slots(best, left):
    batcher = Batcher(best(2))
    batcher.submit(Submission("lost", [ImageSpec(seed=1, attempts=9)]))
    until(batcher, lambda report: report.again == 1 if left == "between attempts" else
          report.running[0].position == 64)
    assert batcher.abandon() == ["lost"] and not batcher.busy
    specs = [ImageSpec(seed=7), ImageSpec(seed=8)]
    assert_same(drawn(batcher, a=specs)["a"], drawn(Batcher(best(2)), a=specs)["a"])


@pytest.mark.parametrize("times", [1, 2])
def test_a_judgement_that_throws_is_repeated_once_and_then_ends_its_request_alone(decoder, times):
    requests = {"bad": [ImageSpec(seed=1, attempts=2, **ASKED["a picture"])], "good": [ImageSpec(seed=2, attempts=2)]}
    batcher, left = Batcher(decoder(2)), [times]
    judge = batcher.decoder.judge

    def thrown(slots):
        if left[0] and 1 in batcher.decoder.seed[slots]:
            left[0] -= 1
            raise RuntimeError("judging")
        return judge(slots)

    batcher.decoder.judge = thrown
    reports, failed = ran(batcher, **requests), {}
    for report in reports:
        failed |= report.failed
    assert {name: str(error) for name, error in failed.items()} == ({"bad": "judging"} if times == 2 else {})
    assert left == [0] and not batcher.scheduler.running
    for name, specs in requests.items():
        if name not in failed:
            alone = drawn(Batcher(decoder(1)), a=specs)["a"]
            if decoder(1).name == "compiled":
                assert_same(finished(reports, name), alone)
        assert len(finished(reports, name)) == (name not in failed)


def test_an_attempt_that_cannot_be_begun_ends_its_request_alone(best):
    requests = {"bad": [ImageSpec(seed=1, attempts=4)], "good": [ImageSpec(seed=2, attempts=4)]}
    batcher = Batcher(with_faults(best(2), Faults(f"prefill:image={1 + 2**53}")))
    reports = ran(batcher, **requests)
    assert_bad_failed_alone(batcher, reports)
    assert_same(finished(reports, "good"), drawn(Batcher(best(1)), a=requests["good"])["a"])


def test_a_quantum_that_throws_in_a_later_attempt_changes_no_byte(decoder):
    spec = ImageSpec(seed=1, attempts=3, **ASKED["a picture"])
    broken = Batcher(with_faults(decoder(1), Faults("glitch:every=2")))
    broken.submit(Submission("a", [spec]))
    reports = ran(broken)
    assert_same(finished(reports, "a"), drawn(Batcher(decoder(1)), a=[spec])["a"])
    begun, retried = 0, set()
    for report in reports:
        begun += report.again
        if report.retries:
            retried.add(begun)
    assert {1, 2} <= retried, "in the second attempt, and in the third"


@pytest.mark.parametrize("fault", ["throw", "nan"])
def test_an_image_that_cannot_be_drawn_ends_alone_beside_images_that_are_judged(decoder, fault):
    requests = {"whole": [ImageSpec(seed=1, attempts=2, canvas=PICTURE, known=WHOLE)],
                "again": [ImageSpec(seed=2, attempts=2), ImageSpec(seed=4, attempts=1)],
                "bad": [ImageSpec(seed=3, attempts=2, **ASKED["a picture"]), ImageSpec(seed=5, attempts=2)]}
    batcher = Batcher(with_faults(decoder(5), Faults(f"{fault}:image=3")))
    reports = ran(batcher, **requests)
    assert_bad_failed_alone(batcher, reports)
    assert [image.recognised.attempts for name in ("whole", "again") for image in finished(reports, name)] == [1, 2, 1]
    assert np.array_equal(finished(reports, "whole")[0].canvas, PICTURE)
    if decoder(1).name == "compiled":
        assert_same(finished(reports, "again"), drawn(Batcher(decoder(2)), a=requests["again"])["a"])


# --- what is told ---

def test_reports_count_judging_repeats_and_the_sub_pixels_of_all_attempts(best):
    batcher = Batcher(best(2))
    batcher.submit(Submission("a", [ImageSpec(seed=seed, attempts=4) for seed in range(3)]))
    batcher.submit(Submission("b", [ImageSpec(seed=7, attempts=1), ImageSpec(seed=8)]))
    reports = ran(batcher)
    assert sum(report.again for report in reports) == 3 * 3
    assert sum(len(report.judged_s) for report in reports) == 3 * 4 + 1
    assert min(seconds for report in reports for seconds in report.judged_s) > 0
    assert sum(report.subpixels for report in reports) == (3 * 4 + 2) * 64
    assert sum(len(report.joined) for report in reports) == 3 + 2, "an image gets its slot once"
    assert reports[-1].repeats == pytest.approx(3 * (1 - (1 - FORGET)**3)), "one attempt is not counted"


def test_what_is_left_of_an_image_counts_the_times_that_it_will_be_drawn_again(best):
    batcher, told = Batcher(best(3)), []
    drawn(batcher, a=[ImageSpec(seed=seed, attempts=3) for seed in range(6)])
    model = LocalModel(batcher, max_queue=8)
    for name, spec in {"again": ImageSpec(seed=7, attempts=3), "once": ImageSpec(seed=7),
                       "edit": ImageSpec(seed=7, attempts=3, **ASKED["a picture"])}.items():
        known = spec.known_tokens(batcher.decoder.config)
        model.admit(Ticket(name, "edits", "somebody", math.inf), Demand(1, known=known, attempts=spec.attempts))
        batcher.submit(Submission(name, [spec]))
    before = batcher.run_quantum().repeats
    while batcher.busy:
        model.apply(report := batcher.run_quantum())
        for image, remaining in zip(report.running, model._running(), strict=True):
            hidden = ~KNOWN if image.request == "edit" else WHOLE
            edited = image.request == "edit"
            left, whole = (expected_passes(report.ratios, int(hidden[begin:].sum()), 64, edited)
                           for begin in (image.position, 2 if edited else 0))
            repeats = 0 if image.request == "once" else report.repeats
            assert remaining.steps == pytest.approx(left + repeats * whole)
            told.append((image.request, image.position == 64))
    assert 0 < before < 2
    assert {("again", False), ("again", True), ("edit", False), ("edit", True), ("once", False)} <= set(told)


def test_recognition_gives_the_probability_of_the_class_that_an_image_was_drawn_with(decoder):
    some = decoder(10)
    some.take([*range(1, 11)], [ImageSpec(seed=seed) for seed in range(10)])
    some.canvas[1:] = PICTURE
    found = some.judge([*range(1, 11)])
    assert [one.label for one in found] == [some.label(slot) for slot in range(1, 11)]
    expected = dict(enumerate(_class_scores(decoder(1))))
    assert np.exp([*expected.values()]).sum() == pytest.approx(1, abs=1e-6)
    assert [one.log_prob for one in found] == pytest.approx([expected[one.label] for one in found], abs=1e-5)
    assert all(isinstance(one, Recognised) and one.attempts == 1 for one in found)
