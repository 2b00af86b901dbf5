"""`python -m weft`: the command line, even if the `weft` script is not on the PATH."""

from .cli import main

raise SystemExit(main())
