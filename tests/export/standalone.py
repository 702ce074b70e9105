"""Runs exported modules where flexgen cannot be imported: `python standalone.py INPUTS OUTPUTS`, as a script.

INPUTS is a file of torch: a list of cases, each with the path of a module, the arguments of its `attention`, and
perhaps those by name and a seed; OUTPUTS gets what each call returned, and the gradients of sums weighted by `weights`,
or the words of its error.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class _NoFlexgen:
    """Makes every import of flexgen fail, installed or not."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == "flexgen":
            raise ImportError("an exported module imports flexgen")


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(case: dict[str, Any]) -> dict[str, Any]:
    module = load(Path(case["path"]))
    try:
        torch.manual_seed(case.get("seed", 0))
        found = module.attention(*case["arguments"], **case.get("named", {}))
    except module.NotCompiledFor as error:
        return {"error": str(error)}
    outputs = found if isinstance(found, tuple) else (found,)
    leaves = [tensor for tensor in case["arguments"] if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    if not leaves or not case["weights"]:
        return {"outputs": [output.detach() for output in outputs], "grads": []}
    loss = sum((output * weight).sum() for output, weight in zip(outputs, case["weights"], strict=True))
    grads = torch.autograd.grad(loss, leaves)
    return {"outputs": [output.detach() for output in outputs], "grads": list(grads)}


def main(arguments: Sequence[str]) -> None:
    sys.meta_path.insert(0, _NoFlexgen())  # type: ignore[arg-type]
    cases = torch.load(arguments[0], weights_only=False)
    torch.save([run(case) for case in cases], arguments[1])
    assert not any(name.split(".")[0] == "flexgen" for name in sys.modules)


if __name__ == "__main__":
    main(sys.argv[1:])
