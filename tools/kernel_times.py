"""Microseconds of the CUDA kernels of a layer on an H200, by a model of their machine code; not
measured.

    python -m tools.kernel_times [--rows 1,4096] [--preset mnist] [--kernels]

It needs nvcc, cuobjdump and nvdisasm. A row of the table: a layer with the state in float16 and in
float32, each with its floor: the time to move its weights and state. --kernels: each kernel, too,
and how many of its blocks a multiprocessor could hold.

A scheduler of a multiprocessor issues an instruction a cycle, of those of its warps that are ready.
ptxas has encoded with each instruction how long its warp then waits, and which of six scoreboards
it sets and waits for (bits 105 to 125 of 128). An instruction keeps its unit busy for some cycles,
and its result comes after some more. So many cycles, and the time to move the kernel's bytes at the
speed of a copy, hide a part of each other: the root of the sum of their squares counts, and 2 us
for a launch.
"""

import math
import re
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

import torch

from linpix.model.config import PRESETS
from tools.harness.arguments import new_parser, numbers, words
from tools.harness.commands import ran

CSRC = Path(__file__).resolve().parents[1] / "csrc"
CLOCK, SCHEDULERS, COPY = 1755e6, 132 * 4, 4.27e12  # Hz; of an H200; bytes a second
LAUNCH_US = 2.0
PROGRAMS = "nvcc", "cuobjdump", "nvdisasm", "c++filt"
CACHE, MEMORY = 400, 800  # cycles of a load from the L2 cache, and from memory
# of state, that a step moves for each head
HALF_BYTES, FLOAT_BYTES = 2048 * 9 / 8 + 256 + 128 * (3.5 + 7 / 8), 8192 + 256
# cycles for which a unit is busy with an instruction, as one of four schedulers sees it, and until
# its result is there
UNITS = {
    "tensor": (6.6, 33),
    "load": (4.0, CACHE),
    "store": (4.0, 10),
    "copy": (4.0, 10),
    "shared": (4.0, 30),
    "special": (8.0, 22),
    "float": (1.0, 4),
    "integer": (2.0, 4),
    "multiply": (2.0, 4),
    "uniform": (1.0, 20),
    "control": (1.0, 4),
}
OPERATIONS = {
    "HMMA": "tensor",
    "LDG": "load",
    "STG": "store",
    "RED": "store",
    "ATOMG": "store",
    "LDGSTS": "copy",
    **dict.fromkeys(("LDS", "STS", "LDSM", "SHFL", "REDUX"), "shared"),
    **dict.fromkeys(("MUFU", "I2F", "F2I", "FRND", "POPC"), "special"),
    **dict.fromkeys(("FFMA", "FMUL", "FADD"), "float"),
    **dict.fromkeys(("IMAD", "HADD2", "HFMA2", "HMUL2", "F2FP", "F2F", "CS2R"), "multiply"),
    **dict.fromkeys(("LDC", "S2R"), "uniform"),
    **dict.fromkeys(
        (
            "BRA",
            "BSSY",
            "BSYNC",
            "BAR",
            "DEPBAR",
            "LDGDEPBAR",
            "EXIT",
            "CALL",
            "NOP",
            "ACQBULK",
            "WARPSYNC",
            "PREEXIT",
        ),
        "control",
    ),
}


@dataclass(frozen=True)
class Instruction:
    address: int
    operation: str
    text: str
    guarded: bool  # it runs under a condition
    target: int | None  # of a branch
    stall: int  # cycles until the warp's next instruction
    sets: int  # the scoreboard of its result; 7: none
    frees: int  # that of its operands
    waits: int  # a bit for each scoreboard


@dataclass(frozen=True)
class Case:
    """A kernel, and how it is run for so many rows."""

    name: str  # as in the table
    source: str
    kernel: str  # in its name
    warps: int  # of a block
    blocks: int  # on a multiprocessor
    grid: int  # blocks in all
    moved: float  # bytes that come from memory, and go there
    trips: tuple[int, ...] = ()  # of its loops, in the order of their ends; 1 of others
    # branches forward that are taken, by their number among those with a condition: from which
    # visit on
    taken: dict[int, int] = field(default_factory=dict)
    # how often a layer runs it, by the precision of the state
    times: dict[str, float] = field(default_factory=lambda: {"fp16": 1, "fp32": 1})
    shared: int = 0  # bytes of a block in shared memory

    def fitting(self, registers: int) -> str:
        """How many blocks a multiprocessor could hold, and for lack of what not more."""
        most = {
            "registers": 65536 // (math.ceil(registers / 8) * 256 * self.warps),
            "shared memory": (228 << 10) // (self.shared + 1024),
            "warps": 64 // self.warps,
            "blocks": 32,
        }
        limit = min(most, key=most.__getitem__)
        return f"{most[limit]} blocks for {limit}"


