"""Which class a prompt asks for."""

import pytest

from linpix.server.web.requests.prompts import wish

DIGITS = [str(digit) for digit in range(10)]
THINGS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.mark.parametrize(("prompt", "names", "label"), [
    ("7", DIGITS, 7), ("seven", DIGITS, 7), ("draw the digit 7", DIGITS, 7), ("2 sevens", DIGITS, 7),
    ("one seven", DIGITS, 7), ("one", DIGITS, 1), ("77", DIGITS, None),
    ("draw me one digit", DIGITS, None), ("a handwritten one", DIGITS, 1), ("one handwritten 4", DIGITS, 4),
    ("-1", DIGITS, None), ("digit-1", DIGITS, 1), ("a number", DIGITS, None),
    ("a green frog", THINGS, 6), ("car", THINGS, 1), ("Puppies!", THINGS, 5), ("a cat and a dog", THINGS, 3),
    ("3", THINGS, 3), ("three boats", THINGS, 8), ("catalogue", THINGS, None),
    ("an ice cream", ["pie", "ice cream"], 1), ("a cat", [], None), ("\ud800", DIGITS, None),
    ("cat " * 10_000, THINGS, 3)])
def test_a_class_is_found_in_a_prompt(prompt, names, label):
    found = wish(prompt, names)
    assert found.label == label
    assert found.revised.startswith("an image" if label is None else names[label])
    found.warning.encode(), found.revised.encode()


def test_one_of_several_classes_is_drawn_and_a_warning_names_the_others():
    assert wish("a cat and a dog", THINGS).warning == "prompt: one class is drawn, cat, not dog"
