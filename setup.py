"""Compiles csrc into shared libraries in model/: one for the processor, and one for CUDA GPUs if
torch was made for CUDA and there is an nvcc. If a library cannot be built, the installation goes
on, and LinPix runs without it.

Only torch's stable ABI is used, so a library that is built here loads into torch 2.10 and later.
torch itself is not imported: pip's isolated builds do not allow it, although torch's headers lie
beside the interpreter.
"""

import os
import platform
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError

STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
# The kernels are compiled once for each of these; on loading, the best that the processor can run
# is chosen.
INSTRUCTION_SETS: dict[str, list[str]] = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {
        "avx2": ["-mavx2", "-mfma"],
        "avx512": AVX512,
        "avx512vnni": [*AVX512, "-mavx512vnni"],
        "avx512bf16": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
    }


CUDA_TARGETS = ("80", "90", "100", "120")  # compute capabilities
CUDA_PTX = "90"  # is also kept as PTX, which the driver compiles for GPUs between and after these


def torch_folder() -> Path | None:
    """Where torch's headers and libraries are: importable, or beside the interpreter in an isolated
    build; or None.
    """
    spec = find_spec("torch")
    places = [Path(spec.origin).parent] if spec and spec.origin else []
    places += [Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
    return next(
        (place for place in places if (place / "include/torch/csrc/stable/library.h").exists()),
        None,
    )


def cuda_of(torch: Path) -> str | None:
    """The CUDA version that torch was made for, or None."""
    found = re.search(
        r"^cuda: .*= ['\"]([\d.]+)['\"]", (torch / "version.py").read_text(), re.MULTILINE
    )
    return found[1] if found else None


def nvcc() -> Path | None:
    """The CUDA compiler: in CUDA_HOME if that is set, else on the PATH, else where its installer
    puts it. None if there is none.
    """
    home = os.environ.get("CUDA_HOME")
    places = [os.path.join(home, "bin")] if home else [None, "/usr/local/cuda/bin"]
    found = [shutil.which("nvcc", path=place) for place in places]
    return next((Path(path).resolve() for path in found if path), None)


def cuda_targets(compiler: Path) -> list[str]:
    """Compute capabilities to compile for: those of CUDA_TARGETS that this nvcc knows."""
    told = subprocess.run(
        [str(compiler), "--list-gpu-code"], capture_output=True, text=True, check=True
    )
    return [target for target in CUDA_TARGETS if f"sm_{target}" in told.stdout.split()]


def folders() -> dict[str, str]:
    """Where the packages are: through src/, whose one link leads to linpix/; or, in a checkout
    without symbolic links (git's default on Windows, and some archives), where the links would
    lead.

    An editable install puts src/ on the path, so that `import linpix` finds the package in any
    folder. Without it, setuptools installs a finder of its own, which Python asks last: beside a
    clone of the name linpix, Python takes that for an empty package.
    """
    if Path("src/linpix/model").is_dir():
        return {"": "src"}
    rooms = {f"linpix.{room}": room for room in ("model", "server", "training")}
    return {"linpix": "linpix"} | rooms


class BuildKernels(build_ext):
    """Builds one shared library for each Extension. Libraries are optional: a failure becomes a
    warning.
    """

    def get_ext_filename(self, name: str) -> str:
        # not a Python module, so its name has no Python version
        return name.replace(".", os.sep) + ".so"

    def build_extension(self, extension: Extension) -> None:
        places = [
            Path(self.get_ext_fullpath(extension.name)).parent,
            *[Path("model")] * self.editable_mode,
        ]
        kind = extension.name.split("_")[1]
        for stale in (path for place in places for path in place.glob(f"liblinpix_{kind}*.so")):
            # if this build fails, the library of an earlier one must not be taken for its result
            stale.unlink()
        torch = torch_folder()
        if kind == "cuda":
            self.build_cuda(extension, torch)
            return
        if torch is None:
            raise CompileError(
                "torch 2.10 or later is not installed, so csrc cannot be compiled, and LinPix will "
                "decode slowly. Install torch, then install LinPix again"
            )
        common = [
            "-std=c++20",
            "-O3",
            "-g0",
            "-fPIC",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            "-Wno-psabi",
        ]
        headers = ["-isystem", str(torch / "include"), STABLE_ABI]
        jobs = [
            ("common", f"csrc/{name}.cpp", headers)
            for name in ("ops", "sequences", "decode", "team")
        ]
        jobs += [
            (name, "csrc/kernels.cpp", [*flags, f"-DLINPIX_ISA={name}"])
            for name, flags in INSTRUCTION_SETS.items()
        ]
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = [
                    pool.submit(
                        self.compiler.compile,
                        [source],
                        output_dir=os.path.join(self.build_temp, name),
                        extra_postargs=common + flags,
                    )
                    for name, source, flags in reversed(jobs)
                ]
                objects = [path for one in made for path in one.result()]
            self.compiler.link_shared_object(
                objects,
                self.get_ext_fullpath(extension.name),
                libraries=["torch_cpu", "pthread"],
                library_dirs=[str(torch / "lib")],
                target_lang="c++",
            )
        except (CompileError, LinkError, ExecError) as error:
            raise CompileError(
                f"{error}; LinPix will decode slowly. Install a C++20 compiler such as g++ and"
                " torch 2.10 or later, then install LinPix again"
            ) from error

    def build_cuda(self, extension: Extension, torch: Path | None) -> None:
        """Compile csrc/cuda if torch was made for CUDA; else do nothing, as on most machines. A GPU
        is not needed.
        """
        version = cuda_of(torch) if torch else None
        if torch is None or version is None:
            return
        compiler = nvcc()
        if compiler is None:
            raise CompileError(
                f"torch is built for CUDA {version}, but there is no nvcc on the PATH or in"
                " CUDA_HOME, so csrc/cuda cannot be compiled, and LinPix will decode on the CPU."
                f" Install the CUDA {version} toolkit, then install LinPix again"
            )
        folder, target = Path(self.build_temp) / "cuda", Path(self.get_ext_fullpath(extension.name))
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        common = [
            str(compiler),
            "-std=c++17",
            "-O3",
            "-DUSE_CUDA",
            "-Icsrc",
            "-Xcompiler",
            "-fPIC,-fvisibility=hidden",
        ]
        others = f"-gencode=arch=compute_{CUDA_PTX},code=compute_{CUDA_PTX}"
        try:
            targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in cuda_targets(compiler)]
        except (OSError, subprocess.CalledProcessError) as error:
            raise self.not_compiled(error, version) from error
        kernels = [*common, "-fmad=false", *targets, others]
        jobs = [[*kernels, "-c", str(source)] for source in sorted(Path("csrc/cuda").glob("*.cu"))]
        jobs += [
            [*common, STABLE_ABI, "-isystem", str(torch / "include"), "-c", str(source)]
            for source in sorted(Path("csrc/cuda").glob("*.cpp"))
        ]
        outputs = [folder / f"{Path(job[-1]).name}.o" for job in jobs]
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for done in [
                    pool.submit(subprocess.run, [*job, "-o", str(output)], check=True)
                    for job, output in zip(jobs, outputs, strict=True)
                ]:
                    done.result()
            beside = [
                "torch_cpu",
                *(["torch_cuda"] if (torch / "lib/libtorch_cuda.so").exists() else []),
            ]
            subprocess.run(
                [
                    *common,
                    "-shared",
                    *map(str, outputs),
                    f"-L{torch / 'lib'}",
                    *(f"-l{name}" for name in beside),
                    "-o",
                    str(target),
                ],
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise self.not_compiled(error, version) from error

    @staticmethod
    def not_compiled(error: Exception, version: str) -> CompileError:
        return CompileError(
            f"{error}; LinPix will decode on the CPU. Install the CUDA {version} toolkit, "
            "then install LinPix again"
        )


schemas = re.search(r"^SCHEMAS = (\d+)", Path("model/ops.py").read_text(), re.MULTILINE)
assert schemas, "model/ops.py must have a line SCHEMAS = N, the version of the operators' schemas"
libraries = [
    Extension(
        f"linpix.model.liblinpix_{kind}_{schemas[1]}",
        [source],
        optional=True,
        depends=sorted(map(str, Path("csrc").glob("**/*.*"))),
    )
    for kind, source in (("cpu", "csrc/ops.cpp"), ("cuda", "csrc/cuda/ops.cpp"))
]
setup(package_dir=folders(), ext_modules=libraries, cmdclass={"build_ext": BuildKernels})
