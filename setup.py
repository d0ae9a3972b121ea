"""Compiles csrc into a shared library in model/. Where that cannot be, the install goes on, and LinPix runs without it.

Only torch's stable ABI is used, so the library made here loads into torch 2.10 and later. torch itself is not
imported: in pip's isolated builds it cannot be, though its headers lie beside the interpreter.
"""

import os
import platform
import re
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError

STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
# The kernels' source is compiled once for each; the best that the processor can run is chosen when it is loaded.
INSTRUCTION_SETS: dict[str, list[str]] = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {"avx2": ["-mavx2", "-mfma"], "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512bf16"]}


def torch_folder() -> Path | None:
    """Where torch's headers and libraries are: importable, or beside the interpreter of an isolated build."""
    spec = find_spec("torch")
    places = [Path(spec.origin).parent] if spec and spec.origin else []
    places += [Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
    return next((place for place in places if (place / "include/torch/csrc/stable/library.h").exists()), None)


class BuildKernels(build_ext):
    """One shared library from several versions of one source. It is optional: a failure becomes a warning."""

    def get_ext_filename(self, name: str) -> str:
        return name.replace(".", os.sep) + ".so"  # not a Python module: no tag of a Python version

    def build_extension(self, extension: Extension) -> None:
        places = [Path(self.get_ext_fullpath(extension.name)).parent, *([Path("model")] if self.editable_mode else [])]
        for stale in (path for place in places for path in place.glob("liblinpix_cpu*.so")):
            stale.unlink()  # should this build fail, the last one's must not be taken for its own
        torch = torch_folder()
        if torch is None:
            raise CompileError("there is no torch of 2.10 or later to compile csrc against; LinPix will decode slowly. "
                               "Install torch, then LinPix again")
        common = ["-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-psabi"]
        headers = ["-isystem", str(torch / "include"), STABLE_ABI]
        jobs = [("common", source, headers) for source in ("csrc/ops.cpp", "csrc/decode.cpp", "csrc/team.cpp")]
        jobs += [(name, "csrc/kernels.cpp", [*flags, f"-DLINPIX_ISA={name}"])
                 for name, flags in INSTRUCTION_SETS.items()]
        objects = []
        try:
            for name, source, flags in jobs:
                objects += self.compiler.compile([source], output_dir=os.path.join(self.build_temp, name),
                                                 extra_postargs=common + flags)
            self.compiler.link_shared_object(objects, self.get_ext_fullpath(extension.name),
                                             libraries=["torch_cpu", "pthread"], library_dirs=[str(torch / "lib")],
                                             target_lang="c++")
        except (CompileError, LinkError, ExecError) as error:
            raise CompileError(f"{error}; LinPix will decode slowly. Install a C++20 compiler such as g++ and torch "
                               "2.10 or later, then LinPix again") from error


schemas = re.search(r"^SCHEMAS = (\d+)", Path("model/ops.py").read_text(), re.MULTILINE)
assert schemas, "model/ops.py says which version of the operators' schemas this is"
kernels = Extension(f"model.liblinpix_cpu_{schemas[1]}", ["csrc/ops.cpp"], optional=True,
                    depends=sorted(map(str, Path("csrc").glob("*.*"))))
setup(ext_modules=[kernels], cmdclass={"build_ext": BuildKernels})
