"""What depends on the version of torch, of which flexgen takes several."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

HAS_2_13 = TorchVersion(torch.__version__) >= (2, 13)
needs_2_13 = pytest.mark.skipif(not HAS_2_13, reason="torch's BlockMask has it since 2.13")
WRITE_ORDER = pytest.param({"compute_dq_write_order": True}, id="write order", marks=needs_2_13)
