"""Notebook 7, dark theme, keyboard, screen reader; and what a page asks of the server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from labs import ROOT, SLOW_MS, Lab, Person
from playwright.sync_api import Locator, expect

# Several starts of sandboxes and pages, also on a loaded machine.
pytestmark = pytest.mark.timeout(400)

AXE = ROOT / "labextension/node_modules/axe-core/axe.min.js"
HIDE = """hidden => {
    Object.defineProperty(document, 'hidden', {get: () => hidden, configurable: true});
    Object.defineProperty(document, 'visibilityState',
        {get: () => hidden ? 'hidden' : 'visible', configurable: true});
    document.dispatchEvent(new Event('visibilitychange'));
}"""


def findings(part: Locator) -> list[str]:
    """Return what axe-core finds serious or critical in a part of the page."""
    part.page.add_script_tag(path=AXE)
    result = part.evaluate("part => axe.run(part, {resultTypes: ['violations']})")
    assert result["passes"]
    return [
        f"{found['id']}: {node['html']} {node['failureSummary']}"
        for found in result["violations"]
        if found["impact"] in ("serious", "critical")
        for node in found["nodes"]
    ]


MAKE = "open('/artifacts/a.csv', 'w').write('x,y\\n1,2\\n')"


@pytest.fixture(params=["JupyterLab Light", "JupyterLab Dark"])
def theme(request: pytest.FixtureRequest, lab: Lab) -> Iterator[str]:
    lab.theme(request.param)
    yield request.param
    lab.theme("JupyterLab Light")


def test_axe_finds_nothing_serious(someone: Person, lab: Lab, theme: str) -> None:
    someone.open(lab.notebook("axe.ipynb", "backintel-sandbox", MAKE))
    expect(someone.page.locator("body")).to_have_attribute("data-jp-theme-name", theme)
    someone.ready()
    someone.show_panel()
    someone.run(0)
    artifacts = someone.section("Artifacts")
    expect(artifacts.get_by_role("listitem")).to_have_count(1)
    expect(someone.section("Receipt")).to_contain_text("not yet")
    assert findings(someone.panel) == []
    assert findings(someone.page.locator(".jp-SandboxStatus")) == []
    someone.status.click()
    assert findings(someone.page.get_by_role("dialog", name="Sandbox")) == []
    assert findings(someone.page.locator(".jp-SandboxStatus")) == []
    someone.page.keyboard.press("Escape")
    artifacts.get_by_role("button", name="a.csv", exact=True).click()
    preview = someone.page.locator(".jp-SandboxPreview")
    expect(preview).to_be_visible()
    assert findings(preview) == []


def test_everything_can_be_done_with_the_keyboard(someone: Person, lab: Lab) -> None:
    someone.open(lab.notebook("keys.ipynb", "backintel-sandbox", MAKE))
    someone.ready()
    keyboard = someone.page.keyboard
    someone.run(0)
    command(someone, "Show Sandbox Panel")
    expect(someone.panel).to_be_visible()
    name = someone.section("Artifacts").get_by_role("button", name="a.csv", exact=True)
    expect(name).to_be_visible()
    tab_to(someone, name)
    keyboard.press("Enter")
    dialog = someone.page.locator(".jp-Dialog")
    expect(dialog.get_by_role("cell", name="2")).to_be_visible()
    expect(dialog.get_by_role("button", name="Download")).to_be_focused()
    keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    command(someone, "Export All Artifacts")
    expect(dialog.get_by_role("textbox")).to_be_focused()
    keyboard.press("Enter")
    expect(someone.notice("1 file was exported to keys-artifacts.")).to_be_visible()
    tab_to(someone, someone.status)
    keyboard.press("Enter")
    details = someone.page.get_by_role("dialog", name="Sandbox")
    expect(details).to_be_focused()
    keyboard.press("Escape")
    expect(someone.status).to_be_focused()


def command(someone: Person, label: str) -> None:
    """Run a command from the palette."""
    someone.page.keyboard.press("Escape")
    someone.page.keyboard.press("Control+Shift+C")
    field = someone.page.locator("#modal-command-palette input")
    expect(field).to_be_focused()
    someone.page.keyboard.insert_text(label)
    item = someone.page.locator("#modal-command-palette .lm-CommandPalette-item")
    expect(item.first).to_contain_text(label)
    someone.page.keyboard.press("Enter")


def tab_to(someone: Person, target: Locator) -> None:
    """Press the tabulator until the target has the focus."""
    for _ in range(120):
        if target.evaluate("target => target === document.activeElement"):
            return
        someone.page.keyboard.press("Tab")
    raise AssertionError(f"the tabulator does not reach {target}")


def test_the_status_is_said_to_a_screen_reader(someone: Person, lab: Lab) -> None:
    someone.open(lab.notebook("said.ipynb", "backintel-sandbox", "1"))
    someone.ready()
    said = re.compile(r"Sandbox: Weaker isolation, \d+ MiB / 2 GiB, 7 h 5\d min left, Offline")
    expect(someone.status).to_have_accessible_name(said)
    someone.show_panel()
    expect(someone.panel.get_by_role("status")).to_have_text("Idle")


def test_notebook_7_shows_status_and_panel(someone: Person, lab: Lab) -> None:
    someone.visit("notebooks/" + lab.notebook("seven.ipynb", "backintel-sandbox", MAKE))
    someone.ready()
    someone.run(0)
    someone.sees_output(0, "8")
    someone.status.click()
    details = someone.page.get_by_role("dialog", name="Sandbox")
    details.get_by_role("button", name="Open the sandbox panel").click()
    expect(someone.panel).to_be_visible()
    artifacts = someone.section("Artifacts")
    expect(artifacts.get_by_role("listitem").filter(has_text="a.csv")).to_be_visible()
    assert findings(someone.panel) == []


def test_a_hidden_page_asks_nothing_and_an_idle_one_little(
    join: Callable[[Lab], Person], lab: Lab
) -> None:
    someone = join(lab)
    someone.page.clock.install()
    asked: list[str] = []
    someone.page.on("request", lambda r: asked.append(r.url) if "/backintel/" in r.url else None)

    def so_far() -> int:
        """Return how often the page asked until now: a request of the test's own ends the row."""
        mark = f"{lab.url}/api/status?mark={len(marks)}"
        marks.append(mark)
        with someone.page.expect_request(mark):
            someone.page.evaluate("mark => { void fetch(mark); }", mark)
        return len(asked)

    marks: list[str] = []
    look = re.compile(r"/backintel/api/kernels/[^/]+$")
    someone.open(lab.notebook("quiet.ipynb", "backintel-sandbox", "print('one')"))
    someone.ready()
    someone.show_panel()
    expect(someone.section("Limits")).to_contain_text("2 GiB")
    someone.page.wait_for_load_state("networkidle")

    # Idle: status, artifacts and receipt together at most every 5 s.
    before = so_far()
    with someone.page.expect_request(look):
        someone.page.clock.run_for(60_000)
    idle = asked[before : so_far()]
    looks = [url for url in idle if look.search(url)]
    assert 1 <= len(looks) <= 12
    # And what a look from before still asks for.
    assert len(idle) <= 3 * len(looks) + 2

    someone.page.evaluate(HIDE, True)
    hidden = so_far()
    someone.page.clock.run_for(60_000)
    assert asked[hidden : so_far()] == []
    # Also with a cell at work, and when it ends.
    someone.run(0)
    someone.sees_output(0, "one")
    someone.page.clock.run_for(60_000)
    assert asked[hidden : so_far()] == []
    with someone.page.expect_request(look):
        someone.page.evaluate(HIDE, False)


def test_a_shutdown_that_a_person_asked_for_is_no_alarm(someone: Person, lab: Lab) -> None:
    someone.open(lab.notebook("before.ipynb", "small", "1"))
    someone.ready()
    someone.page.locator(".jp-MenuBar-item, .lm-MenuBar-item", has_text="Kernel").first.click()
    someone.page.locator(".lm-Menu-item", has_text="Shut Down Kernel").first.click()
    someone.show_panel()
    expect(someone.panel.get_by_role("status")).to_have_text(
        "The sandbox was shut down.", timeout=SLOW_MS
    )
    expect(someone.page.locator(".Toastify__toast")).to_have_count(0)
