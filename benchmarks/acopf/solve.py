"""Writes the grid's data, and the optimum of the first instances that pypower solves.

pip install pypower==5.1.21
python -m benchmarks.acopf.solve          # goes on where it stopped
"""

from __future__ import annotations

import json
import warnings
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np

from .grid import DATA, Grid, draw_loads

OPTIMUM = Path(__file__).parent / "optimum.csv"
INSTANCES, DRAWN = 1200, 4000


def case_data(case: dict[str, Any]) -> dict[str, Any]:
    """What ``Grid`` reads, in per unit of 100 MVA and radians; costs as they are."""
    bus, gen, branch, unit = case["bus"], case["gen"], case["branch"], case["baseMVA"]
    buses = np.c_[
        bus[:, 2:6] / unit, bus[:, 7], np.deg2rad(bus[:, 8]), bus[:, [12, 11]]
    ]
    limits = np.c_[gen[:, 0] - 1, gen[:, [9, 8, 4, 3]] / unit, case["gencost"][:, 4:7]]
    lines = np.c_[branch[:, :2] - 1, branch[:, [2, 3, 4, 8]], np.deg2rad(branch[:, 9])]
    return {"bus": buses.tolist(), "gen": limits.tolist(), "branch": lines.tolist()}


def least_cost(load: np.ndarray) -> float | None:
    """In 10⁴ $/h; None where pypower finds no solution. The lines' limits never bind."""
    from pypower.api import case57, opf, ppoption

    warnings.filterwarnings("ignore")
    case = case57()
    case["bus"][:, 2], case["bus"][:, 3] = np.split(load * case["baseMVA"], 2)
    case["branch"][1:, 5:8] = 0  # Saves half of the work; without any, pypower fails.
    result = opf(case, ppoption(OPF_ALG=560, VERBOSE=0, OUT_ALL=0))
    return result["f"] / 1e4 if result["success"] else None


def main() -> None:
    from pypower.api import case57

    data = case_data(case57())
    lines = [
        f'"{name}": [\n' + ",\n".join(map(json.dumps, data[name])) + "\n]"
        for name in data
    ]
    DATA.write_text("{" + ",\n".join(lines) + "}\n")
    loads = draw_loads(Grid().load, DRAWN).numpy()
    if not OPTIMUM.exists():
        OPTIMUM.write_text("drawn,objective\n")
    rows = OPTIMUM.read_text().split()[1:]
    start = int(rows[-1].split(",")[0]) + 1 if rows else 0
    with OPTIMUM.open("a") as file, Pool(2) as pool:
        solved = len(rows)
        for drawn, found in enumerate(pool.imap(least_cost, loads[start:]), start):
            if solved == INSTANCES:
                return
            if found is not None:
                print(f"{drawn},{found:.7f}", file=file, flush=True)
                solved += 1


if __name__ == "__main__":
    main()
