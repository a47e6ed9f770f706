"""The analysis image: building it from the host's signed archives, importing it, and its receipts.

``receipt`` is what sessions use; the rest runs at ``backintel sandbox prepare``. Nothing in an
image or archive is trusted before its links, entries and digest were examined.
"""
