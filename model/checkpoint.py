"""Checkpoint folders: model.safetensors (or shards), config.json, README.md, SHA256SUMS.

A folder is written under a temporary name and then renamed. Reading is strict. Pickle is not used.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .attempts import MAX_ATTEMPTS
from .attention import attention_for
from .config import ModelConfig
from .heads import log_likelihood
from .pieces import torn, visible, whole
from .transformer import Transformer

FORMAT_VERSION = 1
SHARD_BYTES = 16 * 2**20  # hosts of git repositories warn about larger files
# the default model, the first of these that exists
_FIRST = ("mnist", "mnist-conditional", "mnist-small")
TEMPERATURE_RANGE = (0.5, 1.2)  # for a checkpoint that names none
MAX_TEMPERATURE = 10.0  # highest temperature that a request may ask for
# an image is almost blank if it has less than this part of the full ink that real ones have on
# average; no training image of MNIST has less than twice as much
BLANK = 0.25
# most bytes of config.json, SHA256SUMS, and any other listed file without tensors
LARGEST_TEXT = 2**20
# Tensors that are saved in float32 always. Rounded to bf16 they move means by up to half a grey
# level, which cost 0.07 bits/dim of a model that knows many values exactly, as those of MNIST can
# be known.
_EXACT = ("head.", "norm.")
# half of a surrogate pair, which JSON and names of files may hold: no UTF-8, and so no answer, can
HALF_A_PAIR = re.compile("[\ud800-\udfff]")
# what keyboards write for an apostrophe and a hyphen
_APOSTROPHES = "\u2018\u2019\u02bc\u02b9\u2032\uff07`\u00b4"
_TYPED = dict.fromkeys(map(ord, _APOSTROPHES), "'") | {0x2010: "-", 0x2011: "-"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be used as it is; the message names the file or tensor and
    the remedy.
    """


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A transformer and its provenance."""

    name: str
    net: Transformer  # float32, in evaluation mode
    # data, images, steps, minutes, seed, commit, command, bits_per_dim, ...
    provenance: dict[str, Any]
    digest: str  # SHA-256 of SHA256SUMS, which covers every file listed there
    class_names: tuple[str, ...]
    folder: Path = Path()  # where it was read from
    # ground, ink and prepare: what a drawing board needs to know
    board: dict[str, Any] = field(default_factory=dict)

    @property
    def temperature(self) -> float:
        """The temperature for requests that give none: the one that draws the best images."""
        return float(self.provenance.get("temperature", 1.0))

    @property
    def temperature_range(self) -> tuple[float, float]:
        """The lowest and the highest temperature at which the images are still useful."""
        low, high = self.provenance.get("temperature_range") or TEMPERATURE_RANGE
        return float(low), float(high)

    def temperature_warnings(self, temperature: float) -> list[str]:
        """A warning if images at this temperature are not useful, else none. 0 is another way of
        drawing.
        """
        low, high = self.temperature_range
        if not temperature or low <= temperature <= high:
            return []
        return [
            f"{self.name} draws well at temperatures from {low:g} to {high:g}, got {temperature:g}"
        ]

    @property
    def attempts(self) -> int:
        """Most attempts at an image for requests that do not say."""
        return int(self.provenance.get("attempts", 1))

    def torn(
        self, images: NDArray[np.uint8], known: NDArray[np.bool_], labels: Sequence[int | None]
    ) -> list[bool]:
        """Whether images, (B, T), are in more pieces than they must be, and real ones of a class
        hardly ever are; or almost blank.
        """
        shape, ground = (-1, *self.net.config.image_shape[:2]), self.board.get("ground")
        look = self.provenance.get("real_look")
        if not ground or not look:
            return [False] * len(labels)
        pictures = images.reshape(shape)
        several = torn(pictures, ground[0], known.reshape(shape))
        blank = visible(pictures, ground[0]).sum((1, 2)) < BLANK * look.get("full_ink", 0)
        return [
            bool(empty) or (bool(one) and whole(look, label))
            for one, empty, label in zip(several, blank, labels, strict=True)
        ]

    @property
    def limits(self) -> str | None:
        """One sentence about what the model cannot do."""
        return self.provenance.get("limits")

    @property
    def class_agreement(self) -> float | None:
        """Share of images drawn for a class that a classifier assigns to that class; None if not
        measured.
        """
        return self.provenance.get("class_agreement")

    def class_of(self, text: str) -> int | None:
        """The class that a text names, by name (exactly, or else as folded) or index; None if it
        names none.
        """
        for form in (str.strip, folded):
            names, wanted = [form(name) for name in self.class_names], form(text)
            if wanted in names:
                return names.index(wanted)
        return int(wanted) if wanted in map(str, range(len(names))) else None


def folded(text: str, *, cased: bool = False) -> str:
    """A name as it is compared: without case and, as in Turkish capitals, with or without the dot
    of an i, unless cased; with any apostrophe, hyphen or space, and an accent in its letter or
    after it.
    """
    plain = unicodedata.normalize("NFD", " ".join(text.split())).translate(_TYPED)
    if not cased:
        plain = plain.casefold().replace("i\u0307", "i").replace("\u0131", "i")
    return unicodedata.normalize("NFC", plain)


def load(folder: Path | str) -> Transformer:
    """The transformer of a checkpoint folder, float32, in evaluation mode. Raises
    CheckpointError.
    """
    return read(Path(folder)).net


def read(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint folder. Raises CheckpointError with the problem and the
    remedy.
    """
    digest, files = _verified(folder)
    config, provenance, class_names = _description(folder, files["config.json"])
    tensors: dict[str, Tensor] = {}
    for name in sorted(files):
        if name.endswith(".safetensors"):
            try:
                shard = safetensors.torch.load(files[name])
            # of dtypes it cannot make
            except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"{folder / name} is not a safetensors file ({error}); "
                    "restore it from where the checkpoint came from"
                ) from error
            if twice := shard.keys() & tensors.keys():
                raise CheckpointError(
                    f"{folder / name} has tensor {_listed(twice)} twice; restore the folder from "
                    "where the checkpoint came from"
                )
            tensors |= shard
    _check_tensors(folder, _shapes(folder, config, tensors), tensors)
    net = Transformer(config)
    net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    net = net.eval().requires_grad_(False)
    board = provenance.get("board") or board_of(net, provenance.get("data"))
    return Checkpoint(
        name_of(folder), net, provenance, digest, class_names, Path(os.path.abspath(folder)), board
    )


