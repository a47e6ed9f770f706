"""The store of analysis images: one is current; a preparation replaces it whole or not at all.

Layout of ``dirs.image``: ``NAME/{root,receipt.json,entries.bin}``, the link ``current`` to one of
them, and ``.staging-*`` while a preparation runs. Trusts this user's files; an image is believed
only by its receipt or its digest.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from kernel_provisioner import paths
from kernel_provisioner.errors import (
    ImageInvalid,
    ImageMissing,
    LockTimeout,
    PrepareFailed,
    UsageError,
)
from kernel_provisioner.images import archive, build, receipt, tree
from kernel_provisioner.images.digest import tree_digest
from kernel_provisioner.images.process import SPEAK_EVERY_S, Steps
from kernel_provisioner.images.receipt import Image, load_image
from kernel_provisioner.paths import StateDirs

BUILDER = "2"
"""Raise this when the builder's code changes what an image is; images of others are rebuilt."""

LOCK_WAIT_S = 120.0
_STAGING = ".staging-"
_NEW_CURRENT = ".current.new"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an image is made from: digests of everything but the guidance, and of the guidance."""

    base: str
    docs: str

    def __str__(self) -> str:
        return f"{self.base}+{self.docs}"


class ImageStore:
    """Prepares and finds analysis images below ``dirs.image``."""

    def __init__(self, dirs: StateDirs) -> None:
        self._dirs = dirs

    def prepare(
        self,
        progress: Callable[[str], None],
        *,
        image_archive: Path | None = None,
        image_sha256: str | None = None,
        deadline: float | None = None,
    ) -> Image:
        """Make sure that the current image is whole and of this version; build or import it if not.

        An image imported from an archive stays until another is imported. ``progress`` gets one
        line at a time, from several threads but never two at once, at least every 2 s.
        ``image_sha256`` demands a tree digest (``sha256:`` may be left out). ``deadline`` is a
        ``time.monotonic`` value. Interrupted anywhere, the old image stays current.

        Raises PrepareFailed, LockTimeout, ImageInvalid if the digest is not the demanded one, and
        UsageError as ``check_choice`` does.
        """
        steps = Steps(progress, deadline)
        demanded = _demanded(image_sha256)
        with self._locked(steps):
            self._sweep()
            existing = self._verified(steps)
            recipe = self.recipe(image_archive)
            if existing is not None and self._serves(existing, recipe, image_archive, demanded):
                _compare(existing.id, demanded)
                return existing
            return self._make(steps, existing, recipe, image_archive, demanded)

    @contextlib.contextmanager
    def _locked(self, steps: Steps) -> Iterator[None]:
        """Hold the preparation lock; wait at most min(120 s, what remains)."""
        try:
            self._dirs.image.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise PrepareFailed(
                f"the image store {self._dirs.image} cannot be made ({error.strerror}).",
                remedy="make it writable, or set BACKINTEL_HOME to another directory.",
            ) from None
        lock = filelock.FileLock(self._dirs.prepare_lock, mode=0o600)
        began = time.monotonic()
        until = began + LOCK_WAIT_S
        if steps.deadline is not None:
            until = min(until, steps.deadline)
        while True:
            left = until - time.monotonic()
            try:
                lock.acquire(timeout=max(0.0, min(left, SPEAK_EVERY_S)), poll_interval=0.05)
                break
            except filelock.Timeout:
                waited = time.monotonic() - began
                if left <= SPEAK_EVERY_S:
                    raise LockTimeout(
                        f"another preparation held {self._dirs.prepare_lock} for {waited:.0f} s.",
                        remedy="wait until it has ended, then try again.",
                    ) from None
                steps.say(f"waiting for another preparation ... {waited:.0f} s")
        try:
            yield
        finally:
            lock.release()

    def _sweep(self) -> None:
        """Remove what interrupted preparations left, and superseded images that nobody uses.

        A session that may still run from an older image has its record in ``dirs.sessions``.
        """
        try:
            current = os.readlink(self._dirs.image / receipt.CURRENT)
        except OSError:
            current = ""
        in_use = any(self._dirs.sessions.glob("*.json"))
        for path in self._dirs.image.iterdir():
            stale = path.name.startswith(_STAGING) or path.name == _NEW_CURRENT
            superseded = path.name not in (current, receipt.CURRENT) and not in_use
            if stale or superseded:
                tree.remove(path)

    def _verified(self, steps: Steps) -> Image | None:
        """Return the current image if it is whole; a stale receipt of a whole tree is renewed."""
        try:
            image = load_image(self._dirs)
        except ImageMissing:
            return None
        except ImageInvalid as error:
            steps.say(error.message)
            return None
        try:
            receipt.check_receipt(image)
            return image
        except ImageInvalid as error:
            steps.say(error.message)
        try:
            with steps.step("digesting the whole image"):
                whole = tree_digest(image.root) == image.id
        except (ImageInvalid, OSError) as error:
            steps.say(f"the image cannot be used: {error}")
            return None
        if not whole:
            steps.say("its contents changed; it is made anew")
            return None
        facts = receipt.read_facts(image.receipt_path)
        tree.finish(image.root, os.geteuid(), os.getegid())
        receipt.write_receipt(
            image.receipt_path.parent,
            image_id=image.id,
            python=image.python,
            arch=image.arch,
            created=image.created,
            source=image.source,
            recipe=str(facts.get("recipe")),
        )
        return image

    def recipe(self, image_archive: Path | None) -> Recipe:
        """Return what an image made now would be made from. Raises UsageError (no archive)."""
        if image_archive is not None:
            with archive.open_archive(image_archive) as file:
                return Recipe(hashlib.file_digest(file, "sha256").hexdigest(), "archive")
        guest = paths.guest_code_dir()
        try:
            host = Path("/etc/os-release").read_text()
        except OSError:
            host = ""
        base = hashlib.sha256(f"{BUILDER}\n{os.uname().machine}\n".encode())
        for key in ("ID", "VERSION_ID"):
            base.update("".join(x for x in host.splitlines() if x.startswith(f"{key}=")).encode())
        base.update(_tree_facts(guest / "image"))
        docs = hashlib.sha256(_tree_facts(guest / "docs"))
        return Recipe(base.hexdigest(), docs.hexdigest())

    def _serves(
        self, image: Image, recipe: Recipe, image_archive: Path | None, demanded: str | None
    ) -> bool:
        """Tell whether the whole, current image is what is asked for."""
        if demanded is not None and image_archive is None and image.id == demanded:
            return True
        if image.source == "archive" and image_archive is None:
            return True
        return receipt.read_facts(image.receipt_path).get("recipe") == str(recipe)

    def _make(
        self,
        steps: Steps,
        existing: Image | None,
        recipe: Recipe,
        image_archive: Path | None,
        demanded: str | None,
    ) -> Image:
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self._dirs.image))
        try:
            staging.chmod(0o755)
            home = staging / "home"
            home.mkdir(mode=0o755)
            root = home / receipt.ROOT
            if image_archive is not None:
                imported = archive.import_archive(
                    steps, image_archive, staging=staging, root=root, arch=build.host_arch()
                )
                python, arch, source = imported.python, imported.arch, "archive"
            else:
                guest = paths.guest_code_dir()
                python, arch = self._build(steps, existing, recipe, staging, root, guest)
                source = "built"
            with steps.step("digesting the image"):
                image_id = tree_digest(root)
            _compare(image_id, demanded)
            with steps.step("writing its receipt"):
                os.sync()
                receipt.write_receipt(
                    home,
                    image_id=image_id,
                    python=python,
                    arch=arch,
                    created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    source=source,
                    recipe=str(recipe),
                )
            self._activate(home, image_id)
        except OSError as error:
            raise PrepareFailed(
                f"the image could not be written: {error.strerror} ({error.filename}).",
                remedy=f"see that {self._dirs.image} is writable and has 3 GiB free.",
            ) from error
        finally:
            with contextlib.suppress(OSError):
                tree.remove(staging)
        return load_image(self._dirs)

    def _build(
        self,
        steps: Steps,
        existing: Image | None,
        recipe: Recipe,
        staging: Path,
        root: Path,
        guest: Path,
    ) -> tuple[str, str]:
        """Build anew, or copy the whole current image if only the guidance in /docs changed."""
        if existing is not None and existing.source == "built":
            old = str(receipt.read_facts(existing.receipt_path).get("recipe"))
            if old.partition("+")[0] == recipe.base:
                with steps.step("renewing /docs"):
                    command = ["cp", "--archive", "--reflink=auto", str(existing.root), str(root)]
                    steps.run(command, what="copying the image", env={"PATH": os.defpath})
                    build.add_docs(root, guest)
                    tree.finish(root, os.geteuid(), os.getegid())
                return existing.python, existing.arch
        made = build.build(steps, staging=staging, root=root, guest=guest)
        return made.python, made.arch

    def _activate(self, home: Path, image_id: str) -> None:
        """Move a finished image into the store and make it current, each by one rename."""
        name = image_id.removeprefix("sha256:")[:16]
        number = 0
        target = self._dirs.image / name
        while os.path.lexists(target):
            number += 1
            target = self._dirs.image / f"{name}-{number}"
        home.rename(target)
        link = self._dirs.image / _NEW_CURRENT
        tree.remove(link)
        link.symlink_to(target.name)
        link.rename(self._dirs.image / receipt.CURRENT)
        fd = os.open(self._dirs.image, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def check_choice(image_archive: Path | None, image_sha256: str | None) -> None:
    """Refuse an archive that is no readable file and a digest that is none.

    Raises UsageError.
    """
    _demanded(image_sha256)
    if image_archive is not None:
        archive.open_archive(image_archive).close()


def _demanded(digest: str | None) -> str | None:
    if digest is None:
        return None
    value = digest.removeprefix("sha256:").lower()
    if len(value) != 64 or any(c not in "0123456789abcdef" for c in value):
        raise UsageError(
            f"{digest[:80]!r} is not a sha256 digest.",
            remedy="give the id that `backintel sandbox check` shows for the wanted image.",
        )
    return f"sha256:{value}"


def _compare(image_id: str, demanded: str | None) -> None:
    if demanded is not None and image_id != demanded:
        raise ImageInvalid(
            f"the image is {image_id}, not the demanded {demanded}; nothing was changed.",
            remedy="import the archive of the demanded image, or demand this digest.",
        )


def _tree_facts(directory: Path) -> bytes:
    """Return names and digests of a directory of ours, sorted; caches are left out."""
    lines = []
    for path in sorted(directory.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            lines.append(f"{path.relative_to(directory)}\0{digest}\n")
    return "".join(lines).encode()
