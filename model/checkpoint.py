"""Checkpoint folders: model.safetensors (or shards), config.json, README.md, SHA256SUMS.

A folder is written under a temporary name and then renamed. Reading is strict. Pickle is not used.
"""

import hashlib
import json
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from .config import ModelConfig
from .folders import find, name_of, replacing, unfinished
from .heads import log_likelihood
from .nets import net_for
from .pieces import torn, visible, whole
from .provenance import (
    FORMAT_VERSION,
    TEMPERATURE_RANGE,
    CheckpointError,
    content_of,
    description_of,
    fields_of,
    listed,
)
from .transformer import Transformer

SHARD_BYTES = 16 * 2**20  # hosts of git repositories warn about larger files
# an image is almost blank if it has less than this part of the full ink that real ones have on
# average; no training image of MNIST has less than twice as much
BLANK = 0.25
# Tensors that are saved in float32 always. Rounded to bf16 they move means by up to half a grey
# level, which cost 0.07 bits/dim of a model that knows many values exactly, as those of MNIST can
# be known.
_EXACT = ("head.", "norm.")
# what keyboards write for an apostrophe and a hyphen
_APOSTROPHES = "\u2018\u2019\u02bc\u02b9\u2032\uff07`\u00b4"
_TYPED = dict.fromkeys(map(ord, _APOSTROPHES), "'") | {0x2010: "-", 0x2011: "-"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
        """A warning if images at this temperature are not useful, else none."""
        low, high = self.temperature_range
        if low <= temperature <= high:
            return []
        return [
            f"{self.name} draws well at temperatures from {low:g} to {high:g}, got {temperature:g}"
        ]

    @property
    def attempts(self) -> int:
        """Most attempts at an image for requests that do not say."""
        return int(self.provenance.get("attempts", 1))

    @property
    def recognised(self) -> float:
        """Least probability of its class at which an image is recognised: lower than RECOGNISED if
        real pictures show several classes at once; 0: RECOGNISED.
        """
        return float(self.provenance.get("recognised", 0))

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


def named(name: str | Path | None, checkpoints: str | Path | None = None) -> Checkpoint:
    """Read the checkpoint of MODEL, as find in folders.py finds it. Raises CheckpointError."""
    return read(find(name, checkpoints))


def read(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint folder. Raises CheckpointError with the problem and the
    remedy.
    """
    digest, files = _verified(folder)
    config, provenance, class_names = description_of(folder, files["config.json"])
    tensors = _tensors_of(folder, files)
    _check_tensors(folder, _shapes(folder, config, tensors), tensors)
    net = net_for(config)
    net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    net = net.eval().requires_grad_(False)
    board = provenance.get("board") or board_of(net, provenance.get("data"))
    return Checkpoint(
        name_of(folder), net, provenance, digest, class_names, Path(os.path.abspath(folder)), board
    )


def _tensors_of(folder: Path, files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """The tensors of all shards, by name."""
    tensors: dict[str, Tensor] = {}
    for name in sorted(files):
        if not name.endswith(".safetensors"):
            continue
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
                f"{folder / name} has tensor {listed(twice)} twice; restore the folder from "
                "where the checkpoint came from"
            )
        tensors |= shard
    return tensors


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
    black_or_white, prepare = 0 if ground > 127 else 255, "mnist" if data == "mnist" else None
    return {"ground": [ground], "ink": [black_or_white], "prepare": prepare}


def digest_of(folder: Path) -> str:
    """The digest that `read` would give. Verifies every file but parses no tensor. Raises
    CheckpointError.
    """
    return _verified(folder)[0]


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
        listing = content_of(folder / "SHA256SUMS")
        sums = {}
        for line in listing.decode().splitlines():
            digest, name = line.split("  ", 1)
            sums[name] = digest
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'SHA256SUMS'} is missing or unreadable ({error}); "
            "restore it from where the checkpoint came from"
        ) from error
    for name in ("config.json", "*.safetensors"):
        if not any(Path(each).match(name) for each in sums):
            raise CheckpointError(
                f"{folder / 'SHA256SUMS'} lists no {name}; it lists {listed(sums) or 'nothing'}"
            )
    files: dict[str, bytes] = {}
    for name, expected in sums.items():
        if Path(name).name != name:
            raise CheckpointError(
                f"{folder / 'SHA256SUMS'} lists {name!r:.400}, which is not a file name"
            )
        try:
            files[name] = content_of(folder / name)
        except (OSError, ValueError) as error:  # ValueError also for a NUL in the name
            raise CheckpointError(
                f"{folder / listed([name])} is listed in SHA256SUMS but cannot be read ({error}); "
                "restore it from where the checkpoint came from"
            ) from error
        got = _sha256(files[name])
        if got != expected:
            raise CheckpointError(
                f"{folder / name} has SHA-256 {got[:16]}..., but SHA256SUMS says "
                f"{expected[:16]}...; restore it from where the checkpoint came from"
            )
    return _sha256(listing), files


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
            return {name: tensor.shape for name, tensor in net_for(config).state_dict().items()}
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
                f"{folder} {problem} tensor {listed(names)}; "
                "config.json and the tensors belong to different models"
            )
    for name, shape in expected.items():
        tensor = got[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {tuple(tensor.shape)}, but config.json needs"
                f" {tuple(shape)}"
            )
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{folder}: tensor {name} holds values of {tensor.dtype}; expected one of "
                f"{', '.join(map(str, _DTYPES))}"
            )
        if not bool(tensor.float().isfinite().all()):
            raise CheckpointError(
                f"{folder}: tensor {name} holds values that are not finite numbers in float32"
            )


def rounded(net: Transformer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a network in the precision in which they are saved; see _EXACT."""
    tensors = {}
    for name, tensor in net.state_dict().items():
        saved_as = torch.float32 if name.startswith(_EXACT) else dtype
        tensors[name] = tensor.detach().to(saved_as).contiguous()
    return tensors


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
    with replacing(folder) as new:
        new.mkdir(parents=True)
        for name, shard in _shards(rounded(net, dtype)).items():
            (new / name).write_bytes(_with_metadata(safetensors.torch.save(shard), net.config))
        fields = {
            "format_version": FORMAT_VERSION,
            "architecture": net.config.to_json(),
            "provenance": provenance,
        }
        (new / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        _list_digests(new, sorted(path.name for path in new.iterdir()))
        (new / "README.md").write_bytes(card.encode("utf-8", "backslashreplace"))
        for name, content in (files or {}).items():
            (new / name).write_bytes(content)


def _list_digests(folder: Path, names: Iterable[str]) -> None:
    """Write SHA256SUMS for these files of a folder."""
    lines = []
    for name in names:
        lines.append(f"{_sha256((folder / name).read_bytes())}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(lines))


def _with_metadata(file: bytes, config: ModelConfig) -> bytes:
    """A safetensors file with metadata for programs that see this file alone. safetensors would
    write them in random order, and the digest of equal checkpoints would differ.
    """
    end = 8 + int.from_bytes(file[:8], "little")
    size = f"{config.width}x{config.height}x{config.channels}"
    metadata = {
        "format": "pt",
        "model": f"LinPix {FORMAT_VERSION}, {size}, {config.attention} attention",
        "digest": f"sha256:{_sha256(file[end:])}",  # of the tensors' bytes
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
    fields = fields_of(files["config.json"].decode())
    fields["provenance"] |= facts
    text = (json.dumps(fields, indent=2) + "\n").encode()
    description_of(folder, text)
    with replacing(folder) as new:
        shutil.copytree(folder, new)
        (new / "config.json").write_bytes(text)
        _list_digests(new, files)
        readme = new / "README.md"
        if readme.exists():
            readme.write_bytes(card(readme.read_text("utf-8")).encode("utf-8", "backslashreplace"))


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
