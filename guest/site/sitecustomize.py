"""Runs when any Python starts in the sandbox with guest/site on its path (also child processes).

The kernel itself is started isolated (``-I``), so ``guest/kernel.py`` calls the same hook.
"""

from backintel._duckdb import install_hook

install_hook()
