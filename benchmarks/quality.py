"""`python benchmarks/quality.py --text FILE` is `secateur bench quality --text FILE`."""

import sys

from secateur.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "quality", *sys.argv[1:]]))
