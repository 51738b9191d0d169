"""`--model demo`: the small trained checkpoint that ships with the package, converted to W8A8 at first use."""

import hashlib
import os
import tempfile
from pathlib import Path

from dsv4.checkpoint.convert import convert
from dsv4.checkpoint.plan import plan_conversion
from dsv4.errors import CheckpointError
from dsv4.ops.cpu_build import cache_dir

SOURCE = Path(__file__).resolve().parent.parent / "demo"


def _digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(SOURCE.iterdir()):
        if file.is_file():
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def demo_checkpoint() -> Path:
    """The W8A8 folder, in the user's cache; made whole beside its place and then moved there, so never seen half-made.

    Raises CheckpointError if this installation lacks the demo, or the cache cannot be written.
    """
    if not (SOURCE / "config.json").is_file():
        raise CheckpointError(f"{SOURCE}: the demo model is not part of this installation; try dsv4 make-tiny")
    place = cache_dir() / f"demo-{_digest()}"
    if (place / "config.json").is_file():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix="demo-making-") as work:
            made = Path(work) / "w8a8"
            convert(plan_conversion(SOURCE), made)
            try:
                os.rename(made, place)
            except OSError:
                if not (place / "config.json").is_file():  # not made by another process in the meantime
                    raise
    except OSError as error:
        raise CheckpointError(f"{place}: the demo model could not be converted there ({error.strerror})") from error
    return place


def model_path(name: str) -> Path:
    """The folder that `--model` names: a path, or `demo` where no folder of that name is at hand."""
    path = Path(name)
    return demo_checkpoint() if name == "demo" and not path.exists() else path
