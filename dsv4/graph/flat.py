"""Targets that run the captured graph as one function of all its leaves: `plain` and `inductor`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.graph.stages import Lowered


class FlatLowered(Lowered):
    """A target that runs the whole graph as one function of all its leaves."""

    def callable(self) -> Callable[..., Sequence[Tensor]]:
        """The function: tensor leaves in, tensor results out."""
        raise NotImplementedError

    def build(self, bound: Mapping[int, Tensor]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        traced, run = self.traced, self.callable()
        inputs: list[Any] = [bound.get(i) for i in range(len(traced.args_info))]
        free = [i for i in range(len(inputs)) if i not in bound]
        tensors = [result for result in traced.out_info if result.dtype is not None]
        fresh = [k for k, result in enumerate(tensors) if result.fresh]

        def call(leaves: Sequence[Tensor]) -> list[Tensor]:
            full = inputs.copy()
            for i, x in zip(free, leaves, strict=True):
                full[i] = x
            results = run(*full)
            return [results[k] for k in fresh]

        return call


class PlainLowered(FlatLowered):
    """The captured operators, replayed one by one as they are."""

    target = "plain"
    python_segments = 1

    def callable(self) -> Callable[..., Sequence[Tensor]]:
        module = self.traced.graph_module

        @torch.no_grad()
        def run(*leaves: Tensor) -> Sequence[Tensor]:
            return module(*leaves)

        return run


class InductorLowered(FlatLowered):
    """Compiled by Inductor: slow to build, only for those who ask for it."""

    target = "inductor"

    def callable(self) -> Callable[..., Sequence[Tensor]]:
        compiled = torch.compile(self.traced.graph_module, backend="inductor", fullgraph=True, dynamic=False)

        @torch.no_grad()
        def run(*leaves: Tensor) -> Sequence[Tensor]:
            return compiled(*leaves)

        return run
