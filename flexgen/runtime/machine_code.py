"""Reads machine code as text, NVIDIA's SASS or AMD's assembly: its instructions, and the loops that they form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

# Opcodes by what they do; each stands for itself with any modifiers (`MUFU.EX2` for `MUFU.EX2.F16`). AMD's end in `*`
# where any opcode that begins so is meant.
MATRIX = ("HMMA", "IMMA", "DMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "v_mfma*", "v_smfmac*")
EXPONENTIAL = ("MUFU.EX2", "v_exp_f32*")
LOAD = ("LDG", "LDGSTS", "UTMALDG", "UBLKCP", "global_load*", "buffer_load*", "flat_load*")
STORE = ("STG", "UTMASTG", "RED", "REDG", "ATOMG", "global_store*", "buffer_store*", "flat_store*", "global_atomic*")
SHARED = ("LDS", "LDSM", "STS", "STSM", "ATOMS", "ds_read*", "ds_write*", "ds_load*", "ds_store*")
LOCAL_LOAD = ("LDL", "scratch_load*")
LOCAL_STORE = ("STL", "scratch_store*")
LOCAL = (*LOCAL_LOAD, *LOCAL_STORE)
MULTIPLY_ADD = (
    "FFMA",
    "FFMA2",
    "DFMA",
    "v_fma_f*",
    "v_fmac_f*",
    "v_pk_fma_f*",
    "v_dot2*",
)  # products without a matrix unit
_PADDING = frozenset({"NOP", "s_nop"})


@dataclass(frozen=True, slots=True)
class Opcodes:
    """How often each opcode occurs in some machine code, modifiers included; padding is left out."""

    counts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def count(self, *opcodes: str) -> int:
        """Return how many instructions have one of these opcodes, whatever their modifiers.

        `count("MUFU.EX2")` counts `MUFU.EX2` and `MUFU.EX2.F16`, `count("LDG", "STG")` global loads and stores, and
        `count("v_mfma*")` whatever begins so.
        """
        exact = frozenset(opcodes)
        starts = tuple(code[:-1] if code.endswith("*") else f"{code}." for code in opcodes)
        return sum(number for name, number in self.counts.items() if name in exact or name.startswith(starts))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with its modifiers.
        targets: positions of the instructions that it may branch to.
        falls_through: the next instruction may follow.
        line: of the emitted module, that it computes; of inlined functions of Triton's the one before.
    """

    opcode: str
    targets: tuple[int, ...] = ()
    falls_through: bool = True
    line: int | None = None


def main_loops(code: Sequence[Instruction]) -> tuple[Opcodes, ...]:
    """Return the innermost loops that hold matrix instructions, that with the fewest others for each of those first.

    The first is the loop over tiles that need no mask, where there is one apart. Where products take no matrix unit, as
    those of float32 in full precision, they are multiply-adds.
    """
    matrix = _places(code, MATRIX) or _places(code, MULTIPLY_ADD)
    found = [loop for loop in natural_loops(code) if loop & matrix]
    innermost = [loop for loop in found if not any(other < loop for other in found)]
    innermost.sort(key=lambda loop: (len(loop) / len(loop & matrix), min(loop)))
    return tuple(opcodes([code[number] for number in sorted(loop)]) for loop in innermost)


def _places(code: Sequence[Instruction], kind: tuple[str, ...]) -> set[int]:
    return {number for number, each in enumerate(code) if opcodes([each]).count(*kind)}


def opcodes(code: Sequence[Instruction]) -> Opcodes:
    """Count the opcodes of some instructions."""
    counts = Counter(each.opcode for each in code if each.opcode not in _PADDING)
    return Opcodes(MappingProxyType(dict(sorted(counts.items()))))


# Loops.


def natural_loops(code: Sequence[Instruction]) -> list[frozenset[int]]:
    """Return the instructions of each loop: what can reach its back edge without passing its head."""
    if not code:
        return []
    blocks = _blocks(code)
    after = _successors(code, blocks)
    before: list[list[int]] = [[] for _ in blocks]
    for block, successors in enumerate(after):
        for successor in successors:
            before[successor].append(block)
    dominators, reached = _dominators(before), _reachable(after)
    bodies: dict[int, set[int]] = {}
    for block, successors in enumerate(after):
        for head in successors:
            if block in reached and dominators[block] >> head & 1:
                bodies.setdefault(head, {head}).update(_reaching(block, head, before))
    return [frozenset(number for block in body for number in blocks[block]) for body in bodies.values()]


def _blocks(code: Sequence[Instruction]) -> list[range]:
    """Cut the code into stretches that are entered at their first instruction and left at their last."""
    starts = {0, *(target for each in code for target in each.targets)}
    starts |= {number + 1 for number, each in enumerate(code) if each.targets or not each.falls_through}
    ordered = sorted(start for start in starts if start < len(code))
    return [range(start, end) for start, end in zip(ordered, [*ordered[1:], len(code)], strict=True)]


