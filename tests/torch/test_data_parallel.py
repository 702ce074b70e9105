"""FSDP2 and DDP over a module that owns what its mods capture: gradients are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import flexgen
from tests.torch.layer import HEAD_DIM, HEADS, REACH, WIDTH, Layer, seeded, trained
from tests.torch.models import assert_same
from tests.torch.ranks import WORLD

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x):
        return self.layers(x)


def batches() -> torch.Tensor:
    return torch.randn(2 * WORLD, REACH, WIDTH, generator=torch.Generator().manual_seed(3))


def own(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(WORLD)[dist.get_rank()]


def whole(tensors) -> list[torch.Tensor]:
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _sharded(model: nn.Module, per_layer: bool, after_forward: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.layers if per_layer else ():
        fully_shard(layer, mesh=mesh, reshard_after_forward=after_forward)
    return fully_shard(model, mesh=mesh, reshard_after_forward=after_forward)


@pytest.mark.parametrize(
    "per_layer", [pytest.param(True, id="each layer"), pytest.param(False, id="whole model", marks=pytest.mark.slow)]
)
def test_fully_sharded_module(ranks, per_layer):
    ranks.run(_check_fully_sharded, per_layer, True, False)


@pytest.mark.slow
def test_fully_sharded_module_that_stays_whole_until_the_backward(ranks):
    ranks.run(_check_fully_sharded, True, False, False)


@pytest.mark.slow
def test_compiled_layers_of_a_fully_sharded_module(ranks):
    ranks.run(_check_fully_sharded, True, True, True)


def _check_fully_sharded(per_layer: bool, after_forward: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    x, single, model = batches(), seeded(Two), seeded(Two)
    if compiled:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    model = _sharded(model, per_layer, after_forward)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (single, model)]
    for _ in range(2):  # the second step sees the parameters that the first one made
        output, *expected = trained(single, x)
        found_output, *found = trained(model, own(x))
        assert all(isinstance(grad, DTensor) for grad in found)
        assert_same([found_output, *whole(found)], [own(output), *expected])
        for optimizer in optimizers:
            optimizer.step()
    assert_same(whole(model.parameters()), list(single.parameters()))


def test_data_parallel_module(ranks):
    ranks.run(_check_data_parallel)


def _check_data_parallel() -> None:
    x, single, model = batches(), seeded(Two), DistributedDataParallel(seeded(Two))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (single, model)]
    for _ in range(2):
        output, *expected = trained(single, x)
        assert_same(trained(model, own(x)), [own(output), *expected])
        for optimizer in optimizers:
            optimizer.step()


def test_a_sharded_parameter_outside_of_its_module_is_refused(ranks):
    ranks.run(_check_outside)


def _check_outside() -> None:
    layer = fully_shard(seeded(Layer), mesh=init_device_mesh("cpu", (WORLD,)))
    tensors = [torch.randn(1, HEADS, REACH, HEAD_DIM) for _ in range(3)]
    with pytest.raises(flexgen.UnsupportedProblemError, match="call the module"):
        layer.attention(*tensors)
