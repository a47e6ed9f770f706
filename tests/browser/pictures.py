"""Takes the pictures of the documentation: `make lab-images`. The main states, light and dark."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from labs import CHROMIUM, Lab, Person, kernel, person
from playwright.sync_api import Browser, expect, sync_playwright

SETUP = "import polars as pl\nimport matplotlib.pyplot as plt"
PLOT = r"""delays = pl.DataFrame({
    "month": ["Jan", "Feb", "Mar", "Apr", "May", "Jun"],
    "minutes": [10.0, 10.8, 13.2, 13.9, 12.9, 20.8],
})
plt.figure(figsize=(6, 3))
plt.bar(delays["month"], delays["minutes"], color="teal")
plt.ylabel("mean delay, min")
plt.savefig("/artifacts/delays.png")
delays.write_csv("/artifacts/delays.csv")"""
WAIT = "import time\ntime.sleep(300)"
KERNEL = "backintel-sandbox"


def take(someone: Person, folder: Path, name: str) -> None:
    """Save the page as it is now, pointer and caret out of the way."""
    someone.page.mouse.move(640, 5)
    someone.page.screenshot(path=folder / f"{name}.png", animations="disabled", caret="hide")


def work(browser: Browser, lab: Lab, folder: Path, *, dark: bool) -> None:
    """The panel, the popup beside a running cell, a preview; in the dark the popup is enough."""
    someone = person(browser, lab)
    someone.open(lab.notebook("flights.ipynb", KERNEL, SETUP, PLOT, WAIT))
    someone.ready()
    someone.show_panel()
    someone.run(0)
    someone.run(1)
    rows = someone.section("Artifacts").get_by_role("listitem")
    expect(rows).to_have_count(2)
    expect(someone.cell(1).locator(".jp-OutputArea img")).to_be_visible()
    someone.run(2)
    expect(someone.part("cell")).to_be_visible()
    if not dark:
        take(someone, folder, "lab-panel")
    someone.status.click()
    expect(someone.page.get_by_role("dialog", name="Sandbox")).to_be_visible()
    take(someone, folder, "lab-status-dark" if dark else "lab-status")
    someone.page.keyboard.press("Escape")
    if not dark:
        rows.get_by_role("button", name="delays.png", exact=True).click()
        picture = someone.page.get_by_role("dialog").get_by_role("img", name="delays.png")
        picture.evaluate("picture => picture.decode()")
        take(someone, folder, "lab-preview")
    someone.leave()


def end(browser: Browser, lab: Lab, folder: Path) -> None:
    """Why a sandbox ended."""
    someone = person(browser, lab)
    hungry = "held = []\nwhile True:\n    held.append(bytearray(16 << 20))"
    someone.open(lab.notebook("hungry.ipynb", "small", hungry))
    someone.ready()
    someone.show_panel()
    someone.run(0)
    someone.sees_output(0, "OutOfMemory")
    expect(someone.notice("The sandbox ran out of memory")).to_be_visible()
    expect(someone.panel.get_by_role("status")).to_contain_text("out of memory")
    # What passes by: the warning before the end, the receipt without it, the dying kernel.
    expect(someone.notice("Memory is almost used up")).to_have_count(0)
    expect(someone.section("Receipt")).to_contain_text("out of memory")
    expect(someone.page.get_by_text("BackIntel sandbox | Disconnected")).to_be_visible()
    take(someone, folder, "lab-ended")
    someone.leave()


def seven(browser: Browser, lab: Lab, folder: Path) -> None:
    """Notebook 7."""
    someone = person(browser, lab)
    someone.visit("notebooks/" + lab.notebook("delays.ipynb", KERNEL, SETUP, PLOT))
    someone.ready()
    someone.run(0)
    someone.run(1)
    expect(someone.cell(1).locator(".jp-OutputArea img")).to_be_visible()
    someone.status.click()
    details = someone.page.get_by_role("dialog", name="Sandbox")
    details.get_by_role("button", name="Open the sandbox panel").click()
    expect(someone.section("Artifacts").get_by_role("listitem")).to_have_count(2)
    take(someone, folder, "notebook")
    someone.leave()


def main(folder: Path) -> None:
    """Take all pictures into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=60_000)
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "Chromium is missing"
    flags = [*CHROMIUM, *(["--no-sandbox"] if os.getuid() == 0 else [])]
    kernels = {"small": kernel("BackIntel sandbox", profile="small")}
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        with Lab(Path(home) / "lab", kernels) as lab:
            work(browser, lab, folder, dark=False)
            end(browser, lab, folder)
            seven(browser, lab, folder)
            lab.theme("JupyterLab Dark")
            work(browser, lab, folder, dark=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