def board_of(net: Transformer, data: object = None) -> dict[str, Any]:
    """The board of a checkpoint that states none: by its background or data, else by its most
    probable first value.
    """
    config = net.config
    if config.palette:  # in colours
        colours = [[*colour[:3]] for colour in config.palette]
        ink = colours[1] if len(colours) > 1 else None
        return {"ground": colours[0], "ink": ink, "prepare": None}
    if config.channels != 1:
        return {"ground": None, "ink": None, "prepare": None}
    if config.background is not None or data == "mnist":
        ground = config.ground
    elif config.first_marginal:
        ground = max(range(256), key=config.first_marginal.__getitem__)
    else:
        start = 0 if config.class_first else None
        parameters = net.parameters_of(torch.zeros(1, config.subpixels, dtype=torch.uint8), start)[
            :, :1
        ]
        values = torch.arange(256)[:, None]
        ground = int(log_likelihood(config, parameters.expand(256, -1, -1), values).argmax())
    return {
        "ground": [ground],
        "ink": [0 if ground > 127 else 255],
        "prepare": "mnist" if data == "mnist" else None,
    }


def digest_of(folder: Path) -> str:
    """The digest that `read` would give. Verifies every file but parses no tensor. Raises
    CheckpointError.
    """
    return _verified(folder)[0]


def config_of(folder: Path) -> ModelConfig:
    """The architecture in config.json. No other file is read or verified. Raises
    CheckpointError.
    """
    try:
        return _description(folder, _bytes(folder / "config.json"))[0]
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} cannot be read ({error}); "
            "restore it from where the checkpoint came from"
        ) from error


def unfinished(folder: Path) -> list[Path]:
    """The folders that a save in progress, or an interrupted one, has beside this folder."""
    return [path for path in _beside(folder) if path.is_dir()]


