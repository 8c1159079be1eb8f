"""Speed, memory and error of the objective: plain, compiled, as attention, and fused. The same as `co2 bench loss`.

python benchmarks/contrast.py --out results/loss
python benchmarks/contrast.py --rows 256 4096 --negatives 65536 --backends compiled fused
python benchmarks/contrast.py --sweep --rows 256 1024 4096 --negatives 65536 --out results/loss
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from co2.bench.loss import main

if __name__ == "__main__":
    main()
