"""The engine: images that are checked once they are drawn, and drawn again until the model
recognises their class.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from linpix.model import attempts, pieces
from linpix.model.attempts import Recognised
from linpix.model.cuda import GpuPool
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.compiled import CudaDecoder
from linpix.server.engine.decode.decoder import Decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.decode.faults import Faults, with_faults
from linpix.server.engine.image import State
from linpix.server.engine.job import Job
from tests.server.engine import Drawn, Ran, run, submit, take
from tests.server.engine.test_conditional import KNOWN, PICTURE

NOTHING = np.zeros(64, np.bool_)
WHOLE = ~NOTHING
ASKED = {
    "nothing": {},
    "a class": {"label": 3},
    "a picture": {"canvas": PICTURE, "known": KNOWN},
    "a picture and a class": {"canvas": PICTURE, "known": KNOWN, "label": 3},
    "a picture of which nothing is known": {"canvas": PICTURE, "known": NOTHING},
}


@pytest.fixture
def best(source):
    """The engine that serves this model here."""
    return lambda slots: new_decoder(source, slots)


@pytest.fixture
def recognised(monkeypatch) -> Callable[[float], None]:
    """Sets the probability from which on an image is recognised."""
    return lambda probability: monkeypatch.setattr(attempts, "RECOGNISED", probability)


def ran(engine: Engine, **requests: list[Job]) -> list[Ran]:
    """All quanta, until these requests, which come together, and earlier ones are done."""
    for name, jobs in requests.items():
        submit(engine, name, jobs)
    quanta = []
    while engine.busy:
        quanta.append(run(engine))
    return quanta


def finished(quanta: list[Ran], request: str) -> list[Drawn]:
    return sorted(
        (image for quantum in quanta for image in quantum.finished if image.request == request),
        key=lambda image: image.index,
    )


def assert_bad_failed_alone(engine: Engine, reports: list[Ran]) -> None:
    """Of all requests, only the one named bad has failed, and it left nothing behind."""
    assert [request for quantum in reports for request in quantum.report.failed] == ["bad"]
    assert not finished(reports, "bad") and not engine.slots.running


def drawn(engine: Engine, **requests: list[Job]) -> dict[str, list[Drawn]]:
    """The images of requests that come together, by request."""
    reports = ran(engine, **requests)
    assert not any(quantum.report.failed for quantum in reports)
    return {name: finished(reports, name) for name in requests}


def each_alone(decoder: Callable[[int], Decoder], spec: Job, count: int) -> list[Drawn]:
    """Attempts at an image as requests of their own, which are judged once each."""
    found: list[Drawn] = []
    for number in range(count):
        label = spec.label
        if found and (spec.known is None or not spec.known.any()):
            label = found[0].label
        [one] = drawn(
            Engine(decoder(1)),
            a=[
                dataclasses.replace(
                    spec, seed=spec.seed + 2**53 * number, label=label, attempts=1, candidates=True
                )
            ],
        )["a"]
        found.append(one)
    return found


def surest(images: list[Drawn]) -> int:
    """Which of the attempts."""
    return int(np.argmax([image.recognised.log_prob for image in images]))


def assert_same(found: list[Drawn], expected: list[Drawn]) -> None:
    assert np.array_equal([image.canvas for image in found], [image.canvas for image in expected])
    assert [image.label for image in found] == [image.label for image in expected]
    if expected[0].recognised is not None:
        assert [image.recognised.log_prob for image in found] == [
            image.recognised.log_prob for image in expected
        ]


def until(engine: Engine, true: Callable[[Ran], bool]) -> None:
    """Run quanta until one of them is so."""
    while not true(run(engine)):
        assert engine.busy


# --- which image it is ---


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("asked", ["nothing", "a picture"])
def test_images_in_several_pieces_are_torn_where_real_pictures_hardly_ever_are(
    source, recognised, monkeypatch, request, asked, gpu
):
    recognised(1e-9)
    # random weights draw noise, which is one piece else
    monkeypatch.setattr(pieces, "VISIBLE", 200)
    jobs, made = [Job(seed=40 + number, attempts=3, **ASKED[asked]) for number in range(6)], []
    for look in ({"pieces": 0.03}, {"pieces": 0.2}, {"pieces": 0.03, "divided": [*range(10)]}):
        theirs = dataclasses.replace(
            source,
            provenance={"real_look": look},
            board={"ground": [0], "ink": [255], "prepare": None},
        )
        decoder = (
            CudaDecoder(
                theirs,
                6,
                GpuPool(
                    theirs.net, 6, precision="fp32", **request.getfixturevalue("emulated").place
                ),
                precision="fp32",
            )
            if gpu
            else new_decoder(theirs, 6)
        )
        found = drawn(Engine(decoder), a=jobs)["a"]
        known = np.stack([ASKED[asked].get("known", NOTHING)] * 6).reshape(-1, 8, 8)
        torn = pieces.torn(np.stack([image.canvas for image in found]).reshape(-1, 8, 8), 0, known)
        assert [image.recognised.torn for image in found] == [
            look == {"pieces": 0.03} and one for one in torn
        ]
        made.append([image.recognised.attempts for image in found])
    assert max(made[0]) > 1 and max(made[1]) == max(made[2]) == 1


@pytest.mark.parametrize("asked", ["nothing", "a picture", "a picture and a class"])
def test_the_answer_is_what_the_seed_of_its_surest_attempt_draws_alone(decoder, asked):
    chosen, asked = set(), ASKED[asked]
    for seed in (40, 41):
        spec = Job(seed=seed, attempts=3, **asked)
        alone = each_alone(decoder, spec, 3)
        [found] = drawn(Engine(decoder(1)), a=[spec])["a"]
        assert_same([found], [alone[surest(alone)]])
        assert found.recognised.attempts == 3
        assert found.recognised.label == found.label == asked.get("label", found.label)
        assert len({image.canvas.tobytes() for image in alone}) == 3
        chosen.add(surest(alone))
    assert chosen != {0}, "else this test would not see whether anything is drawn again"


def test_an_image_is_the_same_in_any_company_of_images_that_are_drawn_again(decoder):
    company = {
        "edits": [Job(seed=seed, attempts=3, **ASKED["a picture"]) for seed in range(2)],
        "others": [Job(seed=seed, attempts=2) for seed in range(2)],
        "once": [Job(seed=0)],
        "judged": [Job(seed=9, candidates=True, label=4)],
    }
    alone = {
        name: [drawn(Engine(decoder(1)), a=[spec])["a"][0] for spec in specs]
        for name, specs in company.items()
    }
    for slots in (2, 6) if decoder(1).kind == "compiled" else (6,):
        together = drawn(Engine(decoder(slots)), **company)
        if decoder(1).kind == "compiled":
            for name, images in together.items():
                assert_same(images, alone[name])
        else:  # batches of another size round otherwise, and then another attempt may be the surest
            same = [
                np.array_equal(image.canvas, one.canvas)
                for name, images in together.items()
                for image, one in zip(images, alone[name], strict=True)
            ]
            assert len(same) == 6 and sum(same) >= 4


def test_recognition_alone_changes_no_byte_and_is_not_run_without_attempts(best):
    unseen, seen = (
        drawn(
            Engine(best(2)),
            a=[Job(seed=seed, candidates=seen, **ASKED["a picture"]) for seed in range(2)],
        )["a"]
        for seen in (False, True)
    )
    assert np.array_equal([image.canvas for image in unseen], [image.canvas for image in seen])
    assert [image.label for image in unseen] == [image.label for image in seen]
    assert [image.recognised for image in unseen] == [None, None]
    assert [image.recognised.attempts for image in seen] == [1, 1]


def test_the_first_attempt_that_is_recognised_ends_it_and_none_is_drawn_after_it(best, recognised):
    spec = Job(seed=41, attempts=16, **ASKED["a picture"])
    alone = each_alone(best, spec, 16)
    sure = [image.recognised.confidence for image in alone]
    # surer than all before it
    number = max(range(8), key=lambda index: (sure[index] == max(sure[: index + 1]), index))
    assert number > 0
    recognised(sure[number] * (1 - 1e-9))
    [found] = drawn(Engine(best(1)), a=[spec])["a"]
    assert_same([found], [alone[number]])
    assert found.recognised.attempts == number + 1


@pytest.mark.parametrize("label", [None, 3])
def test_a_whole_picture_is_judged_once_and_never_drawn_again(decoder, label):
    engine = Engine(decoder(3))
    submit(engine, "other", [Job(seed=1, attempts=2)])
    submit(
        engine,
        "whole",
        [Job(seed=seed, attempts=5, canvas=PICTURE, known=WHOLE, label=label) for seed in range(2)],
    )
    reports = ran(engine)
    assert sum(report.again for report in reports) == 1, "the other's"
    likeliest = int(np.argmax(_class_scores(engine.decoder)))
    for image in finished(reports, "whole"):
        assert np.array_equal(image.canvas, PICTURE)
        assert (image.recognised.label, image.recognised.attempts) == (
            likeliest if label is None else label,
            1,
        )


def _class_scores(decoder: Decoder) -> list[float]:
    """Log-probabilities of PICTURE's classes."""
    found = []
    for label in range(10):
        take(decoder, 1, Job(seed=0, label=label, canvas=PICTURE, known=WHOLE))
        found.append(decoder.judge([1])[0].log_prob)
    return found


