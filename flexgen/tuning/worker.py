"""A process that compiles and answers with what kernels cost; see `flexgen.runtime.compile_worker`."""

from __future__ import annotations

from flexgen.runtime.compile_job import CompileJob, Job
from flexgen.runtime.compile_worker import serve
from flexgen.runtime.resources import measure
from flexgen.tuning.cost import CompiledCost, cost_of


def _cost(job: Job) -> CompiledCost:
    assert isinstance(job, CompileJob)
    return cost_of(measure(job.run()), job.target)


if __name__ == "__main__":
    serve(_cost)
