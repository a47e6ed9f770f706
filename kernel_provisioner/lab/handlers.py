"""The REST routes of ``openapi.yaml``. Every verb is authenticated and authorized as Jupyter does.

Questions go to the session's supervisor; what comes from a guest (names and bytes of artifacts) was
validated there and is still served so that no browser runs it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.services.contents.filemanager import FileContentsManager
from tornado import web
from tornado.iostream import StreamClosedError

from kernel_provisioner.errors import (
    BackIntelError,
    ExportRefused,
    NoAnswer,
    NotFound,
    NotRunning,
    UsageError,
)
from kernel_provisioner.kernelspec import KERNEL_NAME
from kernel_provisioner.lab import metrics, plans
from kernel_provisioner.lab.directory import destination
from kernel_provisioner.lab.inert import PREVIEW_BYTES, Inert, inert
from kernel_provisioner.lab.ledger import Entry, Ledger
from kernel_provisioner.session.ask import EXPORT_TIMEOUT_S, QUESTION_TIMEOUT_S, ask, ask_json

_CHUNK = 256 * 1024
_SESSION = re.compile(r"[0-9a-f]{16}")
# The most special first: these are asked in order.
_STATUS: tuple[tuple[type[BackIntelError], int], ...] = (
    (NotFound, 404),
    (NoAnswer, 504),
    (ExportRefused, 422),
)


class Refused(web.HTTPError):
    """An answer that is no success, with the code and the remedy of our own error."""

    def __init__(self, status: int, error: BackIntelError) -> None:
        super().__init__(status, error.message)
        self.error = error


def refused(error: BackIntelError) -> Refused:
    """Return the answer to a request that failed so; most are a conflict with what there is."""
    return Refused(next((code for kind, code in _STATUS if isinstance(error, kind)), 409), error)


class SandboxHandler(APIHandler):
    """What all routes share."""

    auth_resource = "kernels"

    def initialize(self, ledger: Ledger) -> None:
        """Called by tornado with what the route was registered with."""
        self.ledger = ledger

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with the one form of errors."""
        error = kwargs.get("exc_info", (None, None))[1]
        if not isinstance(error, Refused):
            super().write_error(status_code, **kwargs)
            return
        body = {"message": error.error.message, "reason": error.error.code}
        self.finish(json.dumps({**body, "remedy": error.error.remedy}))

    def _no_kernel(self, kernel_id: str) -> web.HTTPError:
        # The words of Jupyter's own API for an id that it does not know.
        return web.HTTPError(404, f"Kernel does not exist: {kernel_id}")

    def _entry(self, kernel_id: str) -> Entry:
        entry = self.ledger.get(kernel_id)
        if entry is None:
            raise self._no_kernel(kernel_id)
        return entry

    def _desk(self, kernel_id: str) -> Path | None:
        """Return where to ask a running session. Raises HTTPError if there is no such kernel."""
        self._entry(kernel_id)
        provisioner = self.ledger.provisioner(kernel_id)
        return provisioner.desk if provisioner else None

    def _running(self, kernel_id: str) -> Path:
        desk = self._desk(kernel_id)
        if desk is None:
            raise refused(NotRunning("the sandbox is not running.", remedy="start the kernel."))
        return desk


class StatusHandler(SandboxHandler):
    """``/kernels/{kernel_id}``."""

    @web.authenticated
    @authorized
    async def get(self, kernel_id: str) -> None:
        """Say what the sandbox does, or why it ended."""
        desk = self._desk(kernel_id)
        entry = self._entry(kernel_id)
        if desk is not None and entry.ended is None:
            try:
                found = await ask_json(desk, "status", timeout=QUESTION_TIMEOUT_S)
            except NotRunning:
                pass  # it ended just now
            except BackIntelError as error:
                raise refused(error) from None
            else:
                self.finish(json.dumps({"kernel_id": kernel_id, **found}))
                return
        self.finish(json.dumps(self.ledger.status(entry)))


class ArtifactsHandler(SandboxHandler):
    """``/kernels/{kernel_id}/artifacts``."""

    @web.authenticated
    @authorized
    async def get(self, kernel_id: str) -> None:
        """List what lies in /artifacts."""
        desk = self._running(kernel_id)
        try:
            found = await ask_json(desk, "listing", timeout=QUESTION_TIMEOUT_S)
        except BackIntelError as error:
            raise refused(error) from None
        self.finish(json.dumps(found))


