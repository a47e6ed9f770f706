"""Tests that only an ordinary user runs: ``test_user.py`` starts them as one."""

from __future__ import annotations

import os

collect_ignore_glob = ["test_*.py"] if os.geteuid() == 0 else []
