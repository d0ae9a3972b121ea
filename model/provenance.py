"""What config.json says of a checkpoint: its architecture and its provenance, read and checked."""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .attempts import MAX_ATTEMPTS
from .config import ModelConfig

FORMAT_VERSION = 1
TEMPERATURE_RANGE = (0.5, 1.2)  # for a checkpoint that names none
MAX_TEMPERATURE = 10.0  # highest temperature that a request may ask for
# most bytes of config.json, SHA256SUMS, and any other listed file without tensors
LARGEST_TEXT = 2**20
# half of a surrogate pair, which JSON and names of files may hold: no UTF-8, and so no answer, can
HALF_A_PAIR = re.compile("[\ud800-\udfff]")


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be used as it is; the message names the file or tensor and
    the remedy.
    """


def config_of(folder: Path) -> ModelConfig:
    """The architecture in config.json. No other file is read or verified. Raises
    CheckpointError.
    """
    try:
        content = content_of(folder / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} cannot be read ({error}); "
            "restore it from where the checkpoint came from"
        ) from error
    return description_of(folder, content)[0]


def description_of(
    folder: Path, config_json: bytes
) -> tuple[ModelConfig, dict[str, Any], tuple[str, ...]]:
    """Architecture, provenance and class names. Raises CheckpointError."""
    try:
        fields = fields_of(config_json.decode())
        if fields.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"format_version must be {FORMAT_VERSION}, got"
                f" {fields.get('format_version')!r:.80}; read it with the LinPix release that"
                " wrote it"
            )
        config, provenance = ModelConfig.from_json(fields["architecture"]), fields["provenance"]
        _check(provenance, config)
    except KeyError as error:
        raise CheckpointError(
            f"{folder / 'config.json'} lacks {error}; "
            "restore it from where the checkpoint came from"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} is no JSON: {error}; "
            "restore it from where the checkpoint came from"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    names = provenance.get("class_names") or range(config.classes)
    return config, provenance, tuple(map(str, names))


def content_of(path: Path) -> bytes:
    """Read a file. Raises OSError, or ValueError for pipes and devices, which may not end, and for
    too long texts.
    """
    if path.exists() and not path.is_file():
        raise ValueError("is not a regular file")
    if path.suffix != ".safetensors":
        size = path.stat().st_size
        if size > LARGEST_TEXT:
            raise ValueError(f"is longer than {LARGEST_TEXT:,} bytes: {size:,}")
    return path.read_bytes()


def fields_of(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError, also for what json.loads accepts: duplicate names, NaN,
    infinity and halves of surrogate pairs.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f"{listed(twice)} is given twice")
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


def _check(provenance: Any, config: ModelConfig) -> None:
    """Raise ValueError unless the fields that other code uses, or sends to clients, have the
    expected types. All of them may be absent.
    """
    _require(isinstance(provenance, dict), "provenance must be a JSON object, got", provenance)
    names = provenance.get("class_names") or []
    _require(
        _is_list(names, str) and len(names) <= config.classes,
        f"class_names must list at most {config.classes} names (the model has {config.classes}"
        " classes), got",
        names,
    )
    bits = provenance.get("bits_per_dim") or {}
    _require(
        isinstance(bits, dict)
        and all(len(name) <= 40 and _is_quantity(bits[name]) for name in bits),
        "bits_per_dim must map short names to numbers, got",
        bits,
    )
    _check_drawing(provenance, config)
    _check_look(provenance.get("real_look"), config)
    _check_board(provenance.get("board"), config)
    limits = provenance.get("limits")
    _require(
        limits is None or (isinstance(limits, str) and limits.isprintable() and len(limits) <= 200),
        "limits must be a sentence of at most 200 characters, got",
        limits,
    )
    for name in ("created", "images", "steps", "minutes"):
        value = provenance.get(name, 0)
        _require(_is_quantity(value), f"{name} must be a number of at least 0, got", value)


def _check_drawing(provenance: dict[str, Any], config: ModelConfig) -> None:
    bounds = provenance.get("temperature_range") or list(TEMPERATURE_RANGE)
    _require(
        isinstance(bounds, list)
        and len(bounds) == 2
        and all(map(_is_temperature, bounds))
        and bounds[0] <= bounds[1],
        f"temperature_range must be two numbers from 0 to {MAX_TEMPERATURE:g}, the lower first,"
        " got",
        bounds,
    )
    temperature = provenance.get("temperature", 1.0)
    _require(
        _is_temperature(temperature),
        f"temperature must be a number from 0 to {MAX_TEMPERATURE:g}, got",
        temperature,
    )
    attempts, most = provenance.get("attempts", 1), MAX_ATTEMPTS if config.class_first else 1
    _require(
        type(attempts) is int and 1 <= attempts <= most,
        f"attempts must be 1, or up to {MAX_ATTEMPTS} for a model that draws the class first, got",
        attempts,
    )
    for name in ("class_agreement", "recognised"):
        share = provenance.get(name)
        _require(
            share is None or (_is_quantity(share) and share <= 1),
            f"{name} must be from 0 to 1, got",
            share,
        )


def _check_look(look: Any, config: ModelConfig) -> None:
    if look is None:
        return
    _require(
        isinstance(look, dict)
        and _is_quantity(look.get("pieces"))
        and _is_quantity(look.get("full_ink", 0))
        and config.grey,
        "real_look must have pieces, the share of real pictures that are in several, and may have"
        " full_ink, a mean number of pixels; only a model of one channel can have it; got",
        look,
    )
    divided = look.get("divided", [])
    _require(
        _is_list(divided, int) and all(0 <= label < config.classes for label in divided),
        "divided of real_look must be a list of classes by index, got",
        divided,
    )


def _check_board(board: Any, config: ModelConfig) -> None:
    if not board:
        return
    parts = 1 if config.grey else 3
    _require(
        isinstance(board, dict)
        and board.keys() == {"ground", "ink", "prepare"}
        and _is_paint(board["ground"], parts)
        and _is_paint(board["ink"], parts)
        and board["prepare"] in (None, "mnist"),
        f"board must have ground and ink, each null or {parts} values 0..255, and prepare, null or"
        " mnist; got",
        board,
    )


def _require(right: bool, expected: str, got: object) -> None:
    if not right:
        raise ValueError(f"{expected} {got!r:.80}")


def _is_paint(value: Any, parts: int) -> bool:
    if value is None:
        return True
    return _is_list(value, int) and len(value) == parts and all(0 <= one <= 255 for one in value)


def _is_list(value: Any, kind: type) -> bool:
    """Whether value is a list of this type; True and False are not int."""
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _is_temperature(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value <= MAX_TEMPERATURE
    )


def _is_quantity(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < 2**63


def listed(names: Iterable[str]) -> str:
    """Names for one line of a message: control characters are escaped, and at most 400 characters
    are kept.
    """
    shown = []
    for name in sorted(names):
        shown.append(name if name.isprintable() else ascii(name))
    text = ", ".join(shown)
    return text if len(text) <= 400 else text[:397] + "..."


def commit() -> str:
    """The commit of this code, for provenance; "unknown" outside a checkout."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=5
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
