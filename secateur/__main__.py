"""`python -m secateur` is the command line."""

import sys

from secateur.cli import main

sys.exit(main())
