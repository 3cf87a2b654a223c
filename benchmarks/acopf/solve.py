"""Writes the grid's data, and the optimum of the first instances that pypower solves.

pip install pypower==5.1.21
python -m benchmarks.acopf.solve          # half an hour
"""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from .grid import DATA, Grid, draw_loads

OPTIMUM = Path(__file__).parent / "optimum.csv"
INSTANCES, DRAWN = 1200, 4000


def case_data(case: dict[str, Any]) -> dict[str, Any]:
    """What ``Grid`` reads, in per unit of 100 MVA and radians; costs as they are."""
    bus, gen, branch, unit = case["bus"], case["gen"], case["branch"], case["baseMVA"]
    buses = np.c_[bus[:, 2:6] / unit, bus[:, 7], np.deg2rad(bus[:, 8]), bus[:, [12, 11]]]
    limits = np.c_[gen[:, 0] - 1, gen[:, [9, 8, 4, 3]] / unit, case["gencost"][:, 4:7]]
    lines = np.c_[branch[:, :2] - 1, branch[:, [2, 3, 4, 8]], np.deg2rad(branch[:, 9])]
    return {"bus": buses.tolist(), "gen": limits.tolist(), "branch": lines.tolist()}


def main() -> None:
    from pypower.api import case57, opf, ppoption

    warnings.filterwarnings("ignore")
    data = case_data(case57())
    lines = [f'"{name}": [\n' + ",\n".join(map(json.dumps, data[name])) + "\n]" for name in data]
    DATA.write_text("{" + ",\n".join(lines) + "}\n")
    loads = draw_loads(Grid().load, DRAWN).numpy() * 100
    options, solved = ppoption(OPF_ALG=560, VERBOSE=0, OUT_ALL=0), 0
    with OPTIMUM.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("drawn", "objective"))
        for drawn, load in enumerate(loads):
            case = case57()
            case["bus"][:, 2], case["bus"][:, 3] = np.split(load, 2)
            result = opf(case, options)
            if result["success"]:
                writer.writerow((drawn, f"{result['f'] / 1e4:.7f}"))
                solved += 1
            if solved == INSTANCES:
                return


if __name__ == "__main__":
    main()