def _successors(code: Sequence[Instruction], blocks: Sequence[range]) -> list[list[int]]:
    number_at = {block.start: number for number, block in enumerate(blocks)}
    after = []
    for block in blocks:
        last = code[block[-1]]
        places = [*last.targets, *([block.stop] if last.falls_through else [])]
        after.append([number_at[place] for place in places if place in number_at])
    return after


def _reachable(after: Sequence[Sequence[int]]) -> set[int]:
    """Return the blocks that can be reached from the first."""
    found, stack = {0}, [0]
    while stack:
        for successor in after[stack.pop()]:
            if successor not in found:
                found.add(successor)
                stack.append(successor)
    return found


def _dominators(before: Sequence[Sequence[int]]) -> list[int]:
    """Return for each block the set of blocks, as bits, that every way from the first one passes."""
    everything = (1 << len(before)) - 1
    found = [1, *[everything] * (len(before) - 1)]
    changed = True
    while changed:
        changed = False
        for block in range(1, len(before)):
            common = everything if before[block] else 0
            for earlier in before[block]:
                common &= found[earlier]
            common |= 1 << block
            changed |= common != found[block]
            found[block] = common
    return found


def _reaching(block: int, head: int, before: Sequence[Sequence[int]]) -> set[int]:
    seen, stack = {head, block}, [block] if block != head else []
    while stack:
        for earlier in before[stack.pop()]:
            if earlier not in seen:
                seen.add(earlier)
                stack.append(earlier)
    return seen


# Texts.

_SASS = re.compile(
    r"^(?:(?P<label>\.L_\w+):"
    r"|\s*//## File \"(?P<file>[^\"]*)\", line (?P<line>\d+)"
    r"|\s*/\*[0-9a-f]{4,}\*/\s+(?P<predicate>@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_.x]*)(?P<operands>[^;\n]*);)",
    re.MULTILINE,
)
_LABEL = re.compile(r"\.L_\w+")
_ENDS = frozenset({"EXIT", "RET", "KILL"})
_BRANCHES = frozenset({"BRA", "JMP", "BRX", "JMX", "BRXU", "JMXU"})


def parse_sass(text: str) -> list[Instruction]:
    """Return the instructions of what `nvdisasm -c -g` prints of one kernel."""
    return _instructions(_SASS, text, _sass)


def _sass(match: re.Match[str], labels: Mapping[str, int], line: int | None) -> Instruction:
    opcode, operands, predicated = match["opcode"], match["operands"], match["predicate"] is not None
    name = opcode.split(".")[0]
    if name in _ENDS:
        return Instruction(opcode, falls_through=predicated, line=line)
    if name not in _BRANCHES:
        return Instruction(opcode, line=line)
    targets = tuple(labels[label] for label in _LABEL.findall(operands) if label in labels)
    conditional = predicated or "," in operands.split("`")[0]  # an operand before the target is a condition
    return Instruction(opcode, targets, conditional and "BRX" not in name, line)


_AMDGCN = re.compile(
    r"^(?:(?P<label>\.?\w+):"
    r"|\t\.loc\t.*?; (?P<places>.*)$"
    r"|\t(?P<opcode>[a-z][a-z0-9_]+)(?:[ \t]+(?P<operands>[^;\n]*))?)",
    re.MULTILINE,
)


def parse_amdgcn(text: str) -> list[Instruction]:
    """Return the instructions of AMD's assembly text of one kernel."""
    return _instructions(_AMDGCN, text, _amdgcn)


def _amdgcn(match: re.Match[str], labels: Mapping[str, int], line: int | None) -> Instruction:
    opcode, operands = match["opcode"], (match["operands"] or "").strip()
    if opcode.startswith(("s_endpgm", "s_setpc")):
        return Instruction(opcode, falls_through=False, line=line)
    if opcode.startswith(("s_cbranch", "s_branch")) and operands in labels:
        return Instruction(opcode, (labels[operands],), opcode != "s_branch", line)
    return Instruction(opcode, line=line)


Decode = Callable[[re.Match[str], Mapping[str, int], int | None], Instruction]


def _instructions(pattern: re.Pattern[str], text: str, decode: Decode) -> list[Instruction]:
    """Decode a text of labels, remarks about lines, and instructions."""
    labels: dict[str, int] = {}
    found: list[tuple[re.Match[str], int | None]] = []
    line = None
    for match in pattern.finditer(text):
        if match["label"]:
            labels[match["label"]] = len(found)
        elif match["opcode"]:
            found.append((match, line))
        else:
            line = _emitted_line(match) or line
    return [decode(match, labels, number) for match, number in found]


def _emitted_line(match: re.Match[str]) -> int | None:
    """Return the line that a remark names, if it is of the emitted module and not of Triton's library."""
    remark = match.groupdict()
    if remark.get("file"):
        return None if "/triton/" in remark["file"] else int(remark["line"])
    places = re.findall(r"(\S+\.py):(\d+):", remark.get("places") or "")
    return next((int(line) for name, line in places if name not in _TRITONS), None)


_TRITONS = frozenset({"standard.py", "core.py", "math.py", "semantic.py", "libdevice.py"})  # of triton.language
