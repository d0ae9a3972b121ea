"""The contents of a checkpoint folder besides the weights: provenance, model card, sample grids;
and the export.
"""

import io
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from linpix.model.attention import attention_for
from linpix.model.checkpoint import read, rounded, save
from linpix.model.choice import choose
from linpix.model.config import ModelConfig
from linpix.model.generate import generate, starts_of, tile
from linpix.model.packing import Packed, pack
from linpix.model.pieces import whole
from linpix.model.provenance import commit
from linpix.model.transformer import Transformer

from .calibrate import calibrate
from .datasets import Dataset
from .evaluate import bits_of, decoded
from .readers import Pixels, written

_ATTRIBUTION = {
    "mnist": (
        "MNIST, by Yann LeCun, Corinna Cortes and Christopher J.C. Burges: 60,000 training images"
    ),
    "cifar10": (
        "CIFAR-10, by Alex Krizhevsky, Vinod Nair and Geoffrey Hinton: 50,000 training images"
    ),
    "avatars": (
        "pixel-art faces made from the parts of DiceBear's Pixel Art, design CC0 1.0 (python -m"
        " linpix.training.avatars): 60,000 training images; in those of the test, hair and clothes"
        " are combined as in none of these"
    ),
    "letters": (
        "letters of 127 font families under the SIL Open Font License (python -m"
        " linpix.training.letters): 60,000 training images; those of the test are of other families"
    ),
}

_ON_HUBS = {"mnist": "ylecun/mnist", "cifar10": "uoft-cs/cifar10"}  # names of these data there


# Facts about drawing, by data set: default temperature, useful range, and limits. For checkpoints
# without facts of their own. See DECISIONS.md.
DRAWN: dict[str, dict[str, Any]] = {
    "mnist": {
        "temperature": 1.0,
        "temperature_range": [0.3, 1.5],
        "limits": "It draws one handwritten digit in the middle, and nothing else.",
    },
    "cifar10": {
        "temperature": 0.8,
        "temperature_range": [0.5, 1.05],
        "limits": "It draws colours and textures, rarely objects.",
    },
    "avatars": {
        "temperature": 1.0,
        "temperature_range": [0.3, 1.1],
        "limits": "It draws one face in pixel art, seen from the front, and nothing else.",
    },
    "letters": {
        "temperature": 1.0,
        "temperature_range": [0.3, 1.2],
        "limits": (
            "It draws one upright letter of the Latin alphabet without accents, and nothing else."
        ),
    },
}


def attempts_of(config: ModelConfig) -> dict[str, int]:
    """Default attempts of a new checkpoint: four if the model draws the class first, and so
    recognises its images.
    """
    return {"attempts": 4} if config.class_first else {}


def sample_grid(net: Transformer, count: int, temperature: float = 1.0) -> bytes:
    """A PNG of `count` samples with seeds 0, 1, ..., ten per line; column c shows class c, or image
    i class i.
    """
    return grid(samples(net, count, temperature), net.config)


def samples(net: Transformer, count: int, temperature: float = 1.0) -> Pixels:
    """The images of sample_grid, (count, T)."""
    classes = net.config.classes
    labels: list[int | None] = [None] * count
    if classes:
        labels = [index % max(10, classes) % classes for index in range(count)]
    packed = _packed(net) if net.device.type == "cpu" else None
    return drawn(net, range(count), labels, temperature, packed)


def _packed(net: Transformer) -> Packed | None:
    """For the compiled engine, where there is one for the network."""
    if choose(net.config, precision="fp32").engine != "compiled":
        return None
    return pack(net, torch.float32)


def drawn(
    net: Transformer,
    seeds: Sequence[int],
    labels: Sequence[int | None],
    temperature: float,
    packed: Packed | None,
) -> Pixels:
    """(B, T), one image for each pair of seed and label. packed: draw with the compiled engine."""
    if packed is None:
        images = generate(net, list(seeds), labels=list(labels), temperature=temperature)
        return np.asarray(images)
    count = len(seeds)
    # slot 0 is for padding
    canvas = torch.zeros(1 + count, net.config.subpixels, dtype=torch.uint8)
    start = torch.tensor([net.start_index(label) for label in labels])
    start = starts_of(net, torch.zeros(count, net.config.classes), np.array(seeds), start)
    known = torch.zeros_like(canvas, dtype=torch.bool)
    temperatures = torch.full((count,), temperature)
    decoded(net, packed, canvas, known, temperatures, start=start, seed=list(seeds))
    return canvas[1:].numpy()


