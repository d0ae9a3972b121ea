"""The model of a GPU's scheduler: what it makes of machine code, and of what was measured."""

import shutil

import pytest

from tools.kernel_times import (
    PROGRAMS,
    cases,
    compiled,
    microseconds,
    path_of,
)

MEASURED_US = 682 / 8  # attention of a layer, 4,096 images of mnist, float32 state, on an H200
# by a warp, by hand: with few rows, and with many
FEW = {"qkv": 16, "up": 16, "out": 16, "down": 64}
MULTIPLIED = {
    "norm": 0,
    "qkv": 256,
    "up": 256,
    "out": 128,
    "down": 512,
    "attention, fp32": 0,
    "attention, fp16, seven of eight tokens": 8,
    "the eighth": 16,
}


@pytest.mark.slow
@pytest.mark.nvcc
def test_attention_takes_as_long_as_was_measured_and_products_multiply_as_often_as_they_must():
    """Within a fifth. If a kernel has changed, look at its branches again: they are counted in
    `cases`.
    """
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        pytest.skip(f"{missing[0]} is not on the PATH")
    code = {source: compiled(source) for source in ("attention.cu", "product.cu")}
    every = [(count, one) for count in (1, 64, 4096) for one in cases(count)]
    for rows, one in every:
        kernel, _, spilled = next(
            each for name, each in code[one.source].items() if one.kernel in name
        )
        assert (
            sum(step.operation.startswith("HMMA") for step in path_of(kernel, one))
            == (MULTIPLIED | FEW if rows <= 64 else MULTIPLIED)[one.name]
        )
        assert not spilled
        if one.name == "attention, fp32" and rows == 4096:
            assert 0.8 < microseconds(kernel, one) / MEASURED_US < 1.25
