"""What a conversion has finished, on disk after every shard, so that a restart repeats at most one shard and trusts the rest.

An input shard is known by its size, modification time and header digest, an output shard by its size and header digest:
nothing of the 167 GB is read again to find out where we were.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4.checkpoint.files import Shard, open_shard, write_atomic
from dsv4.checkpoint.folder import INDEX
from dsv4.checkpoint.quantise import RoundingError
from dsv4.errors import CheckpointError

JOURNAL = ".dsv4-convert.json"
FORMAT = "dsv4-w8a8-v1"


def _identity(shard: Shard) -> dict[str, Any]:
    return {"bytes": shard.nbytes, "mtime_ns": shard.mtime_ns, "header_sha256": shard.header_sha256}


def file_sha256(path: Path) -> str:
    """Digest of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Journal:
    """`finished` by output file: the input shards it came from, the output's identity and digest, and rounding by kind."""

    path: Path
    config_sha256: str
    index_sha256: str
    complete: bool = False
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def start(cls, source: Path, out: Path) -> "Journal":
        """An empty journal for this pair of folders, not yet on disk."""
        return cls(out / JOURNAL, file_sha256(source / "config.json"), file_sha256(source / INDEX))

    @classmethod
    def resume(cls, source: Path, out: Path) -> "Journal":
        """The journal in `out`. Raises CheckpointError if it is damaged or belongs to another source."""
        fresh, where = cls.start(source, out), out / JOURNAL
        try:
            raw = json.loads(where.read_text())
            journal = cls(where, raw["config_sha256"], raw["index_sha256"], raw["complete"], raw["finished"])
            form = raw["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{where}: damaged ({error!r}); remove {out} and convert again") from None
        if form != FORMAT:
            raise CheckpointError(f"{where}: format {form!r}, expected {FORMAT!r}; remove {out} and convert again")
        for name, got, want in (("config.json", journal.config_sha256, fresh.config_sha256),
                                (INDEX, journal.index_sha256, fresh.index_sha256)):  # fmt: skip
            if got != want:
                raise CheckpointError(f"{out}: was begun from another {name} than {source / name}; use another folder")
        return journal

    def save(self) -> None:
        """Replaces the file on disk, atomically."""
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        write_atomic(self.path, json.dumps({"format": FORMAT} | content, indent=1))

    def record(
        self, file: str, inputs: list[Shard], output: Shard, digest: str, rounding: dict[str, RoundingError]
    ) -> None:
        """Notes one finished shard."""
        self.finished[file] = {
            "inputs": {shard.path.name: _identity(shard) for shard in inputs},
            "output": {"bytes": output.nbytes, "header_sha256": output.header_sha256, "digest": digest},
            "rounding": {kind: account.as_dict() for kind, account in rounding.items()},
        }
        self.save()

    def is_finished(self, file: str, inputs: list[Shard]) -> bool:
        """Whether this shard was converted from exactly these inputs and its output still stands."""
        entry = self.finished.get(file)
        if entry is None or entry["inputs"] != {shard.path.name: _identity(shard) for shard in inputs}:
            return False
        try:
            output = open_shard(self.path.parent / file)
        except CheckpointError:
            return False
        return (output.nbytes, output.header_sha256) == (entry["output"]["bytes"], entry["output"]["header_sha256"])

    def rounding(self) -> dict[str, RoundingError]:
        """Rounding by kind over all finished shards."""
        total: dict[str, RoundingError] = {}
        for entry in self.finished.values():
            for kind, account in entry["rounding"].items():
                total.setdefault(kind, RoundingError()).add(RoundingError(**account))
        return dict(sorted(total.items()))
