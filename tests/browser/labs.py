"""A real Jupyter server with the installed wheel, and what a person does in its pages.

The wheel lies in a virtual environment of its own (`make lab-wheel`), with JupyterLab and Notebook
beside it and no Node. Nothing here is a mock: kernels are real sandboxes.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from playwright.sync_api import APIResponse, Browser, Locator, Page, expect

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".data" / "lab"
START_S = 120.0
"""How long a Jupyter server may take to come up."""
STOP_S = 60.0
SLOW_MS = 60_000
"""How long a page may take over anything, also the start of a sandbox."""

# The smallest that an ordinary kernel starts in.
PROFILES = """
[profiles.small]
ram_mib = 512
cpus = 1
workspace_mib = 32
artifacts_mib = 16
temp_mib = 32
cell_deadline = 60
run_deadline = 600
"""

CHROMIUM = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)


def kernel(name: str, **config: Any) -> dict[str, Any]:
    """Return a kernelspec of ours under another display name."""
    shipped = VENV / "share/jupyter/kernels/backintel-sandbox/kernel.json"
    spec: dict[str, Any] = json.loads(shipped.read_text())
    spec["display_name"] = name
    spec["metadata"]["kernel_provisioner"]["config"].update(config)
    return spec


class Lab:
    """A Jupyter server below ``home``; usable as a context manager."""

    def __init__(self, home: Path, kernels: Mapping[str, Mapping[str, Any]]) -> None:
        self.root = home / "files"
        self.root.mkdir(parents=True)
        self.token = secrets.token_hex(16)
        # Held for as long as this object lives, also while no server listens: a socket that is
        # bound and does not listen keeps everybody away who does not ask for this very port.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._home = home
        self._log: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._write(".config/backintel/backintel.toml", PROFILES)
        self._write(
            "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings",
            '{"fetchNews": "false"}',
        )
        for name, spec in kernels.items():
            folder = home / "data" / "kernels" / name
            folder.mkdir(parents=True)
            (folder / "kernel.json").write_text(json.dumps(spec))

    def _write(self, name: str, text: str) -> None:
        path = self._home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def theme(self, name: str) -> None:
        """Choose a theme for pages that are opened from now on."""
        path = "settings/@jupyterlab/apputils-extension/themes.jupyterlab-settings"
        self._write(path, json.dumps({"theme": name}))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._held.close()

    def start(self) -> None:
        """Start the server and return when it answers. Raises AssertionError with its log."""
        environment = {
            "HOME": str(self._home),
            "LANG": "C.UTF-8",
            # Only what the wheel brought: no Node, which a developer's machine may have elsewhere.
            "PATH": f"{VENV}/bin",
            "JUPYTER_PATH": str(self._home / "data"),
            "JUPYTER_CONFIG_DIR": str(self._home / "config"),
            "JUPYTER_RUNTIME_DIR": str(self._home / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(self._home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(self._home / "workspaces"),
            # Each host of the tests has this engine; the kernel that ships names another.
            "BACKINTEL_SANDBOX": "bwrap",
        }
        # The home of a private image, for a machine where another one is in use.
        if "BACKINTEL_HOME" in os.environ:
            environment["BACKINTEL_HOME"] = os.environ["BACKINTEL_HOME"]
        assert shutil.which("node", path=environment["PATH"]) is None
        self._process = subprocess.Popen(
            [
                str(VENV / "bin" / "jupyter-lab"),
                "--no-browser",
                *(["--allow-root"] if os.getuid() == 0 else []),
                f"--port={self.port}",
                "--ServerApp.port_retries=0",
                f"--IdentityProvider.token={self.token}",
                f"--ServerApp.root_dir={self.root}",
                "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        up = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self._process, up), daemon=True)
        self._reader.start()
        assert up.wait(START_S), self.log
        assert self._process.poll() is None, self.log

    def _read(self, process: subprocess.Popen[str], up: threading.Event) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self._log.append(line)
                if "is running at" in line:
                    up.set()
        up.set()

    def stop(self) -> None:
        """Stop the server as a person does with Ctrl-C, twice."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(STOP_S)
            self._reader.join(STOP_S)

    def kill(self) -> None:
        """Kill the server, as a crash does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_S)
        self._reader.join(STOP_S)

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """What the server wrote, without the token."""
        return "".join(self._log).replace(self.token, "TOKEN")

    def notebook(self, name: str, kernel_name: str, *cells: str) -> str:
        """Write a notebook with these code cells and return its name."""
        content = {
            "cells": [
                {
                    "cell_type": "code",
                    "execution_count": None,
                    "id": f"cell-{index}",
                    "metadata": {},
                    "outputs": [],
                    "source": source,
                }
                for index, source in enumerate(cells)
            ],
            "metadata": {
                "kernelspec": {
                    "display_name": kernel_name,
                    "language": "python",
                    "name": kernel_name,
                }
            },
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (self.root / name).write_text(json.dumps(content))
        return name


class Person:
    """Somebody in front of a page of Lab or Notebook 7."""

    def __init__(self, page: Page, lab: Lab) -> None:
        self.page = page
        self.lab = lab
        self.status = page.locator(".jp-SandboxStatus button")
        self.panel = page.locator("#backintel-sandbox-panel")
        # Lab's own words on a lost kernel or server lie over everything until they are closed.
        for title in ("Kernel Restarting", "Server Connection Error"):
            self._close(page.locator(".jp-Dialog", has_text=title))

    def _close(self, dialog: Locator) -> None:
        self.page.add_locator_handler(dialog, lambda: dialog.locator("button").last.click())

    def visit(self, path: str = "lab?reset") -> None:
        """Open a page of the server."""
        mark = "&" if "?" in path else "?"
        self.page.goto(f"{self.lab.url}/{path}{mark}token={self.lab.token}")

    def open(self, notebook: str) -> None:
        """Open a notebook alone in Lab."""
        self.visit(f"lab/tree/{notebook}?reset")

    def cell(self, number: int) -> Locator:
        """Return the numbered cell of the notebook in front."""
        notebook = self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        return notebook.locator(".jp-CodeCell").nth(number)

    def run(self, number: int) -> None:
        """Run one cell, from its editor."""
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def sees_output(self, number: int, text: str) -> None:
        """Wait until the cell's output holds the text."""
        output = self.cell(number).locator(".jp-OutputArea")
        expect(output).to_contain_text(text, timeout=SLOW_MS)

    def ready(self) -> None:
        """Wait until the status item shows a running sandbox."""
        expect(self.status.locator("[data-part=memory]")).to_be_visible(timeout=SLOW_MS)

    def part(self, name: str) -> Locator:
        """Return a part of the status item: badge, memory, cell, left, network or stage."""
        return self.status.locator(f"[data-part={name}]")

    def notice(self, text: str) -> Locator:
        """Return the notification with this text."""
        return self.page.locator(".Toastify__toast", has_text=text)

    def ask(self, path: str, method: str = "GET") -> APIResponse:
        """Ask the server beside the page."""
        headers = {"Authorization": f"token {self.lab.token}"}
        request = self.page.context.request
        return request.fetch(
            f"{self.lab.url}/{path}", method=method, headers=headers, timeout=SLOW_MS
        )

    def leave(self) -> None:
        """Close the browser profile and end all kernels of the server."""
        if self.page.is_closed():
            return
        self.page.close()
        for running in self.ask("api/kernels").json():
            self._end(running["id"])
        self.page.context.close()

    def _end(self, kernel_id: str) -> None:
        """End a kernel; one that died may be forgotten meanwhile.

        jupyter_client (8.10) cannot while it restarts a kernel by itself: status 500.
        """
        deadline = time.monotonic() + STOP_S
        gone = self.ask(f"api/kernels/{kernel_id}", "DELETE")
        while gone.status == 500 and time.monotonic() < deadline:
            time.sleep(0.1)  # the restart needs the processor too
            gone = self.ask(f"api/kernels/{kernel_id}", "DELETE")
        assert gone.ok or gone.status == 404, gone.text()

    def show_panel(self) -> None:
        """Open the sandbox panel from the sidebar."""
        self.page.locator(".lm-TabBar-tab[data-id=backintel-sandbox-panel]").click()
        expect(self.panel).to_be_visible()

    def section(self, title: str) -> Locator:
        """Return the body of a section of the panel."""
        return self.panel.get_by_role("region", name=f"{title} Section", exact=True)


def person(browser: Browser, lab: Lab, **options: Any) -> Person:
    """Return somebody with a fresh browser profile."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
    context.set_default_timeout(SLOW_MS)
    return Person(context.new_page(), lab)
