"""Letters: 28 x 28 pictures of A to Z and a to z, drawn from fonts under the SIL Open Font License.

    python -m linpix.training.letters OUT

A letter keeps its size and its place on the line, unlike a digit of MNIST, which is made as large
as all others and centred. Otherwise o and O would be alike, and so would the upper halves of p and
P. Families for testing are not used for training. The same fonts and seed give the same files.
"""

import argparse
import gzip
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from .idx import LETTERS

_NAMES = """
    3270 allerta anonymous-pro apropal arapey averia-gwf averia-sans-gwf averia-serif-gwf b612
    babelstone-modern bajaderka blankenburg breip cabin cantarell cardo century-catalogue
    cherrybomb cmu comfortaa comic-neue compagnon courier-prime crosextra-caladea dancingscript
    dkg-handwriting dosis dotgothic16 ebgaramond elstob essays1743 eurofurence fantasque-sans
    firacode gamaliel gemunu-libre georgewilliams gfs-artemisia gfs-didot gfs-neohellenic
    gnutypewriter havana hermit hosny-amiri hosny-thabit inconsolata inter junction junicode jura
    karla kaushanscript klaudia-berenika kristi lato league-mono league-spartan leckerli-one
    lemonada liberation2 linuxlibertine lobstertwo manrope millimetre monofur monoid mononoki
    morisawa-bizud-gothic morisawa-bizud-mincho mplus myanmar nanum national-park oflb-asana-math
    okolaks oldstandard opendin oxygen play quattrocento quicksand radisnoir reggae rit-sundar
    rocknroll routed-gothic sawarabi-mincho sil-alkalami sil-andika sil-charis sil-doulos
    sil-gentiumplus sil-lateef smc-chilanka smc-dyuthi smc-gayathri smc-karumbi smc-keraleeyam
    smc-manjari smc-rachana smc-uroob smiley-sans sora stick stix vollkorn woowa-bm
    yanone-kaffeesatz yrsa-rasa yusei-magic"""
PACKAGES = tuple(f"fonts-{name}" for name in _NAMES.split())
HOLLOW = ("BM Euljiro", "Cupola", "National Park Outline")  # beginnings of styles to leave out
FINE = 4  # letters are drawn this many times as large, and then reduced
# height of capitals, y of the line they stand on, margin
CAPITAL, LINE, EDGE = 18 * FINE, 21 * FINE, 1 * FINE
FAINT = 140  # grey of a letter's brightest pixel, below which a style is too thin
# correlation of the capitals and small letters of a style that has only one of the two
ONE_CASE = 0.6
ALIKE = 0.94  # correlation of two styles of one design


@dataclass(frozen=True, slots=True)
class Style:
    """One font file: a weight and slant of a family."""

    family: str
    face: ImageFont.FreeTypeFont  # with capitals of the height CAPITAL
    # (52, 256): each letter stretched to 16 x 16, with a mean of 0 and a norm of 1
    forms: NDArray[np.float32]
    source: dict[str, str]  # for the manifest


def ink(face: ImageFont.FreeTypeFont, letter: str) -> tuple[Image.Image, tuple[int, int]]:
    """A letter without its margins, and the place of its upper left corner relative to where it
    begins on the line.
    """
    left, top, right, bottom = (round(edge) for edge in face.getbbox(letter, anchor="ls"))
    # outlines may exceed their box by a pixel
    image = Image.new("L", (right - left + 4, bottom - top + 4))
    ImageDraw.Draw(image).text((2 - left, 2 - top), letter, 255, face, anchor="ls")
    box = image.getbbox() or (0, 0, 1, 1)
    return image.crop(box), (left - 2 + box[0], top - 2 + box[1])


def draw(
    face: ImageFont.FreeTypeFont,
    letter: str,
    *,
    size: float = 1.0,
    angle: float = 0.0,
    shear: float = 0.0,
    move: Sequence[float] | NDArray[np.float64] = (0, 0),
) -> NDArray[np.uint8]:
    """A picture (28, 28) of a letter on its line, centred from side to side; smaller or higher if
    it would be cut.
    """
    image, corner = ink(face, letter)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = size * turn @ [[1, shear], [0, 1]]
    corners = np.add([[0, 0], [image.width, 0], [0, image.height], image.size], corner) @ matrix.T
    low, high = corners.min(0), corners.max(0)
    fit = min(1.0, (28 * FINE - 2 * EDGE) / (high - low).max())
    place = np.array([14 * FINE - (low[0] + high[0]) / 2 * fit, LINE]) + np.array(move) * FINE
    place = np.clip(place, EDGE - low * fit, 28 * FINE - EDGE - high * fit)
    inverse = np.linalg.inv(matrix * fit)
    x, y = -inverse @ place - corner
    change, fine = (*inverse[0], x, *inverse[1], y), (28 * FINE, 28 * FINE)
    drawn = image.transform(fine, Image.Transform.AFFINE, change, Image.Resampling.BICUBIC)
    return np.asarray(drawn.reduce(FINE))


