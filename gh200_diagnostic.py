"""Run `gracetune diagnose` under the name that the forks use, without installing gracetune."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

from gracetune.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["diagnose", *sys.argv[1:]]))
