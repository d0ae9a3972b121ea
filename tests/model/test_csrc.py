"""The C++ tests of csrc/tests on an emulated arm64; `make sanitize` runs them on this processor."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CSRC = Path(__file__).resolve().parents[2] / "csrc"
COMPILER = "aarch64-linux-gnu-g++"


def test_the_kernels_hold_without_torch_in_their_portable_version(tmp_path):
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not shutil.which(COMPILER) or emulator is None:
        pytest.skip(
            f"{COMPILER} or its emulator is missing; Debian has g++-aarch64-linux-gnu and qemu-user"
        )
    program = tmp_path / "test_kernels"
    sources = [
        CSRC / "tests/test_kernels.cpp",
        *(CSRC / name for name in ("kernels.cpp", "decode.cpp", "team.cpp")),
    ]
    subprocess.run(
        [
            COMPILER,
            "-std=c++20",
            "-O3",
            "-static",
            "-ffp-contract=off",
            "-Wno-psabi",
            "-DLINPIX_ISA=portable",
            f"-I{CSRC}",
            *sources,
            "-pthread",
            "-o",
            program,
        ],
        check=True,
    )
    ended = subprocess.run([emulator, program, "few"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
