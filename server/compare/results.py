"""report.json: what a comparison has found so far, and under which circumstances."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from linpix.model import checkpoint as checkpoints
from linpix.model.checkpoint import Checkpoint
from linpix.model.team import processor_name

from .measure import Cell
from .report import PAPER, Report, Result, listed


def circumstances(checkpoint: Checkpoint, sources: dict[str, Checkpoint | None], budget_s: float,
                  command: str) -> Report:
    """What is known before anything is measured."""
    config = checkpoint.net.config
    return {
        "model": checkpoint.name, "digest": checkpoint.digest, "attention": config.attention,
        "twins": sorted({source.name for source in sources.values() if source} - {checkpoint.name}),
        "subpixels": config.subpixels, "tokens": config.length, "layers": config.layers, "d_model": config.d_model,
        "machine": {"cpu": processor_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
                    "torch": torch.__version__, "platform": platform.platform(),
                    "load": round(os.getloadavg()[0], 2)},
        "commit": checkpoints.commit(), "command": command, "budget_s": budget_s,
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "paper": PAPER,
    }


def findings(cells: Sequence[Cell], spent_s: float, difference: float | None) -> Report:
    """difference: the largest one between the parameters of the two softmax forms, if it was measured."""
    return {"spent_s": _rounded(spent_s), "largest_logit_difference": _rounded(difference),
            "notes": _notes(cells), "results": [_result(cell) for cell in cells]}


def _result(cell: Cell) -> Result:
    backend, estimated = cell.backend, cell.decoded is None
    steps, seconds = (cell.steps(), cell.seconds()) if cell.round_seconds else ({}, None)
    return {
        "backend": backend.name, "engine": backend.engine, "weights": cell.source.name if cell.source else None,
        "precision": backend.precision, "batch": cell.batch,
        "images_per_second": _rounded(cell.batch / seconds if seconds else None),
        "seconds_per_image": _rounded(seconds),  # until the batch's images are done
        "state_bytes": backend.state_bytes,
        "step_seconds": [{"position": t, "seconds": _rounded(x)} for t, x in steps.items()],
        "tail_over_head": _rounded(cell.tail_over_head()) if seconds else None,
        "estimated": estimated, "positions": list(steps) if estimated and seconds else None,
        "bits_per_dim": _bits_per_dim(cell.source.provenance)[0] if cell.source else None,
        "exception": backend.net.attention.exception or None,
        "disturbed": bool(disturbed := cell.disturbed() if seconds else ""),
        "note": cell.note or disturbed or None,
    }


def _notes(cells: Sequence[Cell]) -> list[str]:
    notes = [f"No figure for {cell}: {cell.note}." for cell in cells if cell.note]
    exceptions: dict[str, list[str]] = {}
    for name, backend in {cell.backend.name: cell.backend for cell in cells}.items():
        exceptions.setdefault(backend.net.attention.exception, []).append(name)
    notes += [f"{text}, so bits/dim of {listed(names)} is not strictly autoregressive (*). Drawing does not see later "
              "sub-pixels, since it computes the prefix again at each "
              "position." for text, names in exceptions.items() if text]
    if lost := list(dict.fromkeys(cell.backend.name for cell in cells if cell.source is None)):
        notes.append(f"{listed(lost)} used random weights of the same architecture, because there is no checkpoint. "
                     "Speed does not depend on the weights; bits/dim is not given.")
    sources = {cell.source.name: cell.source.provenance for cell in cells if cell.source}
    if trained := [f"{name} saw {facts['images']:,} images in {facts['minutes']:.0f} minutes"
                   for name, facts in sources.items() if "minutes" in facts]:
        notes.append(f"Training of the models whose bits/dim is given: {', '.join(trained)}.")
    splits: dict[str, list[str]] = {}
    for name, facts in sources.items():
        splits.setdefault(_bits_per_dim(facts)[1], []).append(name)
    if measured_on := [f"{split} for {listed(names)}" for split, names in splits.items() if split]:
        notes.append(f"bits/dim was measured on {', on '.join(measured_on)}.")
    if busy := [cell.waited for cell in cells if cell.round_seconds and cell.disturbed()]:
        notes.append(f"Other work used the processor of the rows marked † for up to {max(busy):.0%} of the time. "
                     "Speeds are of processor time; those of such rows may be too low by a quarter.")
    return notes


def _bits_per_dim(provenance: dict[str, Any]) -> tuple[float | None, str]:
    """bits/dim on the largest number of test images, else on validation images; and on which, in words."""
    bits = dict(provenance.get("bits_per_dim") or {})
    tests = {name: int(name.removeprefix("test_")) for name in bits if name.removeprefix("test_").isdecimal()}
    for name in (*sorted(tests, key=tests.__getitem__, reverse=True), "validation"):
        if bits.get(name):
            return float(bits[name]), f"{tests[name]:,} test images" if name in tests else "validation images"
    return None, ""


def _rounded(x: float | None) -> float | None:
    """To five digits: more would be noise."""
    return None if x is None else float(f"{x:.5g}")
