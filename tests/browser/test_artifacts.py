"""What a notebook made, in the panel: list, preview, download, export; and hostile previews."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
from labs import Lab, Person
from playwright.sync_api import Route, expect

# Several starts of sandboxes and pages, also on a loaded machine.
pytestmark = pytest.mark.timeout(400)

MAKE = r"""
import matplotlib.pyplot as plt
plt.plot([1, 3, 2])
plt.savefig("/artifacts/plot.png"); plt.savefig("/artifacts/plot.svg"); plt.close()
open("/artifacts/table.csv", "w").write('name,note\nA,"one, two"\nB,three\n')
open("/artifacts/page.html", "w").write("<h1>Report</h1><p>of the flights")
open("/artifacts/raw.parquet", "wb").write(bytes(range(256)) * 1000)
"""


def test_artifacts_appear_and_can_be_seen_saved_and_exported(someone: Person, lab: Lab) -> None:
    someone.open(lab.notebook("made.ipynb", "backintel-sandbox", MAKE))
    someone.ready()
    someone.show_panel()
    artifacts = someone.section("Artifacts")
    expect(artifacts).to_contain_text("Files saved in /artifacts appear here.")
    someone.run(0)
    rows = artifacts.get_by_role("listitem")
    expect(rows).to_have_count(5)
    expect(rows.filter(has_text="raw.parquet")).to_contain_text("250 KiB")
    dialog = someone.page.locator(".jp-Dialog")

    for name in ("plot.png", "plot.svg"):
        artifacts.get_by_role("button", name=name, exact=True).click()
        picture = dialog.get_by_role("img", name=name)
        expect(picture).to_be_visible()
        width = picture.evaluate("async picture => (await picture.decode(), picture.naturalWidth)")
        assert width > 100
        dialog.get_by_role("button", name="Close").click()

    artifacts.get_by_role("button", name="table.csv", exact=True).click()
    expect(dialog.get_by_role("cell", name="one, two")).to_be_visible()
    dialog.get_by_role("button", name="Close").click()

    artifacts.get_by_role("button", name="page.html", exact=True).click()
    frame = dialog.frame_locator("iframe")
    expect(frame.get_by_role("heading", name="Report")).to_be_visible()
    dialog.get_by_role("button", name="Close").click()

    with someone.page.expect_download() as saved:
        artifacts.get_by_role("button", name="Download raw.parquet").click()
    raw = saved.value.path().read_bytes()
    assert raw == bytes(range(256)) * 1000
    digest = hashlib.sha256(raw).hexdigest()
    expect(rows.filter(has_text="raw.parquet")).to_contain_text(digest)

    artifacts_bar = someone.panel.get_by_role("toolbar")
    artifacts_bar.get_by_role("button", name="Save all artifacts").click()
    dialog.get_by_role("textbox").fill("kept")
    dialog.get_by_role("button", name="Export").click()
    # At once: it goes by itself, after 10 s.
    exported = someone.notice("5 files were exported to kept.")
    exported.get_by_role("button", name="Show").click()
    assert (lab.root / "kept/raw.parquet").read_bytes() == raw
    assert len(list((lab.root / "kept").iterdir())) == 5
    browser = someone.page.locator("#filebrowser")
    expect(browser.locator(".jp-DirListing-item", has_text="raw.parquet")).to_be_visible()
    for row in rows.all():
        name = row.locator(".jp-SandboxPanel-name").inner_text()
        published = hashlib.sha256((lab.root / "kept" / name).read_bytes()).hexdigest()
        expect(row.locator("code")).to_have_attribute("title", published)

    # A second export into the same folder would mix two states.
    artifacts_bar.get_by_role("button", name="Save all artifacts").click()
    dialog.get_by_role("textbox").fill("kept")
    dialog.get_by_role("button", name="Export").click()
    expect(dialog).to_contain_text("Nothing was exported")
    dialog.get_by_role("button").last.click()


def test_a_file_that_may_not_leave_says_why(someone: Person, lab: Lab) -> None:
    make = "open('/artifacts/tool.exe', 'w').close()"
    someone.open(lab.notebook("refused.ipynb", "backintel-sandbox", make))
    someone.ready()
    someone.show_panel()
    someone.run(0)
    row = someone.section("Artifacts").get_by_role("listitem").filter(has_text="tool.exe")
    expect(row.locator(".jp-SandboxPanel-refused")).not_to_be_empty()
    expect(row.get_by_role("button")).to_have_count(0)


HOSTILE = """<!doctype html>
<title>x</title>
<meta http-equiv="refresh" content="0;url={lab}/canary/refresh">
<link rel="stylesheet" href="{lab}/canary/style">
<base href="{lab}/canary/">
<style>@import url({lab}/canary/import); body {{ background: url({lab}/canary/background) }}</style>
<body onload="parent.postMessage('ran', '*')">
<h1>Shown</h1>
<script>document.querySelector("h1").textContent = "ran"; fetch("{lab}/canary/fetch");
  top.location = "{lab}/canary/top"; parent.document.title = "ran";</script>
