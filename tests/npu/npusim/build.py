"""Builds the simulator's libraries with g++, once per state of the sources: `python build.py` prints their folder.

The folder's name is a digest of the sources, the compiler and the versions of torch and torch_npu, so a change of any
of them makes a new build, and processes that start at the same time wait for one build instead of disturbing it.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, util
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEEDED_TOOLS = ("g++", "nm")
KEPT_BUILDS = 4
# Libraries of CANN that torch_npu is linked with. All that is simulated of them is in libascendcl.so.
EMPTY_LIBRARIES = (
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libacl_tdt_channel",
    "libfmk_parser",
    "libascend_protobuf",
    "libmsprofiler",
    "libascend_hal",
)
LOAD_ORDER = ("libascendcl", *EMPTY_LIBRARIES, "libopapi", "libhccl", "libatb")


class BuildError(RuntimeError):
    """The libraries cannot be built here; the text says why."""


def library_dir() -> Path:
    """The folder with the libraries for the sources as they are now, built if it is not there yet."""
    for tool in NEEDED_TOOLS:
        if shutil.which(tool) is None:
            raise BuildError(f"no {tool} on PATH: install g++ and binutils (Debian: apt-get install g++)")
    builds = Path(sys.prefix) / "npusim"
    target = builds / digest()
    if target.is_dir():
        return target
    builds.mkdir(exist_ok=True)
    with open(builds / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=builds))
            try:
                build_into(unfinished)
                os.rename(unfinished, target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
            remove_old_builds(builds, keep=target)
    return target


def digest() -> str:
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    parts = [compiler, metadata.version("torch"), metadata.version("torch-npu")]
    hasher = hashlib.sha256("\n".join(parts).encode())
    for source in sorted([Path(__file__), *HERE.glob("cann/*.*"), *HERE.glob("executor/*.*")]):
        hasher.update(source.name.encode() + source.read_bytes())
    return hasher.hexdigest()[:16]


def remove_old_builds(builds: Path, keep: Path) -> None:
    old = [path for path in builds.iterdir() if path.is_dir() and path != keep]
    for path in sorted(old, key=lambda p: p.stat().st_mtime, reverse=True)[KEPT_BUILDS - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def package_dir(name: str) -> Path:
    """Where a package is installed, without importing it."""
    spec = util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildError(f"{name} is not installed in {sys.prefix}: make the environment with tests/npu/run.sh")
    return Path(spec.origin).parent


def build_into(out: Path) -> None:
    torch_dir, npu_dir = package_dir("torch"), package_dir("torch_npu")
    headers = npu_dir / "include"
    cann_flags = [
        "-std=c++17",
        "-Wno-deprecated-declarations",
        *(f"-I{path}" for path in (headers, headers / "third_party/acl/inc", headers / "third_party/hccl/inc")),
    ]
    torch_flags = [
        "-std=c++20",
        *(f"-I{torch_dir / 'include' / path}" for path in ("", "torch/csrc/api/include")),
        *cann_flags[1:],
    ]
    entry_points = out / "aclnn_entry_points.cpp"
    entry_points.write_text(aclnn_entry_points(npu_dir / "lib/libtorch_npu.so"))
    units = {
        **{
            name: (HERE / "cann" / f"{name}.cpp", cann_flags)
            for name in ("runtime", "memory", "graphs", "legacy", "hccl", "profiling")
        },
        "aclnn": (HERE / "cann/aclnn.cpp", cann_flags),
        "aclnn_entry_points": (entry_points, ["-std=c++17"]),
        "cpu_kernels": (HERE / "executor/cpu_kernels.cpp", torch_flags),
    }

    def compile_unit(name: str) -> None:
        source, flags = units[name]
        run("g++", "-c", "-fPIC", "-O1", *flags, str(source), "-o", str(out / f"{name}.o"))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_unit, sorted(units, key=lambda name: name != "cpu_kernels")))

    link(out, "libascendcl", ["runtime", "memory", "graphs", "legacy", "profiling"])
    for name in EMPTY_LIBRARIES:
        link(out, name, [], "-Wl,--no-as-needed", "-lascendcl")  # looked up in these by name at run time
    link(out, "libopapi", ["aclnn", "aclnn_entry_points"], "-lascendcl")
    link(out, "libnnopbase", [], "-Wl,--no-as-needed", "-lopapi")  # torch_npu looks workspace functions up there
    link(out, "libhccl", ["hccl"], "-lascendcl", "-lpthread", "-lrt")
    (out / "atb.cpp").write_text(atb_entry_points(npu_dir))
    run("g++", "-c", "-fPIC", "-O1", str(out / "atb.cpp"), "-o", str(out / "atb.o"))
    link(out, "libatb", ["atb"], "-lascendcl")
    link(out, "libnpusim", ["cpu_kernels"], f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10", "-lascendcl")
    for leftover in [*out.glob("*.o"), *out.glob("*.cpp")]:
        leftover.unlink()


def link(out: Path, name: str, objects: list[str], *libraries: str) -> None:
    files = [str(out / f"{unit}.o") for unit in objects]
    run("g++", "-shared", f"-Wl,-soname,{name}.so", *files, f"-L{out}", *libraries, "-o", str(out / f"{name}.so"))


def aclnn_entry_points(library: Path) -> str:
    """One refusing function for every aclnn kernel that torch_npu may look up by name."""
    names = {
        match.group(1).decode().removesuffix("GetWorkspaceSize")
        for match in re.finditer(rb"\0(aclnn[A-Za-z0-9]+)(?=\0)", library.read_bytes())
    }
    by_hand = set(re.findall(r"^long (aclnn\w+)\(", (HERE / "cann/aclnn.cpp").read_text(), re.MULTILINE))
    lines = ['extern "C" {', "long npusim_aclnn(const char* name);"]
    for name in sorted(name for name in names - by_hand if name.endswith("GetMaxWorkspaceSize")):
        lines.append(f"long {name}() {{ return 0; }}")  # no kernel, so no workspace: the size stays 0
        names.remove(name)
    for name in sorted(names - by_hand):
        lines.append(f'long {name}GetWorkspaceSize() {{ return npusim_aclnn("{name}"); }}')
        lines.append(f'long {name}() {{ return npusim_aclnn("{name}"); }}')
    return "\n".join([*lines, "}", ""])


def atb_entry_points(npu_dir: Path) -> str:
    """The C++ functions of the ATB library that torch_npu is linked with: each fails with ATB's own error code."""
    listing = run("nm", "-D", "--undefined-only", *(str(path) for path in (npu_dir / "lib").glob("*.so")))
    symbols = sorted(set(re.findall(r" U (_ZN3atb\w+)", listing)))
    lines = ['extern "C" {', "void npusim_set_error(const char* message);"]
    for symbol in symbols:
        lines.append(f'long {symbol}() {{ npusim_set_error("{symbol}: ATB is not simulated"); return 1; }}')
    return "\n".join([*lines, "}", ""])


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command[:1])} failed:\n{done.stderr[-4000:]}\ncommand: {' '.join(command)}")
    return done.stdout


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{library_dir()}\n")
    except BuildError as error:
        sys.stderr.write(f"[npusim] {error}\n")
        sys.exit(1)
