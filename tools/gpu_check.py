"""What only a GPU can say, in three calls of less than ten minutes each.

    make gpu-check [CALL=1,2,3] [PYTHON=python3] [OUT=build/gpu-check]

The Python needs torch with CUDA, numpy, safetensors, pillow, tqdm, pytest and setuptools, and there
must be an nvcc; neither pip nor a network is asked for. The service is measured where also fastapi,
httpx and what LinPix serves with are installed.

OUT has results.jsonl, where every measurement and the end of every step is a line as soon as it is
known, report.md (all of it as tables), and log.txt (what the steps printed). A run goes on after
what OUT has: neither steps that ended well nor measurements are repeated, so take another OUT after
a change of the code. If tests of decoding fail, those that did run again without the overlap of
kernels, and then with the tiles of few rows; the steps that follow use what passed. bits/dim are
measured where MNIST is, in the folder that LINPIX_DATA names, or in ../shared/data. The report ends
with whether a float16 state is worth its code.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools.harness.arguments import new_parser, numbers
from tools.harness.commands import ROOT, ran, words_of
from tools.results import Results

LIMIT_S = 560.0  # of a call
SHOWN_LINES = 40  # of a step that failed; of others one
OLDER = {
    "without overlap": {"LINPIX_OVERLAP": "0"},  # what is tried if tests of decoding fail
    "in tiles of few rows": {"LINPIX_OVERLAP": "0", "LINPIX_TILES": "few"},
}
NEEDED = ("torch", "numpy", "safetensors", "PIL", "tqdm", "pytest", "setuptools")
SERVING = (
    "fastapi",
    "httptools",
    "httpx",
    "prometheus_client",
    "pydantic_settings",
    "python_multipart",
    "uvicorn",
)
# of a float16 state over float32, in images/s at so many rows; below it, --state fp16 is deleted
WORTH, WORTH_ROWS = 1.3, 1024
# tiny shapes, since every access is looked at
SANITIZED = "padding or taken or recorded or reading_leaves or prefill_leaves"


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]
    limit_s: float
    variables: dict[str, str] = field(default_factory=dict)


class Check:
    """Runs steps one after the other, and writes down how each ended."""

    def __init__(self, out: Path) -> None:
        self.out, self.results = out, Results(out / "results.jsonl")
        self.failed: list[str] = []
        self.until = time.monotonic() + LIMIT_S

    @property
    def variables(self) -> dict[str, str]:
        """Of measurements: those with which tests of decoding pass, if they do not without."""
        if self.results.find(step="decoding", ended="well"):
            return {}
        return next(
            (
                variables
                for how, variables in OLDER.items()
                if self.results.find(step=f"decoding {how}", ended="well")
            ),
            {},
        )

    def run(self, step: Step) -> bool:
        """Whether it ended well, now or in an earlier run; else all of its processes are ended."""
        if self.results.find(step=step.name, ended="well"):
            return True
        left = min(step.limit_s, self.until - time.monotonic())
        if left <= 0:
            return self._note(step, "no time was left for it", 0.0, [])
        print(f"== {step.name}", flush=True)
        began, before = time.monotonic(), clocks()
        with (self.out / "log.txt").open("a+") as log:
            begin = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | self.variables | step.variables,
            )
            try:
                status = process.wait(timeout=left)
                ended = f"exit status {status}" if status else "well"
            except subprocess.TimeoutExpired:
                ended = f"ran out of time, {left:.0f} s"
            finally:
                if process.poll() is None:
                    # what it started, too: the next step wants the GPU
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            log.seek(begin)
            printed = log.read().splitlines()
        self.results = Results(self.results.path)  # with what the step has added
        shown = 1 if ended == "well" else SHOWN_LINES
        print("\n".join(printed[-shown:]), flush=True)
        measured = {"clocks before": before, "clocks after": clocks()} if before else {}
        return self._note(step, ended, time.monotonic() - began, printed, **measured)

    def decide(self) -> None:
        """Once the last speeds of a call are known."""
        found = decision(self.results.known)
        measured = self.results.find(step="decode others", ended="well")
        if measured and found and not self.results.find(part="decision", **found):
            self.results.add(part="decision", **found)
            self._report()

    def _report(self) -> None:
        (self.out / "report.md").write_text(report(self.results.known))

    def _note(
        self, step: Step, ended: str, seconds: float, printed: list[str], **measured: str
    ) -> bool:
        last = next((line.strip() for line in reversed(printed) if line.strip()), "")
        self.results.add(
            step=step.name, ended=ended, seconds=round(seconds), printed=last[:200], **measured
        )
        self._report()
        if ended != "well":
            self.failed.append(f"{step.name}: {ended}")
        return ended == "well"


def clocks() -> str:
    """Of a GPU: MHz of its multiprocessors and memory, and degrees Celsius."""
    if not shutil.which("nvidia-smi"):
        return ""
    asked = "--query-gpu=clocks.sm,clocks.mem,temperature.gpu --format=csv,noheader,nounits"
    return ran(f"nvidia-smi {asked}").stdout.strip()


def decision(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether --state fp16 stays, by what was measured; empty before it was."""
    speed = {
        (line["preset"], line["state"]): line["images_per_second"]
        for line in lines
        if line.get("part") == "decode" and line["batch"] == WORTH_ROWS
    }
    gains = {
        preset: found / speed[preset, "fp32"]
        for (preset, state), found in speed.items()
        if state == "fp16" and (preset, "fp32") in speed
    }
    if not gains:
        return {}
    worth = max(gains.values()) >= WORTH
    return {"--state fp16": "stays" if worth else "delete it, and say so in the log", "gain": gains}


