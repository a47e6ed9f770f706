"""What a session does before anything in it can wait: record, verify, launch.

It runs on the supervisor's main thread before there is an event loop, so everything here returns at
once; what needs time (databases to copy) is left to the supervisor. It trusts the owner's request.
"""

from __future__ import annotations

import time

from kernel_provisioner.engines.base import EngineFacts, Guest, GuestSpec, Launched, SourceMount
from kernel_provisioner.engines.registry import get_engine
from kernel_provisioner.errors import BackIntelError
from kernel_provisioner.images.receipt import Image, load_image
from kernel_provisioner.paths import guest_code_dir, private_dir
from kernel_provisioner.session.journal import Journal
from kernel_provisioner.session.request import Start

BACKSTOP_SLACK_S = 10.0
"""Beyond the run deadline: when the guest ends although its supervisor is stopped."""


class Opening:
    """The first steps of one session. ``begin`` never raises: ``check`` tells what it met."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.journal = Journal(start)
        self.engine = get_engine(start.engine, start.dirs)
        self.phases: dict[str, float] = {}
        """Seconds by phase, until the supervisor has told them."""
        self.facts: EngineFacts | None = None
        self.image: Image | None = None
        self.launched: Launched | None = None
        self._error: BackIntelError | OSError | None = None

    @property
    def remaining(self) -> float:
        """Seconds that the run deadline leaves; negative when it passed."""
        return self.start.started_at + self.start.profile.run_deadline_s - time.monotonic()

    def begin(self) -> None:
        """Record and verify; launch too, unless a source has to be copied before."""
        try:
            self._phase("supervisor")
            self.journal.open()
            self.facts = self.engine.verify()
            self.image = load_image(self.start.dirs)
            private_dir(self.start.dirs.runtime)
            private_dir(self.start.socket_dir)
            mounts = self.journal.mounts
            if mounts is not None and self.remaining > 0:
                self._launch(mounts)
        except (BackIntelError, OSError) as error:
            self._error = error

    def check(self) -> None:
        """Raises what stopped ``begin``: a BackIntelError or OSError."""
        if self._error is not None:
            raise self._error

    def launch(self, sources: tuple[SourceMount, ...]) -> None:
        """Launch unless ``begin`` did. Raises BackIntelError, OSError."""
        if self.launched is None:
            self._launch(sources)

    async def claim(self) -> Guest:
        """Return the launched guest; nobody else has it then. Raises BackIntelError."""
        launched, self.launched = self.launched, None
        assert launched is not None
        return await launched.claim()

    def _launch(self, sources: tuple[SourceMount, ...]) -> None:
        start = self.start
        assert self.image is not None  # begin() came so far
        spec = GuestSpec(
            session=start.session,
            profile=start.profile,
            image_root=self.image.root,
            guest_code=guest_code_dir(),
            socket_dir=start.socket_dir,
            sources=sources,
            endpoints=start.endpoints,
            environment=start.environment,
            backstop_s=max(self.remaining, 0.0) + BACKSTOP_SLACK_S,
        )
        self.journal.note(self.engine.plan(spec))
        self._phase("verified")
        self.launched = self.engine.launch(spec)
        self.journal.note(self.launched.leftovers)

    def _phase(self, name: str) -> None:
        self.phases[name] = time.monotonic() - self.start.started_at
