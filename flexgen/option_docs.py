"""What each kernel option means: the one source of `flexgen options` and of docs/options.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

BACKWARD = "Backward kernels only."
AMD = "AMD targets only."


@dataclass(frozen=True, slots=True)
class OptionDoc:
    """The documentation of one option.

    Attributes:
        values: what may be given, for people.
        default: what flexgen decides where nothing is given.
        summary: what it does, in a sentence or two.
        example: a value that is accepted.
        scope: where it applies, if not everywhere.
    """

    values: str
    default: str
    summary: str
    example: Any
    scope: str = ""


_SIDES = "16, 32, ... 512"
_FLAG = "True, False"

OPTION_DOCS: Mapping[str, OptionDoc] = MappingProxyType(
    {
        "BLOCK_M": OptionDoc(
            _SIDES, "by target, head dim and length", "Query rows that one program of the forward kernel computes.", 64
        ),
        "BLOCK_N": OptionDoc(
            _SIDES, "by target, head dim and length", "Keys that the forward kernel visits in one step.", 64
        ),
        "BLOCK_M1": OptionDoc(_SIDES, "-", "Query rows of a step of the dK/dV kernel.", 64, BACKWARD),
        "BLOCK_N1": OptionDoc(_SIDES, "-", "Keys of a program of the dK/dV kernel.", 64, BACKWARD),
        "BLOCK_M2": OptionDoc(_SIDES, "-", "Query rows of a program of the dQ kernel.", 64, BACKWARD),
        "BLOCK_N2": OptionDoc(_SIDES, "-", "Keys of a step of the dQ kernel.", 64, BACKWARD),
        "num_warps": OptionDoc(
            "1, 2, 4, ... 32", "by tile", "Warps (AMD: wavefronts) of a program; they share the rows of its tile.", 4
        ),
        "num_stages": OptionDoc(
            "1 to 8",
            "the deepest that fits",
            "Depth of the software pipeline: how many steps ahead keys and values are fetched. Each stage takes "
            "shared memory for one tile of both.",
            2,
        ),
        "PRESCALE_QK": OptionDoc(
            _FLAG,
            "False",
            "Multiply the query by the scale once, in its own dtype, instead of each score in float32: fewer "
            "multiplications, one rounding more.",
            True,
        ),
        "USE_SUBTILING": OptionDoc(
            _FLAG,
            "False",
            "Rescale the accumulator in two halves of its columns, to the same result bit for bit. Selects the TRITON "
            "backend.",
            True,
        ),
        "ROWS_GUARANTEED_SAFE": OptionDoc(
            _FLAG,
            "what is proved of the mask",
            "A promise that each query has a live key, which drops the check for rows without one. Believed only "
            "where flexgen proves it; a wrong promise is harmless.",
            True,
        ),
        "BLOCKS_ARE_CONTIGUOUS": OptionDoc(
            _FLAG,
            "False",
            "A promise that the key blocks which a block mask lists for a row are consecutive, so that only the first "
            "index is read. Checked against the lists.",
            True,
        ),
        "WRITE_DQ": OptionDoc(
            _FLAG,
            "-",
            "Which kernel accumulates the gradient of a captured tensor whose element depends on both query and key, "
            "or on neither: the one of dQ (True), or the one of dK and dV (False). By default that of dQ, unless only "
            "the other one runs.",
            True,
            BACKWARD,
        ),
        "FORCE_USE_FLEX_ATTENTION": OptionDoc(
            _FLAG, "False", "Use the general forward kernel also for few queries: selects the TRITON backend.", True
        ),
        "USE_TMA": OptionDoc(
            _FLAG,
            "False",
            "Fetch keys and values with the bulk copy engine of sm_90 and later. They need unit-stride rows on 16-byte "
            "boundaries. Selects the TRITON backend.",
            True,
        ),
        "BACKEND": OptionDoc(
            "AUTO, TRITON, TRITON_DECODE, GLUON",
            "AUTO",
            "Which kind of kernel to emit. AUTO takes TRITON_DECODE for up to 16 queries without a block mask, GLUON "
            "on sm_90 where it applies and wins, TRITON elsewhere; one that does not apply, and torch's FLASH, are "
            "refused with a reason.",
            "TRITON",
        ),
        "kpack": OptionDoc("1, 2", "Triton's", "Elements packed for each matrix instruction's operand.", 2, AMD),
        "matrix_instr_nonkdim": OptionDoc(
            "0, 16, 32", "Triton's", "Rows and columns of a matrix instruction; 0 lets Triton choose.", 16, AMD
        ),
        "waves_per_eu": OptionDoc(
            "0 to 8", "Triton's", "Wavefronts that registers are rationed for on each unit; 0 is no limit.", 2, AMD
        ),
        "FLOAT32_PRECISION": OptionDoc(
            "ieee, tf32, tf32x3",
            "ieee",
            "How float32 matrices are multiplied: in full, in TF32 (10 bits of mantissa), or in three TF32 products.",
            "tf32",
        ),
        "FAST_TANH": OptionDoc(
            _FLAG,
            "True for half-precision inputs on NVIDIA",
            "Compute tanh in score_mod with the hardware's approximation, wrong by at most 2**-11.",
            False,
        ),
        "LONG_ROWS_FIRST": OptionDoc(
            _FLAG,
            "True where later queries visit more keys",
            "Start the programs of the last queries first, so that the last programs to finish are short ones.",
            False,
        ),
        "SPLIT_KV": OptionDoc(
            "1 to 1024",
            "by what the device runs at once, and the live keys",
            "Over how many programs the keys of up to 16 queries are split. Selects the TRITON_DECODE backend.",
            4,
        ),
    }
)

LAYOUT = OptionDoc(
    "bhsd, bshd",
    "bhsd",
    "Order of dimensions of query, key, value and output: batch, heads, sequence, head dim; or sequence before heads.",
    "bshd",
)

AUTOTUNE = OptionDoc(
    _FLAG,
    "False",
    "The first call of each problem on a GPU searches which options are fastest there, as `flexgen tune` does, and "
    "keeps them for later ones. Takes minutes once; not inside torch.compile; measured without dropout.",
    True,
)
WHOLE_DOCS: Mapping[str, OptionDoc] = MappingProxyType({"layout": LAYOUT, "autotune": AUTOTUNE})

PREFIX_NOTE = (
    "Each name but `layout` and `autotune` also exists with the prefix `fwd_` and `bwd_`, for the forward or the "
    "backward kernels alone; a prefixed option wins. An unknown name, or a choice that cannot be honoured, is an error "
    "that says why."
)

# The template variables of a kernel that are no options: what follows from the call.
VARIABLE_DOCS: Mapping[str, str] = MappingProxyType(
    {
        "QK_HEAD_DIM": "Head dim of query and key.",
        "QK_HEAD_DIM_ROUNDED": "The tile's: the next power of two, at least 16.",
        "V_HEAD_DIM": "Head dim of value and output.",
        "V_HEAD_DIM_ROUNDED": "The tile's: the next power of two, at least 16.",
        "SAFE_HEAD_DIM": "Both head dims are their rounded ones, so that no load masks the head dim.",
        "IS_DIVISIBLE": "Both lengths are multiples of the tile, so that no load masks queries or keys.",
        "SM_SCALE": "The softmax scale, where it is a constant of the kernel; else the argument sm_scale.",
        "SCALE_LOG2_E": "SM_SCALE * log2(e): the kernel computes exponentials with base 2.",
        "GQA_SHARED_HEADS": "Query heads that share a key and value head.",
        "SPARSE_Q_BLOCK_SIZE": "Queries of a block of the block mask; 0 without one.",
        "SPARSE_KV_BLOCK_SIZE": "Keys of a block of the block mask; 0 without one.",
        "HAS_FULL_BLOCKS": "The block mask lists blocks that need no mask apart.",
        "OUTPUT_LOGSUMEXP": "The logsumexp of each row is written.",
        "OUTPUT_MAX": "The largest score of each row is written.",
        "OUTPUT_TAIL": "What rounding takes from the logsumexp is written too, so that the backward recomputes exact "
        "weights of scores of any magnitude.",
        "DROPOUT": "How a kernel draws which softmax weights it drops: none; grouped, four pairs with one call of the "
        "generator; or single, where tiles do not fit such groups. Grouped and single draw the same numbers; the "
        "probability is the run-time argument drop_below. See docs/numerics.md.",
        "FOLD_SCALE": "Scale and log2(e) are one factor inside the exponential: there is no score_mod.",
        "SUBTRACT_FIRST": "The row's maximum is subtracted before scores are multiplied by log2(e), so that scores of "
        "any magnitude keep their differences.",
        "ROW_MAX_FLOOR": "Where a row's running maximum starts: finite, so that a row without a live key gives no NaN.",
        "BACKEND": "Which backend emits the kernel: see the option.",
        "template": "Of a Gluon kernel: WS, a producer warp that feeds consumer warpgroups, or ONE, one warpgroup.",
        "CONSUMERS": "Warpgroups of a Gluon kernel that compute; each has 64 of the tile's rows.",
        "VALUE_STAGES": "Value tiles of a Gluon kernel in shared memory; num_stages counts its key tiles.",
        "PERSISTENT": "A Gluon kernel runs one program for each multiprocessor, which walks over row tiles.",
        "KV_TAIL": "The last key tile of a Gluon kernel may reach past KV_LEN.",
        "maxnreg": "Registers of a Gluon kernel's thread at launch, before the partitions share them out.",
        "CONSUMER_REGISTERS": "Registers of a consumer's thread in a Gluon kernel.",
        "PRODUCER_REGISTERS": "Registers of the producer's thread in a Gluon kernel; 0 without one.",
        "SCORE_SCALE": "The softmax scale, times the constant that score_mod multiplies or divides the score by first.",
        "WEIGHT_SCALE": "log2(e), times the softmax scale or the constant that score_mod ends with.",
        "MAX_SCALE": "What makes a row's maximum a score, where scores are kept without a constant factor.",
        "LIVE_KEYS": "Of a decode kernel: no row has more live keys, by the mask's constants.",
        "held": "Of a decode kernel: programs that a multiprocessor holds at a time.",
        "resident": "Of a decode kernel: programs of a multiprocessor that the number of splits is counted for.",
        "PARTIAL_WIDTH": "Of a decode kernel: elements of a partial row in scratch memory, with its maximum and sum.",
        "COMBINE_SPLITS": "Splits of a row that the combining kernel reads at a time.",
        "combine_warps": "Warps of a program of the combining kernel.",
        "PAGE_SIZE": "Keys of a page, where keys and values lie in pages.",
        "stored": "How keys and values are stored, where not in the query's dtype.",
        "K_SCALE": "The scores' scale includes k_scale of the key head.",
        "V_SCALE": "The output is multiplied by v_scale: of the key head, or a number.",
        "index_map": "Query heads that are packed into the rows of one tile.",
        "PACKED_SEQUENCES": "Sequences lie packed along the length: see [packed sequences](packed_sequences.md).",
        "program_order": "Which programs start after one another: all tiles of a head, or all heads of a tile.",
        "SEARCH_WIDTH": "Sequences that a tile compares at a time in the search for its own; 0 where none are packed.",
        "shared_bytes": "Shared memory that the tile needs, an upper bound.",
    }
)

_PAGE = """\
# Kernel options

