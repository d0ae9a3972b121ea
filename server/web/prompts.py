"""Which class a prompt asks for."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from linpix.model.checkpoint import folded

from ..engine.job import SYNONYMS
from .error_handlers import sendable

LONGEST = 1_000  # characters of a prompt that are read
MAX_LISTED = 10  # largest number of words without effect that a warning lists
NUMBERS = {word for digit in "0123456789" for word in (digit, *SYNONYMS[digit].split())}
# words after a number of images, and words before a number that is a class
COUNTED = {"digit", "drawing", "example", "handwritten", "image", "number", "picture", "sample"}
SEVERAL = {f"{word}{end}" for word in COUNTED | NUMBERS for end in ("s", "es")}
NAMING = {"a", "an", "class", "digit", "figure", "label", "number", "the"}


def wish(prompt: str, names: Sequence[str]) -> tuple[int | None, str, str]:
    """The class that a prompt asks for; what the prompt was taken for, for clients that show
    `revised_prompt`; and a warning about words without effect, empty if there are none.

    names: of the model's classes, in the order of their indices. A prompt that is one index asks
           for that class.
    """
    alike = Counter(map(folded, names))
    cased = [alike[folded(name)] > 1 for name in names]  # such as a and A
    known = [folded(name, cased=case) for name, case in zip(names, cased, strict=True)]
    texts = [folded(prompt[:LONGEST], cased=case) for case in (False, True)]
    exact = [label for label, name in enumerate(known) if name == texts[cased[label]]] or [
        label for label in range(len(names)) if texts[0] == str(label)
    ]
    if exact:
        return exact[0], names[exact[0]], ""
    said = [_spaced(text) for text in texts]
    found = []
    for label, name in enumerate(known):
        words = said[cased[label]]
        for named in _named(name, known):
            if named.strip() and named in words:
                found.append((words.count(" ", 0, words.find(named)), -len(named), label, named))
    ignored = "prompt was ignored: it names no class of this model"
    if not names:
        return None, "an image", ignored
    if not found:
        return None, "an image of any class", f"{ignored}; classes: {', '.join(names)}"
    # the first one; of several that begin there, the longest
    certain = [
        (at, length, label, named)
        for at, length, label, named in found
        if _is_meant(at, named, said[cased[label]], cased[label])
    ]
    *_, label, named = min(certain) if certain else max(found)
    others = [
        word for word in dict.fromkeys(said[cased[label]].split()) if word not in named.split()
    ]
    listed = sendable(", ".join(word[:40] for word in others[:MAX_LISTED])) + (
        ", ..." if others[MAX_LISTED:] else ""
    )
    return label, names[label], f"prompt: these words have no effect: {listed}" if others else ""


def _named(name: str, names: Sequence[str]) -> Iterator[str]:
    """The words for a class, spaced: its name, its synonyms, and the plurals of both that name no
    other class.
    """
    for word in (name, *SYNONYMS.get(name, "").split()):
        yield _spaced(word)
        if word[-1:].isalnum() and (len(word) > 2 or word.isdigit()):
            for plural in {f"{word}s", f"{word}es"}.difference(names):
                yield _spaced(plural)


def _is_meant(at: int, named: str, text: str, cased: bool) -> bool:
    """Whether a class is meant that is named at this word of a text. In "a picture of a g", a is an
    article; in "one image of a 7" and "two sevens", one and two are how many.
    """
    word, words = named.strip(), ["", *text.split(), ""]
    before, after = words[at], words[at + 1 + len(named.split())]
    if word in NUMBERS and before not in NAMING:
        if word not in ("1", "one"):
            return after not in SEVERAL
        return after not in COUNTED and (after not in NUMBERS or (word + after).isdigit())
    return word not in (("a", "A", "I", "ones") if cased else ("a", "i", "ones"))


def _spaced(text: str) -> str:
    """The words of a folded text, each between two spaces. A number keeps its sign and what follows
    its point.
    """
    # I'd is one word, dog's is two
    words = r"(?<!\w)-?\d+\.\d+|(?<!\w)-\d+|'s\b|[^\W_]+(?:'(?!s\b)[^\W_]+)*"
    return " ".join(["", *re.findall(words, text), ""])