def _description(
    folder: Path, config_json: bytes
) -> tuple[ModelConfig, dict[str, Any], tuple[str, ...]]:
    """Architecture, provenance and class names."""
    try:
        fields = _fields(config_json.decode())
        if fields.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"format_version must be {FORMAT_VERSION}, got"
                f" {fields.get('format_version')!r:.80}; read it with the LinPix release that"
                " wrote it"
            )
        config = ModelConfig.from_json(fields["architecture"])
        provenance = _checked(fields["provenance"], config)
        return (
            config,
            provenance,
            tuple(map(str, provenance.get("class_names") or range(config.classes))),
        )
    except KeyError as error:
        raise CheckpointError(
            f"{folder / 'config.json'} lacks {error}; "
            "restore it from where the checkpoint came from"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def _verified(folder: Path) -> tuple[str, dict[str, bytes]]:
    """The digest, and the content of every file in SHA256SUMS, so that the verified bytes are the
    ones used.
    """
    if not folder.is_dir():
        left = [str(path) for path in unfinished(folder)]
        cure = (
            f"; an interrupted save left {' and '.join(left)}: rename the first of these that loads"
            if left
            else ""
        )
        raise CheckpointError(f"{folder} is not a checkpoint folder: no such directory{cure}")
    try:
        listing = _bytes(folder / "SHA256SUMS")
        sums = {
            name: digest
            for digest, name in (line.split("  ", 1) for line in listing.decode().splitlines())
        }
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'SHA256SUMS'} is missing or unreadable ({error}); "
            "restore it from where the checkpoint came from"
        ) from error
    for name in ("config.json", "*.safetensors"):
        if not any(Path(listed).match(name) for listed in sums):
            raise CheckpointError(
                f"{folder / 'SHA256SUMS'} lists no {name}; it lists {_listed(sums) or 'nothing'}"
            )
    files: dict[str, bytes] = {}
    for name, expected in sums.items():
        if Path(name).name != name:
            raise CheckpointError(
                f"{folder / 'SHA256SUMS'} lists {name!r:.400}, which is not a file name"
            )
        try:
            files[name] = _bytes(folder / name)
        except (OSError, ValueError) as error:  # ValueError also for a NUL in the name
            raise CheckpointError(
                f"{folder / _listed([name])} is listed in SHA256SUMS but cannot be read ({error}); "
                "restore it from where the checkpoint came from"
            ) from error
        if (got := hashlib.sha256(files[name]).hexdigest()) != expected:
            raise CheckpointError(
                f"{folder / name} has SHA-256 {got[:16]}..., but SHA256SUMS says "
                f"{expected[:16]}...; restore it from where the checkpoint came from"
            )
    return hashlib.sha256(listing).hexdigest(), files


def _bytes(path: Path) -> bytes:
    """Read a file. Raises OSError, or ValueError for pipes and devices, which may not end, and for
    too long texts.
    """
    if path.exists() and not path.is_file():
        raise ValueError("is not a regular file")
    if path.suffix != ".safetensors" and (size := path.stat().st_size) > LARGEST_TEXT:
        raise ValueError(f"is longer than {LARGEST_TEXT:,} bytes: {size:,}")
    return path.read_bytes()


def _fields(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError, also for what json.loads accepts: duplicate names, NaN,
    infinity and halves of surrogate pairs.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        ]:
            raise ValueError(f"{_listed(twice)} is given twice")
        return dict(pairs)

    def refuse(number: str) -> None:
        raise ValueError(f"contains {number}, which is not a JSON number")

    fields = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    if not isinstance(fields, dict):
        raise ValueError(f"must be a JSON object, got {type(fields).__name__}")
    whole = json.dumps(fields, ensure_ascii=False)
    if half := HALF_A_PAIR.search(whole):
        before = whole[max(0, half.start() - 40) : half.end()]
        raise ValueError(
            f"contains half a surrogate pair, which is not text and cannot be sent, at the end of"
            f" {before!a}; write the whole character"
        )
    return fields


