"""Importer for checkpoints of the published reference ("Transformers are RNNs", fast-transformers
0.4.0).

The reference reads x_0 .. x_{T-2} and predicts x_1 .. x_{T-1}: it has no start token, and row p of
its position table is for t = p + 1 here. It concatenates the embeddings of value and position. Here
they are summed, and each table is padded with zeros where the other one has its numbers. Row 256
(the start) and position 0 are never used.

Trainers wrap a model in their own ways: dicts around the tensors, and words before or in their
names. So the tensors are looked for anywhere in the file, by the ends of their names.
"""

import hashlib
import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from .config import AttentionKind, ModelConfig
from .nets import net_for
from .transformer import Transformer

_SHAPES = {28 * 28: (28, 28, 1), 32 * 32 * 3: (32, 32, 3)}  # by T: height, width, channels
_ALWAYS_ZERO = (1.0,) + (0.0,) * 255  # sub-pixel 0 of all 70,000 MNIST images
_PARTS = {
    "attention.out_projection": "out",
    "norm1": "norm1",
    "linear1": "up",
    "linear2": "down",
    "norm2": "norm2",
}  # parts of a layer: the reference's name, the name here
# any of these
_ANCHORS = (
    "value_embedding.weight",
    "pos_embedding.pe",
    "predictor.weight",
    "transformer.norm.weight",
)
# anywhere in a name
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_AVERAGED = re.compile(r"(?<![a-z])(ema|swa|averaged|shadow)(?![a-z])", re.IGNORECASE)
_STEPS = ("iteration", "global_step", "step", "steps")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CURE = "give a checkpoint of the published image model"


class ImporterError(ValueError):
    """A file that cannot be imported as it is; the message names the file, the tensor and the
    remedy.
    """


def import_reference(
    path: Path,
    heads: int,
    attention: AttentionKind = "linear",
    first_marginal: Callable[[ModelConfig], Sequence[float]] | None = None,
) -> tuple[Transformer, dict[str, Any]]:
    """Read a checkpoint of the reference: the transformer, in evaluation mode, and its provenance.

    heads, attention: the file holds neither. A wrong attention, or a wrong number of heads that
    also divides the projections, loads without an error and predicts badly.
    first_marginal: gives P(sub-pixel 0 = v), v = 0..255, in a training set of the configuration's
    shape; without it an image of 28 x 28 always begins with 0, and any other shape is an error.
    Raises ImporterError.
    """
    if attention not in get_args(AttentionKind):
        raise ImporterError(
            f"{path}: --attention must be one of {', '.join(get_args(AttentionKind))}, got "
            f"{attention!r}; the reference's other kinds of attention cannot be imported"
        )
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ImporterError(
            f"{path} cannot be read ({error.strerror}); give the .pth file's path"
        ) from error
    where, state, provenance = _weights(path, _unpack(path, raw))
    config = _config(where, state, heads, attention, first_marginal)
    net = net_for(config)
    net.load_state_dict(_translate(state, config))
    provenance |= {"imported_from": path.name, "sha256": hashlib.sha256(raw).hexdigest()}
    return net.eval().requires_grad_(False), provenance


def _unpack(path: Path, raw: bytes) -> object:
    """What is in a checkpoint file. Runs no code from the file."""
    try:
        if path.suffix == ".safetensors":
            return load_safetensors(raw)
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise ImporterError(
                f"{path} is refused: it contains {found[1]}, and loading that would run code; on a"
                " machine where you trust the file, save only the model's state_dict, with"
                " torch.save"
            ) from error
        raise ImporterError(
            f"{path} is not a torch file, or is damaged; download it again"
        ) from error
    except Exception as error:  # for arbitrary bytes, torch's parsers raise errors of many types
        raise ImporterError(
            f"{path} is not a torch file, or is truncated ({type(error).__name__}); download it "
            "again"
        ) from error


