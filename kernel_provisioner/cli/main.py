"""The parser of ``backintel`` and the mapping of errors to exit statuses (spec N)."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from kernel_provisioner import __version__
from kernel_provisioner.cli.output import deliver, emit, mend_streams, say
from kernel_provisioner.errors import (
    EXIT_DONE,
    EXIT_INFRASTRUCTURE,
    EXIT_INTERRUPTED,
    BackIntelError,
    UsageError,
)

_EXIT_STATUSES = """\
exit status: 0 done, 1 the notebook's code failed, 2 usage or configuration, 3 infrastructure,
4 deadline, 5 another limit, 6 completed but export refused,
129/130/143 hung up/interrupted/terminated"""
_TRACEBACK_CHARS = 8000
_OPTION = re.compile(r"--[A-Za-z][A-Za-z0-9-]*(?==|\Z)")
# Where argparse repeats what was given, which may hold a password: plain words alone are kept.
_REPEATED = (
    (re.compile(r"(ambiguous option: [^=]*)=.*(?= could match )", re.DOTALL), r"\1"),
    (re.compile(r"ignored explicit argument .*", re.DOTALL), "it takes no value"),
    (
        re.compile(r"(invalid choice): (?!'[A-Za-z0-9._-]+' ).*(?= \(choose from )", re.DOTALL),
        r"\1",
    ),
    (re.compile(r"(invalid \w+ value): (?!'[A-Za-z0-9._-]+'\Z).*", re.DOTALL), r"\1"),
)


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that ``--json`` holds for wrong usage, too."""

    def error(self, message: str) -> NoReturn:
        for repeated, instead in _REPEATED:
            message = repeated.sub(instead, message)
        raise UsageError(f"{message}.", remedy=f"see `{self.prog} --help`.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is unknown here: left to the caller it would be told as of ``backintel``."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            found = [_OPTION.match(word) for word in unknown]
            named = [option[0] if option else "an argument that is not known" for option in found]
            self.error(f"unrecognized arguments: {', '.join(dict.fromkeys(named))}")
        return known, unknown


def build_parser() -> _Parser:
    """Return the parser; each leaf sets ``handler``: ``module.word`` of that module's COMMANDS."""
    parser = _Parser(
        prog="backintel",
        description="Run notebooks in a bounded, offline sandbox.",
        epilog=_EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"backintel {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_sandbox(commands)
    _add_kernel(commands)
    sessions = _leaf(commands, "sessions", "sessions.sessions", "list running sandboxes")
    _add_json(sessions)
    _add_export(commands)
    return parser


def _text(word: str) -> str:
    """Refuse an empty word, which is rather a variable that was not set than what is meant."""
    if not word:
        raise argparse.ArgumentTypeError("it is empty")
    return word


def _path(word: str) -> Path:
    # Path("") would be the current directory.
    return Path(_text(word))


Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def _leaf(commands: Commands, name: str, handler: str, text: str) -> _Parser:
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    return parser


def _group(commands: Commands, name: str, text: str) -> Commands:
    parser = commands.add_parser(name, help=text, description=text)
    return parser.add_subparsers(metavar="COMMAND", required=True)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _add_run(commands: Commands) -> None:
    run = _leaf(commands, "run", "run.run", "run a notebook in a sandbox and publish its artifacts")
    run.add_argument("notebook", type=_path, metavar="NOTEBOOK")
    run.add_argument("--engine", metavar="ENGINE", help="smolvm (unless stated), bwrap, or auto")
    run.add_argument("--profile", metavar="P", help="limits: analysis (default), large, ...")
    _add_sources(run)
    _add_endpoints(run)
    run.add_argument(
        "--out",
        type=_path,
        metavar="DIR",
        help="a new or empty directory (default: out-<notebook>-<time> here)",
    )
    run.add_argument("--cell-deadline", type=float, metavar="S", help="seconds a cell may run")
    run.add_argument("--run-deadline", type=float, metavar="S", help="seconds all of it may take")
    run.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="K=V",
        help="set a variable after the cell tagged 'parameters'; V is JSON, else text; repeatable",
    )
    _add_json(run)


def _add_export(commands: Commands) -> None:
    export = _leaf(
        commands, "export", "export.export", "publish the artifacts of a sandbox that is running"
    )
    export.add_argument("session", metavar="SESSION", help="as `backintel sessions` shows it")
    export.add_argument(
        "--out", type=_path, metavar="DIR", required=True, help="a new or empty directory"
    )
    _add_json(export)


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="show PATH read-only as /sources/NAME; repeatable",
    )


