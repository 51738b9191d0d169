"""Ranks: which slice of the model a process owns, and the groups it talks to.

Attention splits heads and output groups over TP, experts split over EP (every rank), the vocabulary of the lm head over
TP. Ranks of one TP group are consecutive: rank = dp_rank * tp + tp_rank. Step functions close over a mesh and are
written for one rank on local shapes.
"""

from dataclasses import dataclass

from dsv4.config import ModelConfig, ParallelConfig
from dsv4.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank's view. `tp_group` and `ep_group` are process-group names, None at size 1.

    ops_exchange: the op set's `moe` moves rows between EP ranks by itself (NPU dispatch and combine); else rows are gathered.
    exact: attention's output projection is split over its results instead of its summands, so that nothing is ever summed
        over ranks and every value has the bits it has on one rank. Two gathers instead of one all-reduce.
    """

    dp: int = 1
    tp: int = 1
    ep: int = 1
    rank: int = 0
    tp_group: str | None = None
    ep_group: str | None = None
    ops_exchange: bool = False
    exact: bool = False

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

    def hidden(self, cfg: ModelConfig) -> slice:
        return self._part(cfg.hidden_size, self.tp, self.tp_rank)

    def vocabulary(self, cfg: ModelConfig) -> slice:
        return self._part(cfg.vocab_size, self.tp, self.tp_rank)

    def experts(self, cfg: ModelConfig) -> slice:
        return self._part(cfg.n_routed_experts, self.ep, self.rank)


SINGLE = Mesh()


def join(parallel: ParallelConfig, *, ops_exchange: bool = False, exact: bool = False) -> Mesh:
    """This process's mesh, from an initialised torch.distributed world of `parallel.ep` ranks.

    Every rank makes every TP group, in the same order, as torch.distributed demands. Raises ConfigError for a world of
    another size.
    """
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    if world != parallel.ep:
        raise ConfigError(f"--ep {parallel.ep} needs {parallel.ep} ranks, the process group has {world}")
    groups = [dist.new_group(list(range(i, i + parallel.tp))) for i in range(0, world, parallel.tp)]
    tp_group = groups[rank // parallel.tp].group_name if parallel.tp > 1 else None
    ep_group = dist.group.WORLD.group_name if parallel.ep > 1 else None
    return Mesh(dp=parallel.dp, tp=parallel.tp, ep=parallel.ep, rank=rank, tp_group=tp_group, ep_group=ep_group,
                ops_exchange=ops_exchange and parallel.ep > 1, exact=exact and parallel.tp > 1)  # fmt: skip
