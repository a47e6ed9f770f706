"""``python -m pip``, ``%pip`` and ``!pip`` all end here."""

from __future__ import annotations

import sys

from pip._offline import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
