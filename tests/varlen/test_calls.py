"""What a call with packed sequences takes, refuses, and says; what changes between calls without compiling again."""

from __future__ import annotations

import pytest
import torch

import flexgen
from flexgen.runtime.kernel import Kernel
from tests.backward.run import draw
from tests.forward.run import refusal
from tests.reference import assert_near
from tests.varlen.run import SMALL_TILES, Packed, check_packed, in_a_loop, offsets_of, pack

PROBLEM, KIND = flexgen.UnsupportedProblemError, flexgen.ProblemTypeError


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


ATTENTION = flexgen.compile(None, causal, SMALL_TILES)


def call(packed: Packed, **changed):
    return ATTENTION(*packed.tensors, **{**packed.offsets, **changed})


def test_a_query_never_sees_keys_of_another_sequence():
    packed = pack((9, 23, 4), grad=False)
    before = call(packed)
    for tensor in packed.tensors:
        tensor[:, :, 9:32] = float("nan")
    after = call(packed)
    assert torch.equal(before[:, :, :9], after[:, :, :9]) and torch.equal(before[:, :, 32:], after[:, :, 32:])
    assert after[:, :, 9:32].isnan().all()


def test_other_contents_of_the_same_tensor_compile_nothing(monkeypatch):
    packed = pack((9, 23, 4), unused=6, grad=False)
    call(packed)
    made = []
    monkeypatch.setattr(Kernel, "__init__", lambda *_: made.append(1))
    for lengths in ((0, 0, 42), (1, 1, 1), (16, 16, 10), (0, 5, 0)):
        packed.cu_seqlens_q.copy_(offsets_of(lengths))
        assert_near("out", call(packed), in_a_loop(packed, None, causal).out, 1e-5)
    for lengths in ((20, 22), (5,), (3,) * 14):  # another number of sequences is no other kernel either
        other = Packed(*packed.tensors, offsets_of(lengths))
        assert_near("out", call(other), in_a_loop(other, None, causal).out, 1e-5)
    assert not made


