"""Which process is killed when: barriers, victims, and a reproducible order of both.

A barrier is an event that can be seen from outside the product: a message of the provisioner, an
entry that appears or vanishes on the host, a process that comes to be. Pure: the same seed gives
the same schedule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Victim(StrEnum):
    """Whom a kill can hit, from the Jupyter server's side to the guest's."""

    CLIENT = "client"
    SUPERVISOR = "supervisor"
    MONITOR = "monitor"
    """The launcher, which becomes bubblewrap's process outside the sandbox."""
    INIT = "init"
    """bubblewrap's process 1 inside the sandbox."""
    KERNEL = "kernel"
    KEEPER = "keeper"
    """The supervisor's fork that ends the guest when nobody else does."""


C, S, M, I, K, P = Victim  # noqa: E741 - as in the table below

OURS = ((C,), (S,), (C, S))
LAUNCHING = (*OURS, (M,), (S, M), (C, M))
BOOTING = (*LAUNCHING, (I,), (S, I))
ALIVE = (*BOOTING, (K,), (C, K), (S, K), (P,), (S, P), (C, S, M, I, K, P))


@dataclass(frozen=True, slots=True)
class Barrier:
    """An event, what the client has to do for it to come, and who can be killed at it."""

    phase: str
    event: str
    does: str
    victims: tuple[tuple[Victim, ...], ...]


BARRIERS = (
    Barrier("start", "spawned", "plain", OURS),
    Barrier("start", "phase supervisor", "plain", OURS),
    Barrier("start", "recorded", "plain", OURS),
    Barrier("start", "socket directory", "plain", OURS),
    Barrier("start", "staging directory", "staged", OURS),
    Barrier("start", "staged copy", "staged", OURS),
    Barrier("start", "phase verified", "plain", OURS),
    Barrier("start", "guest sockets", "plain", OURS),
    Barrier("start", "launcher", "plain", LAUNCHING),
    Barrier("start", "cgroup", "plain", LAUNCHING),
    Barrier("start", "cgroup entered", "plain", LAUNCHING),
    Barrier("start", "bubblewrap", "plain", LAUNCHING),
    Barrier("start", "process 1", "plain", BOOTING),
    Barrier("start", "client sockets", "plain", BOOTING),
    Barrier("start", "phase attested", "plain", ALIVE),
    Barrier("start", "phase kernel", "plain", ALIVE),
    Barrier("start", "phase image", "plain", ALIVE),
    Barrier("start", "phase ready", "plain", ALIVE),
    Barrier("run", "busy", "sleep", ALIVE),
    Barrier("run", "printing", "print", ALIVE),
    Barrier("run", "asking", "ask", ALIVE),
    Barrier("run", "interrupted", "interrupt", ALIVE),
    Barrier("run", "restarting", "restart", OURS),
    Barrier("run", "again attested", "restart", ALIVE),
    Barrier("end", "closing", "plain", OURS),
    Barrier("end", "ended", "crash", OURS),
    Barrier("end", "exporting", "export", OURS),
    Barrier("end", "export staging", "export", OURS),
    Barrier("end", "exported", "export", OURS),
    Barrier("end", "cgroup gone", "plain", OURS),
    Barrier("end", "receipt", "plain", OURS),
)
PROFILES = ("analysis", "interactive", "tiny")


@dataclass(frozen=True, slots=True)
class Kill:
    """One entry of a schedule."""

    number: int
    barrier: Barrier
    victims: tuple[Victim, ...]
    profile: str

    def __str__(self) -> str:
        event = self.barrier.event.replace(" ", "-")
        return f"{self.number:04}-{event}-{'+'.join(self.victims)}-{self.profile}"


def schedule(seed: int, kills: int) -> list[Kill]:
    """Return ``kills`` entries: all pairs of barrier and victims in random order, again and again.

    So a short schedule is a sample without repetition and a long one covers every pair alike.
    """
    # A reproducible choice is wanted, not an unpredictable one.
    chance = random.Random(seed)  # noqa: S311
    pairs = [(barrier, victims) for barrier in BARRIERS for victims in barrier.victims]
    chosen: list[Kill] = []
    while len(chosen) < kills:
        chance.shuffle(pairs)
        for barrier, victims in pairs[: kills - len(chosen)]:
            chosen.append(Kill(len(chosen), barrier, victims, chance.choice(PROFILES)))
    return chosen
