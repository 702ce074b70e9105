"""The mask of a whole sequence, as all ranks together have it, evaluated on tensors of indices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.capture.live import Reading
from flexgen.ir.evaluate import evaluate
from flexgen.ir.graph import Graph, Node
from flexgen.lowering.blocks import BlockRule, block_rule
from flexgen.lowering.facts import MaskFacts, analyse_mask
from flexgen.pipeline import Understood
from flexgen.runtime.describe import scalars_are_trusted


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of a whole call.

    Attributes:
        batch: of the query.
        kv_batch: of key and value; 1 where all of the query's share them.
        q_heads, kv_heads: heads of the query, and of key and value.
        q_len, kv_len: of all ranks together.
        qk_head_dim, v_head_dim: of query and key, and of value.
        dtype: of query, key and value.
    """

    batch: int
    kv_batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    qk_head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, ranks: int = 1) -> Extent:
        """Return the sizes of the whole of which each rank has these, in [B, H, L, D] order."""
        batch, q_heads, queries, head_dim = query.shape
        kv_batch = max(key.shape[0], value.shape[0])
        heads, lengths = (q_heads, key.shape[1]), (queries * ranks, key.shape[2] * ranks)
        return cls(batch, kv_batch, *heads, *lengths, head_dim, value.shape[3], query.dtype)


@dataclass(frozen=True, slots=True)
class WholeMask:
    """A mask, what is proven about it, and what it captured.

    Attributes:
        graph: the captured mask; None for no mask.
        facts: of tiles of one head.
        known_rule: how blocks are classified, where the analysis needed to know.
        batch, heads, q_len, kv_len: how far its indices go.
        buffers, scalars: captured values, by name.
        device: where expressions are evaluated: that of the captured tensors.
    """

    graph: Graph | None
    facts: MaskFacts
    known_rule: BlockRule | None
    batch: int
    heads: int
    q_len: int
    kv_len: int
    buffers: Mapping[str, Tensor]
    scalars: Mapping[str, int | float]
    device: torch.device

    @classmethod
    def of(cls, understood: Understood, reading: Reading, extent: Extent) -> WholeMask:
        """Return the mask of what was read."""
        declared, mask, facts = reading.captured.mods, understood.mods.mask, understood.facts
        scalars = dict(zip((scalar.name for scalar in declared.scalars), reading.scalars, strict=True))
        if not scalars_are_trusted(scalars):  # bounds do not hold for such numbers: all is taken to be live
            mask, facts = None, analyse_mask(None)
        named = dict(zip((buffer.name for buffer in declared.buffers), reading.buffers, strict=True))
        buffers = {buffer.name: named[buffer.name].detach() for buffer in mask.buffers} if mask else {}
        devices = (buffer.device for buffer in buffers.values() if buffer.dim())  # numbers may lie on the host
        device = next(devices, torch.device("cpu"))
        sizes = (extent.batch, extent.q_heads, extent.q_len, extent.kv_len)
        return cls(mask, facts, understood.rule, *sizes, buffers, scalars, device)

    def rule(self) -> BlockRule | None:
        """Return how blocks of the mask are classified; None without a mask."""
        return block_rule(self.graph) if self.known_rule is None and self.graph is not None else self.known_rule

    def value(self, node: Node, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return an expression of the analysis; lengths are known, and b and h unless given: [B, 1, 1] and [Hq, 1]."""
        known = {
            "b": torch.arange(self.batch, device=self.device)[:, None, None],
            "h": torch.arange(self.heads, device=self.device)[:, None],
            "Q_LEN": torch.tensor(self.q_len, device=self.device),
            "KV_LEN": torch.tensor(self.kv_len, device=self.device),
        }
        return evaluate(Graph("mask", "part", node), {**known, **inputs}, self.buffers, self.scalars)