def grid(images: Pixels, config: ModelConfig) -> bytes:
    """A PNG of images (count, T), ten per line."""
    buffer = io.BytesIO()
    Image.fromarray(tile(images, config)).save(buffer, "PNG")
    return buffer.getvalue()


def provenance(data: str, class_names: tuple[str, ...], **facts: Any) -> dict[str, Any]:
    """A checkpoint's provenance, as stored in config.json. Paths in the command, and the name of an
    imported file, may have bytes that are not UTF-8.
    """
    for name, fact in facts.items():
        if isinstance(fact, str):
            facts[name] = written(fact)
    return {
        "data": data,
        "class_names": list(class_names),
        "created": int(time.time()),
        "commit": commit(),
        **facts,
    }


def first_marginal(data: Dataset) -> list[float]:
    """P(sub-pixel 0 = v), v = 0..255, in a training set, for models that do not predict sub-pixel
    0.
    """
    counts = np.bincount(data.images[:, 0], minlength=256)
    shares: list[float] = (counts / counts.sum()).tolist()
    return shares


def card(name: str, config: ModelConfig, source: dict[str, Any]) -> str:
    """The model card, in Markdown."""
    figures = {}
    for what, value in (source.get("bits_per_dim") or {}).items():
        figures[f"bits/dim, {what.replace('test_', 'first test images: ')}"] = f"{value:.4f}"
    figures |= drawing_rows(source)
    context = ", ".join(map(str, config.neighbours)) or "none"
    attention = attention_for(config)
    drawn = "weights" in source and attention.steps_as
    shown = "one class a column" if config.classes <= 10 else "class by class"
    picture = f"\n![Samples, {shown}](samples.png)\n" if drawn else ""
    colours = f"{len(config.palette)}-colour" if config.palette else "colour"
    colours = "grey" if config.grey else colours
    seen = "unknown"
    if "images" in source:
        seen = f"{source['images']:,} in {source['steps']:,} steps, {source['minutes']:.0f} minutes"
    whom = "earlier ones" if attention.exception else "all earlier ones"
    size = attention.state_bytes / 1024
    memory = f"| memory of one image in flight | {size:.0f} KiB |\n" if size else ""
    use = []
    if attention.exception:
        use.append(f"{attention.exception}, so its bits/dim is not strictly autoregressive.")
    if config.class_first:
        use.append(
            "Where no class is asked for, it draws one first, and its bits/dim are those of the"
            " mixture."
        )
    use.append(
        "It draws images like those it was trained on and knows nothing else."
        if attention.steps_as
        else "It has no step-by-step form, so it draws no images."
    )
    predicted = f"as a mixture of {config.mixtures} logistics"
    if config.head == "categorical":
        predicted = f"by {config.values} logits"
    facts, measured = (
        "".join(f"| {name} | {value} |\n" for name, value in rows.items())
        for rows in (attention.facts, figures)
    )
    return f"""{_head(config, source["data"])}# {name}
{picture}
An autoregressive model of {colours} images of {config.width} x {config.height}: a transformer with {config.attention}
attention that predicts each {config.tokens} from {whom}, {predicted}.

| | |
|---|---|
| layers, heads, key and value dim | {config.layers}, {config.heads}, {config.key_dim} and {config.value_dim} |
| d_model, d_ff | {config.d_model}, {config.d_ff} |
| residuals, norm, activation | {config.residual}, {config.norm}, {config.activation} |
{facts}| look-ups; neighbours (dy, dx, dc) | {", ".join(config.look_ups)}; {context} |
| classes | {_cell(", ".join(source["class_names"])) if config.classes else "none"} |
{memory}| training images seen | {seen} |
{measured}
Data: {_ATTRIBUTION.get(source["data"], source["data"])}. Trained by `{source["command"]}` (commit {source["commit"]},
seed {source.get("seed", "unknown")}). {source.get("history", "")}
{" ".join(use)}
"""  # noqa: E501


def _head(config: ModelConfig, data: str) -> str:
    """The YAML by which hubs list a model and link its data."""
    trained_on = f"datasets:\n- {_ON_HUBS[data]}\n" if data in _ON_HUBS else ""
    return f"""---
library_name: linpix
pipeline_tag: unconditional-image-generation
tags:
- safetensors
- autoregressive
- {config.attention}-attention
{trained_on}---

"""


