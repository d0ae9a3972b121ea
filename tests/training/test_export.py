"""What is written into a checkpoint for shipping. tests/training/test_loop.py exports trained
ones.
"""

import dataclasses
import os

import pytest
import yaml

from linpix.model.config import PRESETS
from linpix.training.export import attempts_of, card, drawing_rows, provenance, with_rows


@pytest.mark.parametrize(
    ("preset", "attempts"),
    [
        ("mnist-small", None),
        ("cifar10-small", None),
        ("mnist-conditional", 4),
        ("mnist-large", 4),
        ("cifar10-conditional", 4),
    ],
)
def test_new_models_that_can_recognise_their_images_make_four_attempts(preset, attempts):
    assert attempts_of(PRESETS[preset]).get("attempts") == attempts


@pytest.mark.parametrize("fact", ["command", "imported_from"])
def test_a_fact_with_bytes_that_are_not_utf8_is_kept_in_a_form_that_can_be_sent(fact):
    assert provenance("mine", (), **{fact: os.fsdecode(b"caf\xe9")})[fact] == "caf\\xe9"


@pytest.mark.parametrize(("data", "known"), [("mnist", ["ylecun/mnist"]), ("x: [", None)])
def test_a_card_begins_with_what_hubs_read(data, known):
    source = {"class_names": [], "data": data, "command": "linpix train", "commit": "1a2b3c4"}
    start, head, text = card("mine", PRESETS["tiny"], source).split("---\n", 2)
    facts = yaml.safe_load(head)
    assert start == "" and text.startswith("\n# mine\n") and facts.get("datasets") == known
    assert facts["pipeline_tag"] == "unconditional-image-generation"
    assert facts["library_name"] == "linpix" and "linear-attention" in facts["tags"]


def test_a_class_or_a_limit_of_any_text_stays_in_its_cell_of_the_card():
    source = {
        "class_names": ["a|b", "two\nlines"],
        "data": "mine",
        "command": "linpix train",
        "commit": "1a2b3c4",
    }
    text = card("mine", dataclasses.replace(PRESETS["tiny"], classes=2), source)
    assert "| classes | a\\|b, two lines |\n" in text
    assert "| limits | x \\| y |\n" in with_rows(text, drawing_rows({"limits": "x |\ny"}))
