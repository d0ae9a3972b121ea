"""What a request or a command draws: options that do not go together, defaults, and the specification of each image."""

import dataclasses

import numpy as np
import pytest

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.model.transformer import Transformer
from linpix.server.engine.answers.plan import Plan, class_of, plan
from linpix.server.errors import OptionError
from linpix.server.pictures.pictures import Occluded

CLASS_FIRST = dataclasses.replace(PRESETS["tiny"], patch=4, following=((0, 1, 0),),
                                  look_ups=("previous", "row", "column", "class"))
TINY = checkpoint.Checkpoint("tiny", Transformer(PRESETS["tiny"]), {"temperature": 0.8}, "", ("zero", "one"))
FIRST = checkpoint.Checkpoint("first", Transformer(CLASS_FIRST),
                              {"attempts": 4}, "", ("zero", "one"))


def planned(source=TINY, answers=1, **options) -> Plan:
    return plan(source, answers, **options)


def test_what_is_not_asked_for_is_the_models_own():
    assert planned(seed=5) == Plan(answers=1, seed=5, temperature=0.8, attempts=0)
    assert planned(FIRST, seed=5).attempts == 4
    assert planned(FIRST, seed=5, temperature=0.0).attempts == 0
    assert planned(FIRST, seed=5, candidates=3).attempts == 1, "candidates are drawn once, and judged"
    assert len({planned().seed for _ in range(8)}) == 8


def test_images_answers_and_seeds():
    several = planned(FIRST, 3, candidates=8, seed=10)
    assert (several.answers, several.images) == (3, 8)
    assert [spec.seed for spec in several.specs()] == [*range(10, 18)]


def test_every_image_has_the_picture_to_complete():
    canvas, known = np.arange(64, dtype=np.uint8), np.arange(64) < 8
    [one, other] = planned(answers=2, label=1, seed=0).specs(Occluded(canvas, known))
    assert one.canvas is other.canvas is canvas and one.known is known and (one.label, one.temperature) == (1, 0.8)


@pytest.mark.parametrize(("asked", "param", "words"), [
    ({"answers": 4, "candidates": 3}, "candidates", "at least 4, got 3; the best 4 are returned"),
    ({"answers": 4, "candidates": 17, "limit": 16}, "candidates", r"4\.\.16 here, got 17"),
    ({"temperature": -0.1}, "temperature", "at least 0, got -0.1"),
    ({"temperature": float("nan")}, "temperature", "at least 0, got nan"),
    ({"seed": -1}, "seed", r"at least 0 and below 2\^53: with 1 image the largest seed is 9007199254740991, got -1"),
    ({"seed": 2**53 - 2, "answers": 3}, "seed", "with 3 images the largest seed is 9007199254740989"),
    ({"source": FIRST, "seed": 2**53 - 2, "candidates": 3}, "seed", "with 3 images"),
    ({"attempts": 0}, "attempts", r"1\.\.16, got 0"),
    ({"attempts": 2}, "attempts", "tiny cannot; leave out attempts"),
])
def test_what_cannot_be_asked_for_is_refused_by_name(asked, param, words):
    with pytest.raises(OptionError, match=words) as refused:
        planned(**asked)
    assert refused.value.param == param


@pytest.mark.parametrize(("source", "asked", "words"), [
    (TINY, {"candidates": 2}, "tiny cannot; leave out candidates"),
    (FIRST, {"candidates": 2, "attempts": 2}, "got 2 candidates and 2 attempts"),
    (FIRST, {"temperature": 0.0, "attempts": 2}, "all attempts are the same")])
def test_candidates_and_attempts_need_a_model_that_recognises_classes(source, asked, words):
    with pytest.raises(OptionError, match=words):
        planned(source, **asked)


def test_the_largest_seeds_can_be_asked_for():
    assert planned(answers=3, seed=2**53 - 3).specs()[-1].seed == 2**53 - 1


@pytest.mark.parametrize("seed", [np.uint8(250), np.int32(250)])
def test_seeds_of_numpy_do_not_overflow(seed):
    assert [spec.seed for spec in planned(answers=8, seed=seed).specs()] == [*range(250, 258)]
    with pytest.raises(TypeError, match="float"):
        planned(seed=5.0)


def test_a_class_is_given_by_number_or_name():
    assert [class_of(label, TINY) for label in (None, 1, "1", "one")] == [None, 1, 1, 1]
    with pytest.raises(OptionError, match=r"a class of tiny: 0\.\.1 or one of zero, one; got 'two'"):
        class_of("two", TINY)
    with pytest.raises(OptionError, match="none: it has no classes"):
        class_of(0, dataclasses.replace(TINY, class_names=()))
