"""What the model's functions close over or compute once per step."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.batch import Tables
from dsv4.config import ModelConfig
from dsv4.mesh import SINGLE, Mesh
from dsv4.ops.table import OpSet
from dsv4.params import RopeTables


@dataclass(frozen=True, kw_only=True)
class Env:
    """Fixed before capture: the model, the op set, and this rank's place in the mesh."""

    cfg: ModelConfig
    ops: OpSet
    mesh: Mesh = SINGLE


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Where this step's tokens sit in the caches, what they see, and their rotations: shared by every layer.

    Names and shapes of the address fields are those of `ops.plain.addresses`; `ids` [T] and `history` [R, P] are the step's;
    `rope` and `rope_yarn` [T, r] are the rows of the two tables, `csa_rope`, `hca_rope` [R*J, r] those of closing windows.
    """

    ids: Tensor
    history: Tensor
    positions: Tensor
    window_slots: Tensor
    tail_slots: Tensor
    open_slots: Tensor
    window_rows: Tensor
    csa_slots: Tensor
    csa_rows: Tensor
    csa_starts: Tensor
    hca_slots: Tensor
    hca_rows: Tensor
    hca_starts: Tensor
    csa_visible: Tensor
    hca_visible: Tensor
    rope: Tensor
    rope_yarn: Tensor
    csa_rope: Tensor
    hca_rope: Tensor


def step_context(
    env: Env, tables: Tables, rope: RopeTables, slots: Tensor, ids: Tensor, start: Tensor, length: Tensor, pages: int
) -> StepContext:
    """Addresses of ids [R, Q] at positions start .. start+length-1 of the given slots, seeing at most `pages` history pages."""
    ops, cfg = env.ops, env.cfg
    history = ops.take(tables.history[:, :pages], slots)
    window, tail, open_ = (ops.take(table, slots) for table in (tables.window, tables.tail, tables.open))
    names = ("positions", "window_slots", "tail_slots", "open_slots", "window_rows", "csa_slots", "csa_rows", "csa_starts",
             "hca_slots", "hca_rows", "hca_starts", "csa_visible", "hca_visible")  # fmt: skip
    found = ops.addresses(start, length, history, window, tail, open_, ids.shape[1], cfg.sliding_window)
    at = dict(zip(names, found, strict=True))
    return StepContext(
        ids=ids.flatten(),
        history=history,
        **at,
        rope=ops.take(rope.plain, at["positions"]),
        rope_yarn=ops.take(rope.yarn, at["positions"]),
        csa_rope=ops.take(rope.yarn, at["csa_starts"]),
        hca_rope=ops.take(rope.yarn, at["hca_starts"]),
    )
