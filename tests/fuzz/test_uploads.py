"""Any upload becomes sub-pixels, or an InvalidRequest that names the field."""

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st

from linpix.model.config import ModelConfig
from linpix.server.errors import InvalidRequest
from linpix.server.pictures.uploads import read
from tests.fuzz.harness import Target
from tests.fuzz.pictures import pictures

pytestmark = pytest.mark.slow

CONFIGS = [
    ModelConfig(height=8, width=8),
    ModelConfig(height=8, width=8, channels=3),
    ModelConfig(height=4, width=12),
]
PARAM = "(image|mask)"
KINDS = {
    "corrupt": (
        rf"{PARAM} is truncated or corrupt, and cannot be decoded; save it again as PNG, JPEG or"
        r" WebP"
    ),
    "no picture": (
        rf"{PARAM} (must be a PNG, JPEG or WebP picture, got \d+ bytes(: | that begin with ).*|"
        r"is empty: the file has 0 bytes)"
    ),
    "animated": rf"{PARAM} is animated \(\d+ frames\); it must be one still picture",
    "too large": (
        rf"{PARAM} may have up to 16777216 pixels \(4096x4096\), or up to 67108864 "
        r"\(8192x8192\) if it is a JPEG with one scan, as cameras save them; got .*"
    ),
    "scans": rf"{PARAM} may have up to \d+ scans \(JPEG of \d+x\d+ pixels\), got \d+",
    "too small": (
        r"image must have at least the model's \d+x\d+ pixels \(width x height\), got \d+x\d+;"
        " enlarge it, or put it on a larger ground"
    ),
    "no holes": r"mask has no alpha channel; .*|it is not clear what to fill in: .*keep_rows",
    "contradiction": (
        r"mask and keep_rows both say what to fill in; use one of them|keep_rows must be from 0"
        r" to .*|"
        r"keep_rows and the transparent parts of the picture both say what to fill in; use one of"
        r" them"
    ),
}


@dataclass(frozen=True)
class Upload:
    image: bytes
    mask: bytes | None
    keep_rows: int | None
    config: ModelConfig


def decode(upload: Upload) -> None:
    try:
        found = read(upload.image, upload.config, mask=upload.mask, keep_rows=upload.keep_rows)
    except InvalidRequest as error:
        assert error.param in ("image", "mask", "keep_rows") and error.status in (400, 413, 415)
        assert str(error).startswith(error.param) or "it is not clear" in str(error)
        raise
    assert found.canvas.shape == found.known.shape == (upload.config.subpixels,)
    assert not found.canvas[~found.known].any()
    facts = found.facts
    assert facts["known_before_first_hole"] + facts["known_after_last_hole"] <= facts["known"]


UPLOADS = Target(
    "uploads",
    st.one_of(
        st.builds(
            Upload, pictures, st.none(), st.none() | st.integers(-1, 9), st.sampled_from(CONFIGS)
        ),
        st.builds(Upload, pictures, pictures, st.none(), st.sampled_from(CONFIGS)),
    ),
    decode,
    (InvalidRequest,),
    KINDS,
)


def test_any_upload_is_decoded_or_refused_with_the_name_of_its_field(run):
    run(UPLOADS)