def report(lines: list[dict[str, Any]]) -> str:
    """A table for each part: a row for each measurement, the columns all that was found. And how
    each step ended.
    """
    parts: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        rows = parts.setdefault(line.get("part", "steps"), [])
        nested = [(name, value) for name, value in line.items() if isinstance(value, dict)]
        plain = {name: value for name, value in line.items() if name not in ("part", *dict(nested))}
        whole, by_rows = dict(plain), []
        for unit, found in nested:
            for key, value in found.items():
                if isinstance(value, dict):
                    by_unit = {f"{name}, {unit}": one for name, one in value.items()}
                    by_rows.append(plain | {"rows": key} | by_unit)
                else:
                    whole[f"{key}, {unit}"] = value
        rows += by_rows or [whole]
    return "\n".join(f"## {part}\n\n{table(rows)}" for part, rows in parts.items())


def table(rows: list[dict[str, Any]]) -> str:
    columns = [*dict.fromkeys(chain.from_iterable(rows))]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        lines.append([printed(row.get(name, "")) for name in columns])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def printed(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def step(name: str, line: str, limit_s: float, variables: dict[str, str] | None = None) -> Step:
    """line: its command, as one would type it."""
    return Step(name, words_of([line]), limit_s, variables or {})


def calls(out: Path, work: Path, emulated: Path | None = None) -> list[list[Step]]:
    """The steps of each call, in the order of what they are worth should time run out.

    work: folder of what nobody wants to see later: pictures to train with, checkpoints, pytest's
          cache · emulated:
    kernels for a processor: a tiny form of all of it, to try this file without a GPU.
    """
    python, results = sys.executable, f"--results {out}/results.jsonl"

    def tests(path: str) -> str:
        return f"{python} -m pytest -q -mcuda -ocache_dir={work}/cache {path}"

    def measured(part: str, flags: str = "") -> str:
        if emulated:
            flags = f"--preset tiny --batch 1,2 --state fp32 --emulated {emulated}"
            flags += f" --data {work}/pictures"
        return f"{python} -m tools.benchmarks.cuda {part} {results} {flags}"

    def trains(name: str, asked: str) -> str:
        """Ten steps, an evaluation, drawn samples and a saved checkpoint, of noise in two
        classes.
        """
        device = "cpu" if emulated else "cuda"
        return (
            f"{python} -m linpix train {asked} --data {work}/pictures --out {work}/{name}"
            f" --device {device} --images 160 --batch 16 --warmup-images 32 --validation 16"
        )

    def service(flags: str, limit_s: float) -> list[Step]:
        if missing(SERVING):
            return []
        return [step("service", f"{python} -m tools.benchmarks.service {results} {flags}", limit_s)]

    decoding, sequences = tests("tests/model/test_cuda.py"), "tests/model/attention/test_linear.py"
    if emulated:
        return [
            [
                step("machine", measured("machine"), 120),
                step("tests can be read", f"{decoding} {sequences} --collect-only", 120),
            ],
            [
                step(part, measured(part), 120)
                for part in ("decode", "digests", "likelihood", "kernels", "products")
            ],
            [
                step("training, eager", trains("eager", "tiny --no-compile"), 120),
                step("training", measured("training"), 120),
                *service(f"--model {work}/eager --load 2x1,2x2 --seconds 0.5 --reload", 120),
            ],
        ]
    rows = "1,64,512,1024,4096"
    data = Path(os.environ.get("LINPIX_DATA", "../shared/data"))
    scoring = []
    if (ROOT / data / "mnist").is_dir():
        scores = f"--preset mnist-large,mnist-conditional --data {data}"
        scoring = [step("likelihood", measured("likelihood", scores), 120)]
    again = [
        step(f"decoding {how}", f"{decoding} --last-failed", 100, variables)
        for how, variables in OLDER.items()
    ]
    many = "--device cuda --state fp16 --slots 4096 --max-queue 8192 --max-n 1024 --client-images 0"
    # of our kernels only: torch has its own
    sanitizer = "env compute-sanitizer --error-exitcode=9 --kernel-regex kns=enter"
    others = f"--preset mnist-large,mnist-conditional,cifar10 --batch {rows}"
    some = "--preset mnist,mnist-large,mnist-conditional --batch 1,64,1024,4096"
    large = "--preset mnist-large --batch 4096 --state fp16"
    invariant = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
    return [
        [
            step("build", f"{python} setup.py -q build_ext --inplace --parallel=2", 300),
            step("look", f"{python} -m tools.gpu_check --look", 60),
            step("machine", measured("machine"), 60),
            step("decoding", decoding, 230),
            *again,
            step("attention over sequences", tests(sequences), 60),
            step("digests", measured("digests", some), 100),
            step("decode mnist", measured("decode", f"--preset mnist --batch {rows}"), 120),
            step("races", f"{sanitizer} --tool=racecheck {decoding} -k '{SANITIZED}'", 90),
            step("memory", f"{sanitizer} {decoding} -k '{SANITIZED}'", 90),
        ],
        [
            step("exchange", measured("exchange"), 60),
            step("kernels", measured("kernels", "--preset mnist --batch 64,4096"), 90),
            step("decode others", measured("decode", others), 240),
            *scoring,
            step("kernels of mnist-large", measured("kernels", large), 60),
            step("products of torch", measured("products", f"--batch {rows}"), 40),
            step(
                "the same, as batch-invariant modes set it",
                measured("products", f"--batch {rows}"),
                40,
                invariant,
            ),
        ],
        [
            *service(f"--reload {many}", 230),
            step("training, eager", trains("eager", "mnist --no-compile"), 60),
            step("training", measured("training", "--preset mnist-large --batch 128,256"), 120),
            step("training, compiled", trains("compiled", "mnist"), 150),
        ],
    ]


def missing(packages: tuple[str, ...]) -> list[str]:
    return [name for name in packages if find_spec(name) is None]


def look() -> str:
    """What keeps this machine from the steps that follow, in one line; empty if nothing does."""
    if names := missing(NEEDED):
        return f"not installed here: {', '.join(names)}"
    from linpix.model import ops

    if why := ops.why_no_gpu():
        return why
    import torch

    driver = torch._C._cuda_getDriverVersion()
    if too_new := newer_than_driver(nvcc_version(), driver):
        return too_new
    one, offsets = torch.ones(1, 1, 8, device="cuda"), torch.tensor([0, 1], device="cuda")
    try:
        found, _ = torch.ops.linpix.causal_attention(one, one, one, offsets, 1e-6)
    except RuntimeError as error:
        return f"a kernel does not start: {str(error).splitlines()[0]}"
    wrong = float((found - 1).abs().max())
    return f"attention to oneself is off by {wrong:g}" if wrong > 1e-5 else ""


def nvcc_version() -> tuple[int, ...]:
    told = re.search(r"release (\d+)\.(\d+)", ran("nvcc --version").stdout)
    return tuple(map(int, told.groups())) if told else ()


def newer_than_driver(nvcc: tuple[int, ...], driver: int) -> str:
    """driver: the newest CUDA that it runs, as 1000 * major + 10 * minor. Within a major version
    newer kernels run, too.
    """
    if not nvcc or nvcc[0] <= driver // 1000:
        return ""
    return (
        f"nvcc is of CUDA {nvcc[0]}.{nvcc[1]}, and the driver runs kernels up to CUDA"
        f" {driver // 1000}.{driver % 1000 // 10}: install that toolkit, or a newer driver"
    )


def examine(check: Check, steps: list[Step]) -> None:
    """Ends early if there is no GPU. Older kernels are tried only if the tests of decoding fail."""
    fine = True
    for step in steps:
        if step.name.startswith("decoding "):
            fine = fine or check.run(step)
        elif not check.run(step):
            fine &= step.name != "decoding"
            if step.name == "look":
                return


def write_pictures(folder: Path, size: int, count: int = 200) -> None:
    """Noise, in two classes: what training is given does not decide whether it runs."""
    random = np.random.default_rng(0)
    for i in range(count):
        (folder / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (size, size), np.uint8)).save(
            folder / str(i % 2) / f"{i}.png"
        )


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/gpu-check", help="folder for what is found"
    )
    parser.add_argument("--call", type=numbers, default=[1, 2, 3])
    parser.add_argument(
        "--emulated", type=Path, help="kernels for a processor, to try this in tiny form"
    )
    parser.add_argument(
        "--look", action="store_true", help="only say what is wrong with this machine, if anything"
    )
    given = parser.parse_args()
    # where the toolkit's programs are, if nobody said so
    os.environ["PATH"] += os.pathsep + "/usr/local/cuda/bin"
    if given.look:
        sys.exit(look() or None)
    # and so is the step that runs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    out, check = given.out.resolve(), Check(given.out.resolve())
    work = out.with_name(out.name + "-work")
    if not (work / "pictures").exists():
        side = 8 if given.emulated else 28
        write_pictures(work / "pictures", side)
    for number in given.call:
        check.until = time.monotonic() + LIMIT_S
        examine(check, calls(out, work, given.emulated)[number - 1])
    check.decide()
    print(f"== {'; '.join(check.failed) or 'all well'}; see {out}", flush=True)
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
