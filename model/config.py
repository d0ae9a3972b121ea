"""The configuration of a model: one frozen dataclass, stored in the checkpoint's config.json, and
the presets.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from . import plugins

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
    attention: str = "linear"           # an AttentionKind, or one that a plugin registers
    feature_map: str = "elu+1"          # of queries and keys: a FeatureMap, or a plugin's
    random_features: int = 64           # of the feature map `random`
    lsh_rounds: int = 1                 # rounds of hashing in lsh attention
    lsh_buckets: int = 64               # buckets per round: 1, or an even number
    lsh_chunk: int = 30                 # sorted tokens that attend to each other and the last chunk
    eps: float = 1e-6                   # added to the normaliser in linear attention
    norm: Norm = "post"                 # as in the published reference; pre is for experiments only
    residual: ResidualKind = "plain"    # reversible (two streams) is for experiments only
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
        for check in _CHECKS:
            check(self)

    @property
    def packed(self) -> bool:
        """Whether only some sub-pixels of an image go through the layers, or patches do too."""
        return bool(self.patch) or self.background is not None

    @property
    def skipped_dim(self) -> int:
        """Features of the head for sub-pixels that skip the layers; 0 without such a head."""
        return 0 if self.background is None else self.background_dim

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
    def start(self) -> str:
        """Whether there is a start token, in words before one."""
        return "no" if self.first_marginal else "a"

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
        if self.feature_map not in get_args(FeatureMap):
            return plugins.features_of(self.feature_map, self.key_dim)
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
                _require(isinstance(fields[name], list), f"{name} must be a list", fields[name])
                fields[name] = _tuple(fields[name])
        return cls(**fields)


def _tuple(value: Any) -> Any:
    """Lists as tuples, those in them too."""
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _check_sizes(config: ModelConfig) -> None:
    _require(
        config.lsh_buckets == 1 or config.lsh_buckets % 2 == 0,
        "lsh_buckets must be 1 or an even number",
        config.lsh_buckets,
    )
    _require(
        config.channels in (1, 3),
        "channels must be 1 (grey) or 3 (red, green, blue)",
        config.channels,
    )


def _check_types(config: ModelConfig) -> None:
    for name, kind in get_type_hints(ModelConfig).items():
        value, known = getattr(config, name), get_args(kind)
        least = 0 if name == "classes" else 1
        if kind is int and name not in ("patch", "background_dim"):
            _require(
                type(value) is int and value >= least,
                f"{name} must be an integer of at least {least}",
                value,
            )
            _require(value <= MAX_SIZE, f"{name} must be at most {MAX_SIZE}", value)
        elif get_origin(kind) is Literal:
            _require(value in known, f"{name} must be one of {', '.join(known)}", value)
    _require(
        isinstance(config.eps, float) and 0 < config.eps < 1,
        "eps must be a number between 0 and 1",
        config.eps,
    )
    _require(type(config.twin_of) is str, "twin_of must be a name", config.twin_of)
    attentions, maps = get_args(AttentionKind), get_args(FeatureMap)
    if config.attention not in attentions:
        plugins.look_up("attention", config.attention, attentions)
    if config.feature_map not in maps:
        plugins.look_up("feature_map", config.feature_map, maps)


def _check_layers(config: ModelConfig) -> None:
    if config.residual == "reversible" and config.norm != "pre":
        raise ValueError(
            "reversible residuals need norm 'pre', because a LayerNorm after the sum cannot be "
            f"reversed; got norm {config.norm!r}"
        )
    count, dim = config.random_features, config.key_dim
    if config.feature_map == "random" and (count > MAX_RANDOM_FEATURES or dim > MAX_RANDOM_DIM):
        raise ValueError(
            f"feature_map random needs random_features of at most {MAX_RANDOM_FEATURES} and"
            f" key_dim of at most {MAX_RANDOM_DIM}, got {count} and {dim}"
        )


def _check_look_ups(config: ModelConfig) -> None:
    known, look_ups = get_args(LookUp), config.look_ups
    unknown = [name for name in look_ups if name not in known]
    if unknown or "previous" not in look_ups or len(set(look_ups)) != len(look_ups):
        raise ValueError(
            "look_ups must contain 'previous', and may also contain, once each, "
            f"{', '.join(known[1:])}; got {_short(list(look_ups))}"
        )
    if "class" in look_ups and not config.classes:
        raise ValueError("the look-up 'class' needs classes, got classes=0")


def _check_neighbours(config: ModelConfig) -> None:
    both = config.neighbours + config.following
    _require(
        len(both) <= MAX_NEIGHBOURS,
        f"neighbours and following may have up to {MAX_NEIGHBOURS} entries together",
        len(both),
    )
    for neighbour in both:
        _require(
            _are_integers(neighbour, 3),
            "a neighbour must be three integers (dy, dx, dc)",
            neighbour,
        )
        _require(
            max(map(abs, neighbour)) <= MAX_SIZE,
            f"a neighbour must be at most {MAX_SIZE} away",
            neighbour,
        )
    for neighbour in config.neighbours:
        if config.offset(neighbour) >= 0 or neighbour >= (0, 0, 0):
            raise ValueError(f"neighbour {neighbour} is not strictly earlier in raster order")
    for neighbour in config.following:
        if config.offset(neighbour) <= 0 or neighbour <= (0, 0, 0):
            raise ValueError(
                f"following neighbour {neighbour} is not strictly later in raster order"
            )
    places = config.subpixels * (1 + len(both))
    _require(
        places <= MAX_LOOKED_UP,
        f"height * width * channels * (1 + {len(both)} neighbours) must be at most {MAX_LOOKED_UP}",
        places,
    )


def _are_integers(value: Any, count: int) -> bool:
    """Whether value is a tuple of so many integers; True and False are not integers."""
    if not isinstance(value, tuple) or len(value) != count:
        return False
    return all(type(part) is int for part in value)


def _check_pixels(config: ModelConfig) -> None:
    """Check that the fields go with tokens of a whole pixel."""
    if config.tokens != "pixel":
        return
    if (
        config.channels != 3
        or config.background is not None
        or config.first_marginal
        or "channel" in config.look_ups
    ):
        raise ValueError(
            "tokens 'pixel' need 3 channels, background null, a start token and no look-up"
            f" 'channel'; got channels={config.channels}, background={config.background},"
            f" {config.start} start token, look_ups {list(config.look_ups)}"
        )
    for neighbour in config.neighbours + config.following:
        if neighbour[:2] == (0, 0) or neighbour[2] not in range(config.channels):
            raise ValueError(
                "with tokens 'pixel', a neighbour must be a channel (dc 0..2) of another"
                f" pixel; got {neighbour}"
            )


def _check_head(config: ModelConfig) -> None:
    if config.palette:
        _check_palette(config)
    if config.head == "categorical" and (config.channels != 1 or config.first_marginal):
        raise ValueError(
            "a categorical head needs 1 channel and a start token; got "
            f"channels={config.channels} and {config.start} start token"
        )


def _check_palette(config: ModelConfig) -> None:
    colours = config.palette
    if config.channels != 1 or config.head != "categorical" or len(colours) > 256:
        raise ValueError(
            "a palette needs 1 channel, a categorical head and at most 256 colours; got"
            f" channels={config.channels}, head={config.head} and {len(colours)} colours"
        )
    if config.ground:
        raise ValueError(
            "with a palette, background must be 0, its first colour, or null; got"
            f" {config.background}"
        )
    for index, colour in enumerate(colours):
        alphas = (255,) if index else (0, 255)
        in_range = _are_integers(colour, 4) and 0 <= min(colour) <= max(colour) <= 255
        if not in_range or colour[3] not in alphas:
            raise ValueError(
                "a colour of the palette must be four integers 0..255, red, green, blue and an"
                " alpha of 255, or for the first colour of 0, which makes the background"
                f" transparent; colour {index} is {_short(colour)}"
            )


def _check_patch(config: ModelConfig) -> None:
    side = config.patch
    if (
        type(side) is not int
        or side < 0
        or (side and (config.height % side or config.width % side))
    ):
        raise ValueError(
            f"patch must divide height {config.height} and width {config.width}, or be 0; "
            f"got {_short(side)}"
        )
    if config.following and not side:
        raise ValueError(
            "following neighbours are known only in conditional models: give a patch, or leave "
            "following out"
        )


def _check_background(config: ModelConfig) -> None:
    value, dim = config.background, config.background_dim
    _require(
        value is None or (type(value) is int and 0 <= value <= 255),
        "background must be a value 0..255, or null",
        value,
    )
    _require(
        type(dim) is int and 1 <= dim <= MAX_BACKGROUND_DIM,
        f"background_dim must be an integer of 1..{MAX_BACKGROUND_DIM}",
        dim,
    )


def _check_packed(config: ModelConfig) -> None:
    if not config.packed:
        return
    if config.attention != "linear" or config.residual != "plain" or config.first_marginal:
        raise ValueError(
            "patch and background need linear attention, plain residuals and a start token;"
            f" got {config.attention}, {config.residual} and {config.start} start token; another"
            " kind of attention needs a preset without them, such as mnist-small"
        )


def _check_marginal(config: ModelConfig) -> None:
    shares = config.first_marginal
    if not shares:
        return
    expected = "first_marginal must hold 256 probabilities that sum to 1"
    for share in shares:
        _require(type(share) in (int, float) and not abs(share) > 256, expected, shares)
    least, total = min(shares), sum(shares)
    if len(shares) != 256 or least < 0 or not abs(total - 1) <= 1e-6:
        raise ValueError(f"{expected}, got {len(shares)}, least {least}, that sum to {total:.6f}")
    if config.classes:
        raise ValueError(
            "a model without a start token (first_marginal) cannot have classes, "
            f"got classes={config.classes}"
        )


# in this order: later ones rely on earlier ones
_CHECKS = (
    _check_types,
    _check_sizes,
    _check_layers,
    _check_look_ups,
    _check_neighbours,
    _check_pixels,
    _check_head,
    _check_patch,
    _check_background,
    _check_packed,
    _check_marginal,
)


def _require(right: bool, expected: str, got: object) -> None:
    if not right:
        raise ValueError(f"{expected}, got {_short(got)}")


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


def _each_channel(
    *places: tuple[int, int], channels: tuple[int, ...] = (0, 1, 2)
) -> tuple[Neighbour, ...]:
    """The neighbours at these places (dy, dx), in each of these channels."""
    neighbours = []
    for dy, dx in places:
        neighbours += [(dy, dx, dc) for dc in channels]
    return tuple(neighbours)


# For colour: the left and upper pixels, in the predicted channel and in the channel before it. They
# help a linear predictor most.
_COLOUR_CONTEXT: tuple[Neighbour, ...] = (
    (0, 0, -1),
    *_each_channel(
        (0, -1), (-1, 0), (-1, -1), (-1, 1), (0, -2), (-2, 0), (-2, -1), channels=(0, -1)
    ),
)

# For tokens of a whole pixel: every channel of the eleven pixels that help a linear predictor most.
# The left pixel's blue is missing because it is the previous value.
_PIXEL_CONTEXT: tuple[Neighbour, ...] = (
    (0, -1, 0),
    (0, -1, 1),
    *_each_channel(
        (0, -2), (0, -3), (-1, 0), (-1, 1), (-1, -1), (-1, -2), (-2, 0), (-2, 1), (-2, -1), (-3, 1)
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
_PIXEL_SEAM = _each_channel(
    (0, 1), (0, 2), (1, 0), (1, -1), (1, 1), (1, -2), (2, 0), (2, -1), (2, 1)
)

_SMALL = ModelConfig(
    layers=4,
    heads=4,
    d_model=128,
    d_ff=512,
    classes=10,
    look_ups=("previous", "row", "column"),
    neighbours=_LOCAL_CONTEXT,
)
_CONDITIONAL = replace(
    _SMALL,
    look_ups=("previous", "row", "column", "class"),
    following=_SEAM,
    patch=4,
    background=0,
)
_COLOUR = replace(
    _SMALL,
    height=32,
    width=32,
    channels=3,
    look_ups=("previous", "row", "column", "channel"),
    neighbours=_COLOUR_CONTEXT,
)
_PIXELS = replace(
    _COLOUR,
    tokens="pixel",
    look_ups=_CONDITIONAL.look_ups,
    neighbours=_PIXEL_CONTEXT,
    following=_PIXEL_SEAM,
    patch=4,
)
PRESETS: dict[str, ModelConfig] = {
    "mnist": ModelConfig(classes=10, norm="pre", neighbours=_LOCAL_CONTEXT),
    "cifar10": replace(
        _COLOUR, layers=16, heads=8, d_model=256, d_ff=1024, norm="pre", neighbours=()
    ),
    "mnist-small": _SMALL,
    "mnist-conditional": _CONDITIONAL,
    "mnist-large": replace(_CONDITIONAL, layers=8, heads=8, d_model=256, d_ff=1024),
    # height, width and palette are those of the pictures that it is trained on
    "palette": replace(
        _CONDITIONAL, height=16, width=16, head="categorical", palette=((0, 0, 0, 0),)
    ),
    "cifar10-small": _COLOUR,
    "cifar10-conditional": _PIXELS,
    "cifar10-large": replace(_PIXELS, layers=8, heads=12, d_model=384, d_ff=1536),
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
