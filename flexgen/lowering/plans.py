"""The plans of kernels, of whatever backend, by what the kernels do."""

from __future__ import annotations

from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.gluon_hopper.plan import GluonPlan
from flexgen.lowering.triton.backward_plan import BackwardPlan, DeltaPlan
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.lowering.triton_decode.plan import CombinePlan

AnyForwardPlan = ForwardPlan | GluonPlan
AnyBackwardPlan = BackwardPlan | GluonBackwardPlan
RowPlan = DeltaPlan | CombinePlan  # of the kernels that compute rows, and walk nothing
WalkPlan = AnyForwardPlan | AnyBackwardPlan  # of the kernels that walk tiles
