"""Jobs: options that do not go together, and defaults."""

import dataclasses

import numpy as np
import pytest

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.model.nets import net_for
from linpix.server.engine.image import images_of
from linpix.server.engine.job import Job, checked_options, class_of, label_of
from linpix.server.errors import InvalidRequest
from tests.nets import CLASS_FIRST

TINY = checkpoint.Checkpoint(
    "tiny", net_for(PRESETS["tiny"]), {"temperature": 0.8}, "", ("zero", "one")
)
FIRST = checkpoint.Checkpoint("first", net_for(CLASS_FIRST), {"attempts": 4}, "", ("zero", "one"))


def job(source=TINY, answers=1, **options) -> Job:
    return Job(**checked_options(source, answers, **options))


def seeds(of: Job) -> list[int]:
    return [image.seed for image in images_of(of, "a")]


def test_what_is_not_asked_for_is_the_models_own():
    assert dataclasses.asdict(job(seed=5)) == dataclasses.asdict(
        Job(model="tiny", seed=5, temperature=0.8)
    )
    assert job(FIRST, seed=5).attempts == 4
    for once in (job(FIRST, seed=5, temperature=0.0), job(FIRST, seed=5, candidates=3)):
        assert once.attempts == 1
    assert len({job().seed for _ in range(8)}) == 8


def test_images_answers_and_seeds():
    several = job(FIRST, 3, candidates=8, seed=10)
    assert (several.answers, several.count) == (3, 8)
    assert seeds(several) == [*range(10, 18)]


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        (
            {"answers": 4, "candidates": 3},
            "candidates",
            "at least 4, got 3; the best 4 are returned",
        ),
        ({"answers": 4, "candidates": 17, "limit": 16}, "candidates", r"4\.\.16 here, got 17"),
        ({"temperature": -0.1}, "temperature", "from 0 to 10, got -0.1"),
        ({"temperature": float("nan")}, "temperature", "from 0 to 10, got nan"),
        (
            {"seed": -1},
            "seed",
            (
                r"at least 0 and below 2\^53: with 1 image the largest seed is 9007199254740991,"
                r" got -1"
            ),
        ),
        (
            {"seed": 2**53 - 2, "answers": 3},
            "seed",
            "with 3 images the largest seed is 9007199254740989",
        ),
        ({"source": FIRST, "seed": 2**53 - 2, "candidates": 3}, "seed", "with 3 images"),
        ({"attempts": 0}, "attempts", r"1\.\.16, got 0"),
        ({"attempts": 2}, "attempts", "tiny cannot; leave out attempts"),
        ({"candidates": 2}, "candidates", "tiny cannot; leave out candidates"),
        (
            {"source": FIRST, "candidates": 2, "attempts": 2},
            "attempts",
            "got 2 candidates and 2 attempts",
        ),
        (
            {"source": FIRST, "temperature": 0.0, "attempts": 2},
            "attempts",
            "draw the same image of a class",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(asked, param, words):
    with pytest.raises(InvalidRequest, match=words) as refused:
        job(**asked)
    assert refused.value.param == param


def test_the_largest_seeds_can_be_asked_for():
    assert seeds(job(answers=3, seed=2**53 - 3))[-1] == 2**53 - 1


@pytest.mark.parametrize("seed", [np.uint8(250), np.int32(250)])
def test_seeds_of_numpy_do_not_overflow(seed):
    assert seeds(job(answers=8, seed=seed)) == [*range(250, 258)]
    with pytest.raises(TypeError, match="float"):
        job(seed=5.0)


def test_a_class_may_be_given_by_a_synonym_that_is_not_a_name():
    digits = dataclasses.replace(TINY, class_names=tuple("0123456789"))
    assert [class_of(label, digits) for label in ("seven", " Nought", "7")] == [7, 0, 7]
    mixed = dataclasses.replace(TINY, class_names=("car", "automobile", "auto"))
    assert [class_of(label, mixed) for label in ("car", "auto", "sedan")] == [0, 2, 1]


def test_a_class_is_given_by_number_or_name():
    assert [class_of(label, TINY) for label in (None, 1, "1", "one")] == [None, 1, 1, 1]
    with pytest.raises(
        InvalidRequest, match=r"a class of tiny: 0\.\.1 or one of zero, one; got 'two'"
    ):
        class_of("two", TINY)
    with pytest.raises(InvalidRequest, match="none: it has no classes"):
        class_of(0, dataclasses.replace(TINY, class_names=()))


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("0", "1", "2"), [0, 1, 2]),
        (("cat", "dog"), [0, 1]),
        (("1", "2", "3"), [0, "2", "3"]),
        (("1", "0"), ["1", "0"]),
        (("10", "02", "2"), [0, 1, 2]),
        (("2", "7", "cat"), [0, 1, "cat"]),
    ],
)
def test_the_label_of_a_class_means_that_class_again(names, labels):
    source = dataclasses.replace(TINY, class_names=names)
    found = [label_of(number, source) for number in range(len(names))]
    assert found == labels
    assert [class_of(label, source) for label in found] == [*range(len(names))]
