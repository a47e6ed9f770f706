"""Write Matplotlib's font list and default fonts for the image: plots are silent and quick.

Arguments: the image root as this process sees it (empty when it is the root), the directory that
receives both. Only fonts of the image are listed, whatever the machine has.
"""

import dataclasses
import sys

import matplotlib.font_manager as fonts

FALLBACK = "WenQuanYi Zen Hei"
prefix, target = sys.argv[1:]
find_fonts = fonts.findSystemFonts


def image_fonts(fontpaths=None, fontext="ttf"):
    """Search where asked, else in the image's system fonts; in a stable order."""
    return sorted(find_fonts(fontpaths or [prefix + "/usr/share/fonts"], fontext))


fonts.findSystemFonts = image_fonts
manager = fonts.FontManager()
for name in ("ttflist", "afmlist"):
    entries = [
        dataclasses.replace(entry, fname=entry.fname.removeprefix(prefix))
        if prefix and entry.fname.startswith(prefix + "/usr/share/")
        else entry
        for entry in getattr(manager, name)
    ]
    # Else each plot warns that this family has no normal weight and each bold title that it has no
    # bold one: its only one is called medium.
    entries = [
        same
        for entry in entries
        for same in (
            [dataclasses.replace(entry, weight=weight) for weight in (400, 700)]
            if entry.name == FALLBACK
            else [entry]
        )
    ]
    setattr(manager, name, sorted(entries, key=lambda entry: entry.fname.removeprefix(prefix)))
fonts.json_dump(manager, f"{target}/fontlist-v{fonts.FontManager.__version__}.json")
# Matplotlib looks a missing glyph up only in families that are named: its default has no CJK text.
with open(f"{target}/matplotlibrc", "w") as settings:
    settings.write(f"font.family: DejaVu Sans, {FALLBACK}\n")
print(f"fonts: {len(manager.ttflist)}")
