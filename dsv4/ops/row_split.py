"""What a kernel says of its arguments, so that a call can be split by rows (`graph.sections`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """How a call is split. rows, lines: arguments with a row for each row of the results, or a line for several; weights:
    arguments that every part reads whole. All by index."""

    rows: tuple[int, ...]
    lines: tuple[int, ...]
    weights: tuple[int, ...]