def test_no_other_image_gets_a_slot_while_its_image_is_being_recognised(source):
    """By the engine that fills free slots with NaN after every quantum."""
    specs = [Job(seed=seed, attempts=3, **ASKED["a picture"]) for seed in range(5)]
    poisoned = new_decoder(source, 2)
    poisoned.fill_freed_with_nan = True
    found = drawn(Engine(poisoned), a=specs)["a"]
    assert_same(found, drawn(Engine(new_decoder(source, 5)), a=specs)["a"])


# --- what ends early, or goes wrong ---


@pytest.mark.parametrize("left", ["before it is judged", "between attempts"])
@pytest.mark.parametrize("then", [1, 3])
def test_what_leaves_frees_its_slot_and_the_next_image_there_knows_nothing_of_it(best, left, then):
    engine = Engine(best(1))
    submit(engine, "gone", [Job(seed=1, attempts=9, **ASKED["a picture"])] * 2)
    if left == "between attempts":
        until(engine, lambda report: report.again == 1)
    else:
        until(engine, lambda _: engine.slots.running[1].state is State.CHECKING)
    engine.scheduler.cancel("gone")
    submit(engine, "next", [Job(seed=7, attempts=then)])
    reports = ran(engine)
    assert sum(report.again for report in reports) == then - 1
    assert {image.request for report in reports for image in report.finished} == {"next"}
    assert_same(
        finished(reports, "next"), drawn(Engine(best(1)), a=[Job(seed=7, attempts=then)])["a"]
    )
    assert not engine.slots.running


