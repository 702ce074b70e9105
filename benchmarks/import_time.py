"""What importing flexgen adds to importing torch and triton, in seconds of processor time: best of five processes.

python -m benchmarks.import_time
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import time, torch, triton
start = time.process_time()
import flexgen
alone = time.process_time() - start
flexgen.compile, flexgen.create_block_mask, flexgen.flex_attention
print(alone, time.process_time() - start)
"""


def main() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True) for _ in range(5)
    ]
    alone, everything = (min(float(run.stdout.split()[at]) for run in runs) for at in (0, 1))
    print(f"import flexgen                      {alone:.3f} s")
    print(f"and first use of its public names   {everything:.3f} s")


if __name__ == "__main__":
    main()