def _checked(provenance: Any, config: ModelConfig) -> dict[str, Any]:
    """Raise ValueError unless the fields that other code uses, or sends to clients, have the
    expected types.
    """
    if not isinstance(provenance, dict):
        raise ValueError(f"provenance must be a JSON object, got {provenance!r:.80}")
    names = provenance.get("class_names") or []
    if (
        not isinstance(names, list)
        or len(names) > config.classes
        or not all(isinstance(name, str) for name in names)
    ):
        raise ValueError(
            f"class_names must list at most {config.classes} names (the model has {config.classes} "
            "classes), "
            f"got {names!r:.80}"
        )
    bits = provenance.get("bits_per_dim") or {}
    if not isinstance(bits, dict) or not all(
        len(name) <= 40 and _is_quantity(bits[name]) for name in bits
    ):
        raise ValueError(f"bits_per_dim must map short names to numbers, got {bits!r:.80}")
    _check_drawing(provenance, config)
    for name in ("created", "images", "steps", "minutes"):
        if not _is_quantity(provenance.get(name, 0)):
            raise ValueError(f"{name} must be a number of at least 0, got {provenance[name]!r:.80}")
    return dict(provenance)


def _check_drawing(provenance: dict[str, Any], config: ModelConfig) -> None:
    """Check the fields about drawing, all of which may be absent. Raises ValueError."""
    temperature = provenance.get("temperature", 1.0)
    bounds = provenance.get("temperature_range") or list(TEMPERATURE_RANGE)
    share, limits = provenance.get("class_agreement"), provenance.get("limits")
    if not (
        isinstance(bounds, list)
        and len(bounds) == 2
        and all(map(_is_temperature, bounds))
        and bounds[0] <= bounds[1]
    ):
        raise ValueError(
            f"temperature_range must be two numbers from 0 to {MAX_TEMPERATURE:g}, the lower first,"
            f" got {bounds!r:.80}"
        )
    if not _is_temperature(temperature):
        raise ValueError(
            f"temperature must be a number from 0 to {MAX_TEMPERATURE:g}, got {temperature!r:.80}"
        )
    attempts = provenance.get("attempts", 1)
    if type(attempts) is not int or not 1 <= attempts <= (
        MAX_ATTEMPTS if config.class_first else 1
    ):
        raise ValueError(
            f"attempts must be 1, or up to {MAX_ATTEMPTS} for a model that draws the class first,"
            f" got {attempts!r:.80}"
        )
    if share is not None and not (_is_quantity(share) and share <= 1):
        raise ValueError(f"class_agreement must be a share from 0 to 1, got {share!r:.80}")
    look = provenance.get("real_look")
    if look is not None and not (
        isinstance(look, dict)
        and _is_quantity(look.get("pieces"))
        and _is_quantity(look.get("full_ink", 0))
        and config.grey
    ):
        raise ValueError(
            "real_look must have pieces, the share of real pictures that are in several, and may"
            " have full_ink, a mean number of pixels; only a model of one channel can have it; got"
            f" {look!r:.80}"
        )
    divided = (look or {}).get("divided", [])
    if not (
        isinstance(divided, list)
        and all(type(each) is int and 0 <= each < config.classes for each in divided)
    ):
        raise ValueError(
            f"divided of real_look must be a list of classes by index, got {divided!r:.80}"
        )
    parts = 1 if config.grey else 3
    if (board := provenance.get("board")) and not _is_board(board, parts):
        raise ValueError(
            f"board must have ground and ink, each null or {parts} values 0..255, and"
            f" prepare, null or mnist; got {board!r:.80}"
        )
    if limits is not None and not (
        isinstance(limits, str) and limits.isprintable() and len(limits) <= 200
    ):
        raise ValueError(f"limits must be a sentence of at most 200 characters, got {limits!r:.80}")


def _is_board(board: object, channels: int) -> bool:
    return (
        isinstance(board, dict)
        and board.keys() == {"ground", "ink", "prepare"}
        and board["prepare"] in (None, "mnist")
        and all(
            value is None
            or (
                isinstance(value, list)
                and len(value) == channels
                and all(type(one) is int and 0 <= one <= 255 for one in value)
            )
            for value in (board["ground"], board["ink"])
        )
    )


def _is_temperature(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value <= MAX_TEMPERATURE
    )


