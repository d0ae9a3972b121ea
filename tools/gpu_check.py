"""Everything that only a GPU can say, in one command: build, test, train, measure, look for memory errors.

    make gpu-check [PYTHON=python3] [OUT=build/gpu-check]

The Python needs torch with CUDA, numpy, safetensors, pillow, tqdm, pytest and setuptools, and there must be an nvcc;
neither pip nor a network is asked for. Each step has a limit of its own, and all of them end within ten minutes. OUT
holds what is known so far: report.md (how each step ended), log.txt (what each printed), benchmarks.json and
benchmarks.md. Where decoding fails, its tests run once more without the overlap of kernels, and so does the rest.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 560.0  # of all
SHOWN_LINES = 40  # of a step that failed; of others one
WITHOUT_OVERLAP = {"LINPIX_OVERLAP": "0"}
SANITIZED = "padding or taken or recorded"  # tiny shapes, since every access is looked at

Command = list[str]


class Check:
    """Runs steps one after the other, and writes down how each ended."""

    def __init__(self, out: Path, limit_s: float = LIMIT_S) -> None:
        self.out, self.began, self.limit_s = out, time.monotonic(), limit_s
        self.lines: list[str] = []
        self.failed: list[str] = []
        self.variables: dict[str, str] = {}  # of the steps to come
        out.mkdir(parents=True, exist_ok=True)
        (out / "log.txt").write_text("")

    def step(self, name: str, command: Command, limit_s: float, **variables: str) -> bool:
        """Whether it ended well, in its time and in that of all; else all of its processes are ended."""
        began = time.monotonic()
        left = self.limit_s - (began - self.began)
        if left <= 0:
            return self._note(name, "no time was left for it", 0.0, [])
        print(f"== {name} ({began - self.began:.0f} s)", flush=True)
        with (self.out / "log.txt").open("r+") as log:
            begin = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                                       env=os.environ | self.variables | variables)
            try:
                status = process.wait(timeout=min(limit_s, left))
                ended = f"exit status {status}" if status else ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too: the GPU is wanted for what comes next
                process.wait()
                ended = f"ran out of time, {min(limit_s, left):.0f} s"
            log.seek(begin)
            said = log.read().splitlines()
        print("\n".join(said[-SHOWN_LINES if ended else -1:]), flush=True)
        return self._note(name, ended, time.monotonic() - began, said)

    def _note(self, name: str, ended: str, seconds: float, said: list[str]) -> bool:
        last = next((line.strip() for line in reversed(said) if line.strip()), "").replace("|", "/")
        self.lines.append(f"| {name} | {ended or 'well'} | {seconds:.0f} | {last[:200]} |")
        if ended:
            self.failed.append(f"{name}: {ended}")
        (self.out / "report.md").write_text("\n".join(["| step | ended | seconds | last line |", "|---|---|---|---|",
                                                       *self.lines, "", self.summary]) + "\n")
        return not ended

    @property
    def summary(self) -> str:
        return f"{time.monotonic() - self.began:.0f} s; " + ("; ".join(self.failed) or "all well so far")


def commands(python: str, out: Path, data: Path) -> dict[str, Command]:
    """What each step runs."""
    def tests(path: str) -> Command:
        return [python, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", path]

    decoding = tests("tests/model/test_cuda.py")
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    return {
        "build": [python, "setup.py", "-q", "build_ext", "--inplace", "--parallel=2"],  # CUDA beside the processor's
        "look": [python, "-c", "from linpix.model import ops; import sys; sys.exit(ops.why_no_gpu())"],
        "attention": tests("tests/model/attention/test_linear.py"),
        "decoding": decoding,
        "eager": training(python, "mnist", "cuda", data, data / "eager", "--no-compile"),
        "compiled": training(python, "mnist", "cuda", data, data / "compiled"),
        "benchmark": [python, "-m", "tools.benchmarks.cuda", "--json", str(out / "benchmarks.json"), "--markdown",
                      str(out / "benchmarks.md")],
        "sanitizer": [sanitizer, python, "-c", "import torch; torch.ones(1, device='cuda').sum().item()"],
        "memory": [sanitizer, "--error-exitcode=9", *decoding, "-k", SANITIZED],
    }


def training(python: str, preset: str, device: str, data: Path, run: Path, *flags: str) -> Command:
    """Ten steps, an evaluation, drawn samples and a saved checkpoint."""
    return [python, "-m", "linpix", "train", preset, "--data", str(data / "pictures"), "--out", str(run), "--device",
            device, "--images", "160", "--batch", "16", "--warmup-images", "32", "--validation", "16", *flags]


def write_pictures(folder: Path, size: int, count: int = 200) -> None:
    """Noise, in two classes: what training is given does not decide whether it runs."""
    random = np.random.default_rng(0)
    for i in range(count):
        (folder / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (size, size), np.uint8)).save(folder / str(i % 2) / f"{i}.png")


def examine(check: Check, run: dict[str, Command]) -> None:
    """All steps in the order of what they are worth, should time run out."""
    check.step("build", run["build"], 300)  # should it fail, a CUDA library may have come of it all the same
    if not check.step("a GPU and kernels for it", run["look"], 60):
        return
    check.step("attention over whole sequences", run["attention"], 90)
    if not check.step("decoding", run["decoding"], 180) and \
            check.step("decoding without overlap", run["decoding"], 120, **WITHOUT_OVERLAP):
        check.variables = WITHOUT_OVERLAP
    check.step("training, eager", run["eager"], 60)
    check.step("training, compiled", run["compiled"], 150)
    check.step("benchmark", run["benchmark"], 240)
    if check.step("whether compute-sanitizer works here", run["sanitizer"], 60):
        check.step("memory", run["memory"], 90)
    else:
        check.failed.pop()  # it may be missing, or this kind of machine not allow it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-check", help="folder for what is found")
    out = parser.parse_args().out.resolve()
    os.environ["PATH"] += os.pathsep + "/usr/local/cuda/bin"  # where the toolkit's programs are, if nobody said so
    check = Check(out)
    with tempfile.TemporaryDirectory() as data:
        write_pictures(Path(data) / "pictures", 28)
        examine(check, commands(sys.executable, out, Path(data)))
    print(f"== {check.summary}; see {out}", flush=True)
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