class ArtifactHandler(SandboxHandler):
    """``/kernels/{kernel_id}/artifacts/{path}``."""

    @web.authenticated
    @authorized
    async def get(self, kernel_id: str, path: str) -> None:
        """Send one artifact's bytes."""
        desk = self._running(kernel_id)
        preview = self.get_query_argument("preview", None) == "1"
        form = inert(path, preview=preview)
        if form is None:
            raise web.HTTPError(415, "Files of this kind have no preview; download it.")
        try:
            reply = await ask(desk, "artifact", timeout=EXPORT_TIMEOUT_S, name=path)
        except BackIntelError as error:
            raise refused(error) from None
        if reply.file is None:
            raise refused(NoAnswer("the sandbox's supervisor sent an empty answer."))
        with reply.file as file:
            if preview and reply.message["size"] > PREVIEW_BYTES:
                raise web.HTTPError(413, "This file is too large for a preview; download it.")
            self._head(form, reply.message)
            await self._send(file, form)

    def _head(self, form: Inert, facts: dict[str, Any]) -> None:
        digest = base64.b64encode(bytes.fromhex(facts["sha256"])).decode()
        for name, value in {
            "Content-Type": form.content_type,
            "Content-Disposition": form.disposition,
            "Content-Security-Policy": form.policy,
            "Content-Length": str(facts["size"]),
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Digest": f"sha-256={digest}",
        }.items():
            self.set_header(name, value)

    async def _send(self, file: BinaryIO, form: Inert) -> None:
        try:
            while chunk := file.read(_CHUNK):
                self.write(chunk)
                await self.flush()
            await self.finish(set_content_type=form.content_type)
        except StreamClosedError:
            pass  # the reader went away


class ExportHandler(SandboxHandler):
    """``/kernels/{kernel_id}/export``."""

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str) -> None:
        """Publish all artifacts below the server's root."""
        desk = self._running(kernel_id)
        # It writes where the contents API does, so who may not write there may not here.
        allowed = self.authorizer.is_authorized(self, self.current_user, "write", "contents")
        if not await ensure_async(allowed):
            raise web.HTTPError(403, "User is not authorized to write on resource: contents.")
        manager = self.contents_manager
        if not isinstance(manager, FileContentsManager):
            raise Refused(400, UsageError("this server's contents are not files of a directory."))
        try:
            directory, target = destination(
                Path(manager.root_dir), self.get_json_body(), hidden=manager.allow_hidden
            )
        except UsageError as error:
            raise Refused(400, error) from None
        try:
            made = await ask_json(desk, "export", timeout=EXPORT_TIMEOUT_S, destination=str(target))
        except BackIntelError as error:
            metrics.exported("refused" if isinstance(error, ExportRefused) else "failed")
            raise refused(error) from None
        metrics.exported("published")
        self.finish(json.dumps({**made, "directory": directory}))


class ReceiptHandler(SandboxHandler):
    """``/kernels/{kernel_id}/receipt``."""

    @web.authenticated
    @authorized
    async def get(self, kernel_id: str) -> None:
        """Return a session's receipt."""
        entry = self._entry(kernel_id)
        session = self.get_query_argument("session", entry.session)
        if not _SESSION.fullmatch(session):
            raise Refused(400, UsageError("a session is named by 16 hexadecimal digits."))
        try:
            found = await self._found(entry, session)
        except BackIntelError as error:
            raise refused(error) from None
        self.finish(json.dumps(found))

    async def _found(self, entry: Entry, session: str) -> dict[str, Any]:
        desk = self._desk(entry.kernel_id)
        if session == entry.session and desk is not None:
            try:
                found: dict[str, Any] = await ask_json(desk, "receipt", timeout=QUESTION_TIMEOUT_S)
            except NotRunning:
                pass  # it ended just now
            else:
                return found
        return await self.ledger.receipt(entry, session)


class ProfilesHandler(SandboxHandler):
    """``/profiles``."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List the profiles."""
        try:
            found = plans.profiles()
        except BackIntelError as error:
            raise refused(error) from None
        self.finish(json.dumps({"profiles": found}))


class SourcesHandler(SandboxHandler):
    """``/sources``."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Say what a kernel would be given."""
        name = self.get_query_argument("kernel", KERNEL_NAME)[:256]
        try:
            # In a thread: it looks at the sources, whose file system may be slow.
            found = await asyncio.to_thread(
                plans.plan, name, self.kernel_spec_manager, self.serverapp
            )
        except BackIntelError as error:
            raise refused(error) from None
        self.finish(json.dumps(found))


def handlers(
    base_url: str, ledger: Ledger
) -> list[tuple[str, type[SandboxHandler], dict[str, Any]]]:
    """Return the routes below the server's base URL."""
    kernel = r"/kernels/(?P<kernel_id>\w+-\w+-\w+-\w+-\w+)"
    rule = partial(_rule, re.escape(base_url.rstrip("/") + "/backintel/api"), ledger)
    return [
        rule(kernel, StatusHandler),
        rule(kernel + "/artifacts", ArtifactsHandler),
        rule(kernel + "/artifacts/(?P<path>.+)", ArtifactHandler),
        rule(kernel + "/export", ExportHandler),
        rule(kernel + "/receipt", ReceiptHandler),
        rule("/profiles", ProfilesHandler),
        rule("/sources", SourcesHandler),
    ]


def _rule(
    base: str, ledger: Ledger, path: str, handler: type[SandboxHandler]
) -> tuple[str, type[SandboxHandler], dict[str, Any]]:
    return base + path, handler, {"ledger": ledger}