def _weights(path: Path, data: object) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Where in a file the model is, for messages; its tensors by the reference's names; and the
    steps of its training.

    The first of several models is taken, or the first that is named as averaged weights.
    """
    there: dict[str, dict[str, object]] = {}  # by where they are
    others: list[str] = []
    for place, names in _dicts(data):
        found = _models_among(names)
        for prefix, values in found.items():
            keys = [*place, f"{prefix}*"] if prefix else place
            there[", ".join(keys)] = values
        if not found:
            others += [", ".join([*place, name]) for name in names]
    if not there:
        got = f"it has {', '.join(others)[:300]}" if others else f"it is {type(data).__name__}"
        raise ImporterError(
            f"{path} lacks tensor {_ANCHORS[0]}, at any depth and after any prefix; {got}; give the"
            " published image model's state_dict, saved with torch.save"
        )
    chosen = next(filter(_AVERAGED.search, there), next(iter(there)))
    where = f"{path} ({chosen})" if chosen else str(path)
    tensors = {name: _usable(f"{where}: {name}", value) for name, value in there[chosen].items()}
    facts: dict[str, Any] = {}
    for name in _STEPS:
        steps = data.get(name) if isinstance(data, Mapping) else None
        if type(steps) is int and 0 <= steps < 2**63:
            facts.setdefault("steps", steps)
    if len(there) > 1:
        rest = [place or "without a prefix" for place in there if place != chosen]
        facts["history"] = (
            f"Of the models in {path.name}, it is {chosen}; others: {'; '.join(rest)[:400]}."
        )
    return where, tensors, facts


def _models_among(names: dict[str, object]) -> dict[str, dict[str, object]]:
    """The values of each model in a dict, by what stands before their names, the shortest first."""
    plain = {}
    for name, value in names.items():
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        plain[".".join(parts)] = value
    prefixes: set[str] = set()
    for anchor in _ANCHORS:
        prefixes = prefixes or {
            name.removesuffix(anchor) for name in plain if f".{name}".endswith(f".{anchor}")
        }
    models = {}
    for prefix in sorted(prefixes, key=len):
        # "" begins all names
        inner = tuple(other for other in prefixes if len(other) > len(prefix))
        models[prefix] = {
            name.removeprefix(prefix): value
            for name, value in plain.items()
            if name.startswith(prefix) and not name.startswith(inner) and name != "n_averaged"
        }
    return models


def _usable(what: str, value: object) -> Tensor:
    """A tensor in float32. Raises ImporterError, which begins with what it is."""
    if (
        not isinstance(value, Tensor)
        or value.layout != torch.strided
        or value.device.type != "cpu"
        or value.dtype not in _DTYPES
    ):
        raise ImporterError(
            f"{what} must be a dense tensor of floating-point numbers, "
            f"got {getattr(value, 'dtype', type(value).__name__)}; {_CURE}"
        )
    # a view may claim terabytes
    if value.numel() > value.untyped_storage().nbytes() // value.element_size():
        raise ImporterError(
            f"{what} has shape {tuple(value.shape)}, but the file has less data than that; save it"
            " again as model.state_dict()"
        )
    return value.detach().float()


def _dicts(
    data: object, place: tuple[str, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[tuple[str, ...], dict[str, object]]]:
    """All dicts in data, at most four deep, each once, with the keys that lead to it; of their
    keys, the texts.
    """
    seen = set() if seen is None else seen
    if not isinstance(data, Mapping) or id(data) in seen or len(place) > 4:
        return
    seen.add(id(data))
    named = {name: value for name, value in data.items() if isinstance(name, str)}
    yield place, named
    for name, value in named.items():
        yield from _dicts(value, (*place, name), seen)


def _config(
    path: str,
    state: dict[str, Tensor],
    heads: int,
    attention: AttentionKind,
    first_marginal: Callable[[ModelConfig], Sequence[float]] | None,
) -> ModelConfig:
    """The configuration that the tensors' shapes imply. Checks that every tensor is present and
    fits it.
    """

    def shape(name: str, dimensions: int) -> tuple[int, ...]:
        if name not in state:
            raise ImporterError(f"{path} lacks tensor {name}; {_CURE}")
        if state[name].dim() != dimensions:
            raise ImporterError(
                f"{path}: tensor {name} must have {dimensions} dimensions, got shape "
                f"{tuple(state[name].shape)}; {_CURE}"
            )
        return tuple(state[name].shape)

    _, value_width = shape("value_embedding.weight", 2)
    _, positions, position_width = shape("pos_embedding.pe", 3)
    projections = "transformer.layers.0.attention.{}_projection.weight"
    keys, _ = shape(projections.format("query"), 2)
    values, _ = shape(projections.format("value"), 2)
    d_ff, _ = shape("transformer.layers.0.linear1.weight", 2)
    outputs, _ = shape("predictor.weight", 2)
    for name, rows in (("query", keys), ("value", values)):
        if type(heads) is not int or heads < 1 or rows % heads:
            raise ImporterError(
                f"{path}: --heads must divide the {rows} rows of {projections.format(name)}, "
                f"got {heads}; give the number that the model was trained with"
            )
    if outputs == 0 or outputs % 3:
        raise ImporterError(
            f"{path}: predictor.weight must have 3 rows per mixture, got {outputs}; give a"
            " checkpoint trained with the mixture of logistics"
        )
    if positions + 1 not in _SHAPES:
        known = " or ".join(f"{t - 1} ({h} x {w} x {c})" for t, (h, w, c) in _SHAPES.items())
        raise ImporterError(
            f"{path}: pos_embedding.pe must have {known} positions, got {positions}; "
            "other image shapes cannot be imported"
        )
    height, width, channels = _SHAPES[positions + 1]
    layers = {name.split(".")[2] for name in state if re.match(r"transformer\.layers\.\d+\.", name)}
    if first_marginal is None and (height, width, channels) != (28, 28, 1):
        raise ImporterError(
            f"{path} does not predict sub-pixel 0, so images of {height} x {width} x {channels}"
            " need the first sub-pixels of the training set: give its folder as --data"
        )
    try:
        config = ModelConfig(
            height=height,
            width=width,
            channels=channels,
            layers=len(layers),
            heads=heads,
            key_dim=keys // heads,
            value_dim=values // heads,
            d_model=value_width + position_width,
            d_ff=d_ff,
            mixtures=outputs // 3,
            attention=attention,
            norm="post",
            activation="relu",
            scale_transform="elu",
            first_marginal=_ALWAYS_ZERO,
        )
        if first_marginal is not None:
            config = replace(config, first_marginal=tuple(first_marginal(config)))
    except ValueError as error:
        raise ImporterError(f"{path}: {error}; {_CURE}") from error
    expected = _shapes(config, value_width, position_width)
    for problem, names in (
        ("lacks", expected.keys() - state.keys()),
        ("has unknown", state.keys() - expected.keys()),
    ):
        if names:
            raise ImporterError(
                f"{path} {problem} tensor {', '.join(sorted(names))[:400]}; {_CURE}"
            )
    for name, wanted in expected.items():
        if tuple(state[name].shape) != wanted:
            raise ImporterError(
                f"{path}: tensor {name} must have shape {wanted}, got "
                f"{tuple(state[name].shape)}; {_CURE}"
            )
        if not bool(state[name].isfinite().all()):
            raise ImporterError(
                f"{path}: tensor {name} holds values that are not finite numbers; "
                "give a checkpoint saved before training diverged"
            )
    return config


def _shapes(
    config: ModelConfig, value_width: int, position_width: int
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the reference has for this configuration."""
    width = config.d_model
    keys, values = config.heads * config.key_dim, config.heads * config.value_dim
    shapes: dict[str, tuple[int, ...]] = {
        "value_embedding.weight": (256, value_width),
        "pos_embedding.pe": (1, config.subpixels - 1, position_width),
    }

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    for index in range(config.layers):
        layer = f"transformer.layers.{index}"
        linear(f"{layer}.attention.query_projection", keys, width)
        linear(f"{layer}.attention.key_projection", keys, width)
        linear(f"{layer}.attention.value_projection", values, width)
        linear(f"{layer}.attention.out_projection", width, values)
        linear(f"{layer}.linear1", config.d_ff, width)
        linear(f"{layer}.linear2", width, config.d_ff)
        norm(f"{layer}.norm1")
        norm(f"{layer}.norm2")
    norm("transformer.norm")
    linear("predictor", 3 * config.mixtures, width)
    return shapes


def _translate(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The reference's tensors with LinPix's names and shapes."""
    values, positions = state["value_embedding.weight"], state["pos_embedding.pe"][0]
    table = torch.zeros(257 + config.subpixels, config.d_model)
    table[:256, : values.shape[1]] = values
    table[258:, values.shape[1] :] = positions  # row 257 is position 0, which nothing predicts
    ours = {"inputs.table": table}
    for kind in ("weight", "bias"):
        ours[f"norm.{kind}"] = state[f"transformer.norm.{kind}"]
        ours[f"head.{kind}"] = state[f"predictor.{kind}"]
        for index in range(config.layers):
            theirs = f"transformer.layers.{index}"
            ours[f"layers.{index}.qkv.{kind}"] = torch.cat(
                [
                    state[f"{theirs}.attention.{name}_projection.{kind}"]
                    for name in ("query", "key", "value")
                ]
            )
            for part, name in _PARTS.items():
                ours[f"layers.{index}.{name}.{kind}"] = state[f"{theirs}.{part}.{kind}"]
    return ours
