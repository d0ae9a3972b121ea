"""The C++ tests of csrc/tests: on this processor, and on an emulated arm64."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CSRC = Path(__file__).resolve().parents[2] / "csrc"
ARM = ("aarch64-linux-gnu-g++", "qemu-aarch64")


@pytest.mark.parametrize(("compiler", "runner"), [("g++", ""), ARM], ids=["here", "arm64"])
def test_the_kernels_hold_without_torch_in_their_portable_version(compiler, runner, tmp_path):
    runner = shutil.which(runner) or shutil.which(runner + "-static") or "" if runner else ""
    if not shutil.which(compiler) or (compiler == ARM[0] and not runner):
        pytest.skip(f"{compiler} or its emulator is missing; Debian has g++-aarch64-linux-gnu and qemu-user")
    program = tmp_path / "test_kernels"
    sources = [CSRC / "tests/test_kernels.cpp", *(CSRC / name for name in ("kernels.cpp", "decode.cpp", "team.cpp"))]
    subprocess.run([compiler, "-std=c++20", "-O2", "-static", "-ffp-contract=off", "-Wno-psabi",
                    "-DLINPIX_ISA=portable", f"-I{CSRC}", *sources, "-pthread", "-o", program], check=True, timeout=300)
    ended = subprocess.run([word for word in (runner, str(program)) if word], capture_output=True, text=True,
                           timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
