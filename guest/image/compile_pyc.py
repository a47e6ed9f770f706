"""Byte-compile the Python files named on standard input, inside the image's own interpreter.

Argument: the image root as this process sees it (empty when it is the root). Unchecked-hash files
stay valid whatever happens to times, and cost no stat of the source at import.
"""

import py_compile
import sys

prefix = sys.argv[1]
failed = 0
for line in sys.stdin:
    path = line.rstrip("\n")
    try:
        py_compile.compile(
            prefix + path,
            dfile=path,
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    except (py_compile.PyCompileError, SyntaxError, ValueError, UnicodeError):
        failed += 1  # a few packages ship templates or files for other Python versions
print(f"not compiled: {failed}")
