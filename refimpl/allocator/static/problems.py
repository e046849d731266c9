"""MiniMalloc's problems: files of blocks with their lifetimes, and a capacity in which all of them fit.

    id,lower,upper,size
    b1,0,3,4              block b1 is live in 0 ≤ t < 3 and has 4 bytes

A.1048576.csv is problem A with a capacity of 1,048,576 bytes. The eleven problems in data/minimalloc are those of
MiniMalloc's repository, under the Apache License 2.0.
"""

import csv
from pathlib import Path

from ...common.lifetimes import Lifetimes

FOLDER = Path(__file__).parents[3] / "data" / "minimalloc"  # in a checkout


def load_problem(path):
    """Return (Lifetimes, capacity in bytes) of a file NAME.CAPACITY.csv, or of a problem of data/minimalloc, as "A".

    FileNotFoundError if it is not there, ValueError for a file of another form.
    """
    if not str(path).endswith(".csv"):
        path = next(FOLDER.glob(f"{path}.*.csv"), FOLDER / f"{path}.*.csv")
    with Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        columns = [[int(row[name]) for row in rows] for name in ("lower", "upper", "size")]
        capacity = int(Path(path).name.split(".")[-2])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is no problem of MiniMalloc: expected NAME.CAPACITY.csv with columns id, lower, "
                         f"upper and size ({error!r})") from error
    return Lifetimes(*columns), capacity


def problem_names():
    """List the names that `load_problem` takes, "A" to "K": problems of MiniMalloc (Moffitt 2023) in data/minimalloc.

    An installed package has none: they are in the repository alone.
    """
    return sorted(path.name.split(".")[0] for path in FOLDER.glob("?.*.csv"))
