"""Several workers do one schedule of kills side by side, each in a home of its own.

A kill costs about a second of processor time on one core, most of it the start of its session, so
two cores do twice as many. The schedule is dealt out by turns: the same seed and number of workers
give each worker the same kills. Nothing is shared that is judged: home, mounts and clients are each
worker's own, and control groups and socket directories carry the names of its sessions.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import home
from schedule import Kill
from trial import Figures, Lab

_START_EVERY = 10
"""After so many kills of a worker, and after its last one, the next start is tried."""
_STOP_S = 30.0


class Crew:
    """The workers, seen from the tests."""

    def __init__(self, kills: list[Kill], workers: int, directory: Path) -> None:
        self._problems: dict[int, str] = {}
        self._figures: list[Figures] = []
        self._workers: list[tuple[Connection, SpawnProcess]] = []
        context = multiprocessing.get_context("spawn")
        for index in range(workers):
            reports, theirs = context.Pipe(duplex=False)
            place = directory / str(index)
            place.mkdir()
            share = kills[index::workers]
            process = context.Process(target=_work, args=(theirs, share, place))
            process.start()
            theirs.close()
            self._workers.append((reports, process))
            self._figures.append(Figures())

    def problem(self, kill: Kill) -> str:
        """Wait for this kill; return all that is wrong, an empty text if nothing is.

        Raises EOFError if its worker is gone.
        """
        index = kill.number % len(self._workers)
        reports, _ = self._workers[index]
        while kill.number not in self._problems:
            number, problem, self._figures[index] = reports.recv()
            self._problems[number] = problem
        return self._problems[kill.number]

    @property
    def figures(self) -> Figures:
        """The sum of what the workers have reported."""
        return sum(self._figures, Figures())

    def dismiss(self) -> None:
        """Let each worker finish the kill that it is at, which matters if tests were stopped."""
        for reports, _ in self._workers:
            reports.close()
        for _, process in self._workers:
            process.join(_STOP_S)
            if process.is_alive():
                process.kill()
                process.join()


def _work(reports: Connection, share: list[Kill], place: Path) -> None:
    """Entry point of a worker."""
    # Ctrl-C is for the tests: they dismiss us.
    os.setpgid(0, 0)
    home.enter_own_mounts()
    directory = place / "home"
    directory.mkdir()
    environment = home.make(directory)
    lab = Lab.open(home.dirs_of(environment), environment, place)
    try:
        for done, kill in enumerate(share, 1):
            problem = ""
            try:
                lab.perform(kill)
                if done % _START_EVERY == 0 or done == len(share):
                    lab.prove_next_start()
            except Exception:
                problem = traceback.format_exc()
            reports.send((kill.number, problem, lab.figures))
    except BrokenPipeError:
        return
    finally:
        with suppress(OSError):
            reports.close()
        home.unmake(directory)