def compiled(source: str) -> dict[str, tuple[list[Instruction], int, int]]:
    """The kernels of a file for sm_90: their machine code, registers, and bytes of spilled ones."""
    with tempfile.TemporaryDirectory() as folder:
        object_ = Path(folder) / "object.o"
        said = _output(
            f"nvcc -std=c++17 -I{CSRC} -I{Path(torch.__file__).parent}/include -DUSE_CUDA"
            " -fmad=false -Xptxas -v -gencode=arch=compute_90,code=sm_90"
            f" -c {CSRC}/cuda/{source} -o {object_}"
        )
        code = kernels_of(_output("c++filt", given=_output(f"cuobjdump -sass {object_}")))
    found = re.findall(
        r"function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", said, re.DOTALL
    )
    mangled = "\n".join(name for name, *_ in found)
    names = map(_named, _output("c++filt", given=mangled).splitlines())
    return {
        name: (code[name], int(registers), int(spilled))
        for name, (_, spilled, registers) in zip(names, found, strict=True)
    }


def _output(command: str, given: str = "") -> str:
    """What a command prints, errors too."""
    ended = ran(command, input=given, timeout=600)
    ended.check_returncode()
    return ended.stdout + ended.stderr


def _named(name: str) -> str:
    return re.sub(r"linpix::(gpu::)?", "", name).removeprefix("void enter<")


def kernels_of(listing: str) -> dict[str, list[Instruction]]:
    found: dict[str, list[Instruction]] = {}
    for part in listing.split("Function : ")[1:]:
        code = found[_named(part.partition("\n")[0])] = []
        for address, text, high in re.findall(
            r"/\*([0-9a-f]{4,})\*/\s+(.*?) ?;.*\n\s+/\* 0x([0-9a-f]{16}) \*/", part
        ):
            bits, words = int(high, 16) >> 41, text.split()
            guarded = words[0].startswith("@")
            jump = re.search(r"(?:BRA|CALL).*0x([0-9a-f]+)$", text)
            target = int(jump[1], 16) if jump else None
            code.append(
                Instruction(
                    int(address, 16),
                    words[guarded],
                    text,
                    guarded or "BRA !" in text,
                    target,
                    bits & 15,
                    bits >> 5 & 7,
                    bits >> 8 & 7,
                    bits >> 11 & 63,
                )
            )
    return found


def path_of(code: list[Instruction], case: Case) -> list[Instruction]:
    """The instructions of a warp. A branch forward is taken if the case says so, or if it must be:
    see `leaves_out`.
    """
    at = {instruction.address: index for index, instruction in enumerate(code)}
    conditional = [i for i in code if i.operation == "BRA" and i.guarded]
    taken = {branch.address: case.taken.get(n) for n, branch in enumerate(conditional)}
    loops = [i.address for i in conditional if i.target and i.target < i.address]
    trips = dict.fromkeys(loops, 1) | dict(zip(loops, case.trips, strict=False))
    left = dict(trips)
    path, index, visits = list[Instruction](), 0, Counter[int]()
    while True:
        now = code[index]
        path.append(now)
        index += 1
        if now.operation == "EXIT" and not now.guarded:
            return path
        if now.operation != "BRA" or now.target is None:
            continue
        target, first = at[now.target], taken.get(now.address)
        visits[now.address] += 1
        if not now.guarded:
            index = target
        elif now.address in left:
            left[now.address] -= 1
            if left[now.address] > 0:
                index = target
            else:
                left[now.address] = trips[now.address]  # it may be entered again
        elif first is not None:
            if visits[now.address] > first:
                index = target
        elif leaves_out(now, code[index:target], loops):
            index = target


def leaves_out(branch: Instruction, between: list[Instruction], loops: list[int]) -> bool:
    """Whether a branch forward avoids a call of a slow path, or what it skips leaves out a loop.

    between: what it skips · loops: addresses of their ends.
    """
    if not between:
        return False
    if len(between) < 12 and any(i.operation.startswith("CALL") for i in between):
        return True
    last = between[-1]
    if last.operation != "BRA" or last.guarded:
        return False
    left_out = [loop for loop in loops if branch.address < loop < (last.target or 0)]
    return bool(left_out) and left_out[0] > (branch.target or 0)