def read(file: Path, package: str) -> Style | str:
    """The style in a font file of a package, or the reason why it is left out."""
    face = ImageFont.truetype(str(file), 4 * CAPITAL, layout_engine=ImageFont.Layout.BASIC)
    images = [ink(face, letter) for letter in (*LETTERS, "\uffff")]  # no font has the last one
    missing = images.pop()[0]
    if any(image == missing or image.getextrema() == (0, 0) for image, _ in images):
        return "it lacks letters"
    family, name = (text or "" for text in face.getname())
    if f"{family} {name}".startswith(HOLLOW):
        return "its letters are eroded or hollow"
    face = face.font_variant(size=4 * CAPITAL**2 / sorted(-top for _, (_, top) in images[:26])[13])
    if np.median([draw(face, letter).max() for letter in LETTERS]) < FAINT:
        return "it is too thin"
    small = [image.resize((16, 16), Image.Resampling.BOX) for image, _ in images]
    forms = np.array(small, np.float32).reshape(52, -1)
    forms -= forms.mean(1, keepdims=True)
    forms /= np.linalg.norm(forms, axis=1, keepdims=True) + 1e-6
    # those whose small letters have another form
    telling = [LETTERS.index(letter) for letter in "ABDEGHNQRT"]
    if (forms[:26] * forms[26:])[telling].sum(1).mean() > ONE_CASE:
        return "its capitals are like its small letters"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    style = f"{family} {name}"
    source = {"style": style, "package": package, "file": file.name, "sha256": digest}
    return Style(family, face, forms, source)


def installed(packages: Sequence[str], root: Path) -> tuple[list[Style], dict[str, str]]:
    """The styles in packages, and the reasons for font files that are left out. Raises
    ValueError.
    """
    styles: dict[str, Style] = {}
    absent = [name for name in packages if not (root / f"var/lib/dpkg/info/{name}.list").exists()]
    if 2 * len(absent) > len(packages):
        raise ValueError(
            f"{len(absent)} of {len(packages)} packages of fonts are not installed; run: apt-get"
            f" install {' '.join(absent)}"
        )
    left = dict.fromkeys(absent, "it is not installed")
    for package in packages:
        if package in absent:
            continue
        licence = (root / f"usr/share/doc/{package}/copyright").read_bytes()
        if b"open font licen" not in licence.lower():
            raise ValueError(f"{package} is not under the SIL Open Font License; leave it out")
        for line in sorted((root / f"var/lib/dpkg/info/{package}.list").read_text().splitlines()):
            file = root / line[1:]
            if file.suffix.lower() in (".ttf", ".otf") and not file.is_symlink():
                style = read(file, package)
                if isinstance(style, str):
                    left[line] = style
                else:
                    styles.setdefault(style.source["style"], style)  # often there as .otf and .ttf
    return list(styles.values()), left


def families(styles: Sequence[Style]) -> list[list[Style]]:
    """Styles by family; families of one design (STIX and Doulos), or whose name begins with the
    other's, are one.
    """
    forms = np.stack([style.forms.ravel() for style in styles]) / len(LETTERS) ** 0.5
    alike, group = forms @ forms.T > ALIKE, list(range(len(styles)))
    for a, b in np.ndindex(alike.shape):
        longer = f"{styles[a].family} ".startswith(f"{styles[b].family} ")
        if alike[a, b] or longer:
            joined = group[a]
            group = [group[b] if each == joined else each for each in group]
    members: dict[int, list[Style]] = {}
    for style, number in zip(styles, group, strict=True):
        members.setdefault(number, []).append(style)
    return [*members.values()]


def write(
    out: Path,
    packages: Sequence[str] = PACKAGES,
    root: Path = Path("/"),
    *,
    train: int = 59_000,
    validation: int = 1_000,
    test: int = 5_000,
    seed: int = 0,
) -> None:
    """Write the data set in MNIST's format, with a manifest and the licences of the fonts. Raises
    ValueError.

    A tenth of the families are for testing. A twentieth are for validation: `linpix train` holds
    out the last pictures.
    """
    styles, left = installed(packages, root)

    def shuffled(kind: list[Style]) -> bytes:
        return hashlib.sha256(f"{seed} {kind[0].family}".encode()).digest()

    kinds = sorted(families(styles), key=shuffled)
    tenth, rest = max(1, len(kinds) // 10), max(2, len(kinds) * 3 // 20)
    if len(kinds) <= rest:
        raise ValueError(
            f"expected at least 3 families of fonts, found {len(kinds)}; name more packages"
        )
    generator = np.random.default_rng(seed)
    (out / "licences").mkdir(parents=True)
    manifest: dict[str, object] = {"seed": seed, "left_out": left}
    splits = {
        "train": [(kinds[rest:], train), (kinds[tenth:rest], validation)],
        "test": [(kinds[:tenth], test)],
    }
    for split, parts in splits.items():
        images, labels, sources = [], [], []
        for chosen, count in parts:
            sources += [[style.source for style in kind] for kind in chosen]
            # each family has as many pictures of each letter
            for at in generator.permutation(count):
                kind, label = chosen[at % len(chosen)], at // len(chosen) % len(LETTERS)
                picture = draw(
                    kind[generator.integers(len(kind))].face,
                    LETTERS[label],
                    size=np.exp(generator.uniform(-0.15, 0.1)),
                    angle=generator.normal(0, 0.05),
                    shear=generator.normal(0, 0.06),
                    move=generator.uniform(-1, 1, 2),
                )
                images.append(np.round(picture * (255 / picture.max())))
                labels.append(label)
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            array = np.array(values, np.uint8)
            raw = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">i4").tobytes()
            packed = gzip.compress(raw + array.tobytes(), mtime=0)
            (out / f"letters-{split}-{name}-ubyte.gz").write_bytes(packed)
        manifest[split] = sources
    for package in {style.source["package"] for style in styles}:
        shutil.copyfile(root / f"usr/share/doc/{package}/copyright", out / "licences" / package)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Draw a data set of letters from fonts under the Open Font License."
    )
    parser.add_argument("out", type=Path, help="new folder for the data set")
    parser.add_argument(
        "--root", type=Path, default=Path("/"), help="folder in which the packages are unpacked"
    )
    given = parser.parse_args()
    try:
        write(given.out, root=given.root)
    except (ValueError, OSError) as error:
        sys.exit(f"letters: {error}")
