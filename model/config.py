"""The configuration of a model: one frozen dataclass, stored in the checkpoint's config.json, and
the presets.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

AttentionKind = Literal["linear", "softmax", "lsh"]
FeatureMap = Literal["elu+1", "relu", "polynomial", "random"]
Norm = Literal["post", "pre"]
ResidualKind = Literal["plain", "reversible"]
Activation = Literal["relu", "gelu"]
LookUp = Literal["previous", "position", "row", "column", "channel", "class"]
Neighbour = tuple[int, int, int]
Colour = tuple[int, ...]  # red, green, blue, alpha
ScaleTransform = Literal["exp", "elu"]
Tokens = Literal["sub-pixel", "pixel"]
Head = Literal["mixture", "categorical"]

# Limits far above any model in use. They keep a configuration of 100 bytes from asking for 100
# gigabytes of memory.
MAX_SIZE = 2**20  # largest value of each size
# places at which the inputs of an image are looked up: T, and T more for each neighbour
MAX_LOOKED_UP = 2**24
MAX_NEIGHBOURS = 256
MAX_BACKGROUND_DIM = 2**12
# for feature map `random`, whose directions are made orthogonal
MAX_RANDOM_FEATURES, MAX_RANDOM_DIM = 4096, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of one transformer over the T sub-pixels of an image in raster order."""

    # fmt: off
    height: int = 28
    width: int = 28
    channels: int = 1                   # sub-pixels of a pixel are neighbours: r, g, b, r, g, ...
    tokens: Tokens = "sub-pixel"        # what a step predicts; of a pixel, each channel in turn
    layers: int = 8                     # L
    heads: int = 8                      # H
    key_dim: int = 32                   # D, per head
    value_dim: int = 32                 # M, per head
    d_model: int = 256
    d_ff: int = 1024
    head: Head = "mixture"              # K logistics, or 256 logits for one channel: heads.py
    mixtures: int = 10                  # K, components per token
    attention: AttentionKind = "linear"
    feature_map: FeatureMap = "elu+1"   # of queries and keys of linear attention: features.py
    random_features: int = 64           # of the feature map `random`
    lsh_rounds: int = 1                 # rounds of hashing in lsh attention
    lsh_buckets: int = 64               # buckets per round: 1, or an even number
    lsh_chunk: int = 30                 # sorted tokens that attend to each other and the last chunk
    eps: float = 1e-6                   # added to the normaliser in linear attention
    norm: Norm = "post"                 # as in the published reference; pre trains more steadily
    residual: ResidualKind = "plain"    # reversible: two streams, trained in memory constant in L
    activation: Activation = "gelu"
    look_ups: tuple[LookUp, ...] = ("previous", "position")
    neighbours: tuple[Neighbour, ...] = ()  # (dy, dx, dc) from token t's first sub-pixel, earlier
    following: tuple[Neighbour, ...] = ()  # the same in later tokens: looked up if known at start
    patch: int = 0                      # side of squares of known pixels, read first; 0: not read
    background: int | None = None       # sub-pixels that see only it skip the layers; None: none
    background_dim: int = 128           # hidden features of the head for sub-pixels that skip
    palette: tuple[Colour, ...] = ()    # colours that values stand for; empty: none
    classes: int = 0                    # 0: unconditional only
    scale_transform: ScaleTransform = "exp"  # for drawing; elu: the published elu(log_scale)+1.0001
    first_marginal: tuple[float, ...] = ()  # P(sub-pixel 0 = v) without a start token, else empty
    twin_of: str = ""                   # checkpoint that this one was trained to compare with
    # fmt: on

    def __post_init__(self) -> None:
        for name in (
            "height",
            "width",
            "channels",
            "layers",
            "heads",
            "key_dim",
            "value_dim",
            "d_model",
            "d_ff",
            "mixtures",
            "random_features",
            "lsh_rounds",
            "lsh_buckets",
            "lsh_chunk",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {_short(value)}")
            if value > MAX_SIZE:
                raise ValueError(f"{name} must be at most {MAX_SIZE}, got {_short(value)}")
        if self.lsh_buckets != 1 and self.lsh_buckets % 2:
            raise ValueError(f"lsh_buckets must be 1 or an even number, got {self.lsh_buckets}")
        if self.channels not in (1, 3):
            raise ValueError(
                f"channels must be 1 (grey) or 3 (red, green, blue), got {self.channels}"
            )
        if type(self.classes) is not int or self.classes < 0:
            raise ValueError(
                f"classes must be an integer of at least 0, got {_short(self.classes)}"
            )
        if self.classes > MAX_SIZE:
            raise ValueError(f"classes must be at most {MAX_SIZE}, got {_short(self.classes)}")
        for name, kind in (
            ("attention", AttentionKind),
            ("feature_map", FeatureMap),
            ("norm", Norm),
            ("residual", ResidualKind),
            ("activation", Activation),
            ("scale_transform", ScaleTransform),
            ("tokens", Tokens),
            ("head", Head),
        ):
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(kind))}, got {_short(value)}"
                )
        if self.residual == "reversible" and self.norm != "pre":
            raise ValueError(
                "reversible residuals need norm 'pre', because a LayerNorm after the sum cannot be "
                f"reversed; got norm {self.norm!r}"
            )
        if not (isinstance(self.eps, float) and 0 < self.eps < 1):
            raise ValueError(f"eps must be a number between 0 and 1, got {_short(self.eps)}")
        unknown = [name for name in self.look_ups if name not in get_args(LookUp)]
        if (
            unknown
            or "previous" not in self.look_ups
            or len(set(self.look_ups)) != len(self.look_ups)
        ):
            raise ValueError(
                "look_ups must contain 'previous', and may also contain, once each, "
                f"{', '.join(get_args(LookUp)[1:])}; got {_short(list(self.look_ups))}"
            )
        if (count := len(self.neighbours) + len(self.following)) > MAX_NEIGHBOURS:
            raise ValueError(
                f"neighbours and following may have up to {MAX_NEIGHBOURS} entries together, got"
                f" {count}"
            )
        for neighbour in self.neighbours + self.following:
            if (
                not isinstance(neighbour, tuple)
                or len(neighbour) != 3
                or any(type(part) is not int for part in neighbour)
            ):
                raise ValueError(
                    f"a neighbour must be three integers (dy, dx, dc), got {_short(neighbour)}"
                )
            if max(map(abs, neighbour)) > MAX_SIZE:
                raise ValueError(
                    f"a neighbour must be at most {MAX_SIZE} away, got {_short(neighbour)}"
                )
        for neighbour in self.neighbours:
            if self.offset(neighbour) >= 0 or neighbour >= (0, 0, 0):
                raise ValueError(f"neighbour {neighbour} is not strictly earlier in raster order")
        for neighbour in self.following:
            if self.offset(neighbour) <= 0 or neighbour <= (0, 0, 0):
                raise ValueError(
                    f"following neighbour {neighbour} is not strictly later in raster order"
                )
        if self.tokens == "pixel":
            self._check_pixels()
        if self.palette:
            self._check_palette()
        if self.head == "categorical" and (self.channels != 1 or self.first_marginal):
            raise ValueError(
                "a categorical head needs 1 channel and a start token; got "
                f"channels={self.channels} and {'no' if self.first_marginal else 'a'} start token"
            )
        looked_up = 1 + len(self.neighbours) + len(self.following)
        if (places := self.subpixels * looked_up) > MAX_LOOKED_UP:
            raise ValueError(
                f"height * width * channels * (1 + {looked_up - 1} neighbours) must be at most "
                f"{MAX_LOOKED_UP}, got {places}"
            )
        if "class" in self.look_ups and not self.classes:
            raise ValueError("the look-up 'class' needs classes, got classes=0")
        self._check_condition()
        if self.feature_map == "random" and (
            self.random_features > MAX_RANDOM_FEATURES or self.key_dim > MAX_RANDOM_DIM
        ):
            raise ValueError(
                f"feature_map random needs random_features of at most {MAX_RANDOM_FEATURES} and"
                f" key_dim of at most {MAX_RANDOM_DIM}, got {self.random_features} and"
                f" {self.key_dim}"
            )
        if type(self.twin_of) is not str:
            raise ValueError(f"twin_of must be a name, got {_short(self.twin_of)}")
        if self.first_marginal:
            if any(type(p) not in (int, float) or abs(p) > 256 for p in self.first_marginal):
                raise ValueError(
                    "first_marginal must hold 256 probabilities that sum to 1, got "
                    f"{_short(self.first_marginal)}"
                )
            total = sum(self.first_marginal)
            if (
                len(self.first_marginal) != 256
                or min(self.first_marginal) < 0
                or not abs(total - 1) <= 1e-6
            ):
                raise ValueError(
                    "first_marginal must hold 256 probabilities that sum to 1, got "
                    f"{len(self.first_marginal)}, least {min(self.first_marginal)}, that sum to "
                    f"{total:.6f}"
                )
            if self.classes:
                raise ValueError(
                    "a model without a start token (first_marginal) cannot have classes, "
                    f"got classes={self.classes}"
                )

    def _check_pixels(self) -> None:
        """Raise ValueError if a field does not go with tokens of a whole pixel."""
        if (
            self.channels != 3
            or self.background is not None
            or self.first_marginal
            or "channel" in self.look_ups
        ):
            raise ValueError(
                "tokens 'pixel' need 3 channels, background null, a start token and no look-up"
                f" 'channel'; got channels={self.channels}, background={self.background},"
                f" {'no' if self.first_marginal else 'a'} start token, look_ups"
                f" {list(self.look_ups)}"
            )
        for neighbour in self.neighbours + self.following:
            if neighbour[:2] == (0, 0) or neighbour[2] not in range(self.channels):
                raise ValueError(
                    "with tokens 'pixel', a neighbour must be a channel (dc 0..2) of another"
                    f" pixel; got {neighbour}"
                )

    def _check_palette(self) -> None:
        if self.channels != 1 or self.head != "categorical" or len(self.palette) > 256:
            raise ValueError(
                "a palette needs 1 channel, a categorical head and at most 256 colours; got"
                f" channels={self.channels}, head={self.head} and {len(self.palette)} colours"
            )
        if self.ground:
            raise ValueError(
                "with a palette, background must be 0, its first colour, or null; got"
                f" {self.background}"
            )
        for index, colour in enumerate(self.palette):
            alphas = (255,) if index else (0, 255)
            if (
                not isinstance(colour, tuple)
                or len(colour) != 4
                or any(type(part) is not int or not 0 <= part <= 255 for part in colour)
                or colour[3] not in alphas
            ):
                raise ValueError(
                    "a colour of the palette must be four integers 0..255, red, green, blue and an"
                    " alpha of 255, or for the first colour of 0, which makes the background"
                    f" transparent; colour {index} is {_short(colour)}"
                )

    def _check_condition(self) -> None:
        """Check the fields of models that read every known pixel first, or skip the layers amid
        background.
        """
        if (
            type(self.patch) is not int
            or self.patch < 0
            or (self.patch and (self.height % self.patch or self.width % self.patch))
        ):
            raise ValueError(
                f"patch must divide height {self.height} and width {self.width}, or be 0; "
                f"got {_short(self.patch)}"
            )
        if self.following and not self.patch:
            raise ValueError(
                "following neighbours are known only in conditional models: give a patch, or leave "
                "following out"
            )
        if self.background is not None and (
            type(self.background) is not int or not 0 <= self.background <= 255
        ):
            raise ValueError(
                f"background must be a value 0..255, or null, got {_short(self.background)}"
            )
        if (
            type(self.background_dim) is not int
            or not 1 <= self.background_dim <= MAX_BACKGROUND_DIM
        ):
            raise ValueError(
                f"background_dim must be an integer of 1..{MAX_BACKGROUND_DIM}, "
                f"got {_short(self.background_dim)}"
            )
        if not self.packed:
            return
        if self.attention != "linear" or self.residual != "plain" or self.first_marginal:
            raise ValueError(
                "patch and background need linear attention, plain residuals and a start token;"
                f" got {self.attention}, {self.residual} and {'no' if self.first_marginal else 'a'}"
                " start token"
            )

    @property
    def packed(self) -> bool:
        """Whether only some sub-pixels of an image go through the layers, or patches do too."""
        return bool(self.patch) or self.background is not None

    @property
    def patches(self) -> int:
        """Number of squares in an image, in raster order; 0 for models without a patch."""
        return self.height * self.width // self.patch**2 if self.patch else 0

    @property
    def class_first(self) -> bool:
        """Whether the model draws a class for an image without one before its first sub-pixel,
        given the known pixels.

        Such a model was trained on images with their class only.
        """
        return bool(self.patch and self.classes)

    @property
    def first(self) -> int:
        """The first token that is predicted: 1 in a model without a start token, else 0."""
        return 1 if self.first_marginal else 0

    @property
    def subpixels(self) -> int:
        """T."""
        return self.height * self.width * self.channels

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(H, W) of grey images, (H, W, 3) of images in colour."""
        return (
            (self.height, self.width)
            if self.channels == 1
            else (self.height, self.width, self.channels)
        )

    @property
    def ground(self) -> int:
        """The value whose probability a temperature leaves as it is, in a model with a categorical
        head.
        """
        return self.background or 0

    @property
    def grey(self) -> bool:
        """Whether values are greys."""
        return self.channels == 1 and not self.palette

    @property
    def values(self) -> int:
        """Values that a sub-pixel can have: those from here on are never drawn."""
        return len(self.palette) or 256

    @property
    def token_size(self) -> int:
        """C, sub-pixels that one token predicts: token t predicts t * C .. t * C + C - 1."""
        return self.channels if self.tokens == "pixel" else 1

    @property
    def length(self) -> int:
        """Tokens of a whole image, T / C: the number of its steps."""
        return self.subpixels // self.token_size

    @property
    def row_length(self) -> int:
        """Tokens of an image row."""
        return self.length // self.height

    @property
    def feature_dim(self) -> int:
        """Size of one head's query or key after the feature map, which is the number of rows
        of S.
        """
        return {
            "polynomial": self.key_dim * (self.key_dim + 1) // 2,
            "random": self.random_features,
        }.get(self.feature_map, self.key_dim)

    def offset(self, neighbour: Neighbour) -> int:
        """Distance in sub-pixels from a token's first one to its neighbour in raster order;
        negative is earlier.
        """
        dy, dx, dc = neighbour
        return (dy * self.width + dx) * self.channels + dc

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "ModelConfig":
        """Read what to_json wrote. A missing field gets its default; an unknown field raises
        ValueError.
        """
        if not isinstance(fields, dict):
            raise ValueError(f"the architecture must be a JSON object, got {_short(fields)}")
        fields = dict(fields)
        if unknown := fields.keys() - {field.name for field in dataclasses.fields(cls)}:
            raise ValueError(
                f"unknown configuration fields {_short(sorted(unknown))}; "
                "read it with the LinPix release that wrote it"
            )
        for name in ("look_ups", "first_marginal", "neighbours", "following", "palette"):
            if name in fields:
                if not isinstance(fields[name], list):
                    raise ValueError(f"{name} must be a list, got {_short(fields[name])}")
                fields[name] = tuple(
                    tuple(each) if isinstance(each, list) else each for each in fields[name]
                )
        return cls(**fields)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# Each neighbour of the local context has its own table. Neighbours need no recurrent state.
_LOCAL_CONTEXT: tuple[Neighbour, ...] = (
    (-1, 0, 0),
    (-1, 1, 0),
    (-1, -1, 0),
    (-2, 0, 0),
    (0, -2, 0),
    (-1, 2, 0),
    (-1, -2, 0),
    (-2, 1, 0),
    (-2, -1, 0),
    (-3, 0, 0),
)

# For colour: the left and upper pixels, in the predicted channel and in the channel before it. They
# help a linear predictor most.
_COLOUR_CONTEXT: tuple[Neighbour, ...] = (
    (0, 0, -1),
    *(
        (dy, dx, dc)
        for dy, dx in ((0, -1), (-1, 0), (-1, -1), (-1, 1), (0, -2), (-2, 0), (-2, -1))
        for dc in (0, -1)
    ),
)

# For tokens of a whole pixel: every channel of the eleven pixels that help a linear predictor most.
# The left pixel's blue is missing because it is the previous value.
_PIXEL_CONTEXT: tuple[Neighbour, ...] = (
    (0, -1, 0),
    (0, -1, 1),
    *(
        (dy, dx, dc)
        for dy, dx in (
            (0, -2),
            (0, -3),
            (-1, 0),
            (-1, 1),
            (-1, -1),
            (-1, -2),
            (-2, 0),
            (-2, 1),
            (-2, -1),
            (-3, 1),
        )
        for dc in range(3)
    ),
)

# Places after t that may be known: the edge of a hole. Places further away reach a token through
# the patches.
_SEAM: tuple[Neighbour, ...] = (
    (0, 1, 0),
    (0, 2, 0),
    (1, 0, 0),
    (1, -1, 0),
    (1, 1, 0),
    (1, -2, 0),
    (1, 2, 0),
    (2, 0, 0),
    (2, -1, 0),
    (2, 1, 0),
    (3, 0, 0),
)

# The same for pixels: those that improve a linear predictor by at least 0.02 bits/dim beyond the
# earlier ones.
_PIXEL_SEAM: tuple[Neighbour, ...] = tuple(
    (dy, dx, dc)
    for dy, dx in ((0, 1), (0, 2), (1, 0), (1, -1), (1, 1), (1, -2), (2, 0), (2, -1), (2, 1))
    for dc in range(3)
)

PRESETS: dict[str, ModelConfig] = {
    "mnist": ModelConfig(classes=10, norm="pre", neighbours=_LOCAL_CONTEXT),
    "cifar10": ModelConfig(
        height=32,
        width=32,
        channels=3,
        layers=16,
        classes=10,
        norm="pre",
        look_ups=("previous", "row", "column", "channel"),
    ),
    "mnist-small": ModelConfig(
        layers=4,
        heads=4,
        d_model=128,
        d_ff=512,
        classes=10,
        norm="post",
        look_ups=("previous", "row", "column"),
        neighbours=_LOCAL_CONTEXT,
    ),
    "mnist-conditional": ModelConfig(
        layers=4,
        heads=4,
        d_model=128,
        d_ff=512,
        classes=10,
        norm="post",
        look_ups=("previous", "row", "column", "class"),
        neighbours=_LOCAL_CONTEXT,
        following=_SEAM,
        patch=4,
        background=0,
    ),
    "mnist-large": ModelConfig(
        layers=8,
        heads=8,
        d_model=256,
        d_ff=1024,
        classes=10,
        norm="post",
        look_ups=("previous", "row", "column", "class"),
        neighbours=_LOCAL_CONTEXT,
        following=_SEAM,
        patch=4,
        background=0,
    ),
    # height, width and palette are those of the pictures that it is trained on
    "palette": ModelConfig(
        height=16,
        width=16,
        layers=4,
        heads=4,
        d_model=128,
        d_ff=512,
        head="categorical",
        classes=10,
        norm="post",
        look_ups=("previous", "row", "column", "class"),
        neighbours=_LOCAL_CONTEXT,
        following=_SEAM,
        patch=4,
        background=0,
        palette=((0, 0, 0, 0),),
    ),
    "cifar10-small": ModelConfig(
        height=32,
        width=32,
        channels=3,
        layers=4,
        heads=4,
        d_model=128,
        d_ff=512,
        classes=10,
        norm="post",
        look_ups=("previous", "row", "column", "channel"),
        neighbours=_COLOUR_CONTEXT,
    ),
    "cifar10-conditional": ModelConfig(
        height=32,
        width=32,
        channels=3,
        tokens="pixel",
        layers=4,
        heads=4,
        d_model=128,
        d_ff=512,
        classes=10,
        norm="post",
        look_ups=("previous", "row", "column", "class"),
        neighbours=_PIXEL_CONTEXT,
        following=_PIXEL_SEAM,
        patch=4,
    ),
    "cifar10-large": ModelConfig(
        height=32,
        width=32,
        channels=3,
        tokens="pixel",
        layers=8,
        heads=12,
        d_model=384,
        d_ff=1536,
        classes=10,
        norm="post",
        look_ups=("previous", "row", "column", "class"),
        neighbours=_PIXEL_CONTEXT,
        following=_PIXEL_SEAM,
        patch=4,
    ),
    "tiny": ModelConfig(
        height=8,
        width=8,
        layers=2,
        heads=2,
        key_dim=8,
        value_dim=8,
        d_model=16,
        d_ff=32,
        mixtures=3,
        classes=10,
        norm="pre",
        neighbours=_LOCAL_CONTEXT,
    ),
}


def bits_per_dim(nats: float, config: ModelConfig) -> float:
    """Convert the nats of one image, summed over its T sub-pixels, to bits per sub-pixel."""
    return nats / math.log(2) / config.subpixels
