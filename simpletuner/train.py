"""Where one of the forks had `train.py`, for its launch line:
`accelerate launch --config_file ... simpletuner/train.py --config run.json`.
"""

import sys

from gracetune.cli.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
