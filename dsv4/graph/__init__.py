"""Static graphs: `StepProgram.trace() -> Traced.lower(target) -> Lowered.compile(bind=...) -> Compiled`."""

from dsv4.graph.arena import Arena
from dsv4.graph.compiled import Compiled
from dsv4.graph.programs import Programs, ProgramStats
from dsv4.graph.stages import Lowered, StepProgram, Traced
from dsv4.graph.targets import register, targets

__all__ = ["Arena", "Compiled", "Lowered", "ProgramStats", "Programs", "StepProgram", "Traced", "register", "targets"]
