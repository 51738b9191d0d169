"""Builds host stand-ins for the CANN libraries that torch_npu links to, so that it imports where there is no CANN.

Finds what torch_npu's objects need and nothing provides, generates a stub for every missing symbol (a few succeed as no-ops,
the rest throw), and links them with the dozen entry points of `cann_shim.cpp` that are really executed. Needs g++, nm and
readelf; takes about three seconds once per torch_npu version.
"""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from dsv4.errors import PlatformError

SOURCE = Path(__file__).with_name("cann_shim.cpp")
SONAMES = "sonames.txt"
# Executed while importing, lowering or exiting; all may succeed as no-ops.
_QUIET = re.compile(
    r"^(Msprof\w+|aclAppLog|aclInit|aclFinalize|aclmdl(Init|Finalize|Set)Dump|HcclSetConfig|"
    r"rt(DevBinary|Function)Register|aclrt(Get|Set|Reset)Device|aclrtDestroy\w+|"
    r"aclrt(Get|Set)CurrentContext|aclrtSynchronizeDevice|_ZN2ge7Session[CD]\d.*)$"
)
_LAZY = {"libop_plugin_atb.so"}  # loaded only when an operator of that library really runs
_FLAGS = ("g++", "-shared", "-fPIC", "-O1", "-std=c++17", "-fexceptions", "-fvisibility=default")


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise PlatformError(f"{command[0]} not found: the host shim needs g++ and binutils (nm, readelf)") from None
    except subprocess.CalledProcessError as error:
        raise PlatformError(
            f"{command[0]} failed while building the host shim: {error.stderr.strip()[-400:]}"
        ) from None


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)  # finds without importing
    if spec is None:
        raise PlatformError(f"{package} is not installed; install it with: pip install 'dsv4[npu]'")
    return Path(spec.origin).parent


def _needed(path: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+?)\]", _run("readelf", "-dW", str(path)))


def _symbols(path: Path, which: str) -> dict[str, str]:
    rows = (line.split() for line in _run("nm", "-D", f"--{which}-only", str(path)).splitlines())
    return {name.split("@")[0]: kind for *_, kind, name in rows}


def _system_library(soname: str) -> Path | None:
    path = _run("g++", f"-print-file-name={soname}").strip()
    if path != soname and Path(path).exists():
        return Path(path)
    for line in _run(shutil.which("ldconfig") or "/sbin/ldconfig", "-p").splitlines():
        if line.strip().startswith(soname + " "):
            return Path(line.split("=>")[1].strip())
    return None


def _scan() -> tuple[list[str], list[str]]:
    """(missing libraries, missing symbols) of the installed torch_npu."""
    npu, torch_lib = _folder("torch_npu"), _folder("torch") / "lib"
    objects = [p for p in sorted(npu.rglob("*.so")) if p.name not in _LAZY and p.read_bytes()[:4] == b"\x7fELF"]
    known = {p.name: p for p in [*objects, *torch_lib.glob("*.so*")]}
    libraries = {soname: known.get(soname) or _system_library(soname) for p in objects for soname in _needed(p)}
    providers = {*objects, *filter(None, libraries.values()), *torch_lib.glob("*.so")}
    defined = {name for path in providers for name in _symbols(path, "defined")}
    wanted = {name for path in objects for name, kind in _symbols(path, "undefined").items() if kind == "U"}
    missing = (name for name in wanted - defined if not name.startswith(("Py", "_Py")))
    return sorted(soname for soname, path in libraries.items() if path is None), sorted(missing)


def _stubs(symbols: list[str]) -> str:
    lines = [f'extern "C" long cann_shim_{role}(const char*);' for role in ("quiet", "missing")]
    for i, name in enumerate(symbols):
        role = "quiet" if _QUIET.match(name) else "missing"
        lines.append(f'extern "C" long cann_stub_{i}() __asm__("{name}");')
        lines.append(f'extern "C" long cann_stub_{i}() {{ return cann_shim_{role}("{name}"); }}')
    return "\n".join(lines) + "\n"


def _build(out: Path) -> None:
    sonames, symbols = _scan()
    if not sonames:
        raise PlatformError("every library torch_npu needs is present: this host has CANN, use it instead of the shim")
    core, probe, source = out / "libcann_shim.so", out / "cann_shim.o", out / "cann_stubs.cpp"
    _run("g++", "-c", "-fPIC", "-O1", "-std=c++17", str(SOURCE), "-o", str(probe))
    implemented = {line.split()[-1] for line in _run("nm", "--defined-only", str(probe)).splitlines()}
    source.write_text(_stubs([name for name in symbols if name not in implemented]))
    _run(*_FLAGS, str(source), str(probe), f"-Wl,-soname,{core.name}", "-o", str(core))
    for soname in sonames:
        _run(*_FLAGS, "-Wl,--no-as-needed", f"-Wl,-soname,{soname}", "-Wl,-rpath,$ORIGIN", f"-L{out}", "-lcann_shim",
             "-x", "c++", "/dev/null", "-o", str(out / soname))  # fmt: skip
    probe.unlink()
    (out / SONAMES).write_text("\n".join(sonames) + "\n")


def build(cache: Path) -> Path:
    """The folder with the stand-ins for the installed torch_npu, built into `cache` unless it is there.

    Raises PlatformError without torch_npu or a compiler, or where CANN is installed.
    """
    version = (_folder("torch_npu") / "version.py").read_bytes()
    key = hashlib.sha256(version + SOURCE.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]
    done = cache / f"cann_shim-{key}"
    if not (done / SONAMES).exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _build(Path(scratch))
            shutil.rmtree(done, ignore_errors=True)
            shutil.copytree(scratch, done)
    return done
