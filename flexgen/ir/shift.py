"""Mods whose indices start elsewhere than at 0, for a call that computes a part of a larger problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from flexgen.ir.graph import Graph, Mods, Node, Scalar, const, input_node, make, topological
from flexgen.ir.origins import Origin, Origins


def shift_indices(mods: Mods, origins: Origins, starts: Mapping[str, int]) -> tuple[Mods, Origins]:
    """Return the mods as functions of indices that count from 0 where the mods' own count from `starts`.

    Args:
        starts: by name of an input ("b", "h", "q_idx", "kv_idx"), the index of the mods' that is 0 in the result.
    """
    return _shifted(mods, origins, {name: const(start, torch.int64) for name, start in starts.items() if start})


def shift_by_scalars(mods: Mods, origins: Origins, scalars: Mapping[str, str]) -> tuple[Mods, Origins]:
    """Return the mods with numbers added to their indices that each call brings, so that one kernel serves any start.

    Args:
        scalars: by name of an input ("q_idx", "kv_idx"), the name of the run-time scalar that is added to it; a mod
            gets those whose input it reads. One name may serve both.
    """
    starts = {name: make("scalar", attr=scalar, dtype=torch.int64) for name, scalar in scalars.items()}
    shifted, origins = _shifted(mods, origins, starts)
    declared = [Scalar(name, torch.int64) for name in dict.fromkeys(scalars.values())]
    return Mods(_declaring(shifted.score, declared), _declaring(shifted.mask, declared)), origins


def _declaring(graph: Graph | None, scalars: Sequence[Scalar]) -> Graph | None:
    if graph is None:
        return None
    read = {node.attr for node in graph.nodes() if node.op == "scalar"}
    added = tuple(scalar for scalar in scalars if scalar.name in read)
    return dataclasses.replace(graph, scalars=(*graph.scalars, *added))


def _shifted(mods: Mods, origins: Origins, starts: Mapping[str, Node]) -> tuple[Mods, Origins]:
    replaced: dict[Node, Node] = {}
    for name, start in starts.items():
        own = input_node(name)
        replaced[own] = make("add", own, start, dtype=torch.int64)
    if not replaced:
        return mods, origins
    table: dict[Node, tuple[Origin, ...]] = {}
    graphs = {graph.kind: _with_replaced(graph, replaced, origins, table) for graph in mods.graphs()}
    return Mods(graphs.get("score"), graphs.get("mask")), Origins(MappingProxyType(table))


def _with_replaced(
    graph: Graph, replaced: dict[Node, Node], origins: Origins, table: dict[Node, tuple[Origin, ...]]
) -> Graph:
    for node in topological(graph.root):
        if node not in replaced:
            args = tuple(replaced[arg] for arg in node.args)
            replaced[node] = node if args == node.args else make(node.op, *args, attr=node.attr, dtype=node.dtype)
        if origins.of(node):
            table[replaced[node]] = origins.of(node)
    return dataclasses.replace(graph, root=replaced[graph.root])