def test_backward_refuses_offsets_that_changed_since_the_forward():
    packed = pack((9, 23, 4))
    out = call(packed)
    packed.cu_seqlens_q.copy_(offsets_of((1, 1, 1)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_does_not_need_grad_gets_none():
    packed = pack((9, 23, 4), grad=False)
    packed.value.requires_grad_()
    check_packed(packed, mask=causal)


def test_sinks():
    packed, sinks = pack((9, 0, 23), unused=4), draw(2)
    out, aux = call(packed, sinks=sinks, return_aux=flexgen.AuxRequest(lse=True))
    exact = in_a_loop(packed, None, causal)
    lse = torch.logaddexp(exact.lse, sinks.double()[None, :, None])
    assert_near("lse", aux.lse, lse, 1e-5)
    assert_near("out", out, exact.out * torch.exp(exact.lse - lse)[..., None], 1e-5)
    found = torch.autograd.grad(out.square().sum(), (packed.query, sinks))
    expected = (exact.out * torch.exp(exact.lse - lse)[..., None]).square().sum()
    for grad, other in zip(found, torch.autograd.grad(expected, (packed.query, sinks)), strict=True):
        assert_near("gradient", grad, other, 2e-5)


def test_decisions_are_explained():
    document = torch.zeros(36, dtype=torch.int32)

    def documents(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    tensors = [torch.empty(1, 2, 36, 64, dtype=torch.bfloat16, device="meta")] * 3
    lowered = flexgen.compile(None, documents).lower(*tensors, cu_seqlens_q=offsets_of((30, 6)), target="sm_90")
    text = " ".join(lowered.explain().split())
    for part in (
        "PACKED_SEQUENCES = True because: cu_seqlens were given",
        "SEARCH_WIDTH = 128 because: a tile searches its sequence: one load for up to 128",
        "rejected GLUON: packed sequences (cu_seqlens) begin where no tile of the copy engine does",
        "no table: packed sequences have lengths of their own, and a table has one for all",
        "IS_DIVISIBLE = False because: packed sequences end anywhere",
    ):
        assert part in text
    refusal(
        lambda: flexgen.compile(options={"fwd_BACKEND": "GLUON"}).lower(
            *[torch.empty(1, 2, 256, 64, dtype=torch.bfloat16, device="meta")] * 3,
            cu_seqlens_q=offsets_of((256,)),
            target="sm_90",
        ),
        flexgen.OptionError,
        "GLUON",
        "cu_seqlens",
    )


@pytest.mark.parametrize(
    ("changed", "kind", "mentions"),
    [
        ({"cu_seqlens_q": [0, 36]}, KIND, ("cu_seqlens_q is list", "pad(lengths.cumsum(0), (1, 0))")),
        ({"cu_seqlens_q": None, "cu_seqlens_k": offsets_of((36,))}, KIND, ("without cu_seqlens_q",)),
        ({"cu_seqlens_q": torch.tensor([0.0, 36.0])}, KIND, ("dtype torch.float32", "int32 or int64")),
        ({"cu_seqlens_q": torch.tensor([[0, 36]])}, PROBLEM, ("shape (1, 2)",)),
        ({"cu_seqlens_q": torch.tensor([0, 0, 36, 36])[::2]}, PROBLEM, ("strides (2,)",)),
        ({"cu_seqlens_q": torch.empty(0, dtype=torch.int32)}, PROBLEM, ("[sequences + 1]",)),
        ({"cu_seqlens_k": offsets_of((9, 27))}, PROBLEM, ("4 entries", "3 of")),
        ({"cu_seqlens_k": offsets_of((9, 23, 4), dtype=torch.int64)}, PROBLEM, ("torch.int64",)),
        ({"cu_seqlens_q": torch.empty(4, dtype=torch.int32, device="meta")}, PROBLEM, ("on meta, query on cpu",)),
    ],
)
def test_offsets_of_the_wrong_kind_are_refused(changed, kind, mentions):
    refusal(lambda: call(pack((9, 23, 4)), **changed), kind, *mentions)


def test_tensors_that_are_not_packed_are_refused():
    query = torch.randn(2, 2, 36, 16)
    refusal(
        lambda: ATTENTION(query, query, query, cu_seqlens_q=offsets_of((36,))), PROBLEM, "batch size 2", "batch of 1"
    )
    query, key = torch.randn(1, 2, 36, 16), torch.randn(1, 2, 40, 16)
    refusal(
        lambda: ATTENTION(query, key, key, cu_seqlens_q=offsets_of((36,))), PROBLEM, "36 tokens", "40", "cu_seqlens_k"
    )


def test_a_block_mask_beside_offsets_is_refused():
    table = flexgen.create_block_mask(causal, 1, 1, 36, 36, device="cpu", BLOCK_SIZE=16)
    refusal(lambda: call(pack((9, 23, 4)), block_table=table), PROBLEM, "block mask or table", "flexgen.compile")


@pytest.mark.parametrize(
    ("entries", "mentions"),
    [
        ([1, 9, 36], ("cu_seqlens_q[0] is 1, not 0",)),
        ([0, 30, 6], ("cu_seqlens_q[2] is 6, less than cu_seqlens_q[1], which is 30", "not lengths")),
        ([0, 9, 37], ("cu_seqlens_q[2] is 37", "36 tokens", "kernels do not check")),
    ],
)
def test_contents_are_checked_where_asked(entries, mentions):
    packed = pack((9, 23, 4), grad=False)
    refusal(lambda: call(packed, cu_seqlens_q=torch.tensor(entries), validate=True), PROBLEM, *mentions)


def test_good_contents_pass():
    packed = pack((9, 23, 4), unused=3, grad=False)
    assert torch.equal(call(packed, validate=True), call(packed))
