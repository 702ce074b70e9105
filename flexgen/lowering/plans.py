"""The plans of kernels, of whatever backend, by what the kernels do."""

from __future__ import annotations

from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.gluon_hopper.plan import GluonPlan
from flexgen.lowering.triton.backward_plan import BackwardPlan
from flexgen.lowering.triton.plan import ForwardPlan

AnyForwardPlan = ForwardPlan | GluonPlan
AnyBackwardPlan = BackwardPlan | GluonBackwardPlan
WalkPlan = AnyForwardPlan | AnyBackwardPlan  # of the kernels that walk tiles
