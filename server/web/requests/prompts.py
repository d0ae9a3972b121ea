"""Which class the words of a prompt ask for: by its name, a plural, or another common word for it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..error_handlers import sendable

LONGEST = 1_000  # characters of a prompt that are read
MAX_LISTED = 10  # largest number of words without effect that a warning lists

# Other words for classes of MNIST and CIFAR-10. A model whose classes have other names understands only these names.
_SYNONYMS = {
    "0": "zero nought", "1": "one", "2": "two", "3": "three", "4": "four", "5": "five", "6": "six", "7": "seven",
    "8": "eight", "9": "nine",
    "airplane": "aeroplane plane aircraft jet airliner", "automobile": "car auto sedan", "bird": "birdie sparrow",
    "cat": "kitten kitty tomcat", "deer": "stag doe fawn reindeer", "dog": "puppy hound doggy",
    "frog": "toad treefrog", "horse": "pony foal mare stallion", "ship": "boat vessel ferry steamer yacht",
    "truck": "lorry",
}
_PLAIN = frozenset({  # words that ask for a picture, but not for anything in it
    "a", "an", "and", "any", "by", "can", "could", "create", "digit", "digits", "draw", "drawing", "figure", "for",
    "from", "generate", "give", "hand", "handwritten", "i", "image", "images", "in", "is", "it", "like", "make", "me",
    "my", "number", "numbers", "numeral", "of", "on", "one", "paint", "photo", "photograph", "picture", "pictures",
    "please", "render", "show", "some", "that", "the", "this", "to", "want", "with", "would", "written", "you"})

_COUNTED = frozenset({"digit", "drawing", "handwritten", "image", "number", "numeral", "photo", "picture"})


@dataclass(frozen=True, slots=True)
class Wish:
    """What a prompt asks for, as far as a model can draw it."""

    label: int | None
    revised: str   # what the prompt was taken for, for clients that show `revised_prompt`
    warning: str   # about words without effect; empty if there are none


def wish(prompt: str, names: Sequence[str]) -> Wish:
    """names: of the model's classes, in the order of their indices.

    A prompt that is one name, or one index, asks for that class. Otherwise the first class named by a word is chosen;
    plurals come before other words ("2 sevens" asks for sevens).
    """
    text = prompt[:LONGEST].strip().casefold()
    folded = [name.casefold() for name in names]
    exact = folded.index(text) if text in folded else int(text) if text in map(str, range(len(names))) else None
    if exact is not None:
        return Wish(exact, names[exact], "")
    words = re.findall(r"(?<!\S)-\d+|[^\W_]+", text)  # -1 is not 1
    found = _classes_in(words, folded)
    others = [word for word in dict.fromkeys(words) if word not in _PLAIN and word not in found]
    more = ", ..." if len(others) > MAX_LISTED else ""
    listed = sendable(", ".join(word[:40] for word in others[:MAX_LISTED])) + more
    if not found:
        known = f"; classes: {', '.join(names)}" if names else ""
        any_of = "an image of any class" if names else "an image"
        return Wish(None, any_of + (f" (no class is named by: {listed})" if listed else ""),
                    f"prompt was ignored: it names no class of this model{known}")
    every = [label for label, _ in found.values()]
    chosen = next((label for label, plural in found.values() if plural), every[0])
    warning = f"prompt: these words have no effect: {listed}" if others else ""
    if unused := [names[label] for label in dict.fromkeys(every) if label != chosen]:
        warning = "; ".join([f"prompt: one class is drawn, {names[chosen]}, not {', '.join(unused)}",
                             *([warning.removeprefix("prompt: ")] if warning else [])])
    return Wish(chosen, names[chosen] + (f" (no effect: {listed})" if others else ""), warning)


def _classes_in(words: Sequence[str], names: Sequence[str]) -> dict[str, tuple[int, bool]]:
    """By word: the class that it names, and whether it is a plural. names: in lower case, of one word or several."""
    single: dict[str, tuple[int, bool]] = {}
    for label, name in enumerate(names):
        for one in (name, *_SYNONYMS.get(name, "").split()):
            plurals = [one + "s", one + "es", *([one[:-1] + "ies"] if one.endswith("y") else [])]
            single.setdefault(one, (label, False))
            for plural in plurals if one.isalpha() else ():
                single.setdefault(plural, (label, True))
    found = {word: single[word] for word in words if word in single}
    for label, name in enumerate(names):  # names of several words
        parts = re.findall(r"[^\W_]+", name)
        if len(parts) > 1 and any(list(words[at:at + len(parts)]) == parts for at in range(len(words))):
            found |= dict.fromkeys(parts, (label, False))
    counted = not _COUNTED.isdisjoint(after for word, after in pairwise(words) if word == "one")  # "one digit"
    if "one" in found and "1" not in words and (counted or len({label for label, _ in found.values()}) > 1):
        del found["one"]  # "one seven"
    return found