<!-- Written by `flexgen options --markdown` from flexgen/option_docs.py; edit it there. -->

Options keep Inductor's names, so that those of torch's flex_attention carry over. Pass them as a dict, or as a typed
`flexgen.Options`:

```python
attention = flexgen.compile(score_mod, mask_mod, options={{"BLOCK_M": 64, "fwd_num_warps": 4}})
```

On the command line: `flexgen compile FILE --set BLOCK_M=64 fwd_num_warps=4`. What is not given, flexgen decides;
`flexgen explain FILE` prints each decision with its reason.

{note}

| option | values | default | what it does |
| --- | --- | --- | --- |
{rows}

## Template variables

They stand at the top of each emitted kernel, or are decisions that `explain` prints. Besides the options:

| variable | meaning |
| --- | --- |
{variables}
"""


def markdown() -> str:
    """Return the text of docs/options.md."""
    rows = "\n".join(_row(name, doc) for name, doc in {**OPTION_DOCS, **WHOLE_DOCS}.items())
    variables = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in VARIABLE_DOCS.items())
    return _PAGE.format(note=PREFIX_NOTE, rows=rows, variables=variables)


def _row(name: str, doc: OptionDoc) -> str:
    return f"| `{name}` | {doc.values} | {doc.default} | {f'{doc.summary} {doc.scope}'.strip()} |"
