"""Ranks: which slice of the model a process owns, and the groups it talks to.

Attention splits heads and output groups over TP, experts split over EP (every rank), the vocabulary of the lm head over
TP. Ranks of one TP group are consecutive: rank = dp_rank * tp + tp_rank. Step functions close over a mesh and are
written for one rank on local shapes.
"""

from dataclasses import dataclass

from dsv4.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank's view. `tp_group` and `ep_group` are process-group names, unused at size 1."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    rank: int = 0
    tp_group: str | None = None
    ep_group: str | None = None

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    def _part(self, total: int, parts: int, index: int) -> slice:
        size = total // parts
        return slice(index * size, (index + 1) * size)

    def heads(self, cfg: ModelConfig) -> slice:
        return self._part(cfg.num_attention_heads, self.tp, self.tp_rank)

    def groups(self, cfg: ModelConfig) -> slice:
        return self._part(cfg.o_groups, self.tp, self.tp_rank)

    def vocabulary(self, cfg: ModelConfig) -> slice:
        return self._part(cfg.vocab_size, self.tp, self.tp_rank)

    def experts(self, cfg: ModelConfig) -> slice:
        return self._part(cfg.n_routed_experts, self.ep, self.rank)


SINGLE = Mesh()
