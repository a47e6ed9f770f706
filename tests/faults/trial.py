"""One kill: wait for its barrier, kill its victims, judge what is left and what was told."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import actor
import observe
from schedule import Kill, Victim

from kernel_provisioner.engines.base import ProcessIdentity
from kernel_provisioner.errors import ENDS, Reason
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.processes import identify, is_running, kill_and_wait
from kernel_provisioner.records import Swept, read_record, sweep

NO_PROCESS_AFTER_S = 2.0
CLIENT_BOUND_S = 10.0
BARRIER_BOUND_S = 40.0
ATTEMPTS = 20
_LOOK_S = 0.0003
_HEAR_S = 0.02
# Barriers that no message tells of: they are looked for, as often as a processor allows.
_SEEN = frozenset(
    {
        *("spawned", "recorded", "socket directory", "staging directory", "staged copy"),
        *("guest sockets", "client sockets", "launcher", "bubblewrap", "process 1", "cgroup"),
        *("cgroup entered", "export staging", "exported", "cgroup gone", "receipt"),
    }
)


class Missed(Exception):
    """The event passed, or the victim was gone, before the kill: the session proves nothing."""


@dataclass
class Figures:
    """What is counted and measured of all trials."""

    kills: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    late: int = 0
    left: int = 0
    slowest_client_s: float = 0.0
    slowest_end_s: float = 0.0

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.kills + other.kills,
            self.missed + other.missed,
            self.late + other.late,
            self.left + other.left,
            max(self.slowest_client_s, other.slowest_client_s),
            max(self.slowest_end_s, other.slowest_end_s),
        )


@dataclass
class Lab:
    """What all trials share: a home, a fork server of clients, and the figures."""

    dirs: StateDirs
    environment: dict[str, str]
    directory: Path
    context: ForkServerContext
    figures: Figures = field(default_factory=Figures)

    @classmethod
    def open(cls, dirs: StateDirs, environment: dict[str, str], directory: Path) -> Lab:
        """Start the fork server: it imports the product once, so that a client costs a fork."""
        context = multiprocessing.get_context("forkserver")
        # By a name that is found without our own search path, which the fork server has not.
        context.set_forkserver_preload(["kernel_provisioner.provisioner"])
        # Now, so that it does not inherit what a test puts into the environment.
        forkserver.ensure_running()
        database = directory / "source.sqlite"
        with closing(sqlite3.connect(database)) as made, made:
            # Large enough that the copy can be met half-way.
            made.execute("CREATE TABLE t AS SELECT zeroblob(1 << 20) AS b")
            for _ in range(5):
                made.execute("INSERT INTO t SELECT b FROM t")
        return cls(dirs, environment, directory, context)

    def part(self, does: str, profile: str) -> actor.Part:
        """Return what a client has to do."""
        settings: dict[str, object] = {"profile": profile}
        if does == "staged":
            settings["sources"] = {"data": str(self.directory / "source.sqlite")}
        exports = self.directory / "exports"
        shutil.rmtree(exports, ignore_errors=True)
        exports.mkdir()
        return actor.Part(does, settings, self.environment, str(exports / "artifacts"))

    def perform(self, kill: Kill) -> None:
        """Do one entry of the schedule; raises AssertionError with all that is wrong."""
        seen: object = None
        for _ in range(ATTEMPTS):
            trial = Trial(self, self.part(kill.barrier.does, kill.profile))
            try:
                trial.meet(kill)
            except Missed as missed:
                seen = missed
                self.figures.missed += 1
                trial.let_go()
                continue
            self.figures.kills["+".join(kill.victims)] += 1
            trial.judge(kill)
            return
        raise AssertionError(f"{kill} was not met in {ATTEMPTS} sessions; the last one: {seen}")

    def prove_next_start(self) -> None:
        """A session that nobody disturbs comes up, ends in order, and leaves nothing."""
        trial = Trial(self, self.part("plain", "tiny"))
        trial.let_go()
        assert trial.told.get("reason") == Reason.SHUTDOWN, trial.told


class Trial:
    """One client process and all that is seen of its session (after a restart: sessions)."""

    def __init__(self, lab: Lab, part: actor.Part) -> None:
        self._lab = lab
        self._mounts = observe.mounts()
        self._events: set[str] = set()
        self.told: dict[str, object] = {}
        self.sessions: set[str] = set()
        self._recorded: set[str] = set()
        self._seen: set[ProcessIdentity] = set()
        self.socket_dirs: set[Path] = set()
        self._exports = Path(part.destination).parent
        self._finished = False
        self._disturbed = False
        self._reports, theirs = lab.context.Pipe(duplex=False)
        self._process: ForkServerProcess = lab.context.Process(
            target=actor.perform, args=(theirs, part), name="backintel-test-client"
        )
        self._process.start()
        theirs.close()
        found = identify(self._pid)
        assert found is not None
        self._client = found

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    # -- watching ------------------------------------------------------------------------------

    def _listen(self, seconds: float) -> None:
        """Take the client's reports, waiting at most this long for one."""
        if self._finished:
            return
        reports: Connection = self._reports
        while reports.poll(seconds):
            seconds = 0.0
            try:
                event, facts = reports.recv()
            except EOFError:
                self._finished = True
                return
            self._events.add(event)
            if event.startswith(("phase", "again")):
                self.sessions.add(facts["session"])
                self.socket_dirs.add(Path(facts["socket_dir"]))
            elif event in ("failed", "refused", "done"):
                # A restart that was refused said why; the end that follows knows nothing more.
                known = {name: fact for name, fact in facts.items() if fact is not None}
                self.told = {**self.told, **known}

    def _look(self) -> None:
        """Remember the session of each record that is there."""
        for path in observe.entries(self._lab.dirs.sessions):
            if path.suffix == ".json" and (record := read_record(path)) is not None:
                self.sessions.add(record.session)
                self._recorded.add(record.session)
                self._seen.add(record.supervisor)
                self.socket_dirs.add(record.socket_dir)

    def _supervisor(self) -> int | None:
        for pid in observe.children(self._pid):
            if b"kernel_provisioner.session\0" in observe.command(pid):
                return pid
        return None

    def _find(self, victim: Victim) -> ProcessIdentity | None:
        pid: int | None = self._pid
        if victim is not Victim.CLIENT:
            pid = self._supervisor()
            if victim is Victim.KEEPER:
                # bubblewrap's monitor is forked first.
                pid = (observe.children(pid)[1:] or [None])[0] if pid is not None else None
                return identify(pid) if pid is not None else None
            for step in (Victim.MONITOR, Victim.INIT, Victim.KERNEL):
                if victim is Victim.SUPERVISOR:
                    break
                pid = observe.first_child(pid)
                if victim is step:
                    break
        return identify(pid) if pid is not None else None

    def _met(self, event: str) -> bool:
        """Whether the barrier's event has come."""
        lab = self._lab
        match event:
            case "spawned":
                return self._supervisor() is not None
            case "recorded":
                return bool(self._recorded)
            case "socket directory":
                return any(path.is_dir() for path in self.socket_dirs)
            case "staging directory":
                return bool(observe.entries(lab.dirs.state / "staging"))
            case "staged copy":
                return any(map(observe.entries, observe.entries(lab.dirs.state / "staging")))
            case "guest sockets":
                return any((path / "g-5").exists() for path in self.socket_dirs)
            case "client sockets":
                return any((path / "h-5").exists() for path in self.socket_dirs)
            case "launcher":
                return self._find(Victim.MONITOR) is not None
            case "bubblewrap":
                found = self._find(Victim.MONITOR)
                return found is not None and observe.command(found.pid).startswith(b"bwrap")
            case "process 1":
                return self._find(Victim.INIT) is not None
            case "cgroup":
                return any(observe.control_groups(session) for session in self.sessions)
            case "cgroup entered":
                return any(observe.members(session) for session in self.sessions)
            case "export staging":
                return any(self._exports.glob(".backintel-export-*"))
            case "exported":
                return (self._exports / "artifacts").is_dir()
            case "cgroup gone":
                return "closing" in self._events and not any(
                    observe.control_groups(session) for session in self.sessions
                )
            case "receipt":
                return any(
                    (lab.dirs.receipts / f"{session}.json").exists() for session in self.sessions
                )
        assert event not in _SEEN
        return event in self._events

    def meet(self, kill: Kill) -> None:
        """Wait for the barrier and kill the victims at once. Raises Missed."""
        self.strike(kill.barrier.event, *kill.victims)

    def strike(self, event: str, *victims: Victim) -> None:
        """Kill the victims as soon as the event has come. Raises Missed."""
        self.wait_for(event)
        found = [self._find(victim) for victim in victims]
        if None in found:
            raise Missed(f"{sorted(self._events)} {self.told}")
        # The first one by our hand; the others may meanwhile have followed it.
        hit = [_kill(victim) for victim in found if victim is not None]
        self._disturbed = any(hit)
        if not hit[0]:
            raise Missed(f"{sorted(self._events)} {self.told}")
        self._killed_at = time.monotonic()

    def wait_for(self, event: str) -> None:
        """Wait until the event has come. Raises Missed if the session ends without it."""
        deadline = time.monotonic() + BARRIER_BOUND_S
        patience = _LOOK_S if event in _SEEN else _HEAR_S
        while True:
            self._listen(patience)
            self._look()
            if self._met(event):
                break
            if self._finished:
                raise Missed(f"{sorted(self._events)} {self.told}")
            assert time.monotonic() < deadline, f"{event} never came: {self._events}"

    def wait_for_end(self) -> None:
        """Wait until the client has ended by itself."""
        deadline = time.monotonic() + BARRIER_BOUND_S
        while not self._finished and time.monotonic() < deadline:
            self._listen(0.05)
            self._look()
        assert self._finished, f"the client does not end; it reported {self._events}"

    def wait_for_processes(self) -> None:
        """Wait until no process of the session is left, as after each kill."""
        deadline = self._killed_at + NO_PROCESS_AFTER_S
        assert not observe.gone_by(deadline, self._guest)
        self._look()

    # -- judging -------------------------------------------------------------------------------

    def judge(self, kill: Kill) -> None:
        """Compare what is left and told with the promise; the whole of it goes into the error."""
        lab, figures = self._lab, self._lab.figures
        wrong: list[str] = []
        owner_hit = Victim.CLIENT in kill.victims or Victim.SUPERVISOR in kill.victims
        by = self._killed_at + NO_PROCESS_AFTER_S
        late = observe.gone_by(by, self._all if owner_hit else self._guest)
        figures.slowest_end_s = max(figures.slowest_end_s, time.monotonic() - self._killed_at)
        if Victim.CLIENT not in kill.victims:
            wrong += self._judge_client()
        late += observe.gone_by(max(by, time.monotonic() + NO_PROCESS_AFTER_S), self._all)
        if late:
            figures.late += 1
        for process in dict.fromkeys(late):
            wrong.append(f"still runs: {process.pid} {observe.command(process.pid)[:80]!r}")
            # The next trial is not to suffer from this one.
            kill_and_wait(process, NO_PROCESS_AFTER_S)
        self._look()
        recorded = set(self._recorded)
        wrong += sweep(lab.dirs).left
        left = observe.residue(lab.dirs, self.sessions, self.socket_dirs, self._exports)
        left += [f"mount {point}" for point in observe.mounts() - self._mounts]
        if left:
            figures.left += 1
            wrong += [f"left after a sweep: {path}" for path in left]
        for session in recorded:
            wrong += self._judge_receipt(session)
        self.close()
        assert not wrong, f"{kill}\n" + "\n".join(wrong)

    def _all(self) -> list[ProcessIdentity]:
        self._look()
        self._seen |= {*observe.marked(self._lab.environment["HOME"]), *self._guest()}
        # One that is about to be gone has no environment any more, and is still there for a sweep.
        return [found for found in self._seen if is_running(found)]

    def _guest(self) -> list[ProcessIdentity]:
        return [found for session in self.sessions for found in observe.members(session)]

    def _judge_client(self) -> list[str]:
        """The client, which was not killed, must notice, say why, and end."""
        deadline = self._killed_at + CLIENT_BOUND_S
        while not self._finished:
            begun = time.monotonic()
            self._listen(0.05)
            if begun >= deadline:
                break
        took = time.monotonic() - self._killed_at
        figures = self._lab.figures
        figures.slowest_client_s = max(figures.slowest_client_s, took)
        if not self._finished:
            return [f"the client hangs after {CLIENT_BOUND_S:g} s; it reported {self._events}"]
        self._process.join(CLIENT_BOUND_S)
        if self._process.exitcode != 0:
            return [f"the client failed: exit {self._process.exitcode}, reported {self._events}"]
        if not self.told.get("message"):
            return [f"the client was not told why: {self.told}"]
        return []

    def _judge_receipt(self, session: str) -> list[str]:
        path = self._lab.dirs.receipts / f"{session}.json"
        try:
            ended = json.loads(path.read_text())["ended"]
            if ENDS[Reason(ended["reason"])].kind == ended["class"] and ended["message"]:
                return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [f"no receipt of {session}: {error!r}"]
        return [f"the receipt of {session} gives no reason: {ended}"]

    def let_go(self) -> None:
        """Let the session end by itself: an undisturbed one leaves nothing at all."""
        self.wait_for_end()
        late = observe.gone_by(time.monotonic() + NO_PROCESS_AFTER_S, self._all)
        swept = sweep(self._lab.dirs)
        self.close()
        assert not late
        if not self._disturbed:
            # A start that is refused again and again must not pass as a barrier that was missed.
            assert "code" not in self.told, self.told
            assert swept == Swept()
        assert not observe.residue(self._lab.dirs, self.sessions, self.socket_dirs, self._exports)

    def close(self) -> None:
        self._reports.close()
        # A client that hangs is a failure that was noted; it must not disturb the next trial.
        kill_and_wait(self._client, CLIENT_BOUND_S)
        self._process.join(CLIENT_BOUND_S)
        self._process.close()


def _kill(victim: ProcessIdentity) -> bool:
    """SIGKILL this very process; False if it was gone."""
    try:
        fd = os.pidfd_open(victim.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_running(victim):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True
