"""The commands of the offline pip.

``install`` checks requirements against the image; ``list``, ``freeze`` and ``show`` read its
package records; everything else is refused by policy. This is guidance, not a boundary. Exit status
as pip's: 0 if all that was asked for is there, 1 otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import pip

POLICY = (
    "BackIntel sandbox policy: nothing is installed or downloaded while an analysis runs; "
    "there is no network."
)
REMEDY = (
    "`pip list` shows what is there, /docs/packages.md what to use instead. A package is added by "
    "the owner of the sandbox, in the analysis image or in an owner runtime, before the start."
)
INSTEAD = {
    "fastparquet": "pyarrow or polars",
    "ibis-framework": "duckdb or polars",
    "kaleido": "backintel.save(figure, 'name.html') for Plotly, Matplotlib for pictures",
    "modin": "polars",
    "mysqlclient": "a source file, or an endpoint that the owner assigns",
    "psycopg2": "psycopg (version 3)",
    "psycopg2-binary": "psycopg (version 3)",
    "requests": "the files in /sources: there is no network",
    "scikit-learn": "scipy and numpy",
    "seaborn": "matplotlib",
    "statsmodels": "scipy.stats and numpy.linalg",
    "xlrd": "openpyxl",
    "xlsxwriter": "openpyxl, or backintel.save(table, 'name.xlsx')",
}
"""What the image offers in place of packages that are often asked for."""

_WITH_VALUE = frozenset(
    (
        *("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "-t", "--target"),
        *("-c", "--constraint", "--platform", "--python-version", "--implementation", "--abi"),
        *("--prefix", "--root", "--src", "--progress-bar", "--timeout", "--retries", "--proxy"),
        *("--cert", "--client-cert", "--trusted-host", "--cache-dir", "--log", "--python"),
        *("--upgrade-strategy", "--no-binary", "--only-binary", "--report", "--group"),
        *("-C", "--config-settings", "--exists-action", "--use-feature", "--use-deprecated"),
    )
)
"""Options of pip whose value is the next word, which must not be read as a package name."""


def main(arguments: Sequence[str]) -> int:
    """Run one pip command line and return its exit status."""
    words = [word for word in arguments if word not in ("-q", "--quiet", "-v", "--verbose")]
    if words[:1] in (["--version"], ["-V"]):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        print(f"pip {pip.__version__} (BackIntel sandbox, offline) (python {version})")
        return 0
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "install": _install,
        "list": _list,
        "freeze": _freeze,
        "show": _show,
    }
    if not words or words[0] in ("help", "--help", "-h"):
        print(f"pip here offers: {', '.join(commands)}. {POLICY}\n{REMEDY}")
        return 0
    command = commands.get(words[0])
    if command is None:
        return _refuse([f"`pip {words[0]}` is not available."])
    return command(words[1:])


def _refuse(lines: Sequence[str]) -> int:
    print("\n".join(f"ERROR: {line}" for line in (*lines, POLICY, REMEDY)), file=sys.stderr)
    return 1


def _install(arguments: Sequence[str]) -> int:
    asked = list(_requirements(arguments))
    if not asked:
        return _refuse(["`pip install` was given no requirement."])
    problems = []
    for text in asked:
        problem = _problem(text)
        if problem:
            problems.append(problem)
        else:
            print(f"Requirement already satisfied: {text} (in the analysis image)")
    return _refuse(problems) if problems else 0


def _requirements(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the requirements of an ``install`` command line, those in ``-r`` files included."""
    words = iter(arguments)
    for word in words:
        if word in ("-r", "--requirement"):
            yield from _file_requirements(next(words, ""))
        elif word.startswith("--requirement="):
            yield from _file_requirements(word.partition("=")[2])
        elif word in ("-e", "--editable"):
            yield f"-e {next(words, '')}"
        elif word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            yield word


def _file_requirements(name: str) -> Iterator[str]:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield f"-r {name} ({type(error).__name__})"
        return
    for raw in text.splitlines():
        line = raw.split(" #", 1)[0].split(" --hash", 1)[0].rstrip("\\ \t").strip()
        if line and not line.startswith(("#", "-")):
            yield line


def _problem(text: str) -> str:
    """Return why the image does not meet the requirement ``text``, or nothing if it does."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return f"{text}: only packages that are in the image can be asked for, by name."
    if requirement.url:
        return f"{text}: cannot be fetched."
    if requirement.marker and not requirement.marker.evaluate():
        return ""
    return _unmet(requirement)


def _unmet(requirement: Requirement) -> str:
    name = requirement.name
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        instead = INSTEAD.get(canonicalize_name(name))
        return f"{name}: not in the image." + (f" Use {instead}." if instead else "")
    if not requirement.specifier.contains(found.version, prereleases=True):
        return f"{name}: the image has {found.version}, asked for was {requirement.specifier}."
    for extra in sorted(requirement.extras):
        for line in found.requires or ():
            needed = Requirement(line)
            if needed.marker and not needed.marker.evaluate({"extra": ""}):
                if not needed.marker.evaluate({"extra": extra}):
                    continue
                problem = _unmet(needed)
                if problem:
                    return f"{name}[{extra}] needs {problem}"
    return ""


def _installed() -> list[tuple[str, str]]:
    found = {dist.name: dist.version for dist in metadata.distributions() if dist.name}
    return sorted(found.items(), key=lambda item: canonicalize_name(item[0]))


def _list(_: Sequence[str]) -> int:
    rows = [("Package", "Version"), *_installed()]
    width = max(len(name) for name, _ in rows)
    rows.insert(1, ("-" * width, "-" * max(len(version) for _, version in rows)))
    for name, version in rows:
        print(f"{name:<{width}} {version}")
    return 0


def _freeze(_: Sequence[str]) -> int:
    for name, version in _installed():
        print(f"{name}=={version}")
    return 0


def _show(arguments: Sequence[str]) -> int:
    missing = []
    for name in (word for word in arguments if not word.startswith("-")):
        try:
            found = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            missing.append(f"{name}: not in the image.")
            continue
        for key in ("Name", "Version", "Summary", "License", "License-Expression"):
            if key in found:
                print(f"{key}: {found[key].splitlines()[0]}")
        print("---")
    return _refuse(missing) if missing else 0
