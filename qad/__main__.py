"""`python -m qad`: the command where the script is not on the path."""

import sys

from qad.command.cli import main

sys.exit(main())