@pytest.mark.parametrize("times", [1, 2])
def test_a_judgement_that_throws_is_repeated_once_and_then_ends_its_request_alone(decoder, times):
    requests = {
        "bad": [Job(seed=1, attempts=2, **ASKED["a picture"])],
        "good": [Job(seed=2, attempts=2)],
    }
    engine, left = Engine(decoder(2)), [times]
    judge = engine.decoder.judge

    def thrown(slots):
        if left[0] and 1 in engine.slots.seed[slots]:
            left[0] -= 1
            raise RuntimeError("judging")
        return judge(slots)

    engine.decoder.judge = thrown
    reports, failed = ran(engine, **requests), {}
    for report in reports:
        failed |= report.report.failed
    assert {name: str(error) for name, error in failed.items()} == (
        {"bad": "judging"} if times == 2 else {}
    )
    assert left == [0] and not engine.slots.running
    for name, specs in requests.items():
        if name not in failed:
            alone = drawn(Engine(decoder(1)), a=specs)["a"]
            if decoder(1).kind == "compiled":
                assert_same(finished(reports, name), alone)
        assert len(finished(reports, name)) == (name not in failed)


def test_an_attempt_that_cannot_be_begun_ends_its_request_alone(best):
    requests = {"bad": [Job(seed=1, attempts=4)], "good": [Job(seed=2, attempts=4)]}
    engine = Engine(with_faults(best(2), Faults(f"prefill:image={1 + 2**53}")))
    reports = ran(engine, **requests)
    assert_bad_failed_alone(engine, reports)
    assert_same(finished(reports, "good"), drawn(Engine(best(1)), a=requests["good"])["a"])


def test_a_quantum_that_throws_in_a_later_attempt_changes_no_byte(decoder):
    spec = Job(seed=1, attempts=3, **ASKED["a picture"])
    broken = Engine(with_faults(decoder(1), Faults("glitch:every=2")))
    submit(broken, "a", [spec])
    reports = ran(broken)
    assert_same(finished(reports, "a"), drawn(Engine(decoder(1)), a=[spec])["a"])
    begun, retried = 0, set()
    for report in reports:
        begun += report.again
        if report.report.retries:
            retried.add(begun)
    assert {1, 2} <= retried, "in the second attempt, and in the third"


