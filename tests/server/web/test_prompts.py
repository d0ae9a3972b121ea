"""Which class a prompt asks for."""

import string

import pytest

from linpix.server.web.prompts import wish

DIGITS = [str(digit) for digit in range(10)]
LETTERS, CAPITALS = [*string.ascii_letters], [*string.ascii_uppercase]
THINGS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.mark.parametrize(
    ("prompt", "names", "label"),
    [
        ("7", DIGITS, 7),
        ("seven", DIGITS, 7),
        ("draw the digit 7", DIGITS, 7),
        ("one", DIGITS, 1),
        ("77", DIGITS, None),
        ("a handwritten one", DIGITS, 1),
        ("digit-1", DIGITS, 1),
        ("-1", DIGITS, None),
        ("a -1 or a 4", DIGITS, 4),
        ("1.5", DIGITS, None),
        ("3.", DIGITS, 3),
        ("a number", DIGITS, None),
        ("Generate one image of the digit 7", DIGITS, 7),
        ("1 picture of a 5", DIGITS, 5),
        ("draw one seven", DIGITS, 7),
        ("two sevens", DIGITS, 7),
        ("three 5s", DIGITS, 5),
        ("digit 7 as drawn by a 6 year old", DIGITS, 7),
        ("7 is nicer than 3", DIGITS, 7),
        ("7 has a bar, 1 has none", DIGITS, 7),
        ("5 minus 3", DIGITS, 5),
        ("draw a 1 that looks like a 7", DIGITS, 1),
        ("the digit 1 in the style of a 7", DIGITS, 1),
        ("digit: 1; style: 7", DIGITS, 1),
        ("1, 2, 3", DIGITS, 1),
        ("one 7, please", DIGITS, 7),
        ("the ones that look like 7", DIGITS, 7),
        ("two ones", DIGITS, 1),
        ("a pair of glasses", ["glass", "glasses", "bus"], 1),
        ("two buses", ["glass", "glasses", "bus"], 2),
        ("the s in it", ["!!!", "s"], 1),
        ("1 and 7", DIGITS, 1),
        ("seven's", DIGITS, 7),
        ("two frogs and cats", THINGS, 6),
        ("as is", LETTERS, None),
        ("a green frog", THINGS, 6),
        ("car", THINGS, 1),
        ("Puppy!", THINGS, 5),
        ("a dog and a cat", THINGS, 5),
        ("3", THINGS, 3),
        ("three 3", THINGS, None),
        ("a boat", THINGS, 8),
        ("catalogue", THINGS, None),
        ("an ice cream", ["ice", "pie", "ice cream"], 2),
        ("a polar bear", ["polar_bear"], 0),
        ("a cat", [], None),
        ("a caf\u00e9", ["cafe\u0301"], 0),
        ("a cafe\u0301", ["caf\u00e9"], 0),
        ("CAFE\u0301", ["caf\u00e9"], 0),
        ("\ud800", DIGITS, None),
        ("a picture of O\u2019Neil", ["O'Neil"], 0),
        ("O'Neil's", ["Neil", "O\u2019Neil"], 1),
        ("not izmir", ["\u0130zmir"], 0),
        ("\u0130zmir", ["Izmir", "\u0130zmir"], 1),
        ("a T\u2011shirt", ["shirt", "T-shirt"], 1),
        ("+", ["-", "+"], 1),
        ("a +", ["-", "+"], None),
        ("cat " * 10_000, THINGS, 3),
        ("g", LETTERS, 6),
        (" G ", LETTERS, 32),
        ("a", LETTERS, 0),
        ("the letter A.", LETTERS, 26),
        ("a bold g", LETTERS, 6),
        ("A picture of a g", LETTERS, 6),
        ("I want a Q", LETTERS, 42),
        ("the capital I", LETTERS, 34),
        ("a picture of the letter A", LETTERS, 26),
        ("a nice A", LETTERS, 26),
        ("A picture of the letter a", LETTERS, 0),
        ("a picture of an I", LETTERS, 34),
        ("I want an A", LETTERS, 26),
        ("I'd like a g", LETTERS, 6),
        ("it\u2019s a g", LETTERS, 6),
        ("I don't want a Q", LETTERS, 42),
        ("a dog's face", THINGS, 5),
        ("a bird\u2019s nest", THINGS, 2),
        ("the letter g's tail", LETTERS, 6),
        ("I want a G", CAPITALS, 6),
        ("i want an a", CAPITALS, 0),
        ("an i", CAPITALS, 8),
        ("DOG", ["a", "A", "dog"], 2),
        ("my dog", ["a", "A", "Dog"], 2),
        ("hello", LETTERS, None),
        ("e\u0301", ["\u00e9", "\u00c9"], 0),
    ],
)
def test_a_class_is_found_in_a_prompt(prompt, names, label):
    found, revised, warning = wish(prompt, names)
    assert found == label
    assert revised == (
        names[label] if label is not None else "an image of any class" if names else "an image"
    )
    warning.encode(), revised.encode()


def test_the_first_class_is_drawn_and_a_warning_names_all_other_words():
    assert (
        wish("Cat, cat and a dog", THINGS)[2] == "prompt: these words have no effect: and, a, dog"
    )
    assert wish("a dog", THINGS)[2] == "prompt: these words have no effect: a"
    assert wish("dog", THINGS)[2] == ""
    assert wish("cat " + " ".join(map(str, range(20, 40))), THINGS)[2].endswith("28, 29, ...")
