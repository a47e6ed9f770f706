"""``backintel run``: words of the command line into a run request, and its result into words."""

from __future__ import annotations

import argparse
import os
import sys

from kernel_provisioner import proofs
from kernel_provisioner.cli.output import RunReporter, emit, say
from kernel_provisioner.endpoints import parse_endpoints
from kernel_provisioner.errors import EXIT_DONE
from kernel_provisioner.notebook import parse_parameters
from kernel_provisioner.paths import state_dirs
from kernel_provisioner.runmodel import RunRequest, RunResult
from kernel_provisioner.sources import parse_sources


def run(options: argparse.Namespace) -> int:
    """Run a notebook; return the exit status of spec N."""
    parameters = parse_parameters(options.param)
    reporter = RunReporter(sys.stderr)
    settings = settings_of(options)
    if options.engine == "auto":
        choice = proofs.resolve_auto(state_dirs())
        settings |= {"engine": choice.engine, "engine_requested": "auto"}
        reporter.note(f"engine auto: {choice.engine}, {choice.why}")
    from kernel_provisioner.runner import run as run_notebook

    request = RunRequest(options.notebook, options.out, settings, parameters)
    result = run_notebook(request, reporter)
    if options.json:
        emit(result.as_dict())
    for line in summary(result):
        if options.json:
            say(line)
        else:
            print(line)
    return result.exit_status


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    """Return the settings that were typed, and only those (spec D5)."""
    typed = {
        "engine": options.engine,
        "profile": options.profile,
        "cell_deadline": options.cell_deadline,
        "run_deadline": options.run_deadline,
        # Paths are the owner's words in this directory.
        "sources": {
            name: os.path.abspath(path) for name, path in parse_sources(options.source).items()
        },
        "endpoints": parse_endpoints(options.endpoint),
    }
    return {key: value for key, value in typed.items() if value not in (None, {})}


def summary(result: RunResult) -> list[str]:
    """Return how a run went, for people."""
    done = result.exit_status == EXIT_DONE
    ran = f"{result.cells_run} of {result.cells_total} cells"
    lines = [f"{'done' if done else 'not completed'}: {ran} in {result.seconds:.1f} s"]
    if result.error is not None:
        where = f"cell {result.failed_cell}: " if result.failed_cell else ""
        lines.append(f"reason     {where}{result.error['code']}: {result.error['message']}")
        if result.error["remedy"]:
            lines.append(f"remedy     {result.error['remedy']}")
    lines.append(f"notebook   {result.notebook or 'not saved'}")
    if result.published:
        files = "1 file" if len(result.artifacts) == 1 else f"{len(result.artifacts)} files"
        lines.append(f"artifacts  {result.out / 'artifacts'} ({files})")
    else:
        lines.append("artifacts  none published")
    lines.append(f"receipt    {result.receipt or 'not saved'}")
    # Indented, so that a cell's error of several lines cannot look like lines of this summary.
    return [line.replace("\n", "\n           ") for line in lines]


COMMANDS = {"run": run}
