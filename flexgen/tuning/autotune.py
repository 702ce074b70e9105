"""`options={"autotune": True}`: what a first call searches."""

from __future__ import annotations

import torch

from flexgen.errors import OptionError
from flexgen.torch_library.call import needs_operator
from flexgen.torch_library.refuse import refuse
from flexgen.tuning.settings import Settings
from flexgen.tuning.tune import TuningSubject, tune, tuned_store


def refuse_autotune(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Check that a call may measure.

    Raises:
        UnsupportedProblemError: the call is being traced.
        OptionError: the tensors are on no GPU.
    """
    if needs_operator(query, key, value):
        refuse(
            "autotune=True was set for a call that is being traced",
            why="the first call measures kernels, and a trace runs none",
            fix="set the options that `flexgen tune FILE` prints for this problem instead of autotune",
        )
    if query.device.type != "cuda":
        raise OptionError(
            f"autotune=True cannot be honoured on {query.device}",
            why="it measures kernels on a GPU; elsewhere they are interpreted, and times mean nothing",
            fix="leave autotune out for calls on the CPU",
        )


def autotuned_settings(subject: TuningSubject, backward: bool) -> Settings:
    """Return the fastest settings for a call, stored ones or those that a search finds.

    Args:
        backward: gradients are wanted; the backward kernels are tuned after the forward one.
    """
    store = tuned_store()
    found = tune(subject, "forward", store).tuned.settings
    if backward:
        found = {**found, **tune(subject.having(found), "backward", store).tuned.settings}
    return found