@pytest.mark.parametrize("fault", ["throw", "nan"])
def test_an_image_that_cannot_be_drawn_ends_alone_beside_images_that_are_judged(decoder, fault):
    requests = {
        "whole": [Job(seed=1, attempts=2, canvas=PICTURE, known=WHOLE)],
        "again": [Job(seed=2, attempts=2), Job(seed=4, candidates=True)],
        "bad": [Job(seed=3, attempts=2, **ASKED["a picture"]), Job(seed=5, attempts=2)],
    }
    engine = Engine(with_faults(decoder(5), Faults(f"{fault}:image=3")))
    reports = ran(engine, **requests)
    assert_bad_failed_alone(engine, reports)
    assert [
        image.recognised.attempts
        for name in ("whole", "again")
        for image in finished(reports, name)
    ] == [1, 2, 1]
    assert np.array_equal(finished(reports, "whole")[0].canvas, PICTURE)
    if decoder(1).kind == "compiled":
        assert_same(finished(reports, "again"), drawn(Engine(decoder(2)), a=requests["again"])["a"])


@pytest.mark.parametrize(("stream", "steps"), [(True, 8), (False, 16)])
def test_a_quantum_is_a_part_of_an_image_or_for_streams_an_image_row(
    source, monkeypatch, stream, steps
):
    monkeypatch.setattr("linpix.server.engine.decode.engine.PARTS", 4)
    engine = Engine(new_decoder(source, 2, "eager"))
    engine.scheduler.learn(2, 1e-9)  # seconds of a step
    submit(engine, "a", [Job(seed=1, stream=stream)])
    submit(engine, "b", [Job(seed=2)])
    engine.run_quantum()
    assert engine.slots.position[1:].tolist() == [steps] * 2


# --- what is reported ---


def test_reports_have_each_image_that_joins_and_the_sub_pixels_of_all_attempts(best):
    engine = Engine(best(2))
    submit(engine, "a", [Job(seed=seed, attempts=4) for seed in range(3)])
    submit(engine, "b", [Job(seed=7, candidates=True), Job(seed=8)])
    quanta = ran(engine)
    assert sum(quantum.again for quantum in quanta) == 3 * 3
    assert sum(quantum.report.subpixels for quantum in quanta) == (3 * 4 + 2) * 64
    joined = [
        (image.request, image.attempt) for quantum in quanta for image in quantum.report.joined
    ]
    assert sorted(joined) == sorted(
        [("a", attempt) for attempt in (1, 2, 3, 4)] * 3 + [("b", 1)] * 2
    )


@pytest.mark.parametrize("given", [0, 3])
def test_of_each_image_the_first_rows_are_reported_once_and_of_streams_all_rows_of_all_attempts(
    best, given
):
    known = np.arange(64) < 8 * given + 2
    for stream in (False, True):
        engine, told = Engine(best(2)), {}
        submit(
            engine,
            "a",
            [
                Job(seed=seed, stream=stream, attempts=3, canvas=PICTURE, known=known)
                for seed in (1, 2)
            ],
        )
        for quantum in ran(engine):
            for image, rows, canvas in quantum.report.rows:
                assert rows and (canvas is not None) == stream
                told.setdefault(image, []).append((rows, canvas))
        assert len(told) == (6 if stream else 2) and {image.attempt for image in told} == (
            {1, 2, 3} if stream else {1}
        )
        for image, reports in told.items():
            every = [row for rows, _ in reports for row in rows]
            assert (
                every == [*range(given + 1, 9)]
                if stream
                else len(reports) == 1 and every[0] == given + 1
            )
            for rows, canvas in reports if stream else []:
                assert np.array_equal(canvas[: 8 * rows[-1]], image.canvas[: 8 * rows[-1]])


def test_recognition_gives_the_probability_of_the_class_that_an_image_was_drawn_with(decoder):
    some = decoder(10)
    for slot in range(1, 11):
        take(some, slot, Job(seed=slot - 1, canvas=PICTURE, known=NOTHING))
    found = some.judge([*range(1, 11)])
    assert [one.label for one in found] == [some.label(slot) for slot in range(1, 11)]
    expected = dict(enumerate(_class_scores(decoder(1))))
    assert np.exp([*expected.values()]).sum() == pytest.approx(1, abs=1e-6)
    assert [one.log_prob for one in found] == pytest.approx(
        [expected[one.label] for one in found], abs=1e-5
    )
    assert all(isinstance(one, Recognised) and one.attempts == 1 for one in found)