class Warp:
    """How far it is, and what it waits for, in cycles."""

    def __init__(self, ready: float) -> None:
        self.ready, self.place = ready, 0
        self.boards = [0.0] * 8  # when each scoreboard is free; the last two are nobody's
        # when each group of asynchronous copies has come; the last one is still open
        self.copies = [0.0]
        self.at_barrier = False

    def can_issue(self, step: Instruction) -> float:
        """When: after its last instruction, and what this one waits for."""
        times = [self.ready, *(self.boards[b] for b in range(6) if step.waits >> b & 1)]
        allowed = re.search(r"DEPBAR.*SB0, 0x(\d+)", step.text)  # copies that may be under way
        if allowed:
            times += self.copies[: len(self.copies) - 1 - int(allowed[1])][-1:]
        return max(times)


def unit_of(step: Instruction) -> str:
    name = step.operation.split(".")[0]
    other = "uniform" if name.startswith("U") else "integer"
    return OPERATIONS.get(name, other)


def cycles(path: list[Instruction], count: int, resident: int) -> float:
    """Until a scheduler has run so many warps, of which `resident` at a time; these meet at
    barriers.
    """
    follow = next((n for n, step in enumerate(path) if step.operation == "ACQBULK"), 0)
    free, units, waiting = 0.0, dict.fromkeys(UNITS, 0.0), count - resident
    warps = [Warp(0.0) for _ in range(resident)]
    while warps:
        when, warp = min(
            (
                (max(w.can_issue(path[w.place]), units[unit_of(path[w.place])]), n)
                for n, w in enumerate(warps)
                if not w.at_barrier
            )
        )
        chosen = warps[warp]
        step, now = path[chosen.place], max(when, free)
        unit = unit_of(step)
        busy, latency = UNITS[unit]
        if step.operation.startswith(("LDS.128", "LDSM", "STS.128")):
            busy += 12
        if unit == "load" and chosen.place < follow and re.search(r"\.128|\.EF", step.operation):
            latency = MEMORY  # the state; everything else is in the L2 cache
        free, units[unit] = now + 1, now + busy
        for board, done in ((step.sets, latency), (step.frees, 10)):
            chosen.boards[board] = max(chosen.boards[board], now + done)
        if unit == "copy":
            chosen.copies[-1] = now + CACHE + 150
        elif step.operation == "LDGDEPBAR":
            chosen.copies.append(0.0)
        chosen.ready, chosen.place = now + max(1, step.stall), chosen.place + 1
        chosen.at_barrier = step.operation.startswith("BAR")
        if all(each.at_barrier for each in warps):
            for each in warps:
                each.at_barrier, each.ready = False, now + 20
        if chosen.place == len(path):
            warps.remove(chosen)
            if waiting > 0:
                waiting -= 1
                warps.append(Warp(now + 300))  # a new block
    return free


