"""`python -m embedfuse` is the command `embedfuse`."""

import sys

from .cli import main

sys.exit(main())
