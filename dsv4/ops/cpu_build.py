"""Builds the CPU kernels once per machine, compiler and source, and loads them.

The library lands in `$XDG_CACHE_HOME/dsv4` (default `~/.cache/dsv4`) under a name that holds the digest of everything it
depends on, so a stale build is never loaded and two processes may build at once: each writes its own file and renames it.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from dsv4.errors import PlatformError

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
# Contraction off and no fast-math: the bits of a result are those the source spells out, at every vector width.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-exceptions",
    "-pthread",
    "-fPIC",
    "-shared",
    "-Wno-psabi",
)


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX, else g++, else clang++. Raises PlatformError if there is none."""
    if named := os.environ.get("CXX"):
        command = shlex.split(named)
        if command and shutil.which(command[0]):
            return command
        raise PlatformError(f"CXX is {named!r}, which is not an executable")
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise PlatformError("no C++ compiler: expected g++ or clang++ on the path, or CXX")


def _native() -> str:
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlatformError(f"{command[0]} did not run: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise PlatformError(f"{command[0]} failed on the CPU kernels: {reason}")
    return done.stdout


def cache_dir() -> Path:
    """Where built libraries are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4"


def build(extra_flags: tuple[str, ...] = ()) -> Path:
    """The path of the compiled library; compiles it if this source, compiler, machine and flags were not seen before.

    Raises PlatformError if there is no compiler, it fails, or the cache folder cannot be written.
    """
    command = [*compiler(), *FLAGS, _native(), *extra_flags]
    # The predefined macros name the compiler's version and every instruction set that "native" turned on.
    macros = _run([*compiler(), *FLAGS, _native(), *extra_flags, "-dM", "-E", "-x", "c++", os.devnull])
    key = hashlib.sha256("\0".join([*command, macros, SOURCE.read_text()]).encode()).hexdigest()[:24]
    target = cache_dir() / f"kernels-{key}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
            made = Path(folder) / target.name
            _run([*command, str(SOURCE), "-o", str(made)])
            os.replace(made, target)
    except OSError as error:
        raise PlatformError(f"cannot write the CPU kernels to {target.parent}: {error}") from None
    return target


def load(path: Path) -> ctypes.CDLL:
    """Loads a built library."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise PlatformError(f"cannot load the CPU kernels: {error}") from None
    library.dsv4_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.dsv4_run_sections.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.dsv4_run.restype = library.dsv4_run_sections.restype = None
    return library


@cache
def library() -> ctypes.CDLL:
    """The kernels of this process, built if need be. Raises PlatformError."""
    return load(build())