def microseconds(code: list[Instruction], case: Case) -> float:
    path, held = path_of(code, case), case.warps * case.blocks // 4  # warps of a scheduler at once
    if any(i.operation.startswith("BAR") for i in path):  # blocks of several warps, wave after wave
        waves = math.ceil(case.grid / (SCHEDULERS // 4 * case.blocks))
        last = case.grid - (waves - 1) * SCHEDULERS // 4 * case.blocks
        fewer = max(1, case.warps * math.ceil(last / (SCHEDULERS // 4)) // 4)
        taken = (waves - 1) * cycles(path, held, held) + cycles(path, fewer, fewer)
    else:
        many = 6 * held
        taken = cycles(path, many, held) / many * max(case.grid * case.warps / SCHEDULERS, held)
    return math.hypot(taken / CLOCK, case.moved / COPY) * 1e6 + LAUNCH_US


# shapes of MultiplyMany with their rows and columns of a tile: by whether the rows are many, and
# whether the product is added
TILES = {
    (True, True): ("2, 4, 4, 2, 3", 128, 64),
    (True, False): ("4, 4, 2, 4, 3", 128, 128),
    (False, True): ("1, 2, 2, 2, 4", 32, 32),
    (False, False): ("2, 2, 2, 4, 4", 64, 64),
}


FEW = 64  # as in csrc/cuda/kernels.h


def of_few(name: str, rows: int, kind: int, wide: int, deep: int) -> Case:
    """A product of few rows. kind: 0 is qkv, 1 is up, 2 is added."""
    stages, in_block, added = deep // 32, min(rows, 16), kind == 2
    if added:  # how many copies a lane makes of a row
        branches = {1: (3, 5), 2: (4, 5), 4: (2,)}[max(1, deep // 256)]
    else:
        branches = (1, 46) if rows <= 4 else (28,)
    taken = dict.fromkeys(branches, 0)
    if stages % 4 == 0:
        taken[11 if added else 52] = 0
    trips = (1, math.ceil(in_block / 2) if added else 1, stages // 4, stages % 4)
    warps = 2 if added else 4
    kernel = f"Multiply<bfloat16, (Product){kind}, {warps}, 16, 8>"
    grid = math.ceil(rows / 16) * math.ceil(wide / (8 * warps))
    shared = 16 * warps * 512 + 16 * 2 * (deep + 8)
    blocks = 16 // warps
    return Case(name, "product.cu", kernel, warps, blocks, grid, 0, trips, taken, shared=shared)


def of_many(name: str, rows: int, kind: str, wide: int, deep: int) -> Case:
    shape, high, across = TILES[rows > 1024, kind == "2, false"]
    kernel = f"MultiplyMany<(Product){kind}, {shape}>"
    grid = math.ceil(rows / high) * math.ceil(wide / across)
    warps = 4 if high == 32 else 8
    blocks, trips = 16 // warps, (deep // 64,)
    shared = int(shape[-1]) * (high * 144 + across * 128)
    return Case(name, "product.cu", kernel, warps, blocks, grid, 0, trips, shared=shared)


def cases(rows: int, preset: str = "mnist") -> list[Case]:
    """Of a layer with heads of 32."""
    config = PRESETS[preset]
    width, heads, found = config.d_model, rows * config.heads, list[Case]()
    shapes = (
        ("qkv", "0, false", 3 * 32 * config.heads, width),
        ("up", "1, true", config.d_ff, width),
        ("out", "2, false", width, 32 * config.heads),
        ("down", "2, false", width, config.d_ff),
    )
    if rows > FEW:
        columns, taken = 8 if width > 128 else 4, {7: 0}
        kernel, grid = f"NormaliseRows<{columns}>", math.ceil(rows / 128) * 32
        twice = {"fp16": 2.0, "fp32": 2.0}
        found.append(Case("norm", "product.cu", kernel, 4, 8, grid, 0, taken=taken, times=twice))
    for name, kind, wide, deep in shapes:
        if rows > FEW:
            found.append(of_many(name, rows, kind, wide, deep))
        else:
            found.append(of_few(name, rows, int(kind[0]), wide, deep))
    for name, branch, share in (
        ("attention, fp16, seven of eight tokens", 6, 7 / 8),
        ("the eighth", 5, 1 / 8),
    ):
        kernel, taken = "Recall<bfloat16, true>", {branch: 0}
        found.append(
            Case(
                name,
                "attention.cu",
                kernel,
                4,
                9,
                heads // 4 or 1,
                heads * HALF_BYTES,
                taken=taken,
                times={"fp16": share},
                shared=4 * 1536,
            )
        )
    name, kernel = "attention, fp32", "Attend<bfloat16, 32>"
    moved, grid = heads * FLOAT_BYTES, heads // 4 or 1
    only = {"fp32": 1.0}
    found.append(Case(name, "attention.cu", kernel, 4, 5, grid, moved, taken={5: 0}, times=only))
    return found


def floors(rows: int, preset: str) -> list[float]:
    """us to move the weights of a layer, and the state in float16 and in float32."""
    config = PRESETS[preset]
    width, attended = config.d_model, 32 * config.heads
    weights = 2 * width * (4 * attended + 2 * config.d_ff)
    heads = rows * config.heads
    return [(weights + heads * each) / COPY * 1e6 for each in (HALF_BYTES, FLOAT_BYTES)]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rows", type=numbers, default=[4096])
    parser.add_argument("--preset", type=words, default=["mnist"])
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        sys.exit(f"this needs {' and '.join(missing)} on the PATH")
    load = cache(compiled)
    print("| preset | rows | fp16 state, us | its floor | fp32 state | its floor |")
    print("|---|---|---|---|---|---|")
    for preset, rows in product(given.preset, given.rows):
        layer = {"fp16": 0.0, "fp32": 0.0}
        for case in cases(rows, preset):
            code, registers, spilled = next(
                each for name, each in load(case.source).items() if case.kernel in name
            )
            us = microseconds(code, case)
            if given.kernels:
                cells = registers, spilled, case.warps * case.blocks, len(path_of(code, case))
                counts = "{} registers, {} bytes spilled, {} warps at once, {} instructions"
                room = f"at most {case.fitting(registers)}, each {case.shared} bytes shared"
                print(f"{case.name}: {us:.1f} us, {counts.format(*cells)} of a warp, {room}")
            for state, times in case.times.items():
                layer[state] += times * us
        lowest, low = floors(rows, preset)
        half, whole = layer.values()
        print(f"| {preset} | {rows} | {half:.1f} | {lowest:.1f} | {whole:.1f} | {low:.1f} |")


if __name__ == "__main__":
    main()
