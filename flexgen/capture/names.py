"""Names for captured values: ASCII identifiers that collide with nothing in emitted code."""

from __future__ import annotations

import builtins
import keyword
import re
import unicodedata

from flexgen.ir.graph import INPUT_AXES

# Names that mods, templates and Triton's language own. A captured value never takes one of them.
RESERVED: frozenset[str] = frozenset(
    {"tl", "triton", "torch", "math", "libdevice", "gl", "self", "scale", "query", "key", "value", "out", "lse"}
    | {"q", "k", "v", "acc", "mask", "row_max", "row_sum", "alpha", "p", "scores", "q_start", "kv_start", "head_dim"}
    | {"Q", "K", "V", "M", "N", "B", "H", "Hq", "Hkv", "Z", "LSE", "MAX", "DELTA", "DO", "DQ", "DK", "DV", "OUT"}
    | {"inf", "nan", "buffers", "scalars"}  # the IR's text
    | set(INPUT_AXES)
    | set(keyword.kwlist)
    | set(keyword.softkwlist)
    | set(dir(builtins))
)
# Names that emitted kernels bind where captured values are in scope: parameters, local variables and functions.
# A test compares them with what kernels bind.
_BOUND_IN_KERNELS = frozenset(
    (  # noqa: SIM905
        "accumulate ahead as_operand attend attend_tile aux_offset b_hi b_lo barriers base batch batch_head "
        "batch_heads block classify column_exists consume consumer consumer_registers count count_blocks "
        "count_offset counts decide_blocks delta desc descriptors end exists fill_blocks finish_scores first "
        "first_block fits forward full h_hi h_lo head key_desc keys kv_block kv_head kv_heads kv_hi kv_lo kv_width "
        "last left listed live live_keys load_tile locate logsumexp mask_mod max_score max_scores modified multiply "
        "natural_max new_max next_full next_partial next_slot num_blocks num_full num_partial operand output "
        "own_block packed partial phase produce producer program q_block q_hi q_lo q_row q_tile qk_dim queries "
        "query_desc query_tile rescale right ring row row_exists row_is_empty row_of_blocks row_shift row_start "
        "row_tile row_tile_at row_tiles score_grad score_mod shape shared_head slot sm_scale softmax start "
        "start_copy state states step store_rows swap tile tile_at tiles tiles_per_block tiles_per_head "
        "tiles_per_own_block tiles_per_q_block turn turn_count v_dim value_desc visited wait_for wanted warpgroup "
        "weight wide_kv_head before keep_interval values checked needs_mask inverse in_full past "
        "log_sum added logsumexp_tail row_tail "
        "kv_len split splits per_split share combine partial_row page in_page score_scale v_scale "
        "dropout_seed dropout_stream drop_below is_kept keep_scale kept stream "
        "cu_seqlens_k cu_seqlens_q kv_base kv_begin q_base q_begin sequence_of SEQUENCES "
        "blocks deltas differentiate dim first_row free fresh hidden kv_tile line_of_blocks live_queries own_full "
        "own_start q_width row_at row_offset row_shifts row_tails rows_before rows_of_head wait_filled wait_free weigh "
        "weight_operand"
    ).split()
)
_PRELUDE = frozenset(
    (  # noqa: SIM905
        "expm1 float_floor_div float_floor_mod floor_div floor_mod from_e4m3 log1p power round_half_even sigmoid sign "
        "tanh tanh_approx truncate"
    ).split()
)
# Spelled like a template variable (BLOCK_M, SM_SCALE, num_warps): upper case with an underscore, or a launch option;
# like the numbered names of loop bounds; or like what backward kernels make of a buffer's name.
_TEMPLATE_LIKE = re.compile(
    r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|num_warps|num_stages|num_ctas|stride_\w+|\w+_(ptr|desc|stride_?\w+|size\d+)"
    r"|(lo|hi|full_lo|full_hi|consumer)(_\d+)?|(gap|width|tiles)_\d+|backward_\w+"
    r"|(grad|share_of|scale_of|largest_of|contribution|scatter|measure|head_grad|head_query|summarise)_\w+"
    r"|(query|key|value)_(b|h|empty|full|phase|slot|tiles)"
)


_MOST_CHARACTERS = 64  # of a name: a key of a dictionary may be a text of any length


def _ascii_letter(char: str) -> str:
    """Spell one character in ASCII: a decomposition if there is one, else the last word of its Unicode name."""
    plain = unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()
    if plain:
        return plain
    words: list[str] = re.findall(r"[A-Za-z0-9]+", unicodedata.name(char, f"u{ord(char):x}"))
    return words[-1].lower()


def sanitise(name: str, fallback: str) -> str:
    """Return `name` as an ASCII identifier; `fallback` where nothing of it is left."""
    spelled = "".join(char if char.isascii() else _ascii_letter(char) for char in name)
    cleaned = re.sub(r"\W+", "_", spelled).strip("_")
    if not cleaned:
        return fallback
    cleaned = cleaned[:_MOST_CHARACTERS].strip("_")
    return f"{fallback}_{cleaned}" if cleaned[0].isdigit() else cleaned


def is_reserved(name: str) -> bool:
    """Whether a captured value must not take the name."""
    return name in RESERVED or name in _BOUND_IN_KERNELS or name in _PRELUDE or bool(_TEMPLATE_LIKE.fullmatch(name))


class NameTable:
    """Hands out unique names; `suffix` tells apart a captured value that wants a reserved name."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def claim(self, wanted: str, *, suffix: str) -> str:
        name = sanitise(wanted, suffix)
        if is_reserved(name):
            name = f"{name}_{suffix}"
        unique, count = name, 1
        while unique in self._taken:
            count += 1
            unique = f"{name}_{count}"
        self._taken.add(unique)
        return unique