def _add_endpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="NAME=HOST:PORT",
        help="let the notebook reach this TCP service, and no other; repeatable",
    )


def _add_sandbox(commands: Commands) -> None:
    group = _group(commands, "sandbox", "prepare and check what sandboxes are made of")
    prepare = _leaf(group, "prepare", "sandbox.prepare", "make the image and prove that it boots")
    prepare.add_argument("--image-archive", type=_path, metavar="F", help="docker save or OCI file")
    prepare.add_argument("--image-sha256", metavar="H", help="refuse an image of another digest")
    _add_json(prepare)
    check = _leaf(group, "check", "sandbox.check", "check this host, engine and image")
    check.add_argument("--boot", action="store_true", help="boot a sandbox and remember the proof")
    check.add_argument("--deep", action="store_true", help="digest every file of image and engine")
    _add_json(check)
    collect = _leaf(group, "gc", "sandbox.gc", "remove what killed sessions left")
    _add_json(collect)


def _add_kernel(commands: Commands) -> None:
    group = _group(commands, "kernel", "the kernel in JupyterLab")
    install = _leaf(group, "install", "kernel.install", "install the kernel for Jupyter")
    _add_location(install)
    install.add_argument("--engine", metavar="E", help="smolvm (unless stated) or bwrap")
    install.add_argument("--profile", metavar="P", help="limits: interactive (default), ...")
    _add_sources(install)
    _add_endpoints(install)
    _add_json(install)
    uninstall = _leaf(group, "uninstall", "kernel.uninstall", "remove the kernel")
    _add_location(uninstall)
    _add_json(uninstall)
    _add_json(_leaf(group, "list", "kernel.list", "list the kernels that are installed"))


def _add_location(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for this user")
    place.add_argument("--sys-prefix", action="store_true", help="in this Python environment")
    place.add_argument("--prefix", type=_path, metavar="P", help="below this prefix")
    parser.add_argument(
        "--name", type=_text, metavar="N", help="kernel name, by default backintel-sandbox"
    )


def _handler(dotted: str) -> Callable[[argparse.Namespace], int]:
    from importlib import import_module

    module, word = dotted.split(".")
    commands: Mapping[str, Callable[[argparse.Namespace], int]]
    commands = import_module(f"kernel_provisioner.cli.{module}").COMMANDS
    return commands[word]


def _terminate(signum: int, frame: object) -> None:
    # Unwinds, so that locks and half-made files are cleaned up.
    raise SystemExit(128 + signum)


def _failed(error: Mapping[str, object], status: int, words: Sequence[str]) -> int:
    if "--json" in words:
        emit({"schema": "backintel.error/1", "exit_status": status, "error": error})
    return status


def _execute(words: Sequence[str]) -> int:
    try:
        options = build_parser().parse_args(words)
        return _handler(options.handler)(options)
    except BackIntelError as error:
        say(f"backintel: {error}")
        return _failed(error.as_dict(), error.exit_status, words)
    except KeyboardInterrupt:
        say("backintel: interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        say(traceback.format_exc()[-_TRACEBACK_CHARS:], _TRACEBACK_CHARS)
        say("backintel: internal error; please report it with the lines above")
        internal = {
            "code": "internal",
            "message": f"this program failed ({type(error).__name__}).",
            "remedy": "please report it with what is on stderr.",
        }
        # Status 1 would blame the notebook.
        return _failed(internal, EXIT_INFRASTRUCTURE, words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    mend_streams()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        # nohup's word that the command outlives its terminal is heard.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _terminate)
    # Printed at the end, at once: what the command does never depends on who reads.
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            status = _execute(words)
    except SystemExit:
        # Of --help, --version, and a signal.
        deliver(printed.getvalue())
        raise
    lost = deliver(printed.getvalue())
    # Whoever closed a pipe has seen enough.
    if lost is not None and not isinstance(lost, BrokenPipeError):
        reason = getattr(lost, "strerror", None) or "it is closed"
        say(f"backintel: the result could not be written to standard output ({reason}).")
        # A run's result is its files; of other commands nothing is left then.
        if status == EXIT_DONE and words[0] != "run":
            return EXIT_INFRASTRUCTURE
    return status


if __name__ == "__main__":
    sys.exit(main())
