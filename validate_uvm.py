"""Run `gracetune diagnose --allocation-only` under the name that existing GH200 scripts use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

from gracetune.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["diagnose", "--allocation-only", *sys.argv[1:]]))