def drawing_rows(source: dict[str, Any]) -> dict[str, str]:
    """Rows of a model card about drawing, for those facts that provenance has."""
    rows: dict[str, str] = {}
    if "temperature" in source:
        low, high = source["temperature_range"]
        rows["temperature; useful range"] = f"{source['temperature']:g}; {low:g} to {high:g}"
    if (attempts := source.get("attempts")) is not None:  # 1 too: with_rows removes no rows
        look = source.get("real_look")
        text = f"{attempts}, until the model recognises its class"
        if recognised := source.get("recognised"):
            text += f" with {recognised:g}"
        if look and whole(look, None):
            text += " and it is in one piece"
            if look.get("divided"):
                text += ", unless those of its class often are not"
        rows["attempts at an image"] = "1" if attempts == 1 else text
    if (share := source.get("class_agreement")) is not None:
        rows["images of the class asked for"] = (
            f"{share:.3f}, to a CNN trained on the same pictures"
        )
    if "look" in source:
        for name, row in (
            ("greys", "different greys in an image"),
            ("full_ink", "pixels of full ink in an image"),
            ("pieces", "share of images in more than one piece"),
            ("specks", "share of images with specks"),
        ):
            rows[row] = f"{source['look'][name]:g} (in test images {source['real_look'][name]:g})"
    if source.get("limits"):
        rows["limits"] = _cell(source["limits"])
    return rows


def _cell(text: str) -> str:
    """A text in a table of Markdown: folders, which are classes, may have any name."""
    return " ".join(text.split()).replace("|", r"\|")


def with_rows(card: str, rows: dict[str, str]) -> str:
    """The model card with these rows in its table. They replace rows of the same names, or are
    added at the end.
    """
    lines = card.splitlines()
    for name, value in rows.items():
        beginning = f"| {name} |"
        found = [at for at, line in enumerate(lines) if line.startswith(beginning)]
        if found:
            lines[found[0]] = f"{beginning} {value} |"
        else:
            table = [at for at, line in enumerate(lines, 1) if line.startswith("|")]
            last = table[-1] if table else len(lines)
            lines.insert(last, f"{beginning} {value} |")
    return "\n".join(lines) + "\n"


def export(
    run: Path,
    out: Path,
    test_data: Callable[[ModelConfig], Dataset],
    *,
    fp32: bool = False,
    unseen: Dataset | None = None,
    twin_of: str | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Write a run's checkpoint for shipping: bf16 unless fp32, with the bits/dim of exactly these
    weights.

    fp32: not only what checkpoint.rounded keeps in float32 · unseen: images that the run was not
    trained on, to calibrate the head with; not calibrated without · twin_of: see ModelConfig; None
    keeps the one of the run. Returns the provenance that was written.
    """
    found = read(run)
    if twin_of is not None:
        found.net.config = replace(found.net.config, twin_of=twin_of)
    dtype = torch.float32 if fp32 else torch.bfloat16
    # which copies them into float32
    found.net.load_state_dict(rounded(found.net, dtype))
    config, told = found.net.config, found.provenance
    if unseen is not None:
        calibration = calibrate(found.net, unseen)
        print(
            f"{calibration} Their hidden tokens in the layers: {calibration.before:.4f} bits/dim"
            f" before, {calibration.after:.4f} after",
            file=sys.stderr,
        )
        told = told | {"history": f"{told.get('history', '')} {calibration}".strip()}
    data = test_data(config)
    print(f"evaluating {len(data.images):,} test images", file=sys.stderr, flush=True)
    # The compiled engine's figures agree to 1e-6. It is 2.5 times as fast for models that skip
    # background, and 1.7 times for models with tokens of whole pixels.
    packed = _packed(found.net) if config.packed else None
    bits = bits_of(found.net, data.images, packed=packed, progress=progress)
    counts = sorted({min(1_000, len(bits)), len(bits)})
    figures = {f"test_{count}": round(float(bits[:count].mean()), 5) for count in counts}
    source = DRAWN.get(told.get("data", ""), {}) | attempts_of(config) | told
    source |= {
        "board": found.board,
        "bits_per_dim": figures,
        "weights": str(dtype).removeprefix("torch."),
    }
    drawings = {}
    if found.net.attention.steps_as:
        print("drawing 100 samples", file=sys.stderr, flush=True)
        drawings["samples.png"] = sample_grid(found.net, 100, source.get("temperature", 1.0))
    text = card(out.name, config, source)
    save(out, found.net, source, text, dtype, drawings)
    return source