def _is_quantity(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < 2**63


def _listed(names: Iterable[str]) -> str:
    """Names for one line of a message: control characters are escaped, and at most 400 characters
    are kept.
    """
    text = ", ".join(name if name.isprintable() else ascii(name) for name in sorted(names))
    return text if len(text) <= 400 else text[:397] + "..."


class _WithoutValues(TorchFunctionMode):
    """Skips the initialization of weights, which on "meta" would import torch's compiler and take a
    second.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _shapes(folder: Path, config: ModelConfig, got: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Shapes of all tensors that the configuration asks for, found without allocating them."""
    if config.layers > len(got):
        raise CheckpointError(
            f"{folder / 'config.json'} needs {config.layers} layers, but the checkpoint has "
            f"{len(got)} tensors; config.json and the tensors belong to different models"
        )
    try:
        with torch.device("meta"), _WithoutValues():
            return {name: tensor.shape for name, tensor in Transformer(config).state_dict().items()}
    except (RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} describes tensors too large for any memory; restore it from "
            "where the checkpoint came from"
        ) from error


def _check_tensors(
    folder: Path, expected: Mapping[str, torch.Size], got: dict[str, Tensor]
) -> None:
    for problem, names in (
        ("lacks", expected.keys() - got.keys()),
        ("has the unknown", got.keys() - expected.keys()),
    ):
        if names:
            raise CheckpointError(
                f"{folder} {problem} tensor {_listed(names)}; "
                "config.json and the tensors belong to different models"
            )
    for name, shape in expected.items():
        if got[name].shape != shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {tuple(got[name].shape)}, but config.json needs"
                f" {tuple(shape)}"
            )
        if got[name].dtype not in _DTYPES:
            raise CheckpointError(
                f"{folder}: tensor {name} holds values of {got[name].dtype}; expected one of "
                f"{', '.join(map(str, _DTYPES))}"
            )
        if not bool(got[name].float().isfinite().all()):
            raise CheckpointError(
                f"{folder}: tensor {name} holds values that are not finite numbers in float32"
            )


