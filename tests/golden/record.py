"""Record golden runs: `python tests/golden/record.py [RUN ...]`; without a name, all of them.

Record only when results are meant to change, and say in the commit which change it was.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from golden_runs import RECORDS, RUNS, train


def main(names: list[str]) -> None:
    """Write one record for each of the named runs."""
    sys.path.append(str(Path(__file__).parents[1]))  # as pytest does: tests share modules there
    RECORDS.mkdir(exist_ok=True)
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            record = train(name, Path(folder))
        (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
        sys.stdout.write(f"recorded {name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
