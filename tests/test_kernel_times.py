"""The model of a GPU's scheduler: what it makes of machine code, and of what was measured."""

import shutil

import pytest

from tools.kernel_times import (
    CACHE,
    PROGRAMS,
    Case,
    cases,
    compiled,
    cycles,
    kernels_of,
    microseconds,
    path_of,
)

MEASURED_US = 682 / 8  # attention of a layer, 4,096 images of mnist, float32 state, on an H200
# by a warp, by hand
MULTIPLIED = {
    "norm": 0,
    "qkv": 256,
    "up": 256,
    "out": 128,
    "down": 512,
    "attention, fp32": 0,
    "attention, fp16, seven of eight tokens": 24,
    "the eighth": 32,
}


def listing(*lines: str) -> str:
    """As of cuobjdump: each line has a stall, the scoreboards that it sets and waits for (7: none),
    and a text.
    """
    text = "Function : void linpix::gpu::enter<linpix::gpu::Some, linpix::Call>(linpix::Call)\n"
    for number, line in enumerate(lines):
        stall, sets, waits, words = line.split(maxsplit=3)
        control = int(stall) | int(sets) << 5 | 7 << 8 | (1 << int(waits) & 63) << 11
        text += (
            f"  /*{number * 16:04x}*/  {words} ;  /* 0x0000000000000000 */\n  /*"
            f" 0x{control << 41:016x} */\n"
        )
    return text


def case(**given: object) -> Case:
    return Case("", "", "Some", 4, 2, 1, 0.0, **given)


def test_an_instruction_waits_for_its_scoreboard_its_unit_and_the_issue_of_another():
    text = listing("1 0 7 LDG.E R0, desc[UR4][R2.64]", "4 7 0 FADD R1, R0, R0", "1 7 7 EXIT")
    [(name, code)] = kernels_of(text).items()
    assert name.startswith("Some, Call>") and path_of(code, case()) == code
    assert cycles(code, 1, 1) == CACHE + 4 + 1
    # a load takes its unit four cycles; an EXIT comes between
    assert cycles(code, 2, 2) == 4 + CACHE + 1 + 4 + 1
    assert cycles(code, 2, 1) > 2 * CACHE  # one after the other


def test_a_warp_takes_loops_so_often_and_avoids_slow_paths():
    [code] = kernels_of(
        listing(
            # what follows leaves out the loop, 3 to 5
            "1 7 7 @P0 BRA 0x30",
            "1 7 7 FADD R1, R1, R1",
            "1 7 7 BRA 0x60",
            "1 7 7 @P1 BRA 0x50",
            "1 7 7 CALL.REL.NOINC 0x90",
            "1 7 7 @P2 BRA 0x30",
            "1 7 7 @P3 BRA 0x80",
            "1 7 7 FMUL R1, R1, R1",
            "1 7 7 EXIT",
            "1 7 7 RET.REL.NODEC R2 0x0",
        )
    ).values()
    assert [step.address // 16 for step in path_of(code, case(trips=(2,)))] == [
        0,
        3,
        5,
        3,
        5,
        6,
        7,
        8,
    ]
    assert [step.address // 16 for step in path_of(code, case(taken=(3,)))] == [0, 3, 5, 6, 8]


@pytest.mark.slow
@pytest.mark.nvcc
def test_attention_takes_as_long_as_was_measured_and_products_multiply_as_often_as_they_must():
    """Within a fifth. If a kernel has changed, look at its branches again: they are counted in
    `cases`.
    """
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        pytest.skip(f"{missing[0]} is not on the PATH")
    code = {source: compiled(source) for source in ("attention.cu", "product.cu")}
    for one in cases(4096):
        kernel, _, spilled = next(
            each for name, each in code[one.source].items() if one.kernel in name
        )
        assert (
            sum(step.operation.startswith("HMMA") for step in path_of(kernel, one))
            == MULTIPLIED[one.name]
        )
        assert not spilled
        if one.name == "attention, fp32":
            assert 0.8 < microseconds(kernel, one) / MEASURED_US < 1.25