def rounded(net: Transformer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a network in the precision in which they are saved; see _EXACT."""
    return {
        name: tensor.detach().to(torch.float32 if name.startswith(_EXACT) else dtype).contiguous()
        for name, tensor in net.state_dict().items()
    }


def save(
    folder: Path,
    net: Transformer,
    provenance: dict[str, Any],
    card: str,
    dtype: torch.dtype = torch.float32,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint folder. An existing folder of that name is replaced as a whole.

    card: the model card, Markdown · dtype: of all tensors but those of _EXACT · files: contents of
    additional files, by name.
    """
    with _replacing(folder) as new:
        new.mkdir(parents=True)
        for name, shard in _shards(rounded(net, dtype)).items():
            (new / name).write_bytes(_with_metadata(safetensors.torch.save(shard), net.config))
        fields = {
            "format_version": FORMAT_VERSION,
            "architecture": net.config.to_json(),
            "provenance": provenance,
        }
        (new / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        sums = [
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
            for path in sorted(new.iterdir())
        ]
        (new / "SHA256SUMS").write_text("\n".join(sums) + "\n")
        (new / "README.md").write_bytes(card.encode("utf-8", "backslashreplace"))
        for name, content in (files or {}).items():
            (new / name).write_bytes(content)


def _with_metadata(file: bytes, config: ModelConfig) -> bytes:
    """A safetensors file with metadata for programs that see this file alone. safetensors would
    write them in random order, and the digest of equal checkpoints would differ.
    """
    end = 8 + int.from_bytes(file[:8], "little")
    size = f"{config.width}x{config.height}x{config.channels}"
    metadata = {
        "format": "pt",
        "model": f"LinPix {FORMAT_VERSION}, {size}, {config.attention} attention",
        "digest": f"sha256:{hashlib.sha256(file[end:]).hexdigest()}",  # of the tensors' bytes
    }
    header = json.dumps({"__metadata__": metadata} | json.loads(file[8:end])).encode()
    header += b" " * (-len(header) % 8)  # the tensors stay aligned
    return len(header).to_bytes(8, "little") + header + file[end:]


def describe(folder: Path, facts: Mapping[str, Any], card: Callable[[str], str] = str) -> None:
    """Add facts to the provenance of a checkpoint folder, or replace them. The tensors do not
    change.

    card: maps the old model card to the new one. Raises CheckpointError if the folder does not
    load, or would not load after the change.
    """
    _, files = _verified(folder)
    fields = _fields(files["config.json"].decode())
    fields["provenance"] |= facts
    text = (json.dumps(fields, indent=2) + "\n").encode()
    _description(folder, text)
    with _replacing(folder) as new:
        shutil.copytree(folder, new)
        (new / "config.json").write_bytes(text)
        sums = [
            f"{hashlib.sha256((new / name).read_bytes()).hexdigest()}  {name}" for name in files
        ]
        (new / "SHA256SUMS").write_text("\n".join(sums) + "\n")
        if (readme := new / "README.md").exists():
            readme.write_bytes(card(readme.read_text("utf-8")).encode("utf-8", "backslashreplace"))


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder, to be made in the block, which then replaces `folder`; after an error, as of a
    full disk, it is removed.
    """
    new, old = _beside(folder)
    # an earlier save was interrupted between its two renames
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(new, ignore_errors=True)
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    for path in new.iterdir():
        # whatever the umask is: a service may run as another user
        path.chmod(0o644)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    """Temporary places: of the new folder until it is complete, and of the old one until the new
    one is renamed.
    """
    return folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")


def _shards(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """File names and their tensors, in order; each file has at most SHARD_BYTES unless one tensor
    alone has more.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {
        f"model-{index:05}-of-{len(shards):05}.safetensors": shard
        for index, shard in enumerate(shards, 1)
    }


def root(checkpoints: Path | None) -> Path:
    """The folder in which names are looked up: the given one, else checkpoints/ of the checkout."""
    if checkpoints is None:
        checkpoints = Path(__file__).resolve().parent.parent / "checkpoints"
        if not checkpoints.is_dir():
            raise CheckpointError(
                "this LinPix is installed without its source tree, so it has no checkpoints of its "
                "own; give their folder with --checkpoints DIR"
            )
    if not checkpoints.is_dir():
        raise CheckpointError(
            f"{checkpoints} is not a folder; give the folder of checkpoints as --checkpoints"
        )
    return checkpoints


def name_of(folder: Path) -> str:
    """The last part of a folder's path. A link is not followed, since its target may change."""
    return Path(os.path.abspath(folder)).name


def folders(root: Path) -> list[Path]:
    """The checkpoint folders under root: the default model's first, all others sorted by name.

    Folders that a save or a training run keeps beside them are left out, as are folders that this
    process may not enter, such as a volume's lost+found.
    """
    found = sorted(
        path
        for path in root.iterdir()
        if os.path.isfile(path / "config.json") and path.suffix not in (".new", ".old", ".training")
    )
    return sorted(found, key=lambda path: _FIRST.index(path.name) if path.name in _FIRST else 9)


def find(name: str | Path | None, checkpoints: Path | None = None) -> Path:
    """The folder of MODEL: a name under checkpoints, or a folder; None: of the default model.
    Raises CheckpointError, listing the names.
    """
    if name is None:
        found = folders(root(checkpoints))
        drawing = (path for path in found if attention_for(config_of(path)).steps_as)
        if (first := next(drawing, None)) is None:
            raise CheckpointError(
                f"{root(checkpoints)} holds no checkpoint that draws images; give another folder"
                " with --checkpoints, or train a model with linpix train"
            )
        return first
    if not isinstance(name, str | Path):
        raise CheckpointError(
            f"model must be a name or a folder, and comes first; got a {type(name).__name__}"
        )
    name = str(name)
    if "/" in name or name in (".", ".."):
        if not Path(name).is_dir():
            raise CheckpointError(f"there is no checkpoint folder {name}")
        return Path(name)
    if Path(name).is_dir() and (Path(name) / "SHA256SUMS").exists():
        return Path(name)
    at = root(checkpoints)
    if not name or not (at / name).is_dir():
        there = ", ".join(path.name for path in folders(at)) or "none"
        raise CheckpointError(
            f"there is no model {name!r} in {at}, which has: {there}. Give one of these names, or a"
            " checkpoint folder"
        )
    return at / name


def commit() -> str:
    """The commit of this code, for provenance; "unknown" outside a checkout."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=5
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
