"""The C++ tests of csrc/tests on an emulated arm64; `make sanitize` runs them on this processor."""

import shutil

import pytest

from tools.harness.commands import ROOT, ran

pytestmark = pytest.mark.slow

CSRC = ROOT / "csrc"
COMPILER = "aarch64-linux-gnu-g++"


def test_the_kernels_hold_without_torch_in_their_portable_version(tmp_path):
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not shutil.which(COMPILER) or emulator is None:
        pytest.skip(
            f"{COMPILER} or its emulator is missing; Debian has g++-aarch64-linux-gnu and qemu-user"
        )
    program = tmp_path / "test_kernels"
    flags = "-std=c++20 -O3 -static -ffp-contract=off -Wno-psabi -DLINPIX_ISA=portable -pthread"
    sources = "tests/test_kernels.cpp kernels.cpp decode.cpp team.cpp"
    compiled = ran(f"{COMPILER} {flags} -I. {sources} -o {program}", cwd=CSRC)
    assert compiled.returncode == 0, compiled.stderr
    ended = ran(f"{emulator} {program} few")
    assert ended.returncode == 0, ended.stdout + ended.stderr
