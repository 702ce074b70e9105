"""Messages between the ranks of a group: posted without waiting, so that they travel while kernels run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Post:
    """One message.

    Attributes:
        rank: whom it goes to or comes from, as a rank of the group.
        message: what is sent, or where it is received: a contiguous tensor.
    """

    rank: int
    message: Tensor


class Pending:
    """Messages on their way; what is sent must not be written to, and what is received not be read, until `wait`."""

    def __init__(self, works: Sequence[dist.Work], posts: Sequence[Post]) -> None:
        self._works, self._posts = works, posts

    def wait(self) -> None:
        """Wait until the messages have arrived; with NCCL, the present stream waits and the host goes on."""
        for work in self._works:
            work.wait()
        self._posts = ()


class Exchange:
    """Messages of one group of ranks, all of which post alike and in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._global_ranks = dist.get_process_group_ranks(group)

    def post(self, send: Post | None, receive: Post | None) -> Pending:
        """Start sending and receiving; None where there is nothing."""
        posts = [(kind, post) for kind, post in ((dist.isend, send), (dist.irecv, receive)) if post is not None]
        operations = [
            dist.P2POp(kind, post.message, self._global_ranks[post.rank], self._group) for kind, post in posts
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(works, [post for _, post in posts])

    def same_everywhere(self, number: int, device: torch.device) -> bool:
        """Whether all ranks have brought the same number; waits for them.

        Args:
            number: at most 62 bits.
            device: where the group's backend can send from.
        """
        own = torch.tensor([number], device=device)
        numbers = [torch.empty_like(own) for _ in self._global_ranks]
        dist.all_gather(numbers, own, group=self._group)
        return bool((torch.cat(numbers) == own).all())

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, all of one shape."""
        tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in self._global_ranks]
        dist.all_gather(tensors, tensor.contiguous(), group=self._group)
        return tensors

    def with_summed_gradient(self, tensor: Tensor) -> Tensor:
        """Return a tensor that all ranks hold alike; the gradient that each has of it is summed over them."""
        summed: Tensor = _SummedGradient.apply(tensor, self._group)  # type: ignore[no-untyped-call]
        return summed


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
