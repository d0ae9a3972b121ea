"""What numbers are measured on: this machine, or its emulated GPU."""

import os
from pathlib import Path

import torch

from linpix.model import ops
from linpix.model.machine import processor_name

OPERATORS = (
    ops.RECURRENT_STEP,
    ops.DECODE_QUANTUM,
    ops.PREFILL,
    ops.READ,
    ops.CAUSAL_ATTENTION,
    ops.CAUSAL_ATTENTION_BACKWARD,
)


def machine() -> str:
    return f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def define_emulated(library: Path) -> torch.library.Library:
    """The operators linpix_emulated: the CUDA sources, compiled for a processor."""
    definitions = torch.library.Library("linpix_emulated", "DEF")
    for schema in OPERATORS:
        definitions.define(schema)
    torch.ops.load_library(str(library))
    return definitions
