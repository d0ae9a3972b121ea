"""Everything that only a GPU can say, in one command: build, test, look for memory errors, measure.

    make gpu-check [PYTHON=python3]

The Python needs torch with CUDA, numpy, safetensors, pytest and setuptools, and there must be an nvcc; neither pip nor
a network is asked for. Writes benchmarks.json and benchmarks.md, and ends within nine minutes.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 530  # of all
ROOT = Path(__file__).resolve().parents[1]
TESTS = ["-m", "pytest", "-q", "-m", "cuda", "tests/model/test_cuda.py"]
SANITIZED = "padding or taken or recorded"  # tiny shapes, since every access is looked at


def main() -> int:
    began, failed = time.monotonic(), []

    def run(name: str, *command: str, limit_s: float) -> bool:
        print(f"== {name} ({time.monotonic() - began:.0f} s)", flush=True)
        left = max(1.0, LIMIT_S - (time.monotonic() - began))
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            ended = process.wait(timeout=min(limit_s, left))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it started, too: the GPU is wanted for what comes next
            ended = -1
        if ended:
            failed.append(f"{name}: {'ran out of time' if ended == -1 else f'exit status {ended}'}")
        return not ended

    python = sys.executable
    os.environ["PATH"] += os.pathsep + "/usr/local/cuda/bin"  # where the toolkit's programs are, if nobody said so
    if run("build", python, "setup.py", "-q", "build_ext", "--inplace", limit_s=120):
        code = "from model import ops; import sys; sys.exit(ops.why_no_gpu())"
        if run("a GPU and kernels for it", python, "-c", code, limit_s=60):
            run("tests", python, *TESTS, limit_s=180)
            sanitizer = shutil.which("compute-sanitizer")
            works = sanitizer and run("whether compute-sanitizer works here", sanitizer, python, "-c",
                                      "import torch; torch.ones(1, device='cuda').sum().item()", limit_s=60)
            if works:
                run("memory", str(sanitizer), "--error-exitcode=9", python, *TESTS, "-k", SANITIZED, limit_s=90)
            elif failed and failed[-1].startswith("whether"):
                print(failed.pop() + "; memory is not checked", flush=True)
            run("benchmark", python, "-m", "tests.benchmarks.cuda", "--json", "benchmarks.json", "--markdown",
                "benchmarks.md", limit_s=240)
    print(f"== {time.monotonic() - began:.0f} s in all; " + ("; ".join(failed) or "all well"), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
