"""Faces from the parts of a small package of the same form: shapes, layers, classes, what is held
out.
"""

import numpy as np
import pytest
from PIL import Image

from linpix.model.config import PRESETS
from linpix.training import avatars
from linpix.training.avatars import CLASSES, ORDER, filled, layers, read, write
from linpix.training.datasets import load
from linpix.training.palette import of_pictures

COLOURS = {"skin": "ffccaa", "hair": "102030", "hat": "0000ff", "clothing": "00ff00"}


@pytest.fixture
def package(tmp_path):
    lib = tmp_path / "package" / "lib"
    (lib / "components").mkdir(parents=True)
    (tmp_path / "package" / "LICENSE").write_text("Design\nLicense: CC0 1.0\nCode\nMIT License\n")
    (lib / "index.js").write_text(
        'body: `<path d="M4 2h8v10H4z" fill="${escape.xml(`${colors.skin}`)}"/>${(_b = 1)}`,'
    )
    choices = "type: 'array', items: { pattern: '^[a-fA-F0-9]{6}$' }"
    (lib / "schema.js").write_text(
        "\n".join(
            f"{name}Color: {{ {choices}, default: ['{colour}'] }},"
            for name, colour in COLOURS.items()
        )
    )
    for kind in ORDER:
        names = [*(f"short{i}" for i in range(5)), *(f"long{i}" for i in range(5))]
        fill = 'fill="${escape.xml(`${colors.hair}`)}"'
        row = ORDER.index(kind)
        parts = "".join(
            f'{name}: (components, colors) => `<path d="M{at} {row}h1v1h-1z" {fill}/>`,\n'
            for at, name in enumerate(names)
        )
        (lib / "components" / f"{kind}.js").write_text(f"export const {kind} = {{\n{parts}}};\n")
    return tmp_path / "package"


def shape(mask) -> list[tuple[int, int]]:
    return [(int(y), int(x)) for y, x in np.argwhere(mask)]


def test_a_path_has_the_pixels_inside_it():
    assert shape(filled("M2 3h2v1H2z")) == [(3, 2), (3, 3)]
    assert shape(filled("M2 3h1v1H2zM5 3h1v1H5Z")) == [(3, 2), (3, 5)]
    # relative to where the last part began
    assert shape(filled("M2 3h1v1h-1V3Zm1 1h1v1h-1z")) == [(3, 2), (4, 3)]
    ring = "M0 0h3v3H0zM1 1h1v1H1z"
    assert (1, 1) in shape(filled(ring)) and (1, 1) not in shape(filled(ring, evenodd=True))
    against = "M0 0h3v3H0zM1 1v1h1V1z"  # the hole goes round the other way
    assert (1, 1) not in shape(filled(against)) and len(shape(filled(against))) == 8


def test_layers_take_what_their_group_and_mask_say():
    found = layers(
        '<g fill="#fff" fill-rule="evenodd"><path d="M0 0h3v3H0zM1 1h1v1H1z"/></g>'
        '<mask id="a"><path d="M4 4h1v1H4z" opacity=".9" fill="hair"/></mask>'
        '<g mask="url(#a)"><path fill="hair" fill-opacity=".5" d="M0 0h16v16H0z"/></g>'
    )
    assert [(layer.fill, layer.opacity) for layer in found] == [("#fff", 1.0), ("hair", 0.5)]
    assert found[0].mask.sum() == 8 and shape(found[1].mask) == [(4, 4)]


def test_a_face_is_painted_in_order_and_its_pixels_are_opaque_or_transparent(package):
    style = read(package)
    style.parts["hat"]["short0"] = layers(
        '<path d="M0 7h1v1H0zM4 2h1v1H4z" fill="#0000ff" fill-opacity=".4"/>'
    )
    face = avatars.painted(style, {"hat": "short0"}, COLOURS)
    assert {*np.unique(face[..., 3])} == {0, 255}
    assert face[7, 0].tolist() == [0, 0, 0, 0]  # too faint to be there
    assert face[2, 4].tolist() == [153, 122, 204, 255] and face[3, 4].tolist() == [
        255,
        204,
        170,
        255,
    ]


def test_pairs_for_testing_are_never_in_training_and_the_same_seed_gives_the_same_files(
    package, tmp_path
):
    for name in ("one", "two"):
        write(package, tmp_path / name, train=400, test=50)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.png"))
    assert len(files) == 450
    assert all(
        (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
        for file in files
    )
    assert "CC0 1.0" in (tmp_path / "one" / "LICENSE").read_text()

    def pairs(split):
        """Hair and clothes: each kind of part has a row of its own, and each style a column."""
        faces = [np.asarray(Image.open(path)) for path in (tmp_path / "one" / split).rglob("*.png")]
        ink = [(face[..., :3] == (16, 32, 48)).all(-1) for face in faces]
        rows = [ORDER.index(kind) for kind in ("hair", "clothing")]
        return {tuple(int(each[row].argmax()) for row in rows) for each in ink}

    assert len(pairs("train")) > 50 and len(pairs("test")) > 2
    assert not pairs("train") & pairs("test")
    for label in CLASSES:
        assert len([*(tmp_path / "one" / "train" / label).iterdir()]) == 80


def test_the_hair_is_what_the_class_says(package):
    style = read(package)
    pictures = avatars.faces(style, 0, held_out=False)
    drawn = [next(pictures) for _ in range(200)]
    for label, face in drawn:
        styles = np.flatnonzero((face[ORDER.index("hair"), :, :3] == (16, 32, 48)).all(-1))
        if label in ("beard", "short hair"):
            assert (styles < 5).all() and len(styles) == 1
        if label == "long hair":
            assert (styles >= 5).all() and len(styles) == 1


def test_a_package_under_another_licence_is_refused(package):
    (package / "LICENSE").write_text("All rights reserved")
    with pytest.raises(ValueError, match="does not say CC0"):
        read(package)


def test_the_palette_and_the_size_are_those_of_the_pictures(package, tmp_path):
    write(package, tmp_path / "faces", train=100, test=10)
    config = of_pictures(tmp_path / "faces", PRESETS["palette"], 8)
    assert (config.height, config.width, config.palette[0][3]) == (16, 16, 0)
    assert {colour[:3] for colour in config.palette[1:]} == {(255, 204, 170), (16, 32, 48)}
    data = load(tmp_path / "faces", "train", config)
    assert data.classes == CLASSES and data.images.shape == (100, 256)
    # in random order: what is held out has every class
    assert {*data.labels[-50:].tolist()} == {0, 1, 2, 3, 4}
