"""What config.json may say, and the sentences about what it may not."""

import pytest

from tests.model.test_checkpoint import assert_refused, change_fields, seal

FIELDS = {
    "other version": ("", {"format_version": 2}, "format_version must be 1, got 2"),
    "no version": ("", {"format_version": None}, "format_version must be 1, got None"),
    "no architecture": ("", {"architecture": None}, "lacks 'architecture'"),
    "no provenance": ("", {"provenance": None}, "lacks 'provenance'"),
    "unknown field": ("architecture", {"depth": 1}, r"unknown configuration fields \['depth'\]"),
    "wrong value": ("architecture", {"layers": 0}, "layers must be an integer"),
    "wrong type": ("", {"architecture": [1]}, "config.json"),
    "wrong list": ("architecture", {"neighbours": 3}, "config.json"),
    "wrong names": ("provenance", {"class_names": 5}, "class_names must list at most"),
    "more names than classes": (
        "provenance",
        {"class_names": [*"abcdefghijk"]},
        "class_names must list at most 10 names",
    ),
    "a list for provenance": (
        "",
        {"provenance": [["data", "x"]]},
        "provenance must be a JSON object",
    ),
    "wrong bits/dim": (
        "provenance",
        {"bits_per_dim": {"test_1000": "low"}},
        "bits_per_dim must map short names to numbers",
    ),
    "infinite bits/dim": (
        "provenance",
        {"bits_per_dim": {"test_1000": float("inf")}},
        "config.json: contains Infinity, which is not a JSON number",
    ),
    "attempts of a model that cannot": (
        "provenance",
        {"attempts": 2},
        "attempts must be 1, or up to 16 for a model that draws the class first, got",
    ),
    "recognised by more than all": ("provenance", {"recognised": 1.1}, "recognised must be .*1.1"),
    "no attempts": ("provenance", {"attempts": 0}, "attempts must be 1, .*got 0"),
    "half an attempt": ("provenance", {"attempts": 1.0}, "attempts must be 1, .*got 1.0"),
    "attempts in words": ("provenance", {"attempts": "1"}, "attempts must be 1, .*got '1'"),
    "true attempts": ("provenance", {"attempts": True}, "attempts must be 1, .*got True"),
    "a board of another depth": (
        "provenance",
        {"board": {"ground": [0, 0], "ink": [255], "prepare": None}},
        "board must have ground and ink, each null or 1",
    ),
    "a look in words": ("provenance", {"real_look": {"pieces": "few"}}, "real_look must have"),
    "a look without pieces": ("provenance", {"real_look": {}}, "real_look must have pieces"),
    "ink in words": (
        "provenance",
        {"real_look": {"pieces": 0, "full_ink": "much"}},
        "full_ink, a mean number of pixels",
    ),
    "a divided class by name": (
        "provenance",
        {"real_look": {"pieces": 0, "divided": ["i"]}},
        "divided of real_look",
    ),
    "an unknown divided class": (
        "provenance",
        {"real_look": {"pieces": 0, "divided": [10]}},
        "divided of real_look",
    ),
    "wrong time": ("provenance", {"created": "today"}, "created must be a number"),
    "half a pair as a class": (
        "provenance",
        {"class_names": ["a", "\ud800"]},
        r"half a surrogate pair.* at the end of '.*class_names.*ud800'; write the whole",
    ),
    "half a pair in a key": ("provenance", {"bits_per_dim": {"\udfff": 1}}, "half a surrogate"),
    "half a pair in a twin": ("architecture", {"twin_of": "a\udce9"}, "half a surrogate pair"),
    "half a pair deep in a list": ("provenance", {"x": [[{"y": "\ud83d!"}]]}, "half a surrogate"),
    "half a pair in limits": ("provenance", {"limits": "It \ud800."}, "half a surrogate pair"),
    "wrong twin": ("architecture", {"twin_of": ["mnist"]}, "twin_of must be a name"),
    "a list of one": ("architecture", {"look_ups": "previous"}, "look_ups must be a list"),
    "no numbers": (
        "architecture",
        {"first_marginal": ["x"] * 256},
        "first_marginal must hold 256 probabilities",
    ),
}


@pytest.mark.parametrize(("part", "changes", "message"), FIELDS.values(), ids=FIELDS)
def test_a_wrong_configuration_is_refused_with_the_field(part, changes, message, folder):
    change_fields(folder, part, **changes)
    assert_refused(folder, message, "config.json")


def test_names_given_twice_are_refused(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"layers": 2', '"layers": 3, "layers": 2'))
    seal(folder)
    assert_refused(folder, "layers is given twice", "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\0"])
def test_a_configuration_that_is_not_a_json_object_is_refused(text, folder):
    (folder / "config.json").write_text(text)
    seal(folder)
    assert_refused(folder, r"config\.json")
