"""One message for requests and commands: names of options as the API's fields, and as flags."""

import pytest

from linpix.model.config import PRESETS
from linpix.server.errors import OptionError, as_fields, as_flags
from linpix.server.pictures.pictures import PictureError, decode


@pytest.mark.parametrize(("message", "fields", "flags"), [
    ("`keep_rows` must be from 0 to 8", "keep_rows must be from 0 to 8", "--keep-rows must be from 0 to 8"),
    ("leave out `prepare=mnist`, or `mask`", "leave out prepare=mnist, or mask",
     "leave out --prepare mnist, or --mask"),
    ("`image` is truncated", "image is truncated", "image is truncated"),
    ("a mask, in plain words", "a mask, in plain words", "a mask, in plain words")])
def test_names_in_backticks_are_fields_or_flags(message, fields, flags):
    assert (as_fields(message), as_flags(message)) == (fields, flags)


def test_bytes_of_a_file_are_no_options():
    with pytest.raises(PictureError, match=r"begin with b'\\x60mask\\x60'$") as caught:
        decode(b"`mask`", PRESETS["tiny"], mask=None, keep_rows=None)
    assert caught.value.for_commands == str(caught.value)


def test_an_error_keeps_both():
    error = OptionError("`seed` must be at least 0", "seed")
    assert (str(error), error.for_commands) == ("seed must be at least 0", "--seed must be at least 0")
    assert (error.param, error.status) == ("seed", 400)
