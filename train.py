"""Train a model from a run file: `python train.py --config config/examples/minimal.json`."""

import sys

from gracetune.cli.train_script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
