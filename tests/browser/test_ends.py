"""Every end of a sandbox says why: in the cell, in a notification, in the status item."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from labs import SLOW_MS, Lab, Person
from playwright.sync_api import expect

# Several starts of sandboxes and pages, also on a loaded machine.
pytestmark = pytest.mark.timeout(400)

FOREVER = "while True: pass"
HUNGRY = "more = []\nwhile True: more.append(bytearray(16 << 20))"


def test_a_late_cell_is_interrupted_and_says_so(someone: Person, lab: Lab) -> None:
    someone.open(lab.notebook("late.ipynb", "late", "x = 7", FOREVER, "print('still', x)"))
    someone.ready()
    someone.run(0)
    someone.run(1)
    # It goes by itself, after 20 s.
    expect(someone.notice("A cell ran longer than 3 s and was interrupted.")).to_be_visible()
    someone.sees_output(1, "KeyboardInterrupt")
    someone.run(2)
    someone.sees_output(2, "still 7")


def test_a_deadline_that_ends_the_sandbox_says_so_and_offers_a_restart(
    someone: Person, lab: Lab
) -> None:
    someone.open(lab.notebook("strict.ipynb", "strict", FOREVER, "print('new')"))
    someone.ready()
    someone.run(0)
    someone.sees_output(0, "CellDeadlineExceeded")
    notice = someone.notice("A cell ran longer than 3 s and the sandbox was ended.")
    expect(notice).to_be_visible()
    notice.get_by_role("button", name="Show receipt").click()
    receipt = someone.page.locator(".jp-SandboxReceipt")
    expect(receipt).to_contain_text('"reason": "CellDeadlineExceeded"', timeout=SLOW_MS)
    someone.page.locator(".jp-Dialog").get_by_role("button", name="Close").click()
    notice.get_by_role("button", name="Restart").click()
    someone.ready()
    someone.run(1)
    someone.sees_output(1, "new")


def test_a_sandbox_that_runs_out_of_memory_says_so(someone: Person, lab: Lab) -> None:
    """2i2c infrastructure#3427: a kernel dies of memory without a reason."""
    someone.open(lab.notebook("hungry.ipynb", "small", HUNGRY, "print('new')"))
    someone.ready()
    someone.run(0)
    someone.sees_output(0, "OutOfMemory")
    notice = someone.notice("The sandbox ran out of memory (512 MiB). Its variables are gone.")
    expect(notice).to_be_visible()
    notice.get_by_role("button", name="Restart").click()
    someone.ready()
    someone.run(1)
    someone.sees_output(1, "new")


def test_an_old_notice_cannot_end_the_fresh_sandbox_that_followed(
    someone: Person, lab: Lab
) -> None:
    someone.open(lab.notebook("followed.ipynb", "again", HUNGRY, "print('new')"))
    someone.ready()
    someone.run(0)
    notice = someone.notice("The sandbox ran out of memory (512 MiB). Its variables are gone.")
    expect(notice).to_be_visible()
    someone.ready()
    expect(notice.get_by_role("button", name="Restart")).to_have_count(0)
    # Why the other one ended can still be read.
    expect(notice.get_by_role("button", name="Show receipt")).to_be_visible()
    someone.run(1)
    someone.sees_output(1, "new")


def test_nearly_full_memory_is_warned_of_until_the_end(someone: Person, lab: Lab) -> None:
    hold = "held = b'x' * (455 << 20)"
    someone.open(lab.notebook("nearly.ipynb", "small", hold, HUNGRY))
    someone.ready()
    someone.run(0)
    notice = someone.notice("Memory is almost used up:")
    expect(notice).to_contain_text("At the limit the kernel ends.")
    expect(someone.part("memory")).to_have_class(re.compile("jp-mod-warn"))
    someone.run(1)
    expect(someone.notice("The sandbox ran out of memory")).to_be_visible()
    expect(notice).to_be_hidden()
    # The list behind Lab's bell keeps what went by itself after 20 s, but not what is over.
    someone.page.locator(".jp-Notification-Status").click()
    told = someone.page.locator(".jp-Notification-List-Item")
    expect(told.filter(has_text="ran out of memory")).to_be_visible()
    expect(told.filter(has_text="Memory is almost used up")).to_have_count(0)


def test_a_restarted_server_has_no_sandbox_to_go_on_with(
    join: Callable[[Lab], Person], tmp_path: Path
) -> None:
    with Lab(tmp_path / "own", {}) as server:
        someone = join(server)
        someone.open(server.notebook("gone.ipynb", "backintel-sandbox", "x = 1", "print(x)"))
        someone.ready()
        someone.run(0)
        someone.show_panel()
        server.kill()
        server.start()
        text = "The Jupyter server was restarted and the sandbox ended."
        notice = someone.notice(text)
        expect(notice).to_be_visible(timeout=SLOW_MS)
        expect(someone.part("stage")).to_have_text("Sandbox ended")
        expect(someone.panel.get_by_role("status")).to_contain_text(text)
        notice.get_by_role("button", name="Restart").click()
        someone.ready()
        someone.run(1)
        someone.sees_output(1, "NameError")
        server.stop()
        expect(someone.part("stage")).to_have_text("Sandbox ended", timeout=SLOW_MS)
        expect(someone.panel.get_by_role("status")).to_have_text("The sandbox was shut down.")
        someone.page.context.close()
