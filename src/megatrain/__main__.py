"""``python -m megatrain``."""

from megatrain.cli.main import main

main()
