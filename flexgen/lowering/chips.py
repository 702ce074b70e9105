"""What a chip can do at best, for each target: rates of its units, and what its multiprocessors hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor (compute unit) shares out among the programs that run on it at the same time.

    On AMD registers, and the wavefronts that they leave room for, belong to one of four SIMD units.

    Attributes:
        registers: 32-bit registers, of all threads.
        register_unit: a warp gets a multiple of this many registers.
        warps: most warps (wavefronts).
        programs: most programs.
        shared_bytes: shared memory (LDS) of all programs.
        shared_reserved: what each program takes of it besides what it asks for.
        simds: units that warps are bound to, four to a multiprocessor; registers and warps are divided evenly.
    """

    registers: int
    register_unit: int
    warps: int
    programs: int
    shared_bytes: int
    shared_reserved: int
    simds: int = 4


@dataclass(frozen=True, slots=True)
class Chip:
    """The chip that a target's predictions are made for: peak rates, none of which a kernel exceeds.

    Attributes:
        name: of the product; others of the same target may be slower or faster.
        multiprocessors: how many (compute units on AMD).
        half, tf32, float32: FLOP/s of matrix products by operand: 16 bits, TF32, and float32 in full precision, all
            with float32 sums, dense; of float32 by the ordinary units where there is no matrix unit for it.
        memory: bytes/s.
        clock: of the multiprocessors, in Hz, at which the other rates are stated.
        exponentials_per_clock: exp2 and similar functions of one multiprocessor in a clock cycle.
        source: where the numbers come from.
    """

    name: str
    multiprocessors: int
    half: float
    tf32: float
    float32: float
    memory: float
    clock: float
    exponentials_per_clock: int
    source: str

    @property
    def exponentials(self) -> float:
        """Return how many exponentials a second all multiprocessors compute."""
        return self.multiprocessors * self.exponentials_per_clock * self.clock


# Exponentials of NVIDIA's chips: 16 results a clock cycle, CUDA C++ Programming Guide, "Arithmetic Instructions". Of
# AMD's: a quarter of the 64 lanes a cycle; CDNA 4 doubled that (white papers of CDNA 3 and CDNA 4).
A100 = Chip("A100 SXM 80 GB", 108, 312e12, 156e12, 19.5e12, 2.039e12, 1.41e9, 16, "A100 datasheet")
RTX_3090 = Chip("RTX 3090", 82, 71e12, 35.6e12, 35.6e12, 0.936e12, 1.695e9, 16, "GA102 white paper")
RTX_4090 = Chip("RTX 4090", 128, 165.2e12, 82.6e12, 82.6e12, 1.008e12, 2.52e9, 16, "Ada white paper")
H200 = Chip("H200 SXM", 132, 989.4e12, 494.7e12, 66.9e12, 4.8e12, 1.83e9, 16, "H200 datasheet, H100 white paper")
B200 = Chip("B200", 148, 2250e12, 1125e12, 75e12, 8e12, 1.85e9, 16, "HGX B200 datasheet; the clock is a guess")
RTX_5090 = Chip("RTX 5090", 170, 209.5e12, 104.8e12, 104.8e12, 1.792e12, 2.407e9, 16, "RTX Blackwell white paper")
MI250X = Chip("one die of MI250X", 110, 191.5e12, 47.9e12, 47.9e12, 1.638e12, 1.7e9, 16, "MI250X datasheet, halved")
MI300X = Chip("MI300X", 304, 1307.4e12, 653.7e12, 163.4e12, 5.3e12, 2.1e9, 16, "MI300X datasheet")
MI355X = Chip("MI355X", 256, 2516.6e12, 157.3e12, 157.3e12, 8e12, 2.4e9, 32, "MI355X datasheet")

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; on AMD the instruction set guides of
# CDNA 2, 3 and 4: 512 registers a lane in each of four SIMD units, vector and accumulation registers together.
MULTIPROCESSOR_80 = Multiprocessor(65536, 256, 64, 32, 167936, 1024)
MULTIPROCESSOR_86 = Multiprocessor(65536, 256, 48, 16, 102400, 1024)
MULTIPROCESSOR_89 = Multiprocessor(65536, 256, 48, 24, 102400, 1024)
MULTIPROCESSOR_90 = Multiprocessor(65536, 256, 64, 32, 233472, 1024)
MULTIPROCESSOR_120 = Multiprocessor(65536, 256, 48, 24, 102400, 1024)
CDNA = Multiprocessor(131072, 512, 32, 32, 65536, 0)
CDNA_4 = Multiprocessor(131072, 512, 32, 32, 163840, 0)