<img src="{lab}/canary/image" onerror="document.querySelector('h1').textContent = 'ran'">
<iframe src="{lab}/canary/frame"></iframe>
<svg><use href="{lab}/canary/use#x"></use></svg>
<object data="{lab}/canary/object"></object>
<form action="{lab}/canary/form"><input autofocus><button><p>Send</p></button></form>
<p><a href="{lab}/canary/link" target="_top">Link</a></p>
<div>Shadow<template shadowrootmode="open"><a href="{lab}/canary/shadow">Shadow</a></template></div>
<svg><a><set attributeName="href" to="{lab}/canary/set"/><text y="20">Later</text></a></svg>
<svg><a><animate attributeName="href" values="{lab}/canary/animate;{lab}/canary/animate"
  dur="9s" repeatCount="indefinite"/><text y="20">Moved</text></a></svg>
<map name="map"><area shape="default" href="{lab}/canary/area"></map>
<img usemap="#map" alt="Mapped" src="data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA=">
<p id="mine" style="color: rgb(1, 2, 3)">Kept</p>
<svg width="40" height="20"><defs><rect id="bar" width="30" height="9"/></defs>
<use href="#bar"/></svg>
<svg><foreignObject><style><a href="{lab}/canary/foreign">Foreign</a></style></foreignObject></svg>
<svg><style><a href="{lab}/canary/styled">Styled</a></style></svg>
<math><mtext><table><mglyph><style><!--</style><a title="--><a href={lab}/canary/math>Math</a>">
</a></style></mglyph></table></mtext></math>
<noscript><p title="</noscript><a href={lab}/canary/noscript>x</a>"></noscript>
"""
CLICKED = ("Send", "Link", "Shadow", "Later", "Moved")
LIVE = "a, area, base, button, form, iframe, link, math, meta[http-equiv=refresh], object, script"


def test_a_hostile_page_in_a_preview_runs_and_reaches_nothing(someone: Person, lab: Lab) -> None:
    page = json.dumps(HOSTILE.format(lab=lab.url))
    picture = json.dumps(
        '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="200">'
        f'<script>fetch("{lab.url}/canary/svg")</script>'
        f'<image href="{lab.url}/canary/in-svg" width="9" height="9"/>'
        '<rect width="300" height="200" fill="teal"/></svg>'
    )
    make = f"""
open('/artifacts/bad.html', 'w').write({page})
open('/artifacts/bad.svg', 'w').write({picture})
"""
    reached: list[str] = []

    def canary(route: Route) -> None:
        reached.append(route.request.url)
        route.abort()

    someone.page.context.route(re.compile("/canary/"), canary)
    someone.open(lab.notebook("hostile.ipynb", "backintel-sandbox", make))
    someone.ready()
    someone.show_panel()
    someone.run(0)
    artifacts = someone.section("Artifacts")
    dialog = someone.page.locator(".jp-Dialog")

    artifacts.get_by_role("button", name="bad.html", exact=True).click()
    frame = dialog.frame_locator("iframe")
    expect(frame.get_by_role("heading")).to_have_text("Shown")
    expect(dialog.locator("iframe")).to_have_attribute("sandbox", "")
    # What a person could be made to click leads nowhere either.
    for text in CLICKED:
        frame.get_by_text(text, exact=True).click()
        expect(frame.get_by_role("heading")).to_have_text("Shown")
    frame.get_by_role("img", name="Mapped").click()
    # A selector looks into shadows too.
    expect(frame.locator(LIVE)).to_have_count(0)
    expect(frame.locator("template, set, animate, foreignObject, svg style")).to_have_count(0)
    # What does no harm is as it was made.
    expect(frame.locator("#mine")).to_have_css("color", "rgb(1, 2, 3)")
    bar = frame.locator("use[href]").bounding_box()
    assert bar is not None
    assert bar["width"] == 30
    expect(frame.get_by_role("heading")).to_have_text("Shown")
    dialog.get_by_role("button", name="Close").click()

    artifacts.get_by_role("button", name="bad.svg", exact=True).click()
    shown = dialog.get_by_role("img", name="bad.svg")
    assert shown.evaluate("async picture => (await picture.decode(), picture.naturalWidth)") == 300
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()
    assert reached == []
    assert someone.page.url.startswith(f"{lab.url}/lab/")

    # The same bytes opened as a page of their own have no origin and run no script.
    kernels = someone.ask("api/kernels").json()
    address = f"{lab.url}/backintel/api/kernels/{kernels[0]['id']}/artifacts/bad.html"
    tab = someone.page.context.new_page()
    tab.goto(f"{address}?preview=1", wait_until="commit")
    expect(tab.get_by_role("heading")).to_have_text("Shown")
    assert [url for url in reached if not url.endswith("/canary/refresh")] == []
    tab.close()
