"""Fixtures that several rooms need: real data, golden vectors, small checkpoints, a server, an
emulated GPU.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import fcntl
import inspect
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin starve others
# not one for all of a user's processes: a kernel that another compiles is waited for, and after 600
# s the test fails
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).resolve().parents[1] / "build/inductor")
)
# `python -m linpix` in any folder is this one
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])

import pytest
import torch

from linpix.model import checkpoint, ops, plugins
from linpix.model.config import PRESETS
from tests.nets import perturbed_net, saved
from tools.harness.commands import ROOT, words_of
from tools.harness.machine import define_emulated

# tests of kernels need neither this nor httpx: `make gpu-check` runs without them
with contextlib.suppress(ModuleNotFoundError):
    import hypothesis

    hypothesis.settings.load_profile("ci")  # the same examples each time, and no deadlines


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine."""
    if not inspect.iscoroutinefunction(test := pyfuncitem.obj):
        return None
    asyncio.run(
        test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters})
    )
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What needs a GPU, its compiler, or our kernels is left out where there is none."""
    if item.get_closest_marker("cuda") and not ops.gpu:
        pytest.skip(ops.why_no_gpu())
    if item.get_closest_marker("kernels") and not ops.compiled:
        pytest.skip(ops.why())
    if item.get_closest_marker("nvcc") and shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH")


def _shared(variable: str, default: str, what: str) -> Path:
    folder = (ROOT / os.environ.get(variable, default)).resolve()
    if not folder.is_dir():
        pytest.skip(
            f"{what} are not at {folder}; say where with {variable}, relative to {ROOT} or absolute"
        )
    return folder


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of mnist/ and cifar10/."""
    folder = _shared("LINPIX_DATA", "../shared/data", "MNIST and CIFAR-10")
    if not (folder / "mnist").is_dir() or not (folder / "cifar10").is_dir():
        pytest.skip(f"no mnist/ and cifar10/ in {folder}; LINPIX_DATA may name another folder")
    return folder


@pytest.fixture(scope="session")
def class_first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that draws the class first, with random weights."""
    folder = tmp_path_factory.mktemp("class-first") / "first"
    config = dataclasses.replace(
        PRESETS["tiny"], patch=4, look_ups=("previous", "row", "column", "class")
    )
    return saved(folder, perturbed_net(config))


@pytest.fixture(scope="session")
def thrice(class_first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of which three attempts are made where nothing is said."""
    folder = shutil.copytree(class_first, tmp_path_factory.mktemp("attempts") / "first")
    checkpoint.describe(folder, {"attempts": 3})
    return folder


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of vectors made with the published reference implementation."""
    return _shared("LINPIX_GOLDEN", "../shared/golden", "the reference's golden vectors")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of the preset `tiny`, named so, with random weights. Not to be changed:
    copy it.
    """
    return saved(
        tmp_path_factory.mktemp("checkpoints") / "tiny",
        PRESETS["tiny"],
        images=0,
        steps=0,
        minutes=0.0,
        seed=0,
        commit="unknown",
        command="tests/conftest.py",
        bits_per_dim={},
    )


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return shutil.copytree(tiny, tmp_path / "tiny")


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[Any]:
    """One server for the tests that leave it as they found it."""
    from tools.harness.servers import serving

    with serving(tiny.parent) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    """A client of the server, or of the one that a module has in its place."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint, `slow`: mnist-small with random weights. EAGER: most of a
    second an image.
    """
    return saved(tmp_path_factory.mktemp("slow") / "slow", PRESETS["mnist-small"]).parent


def _compile_emulated(folder: Path, library: Path) -> None:
    # without the checks of longjmp, which refuse to go from one stack to another
    cuda, torch_folder = ROOT / "csrc/cuda", Path(torch.__file__).parent
    flags = (
        "-std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing -fPIC -Wall -Wextra -Werror"
        " -Wno-unknown-pragmas -U_FORTIFY_SOURCE -DLINPIX_EMULATE"
        " -DTORCH_TARGET_VERSION=0x020a000000000000"
        f" -isystem {torch_folder}/include"
    )
    for source in [*sorted(cuda.glob("*.cu")), *sorted(cuda.glob("*.cpp"))]:
        command = f"g++ {flags} -x c++ -c {source} -o {folder}/{source.name}.o"
        subprocess.run(words_of([command]), check=True)
    objects = " ".join(map(str, folder.glob("*.o")))
    command = f"g++ -shared {objects} -L{torch_folder}/lib -ltorch_cpu -o {folder}/linked.so"
    subprocess.run(words_of([command]), check=True)
    (folder / "linked.so").rename(library)  # whole, or not there


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The CUDA sources, compiled by g++ for the host, as operators of their own. Once for all
    processes of a run.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    library = folder / "emulated.so"
    with (folder / "emulated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile_emulated(tmp_path_factory.mktemp("emulated"), library)
    definitions = define_emulated(library)
    compiled = ctypes.CDLL(str(library))
    backwards, shared_bytes = compiled.linpix_backwards, compiled.linpix_shared_bytes
    backwards.argtypes, shared_bytes.argtypes = [ctypes.c_bool], [ctypes.c_int]
    place = {"device": "cpu", "operators": torch.ops.linpix_emulated}  # arguments for GpuPool
    yield SimpleNamespace(
        operators=torch.ops.linpix_emulated,
        place=place,
        backwards=backwards,
        library=library,
        shared_bytes=shared_bytes,
        definitions=definitions,
    )
    backwards(False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With LINPIX_FORBID_SKIPS a test that was left out fails the run, unless it wanted a GPU or
    its compiler.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("LINPIX_FORBID_SKIPS") or reporter is None:
        return
    left_out = [
        report
        for report in reporter.stats.get("skipped", [])
        if not {"cuda", "nvcc"} & set(report.keywords)
    ]
    if left_out:
        reporter.write_line(
            f"{len(left_out)} tests were skipped, and LINPIX_FORBID_SKIPS is set", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is nearly full: whoever writes more bytes into a file gets an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def no_plugins(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(plugins, "_registered", {"attention": {}, "feature_map": {}})
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setenv(plugins.VARIABLE, "")
