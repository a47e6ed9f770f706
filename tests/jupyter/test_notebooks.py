"""The committed notebooks, run for real; their numbers are recomputed here from the source data.

The recomputation uses nothing but the standard library, so it shares no code with the notebooks.
What only a data library can read (Parquet, worksheets) is read back in a second sandbox that gets
the artifacts of the first as its source.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import statistics
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = [pytest.mark.sandbox, pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = ROOT / "notebooks"


@dataclass
class Run:
    """A finished ``backintel run --json``."""

    status: int
    report: dict[str, Any]
    out: Path
    progress: str

    @property
    def artifacts(self) -> Path:
        return self.out / "artifacts"

    def load(self, name: str) -> Any:
        return json.loads((self.artifacts / name).read_text())

    def outputs(self) -> Iterable[Any]:
        (path,) = self.out.glob("*.ipynb")
        for cell in nbformat.read(path, 4).cells:
            yield from cell.get("outputs", [])


def run(notebook: Path, out: Path, sources: Mapping[str, Path], *options: str) -> Run:
    """Run a notebook on the bwrap engine; fail with what was printed if it did not complete."""
    command = [sys.executable, "-m", "kernel_provisioner.cli.main", "run", str(notebook)]
    command += ["--engine", "bwrap", "--out", str(out), "--json", *options]
    for name, path in sources.items():
        command += ["--source", f"{name}={path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return Run(done.returncode, json.loads(done.stdout), out, done.stderr)


def run_cells(directory: Path, sources: Mapping[str, Path], *cells: str) -> Run:
    notebook = directory / "cells.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in cells]), notebook)
    return run(notebook, directory / "out", sources)


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


@pytest.fixture(scope="module")
def data() -> Path:
    """The directory that `make data` writes."""
    directory = ROOT / ".data" / "flights"
    if not (directory / "flights.csv").is_file():
        pytest.skip("the flights data are missing; run `make data`.")
    return directory


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    before = digests(data)
    done = run(NOTEBOOKS / "flights.ipynb", tmp_path_factory.mktemp("f") / "out", {"flights": data})
    assert digests(data) == before, "a source was changed"
    return done


@pytest.fixture(scope="module")
def energy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    source = NOTEBOOKS / "data" / "energy"
    return run(NOTEBOOKS / "energy.ipynb", tmp_path_factory.mktemp("e") / "out", {"energy": source})


@dataclass
class Flight:
    """One line of the source table, as far as it is recomputed."""

    key: tuple[str, int, int]
    month: int
    day: int
    hour: int
    origin: str
    carrier: str
    dest: str
    tailnum: str
    time_hour: str
    departed: bool
    dep_delay: int | None
    delay: int | None

    @property
    def late(self) -> bool:
        return self.delay is not None and self.delay >= 15


def number(text: str) -> int | None:
    return None if text == "NA" else int(text)


@pytest.fixture(scope="module")
def table(data: Path) -> list[Flight]:
    with (data / "flights.csv").open(newline="") as file:
        return [
            Flight(
                key=(row["origin"], int(row["hour"]), int(row["month"])),
                month=int(row["month"]),
                day=int(row["day"]),
                hour=int(row["hour"]),
                origin=row["origin"],
                carrier=row["carrier"],
                dest=row["dest"],
                tailnum=row["tailnum"],
                time_hour=row["time_hour"],
                departed=row["dep_time"] != "NA",
                dep_delay=number(row["dep_delay"]),
                delay=number(row["arr_delay"]),
            )
            for row in csv.DictReader(file)
        ]


@pytest.fixture(scope="module")
def arrived(table: list[Flight]) -> list[Flight]:
    return [flight for flight in table if flight.delay is not None]


def late_share(some: Iterable[Flight]) -> float:
    known = [flight.late for flight in some if flight.delay is not None]
    return sum(known) / len(known)


def cancelled_share(some: Iterable[Flight]) -> float:
    return statistics.fmean(not flight.departed for flight in some)


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def test_flights_completes_with_the_required_artifacts(flights: Run) -> None:
    assert flights.report["complete"] is True
    notebook = json.loads((NOTEBOOKS / "flights.ipynb").read_text())
    required = {
        item if isinstance(item, str) else item["artifact"]
        for item in notebook["metadata"]["backintel"]["requires"]
    }
    assert digests(flights.artifacts) == {
        item["name"]: item["sha256"] for item in flights.report["artifacts"]
    }
    assert required == digests(flights.artifacts).keys()
    assert sum(item["size"] for item in flights.report["artifacts"]) < 16 * 1024**2


@pytest.mark.parametrize("name", ["flights", "energy"])
def test_notebooks_print_no_warning_not_even_at_the_first_plot(
    name: str, request: pytest.FixtureRequest
) -> None:
    """matplotlib#32246: the cache is warm and writable, so the first plot is silent."""
    outputs = list(request.getfixturevalue(name).outputs())
    assert [output.text for output in outputs if output.output_type == "stream"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_flights_totals(flights: Run, table: list[Flight], arrived: list[Flight]) -> None:
    findings = flights.load("findings.json")
    delays = [flight.delay for flight in arrived if flight.delay is not None]
    assert findings["flights"] == len(table) == 336_776
    assert findings["cancelled"] == sum(not flight.departed for flight in table) == 8_255
    assert findings["arrived"] == len(arrived) == 327_346
    assert findings["late"] == sum(flight.late for flight in arrived)
    assert findings["late_share"] == close(late_share(arrived))
    assert findings["mean_arrival_delay_minutes"] == close(statistics.fmean(delays))
    assert findings["median_arrival_delay_minutes"] == close(statistics.median(delays))
    regained = [f.dep_delay - f.delay for f in arrived if f.delay is not None and f.dep_delay]
    positive = [
        f.dep_delay - f.delay
        for f in arrived
        if f.delay is not None and f.dep_delay is not None and f.dep_delay > 0
    ]
    assert len(positive) < len(regained)
    assert findings["minutes_regained_in_the_air"] == close(statistics.fmean(positive))


def test_flights_calendar_and_hours(
    flights: Run, table: list[Flight], arrived: list[Flight]
) -> None:
    findings = flights.load("findings.json")
    months, days, hours = defaultdict(list), defaultdict(list), defaultdict(list)
    for flight in table:
        months[flight.month].append(flight)
        days[f"2013-{flight.month:02}-{flight.day:02}"].append(flight)
        if 5 <= flight.hour <= 23:
            hours[str(flight.hour)].append(flight)
    monthly = {month: late_share(some) for month, some in months.items()}
    assert findings["calmest_month"] == min(monthly, key=monthly.__getitem__) == 9
    assert findings["worst_month"] == max(monthly, key=monthly.__getitem__) == 12
    assert findings["worst_month_late_share"] == close(max(monthly.values()))
    cancelled = {day: cancelled_share(some) for day, some in days.items()}
    assert findings["most_cancelled_day"] == max(cancelled, key=cancelled.__getitem__)
    assert findings["most_cancelled_day_share"] == close(max(cancelled.values()))
    daily = {day: late_share(some) for day, some in days.items()}
    assert findings["worst_day"] == max(daily, key=daily.__getitem__)
    assert findings["worst_day_late_share"] == close(max(daily.values()))
    hourly = {hour: late_share(some) for hour, some in hours.items()}
    assert findings["late_share_by_hour"] == {h: close(share) for h, share in hourly.items()}
    assert str(findings["worst_hour"]) == max(hourly, key=hourly.__getitem__)


def test_flights_carriers_against_their_schedule(flights: Run, arrived: list[Flight]) -> None:
    findings = flights.load("findings.json")
    groups: dict[tuple[str, int, int], list[bool]] = defaultdict(list)
    for flight in arrived:
        groups[flight.key].append(flight.late)
    expected = {key: statistics.fmean(late) for key, late in groups.items()}
    excess: dict[str, list[float]] = defaultdict(list)
    for flight in arrived:
        excess[flight.carrier].append(flight.late - expected[flight.key])
    means = {
        carrier: statistics.fmean(values)
        for carrier, values in excess.items()
        if len(values) >= 500
    }
    found = findings["carrier_excess_late_share"]
    assert found == {carrier: pytest.approx(mean, abs=1e-9) for carrier, mean in means.items()}
    assert len(found) == 14
    assert findings["best_carrier"] == min(means, key=means.__getitem__)
    assert findings["worst_carrier"] == max(means, key=means.__getitem__)


def test_flights_weather(flights: Run, table: list[Flight], data: Path) -> None:
    findings = flights.load("findings.json")
    with (data / "weather.csv").open(newline="") as file:
        observed = {
            (row["origin"], row["time_hour"]): (float(row["precip"]), float(row["visib"]))
            for row in csv.DictReader(file)
        }
    fine, wet = [], []
    for flight in table:
        rain, visibility = observed.get((flight.origin, flight.time_hour), (None, None))
        if rain is None or visibility is None:
            continue
        if rain > 0:
            wet.append(flight)
        elif visibility >= 10:
            fine.append(flight)
    assert findings["late_share_fine_weather"] == close(late_share(fine))
    assert findings["late_share_rain"] == close(late_share(wet))
    assert findings["cancelled_share_fine_weather"] == close(cancelled_share(fine))
    assert findings["cancelled_share_rain"] == close(cancelled_share(wet))


def test_flights_age_of_the_aircraft(flights: Run, arrived: list[Flight], data: Path) -> None:
    findings = flights.load("findings.json")
    with (data / "planes.csv").open(newline="") as file:
        built = {
            row["tailnum"]: int(row["year"]) for row in csv.DictReader(file) if row["year"] != "NA"
        }
    known = [flight for flight in arrived if flight.tailnum in built]
    groups: dict[tuple[str, int, int], list[bool]] = defaultdict(list)
    ages: dict[str, list[Flight]] = defaultdict(list)
    for flight in known:
        groups[flight.carrier, flight.hour, flight.month].append(flight.late)
        ages[str(min((2013 - built[flight.tailnum]) // 5, 5) * 5)].append(flight)
    assert findings["late_share_by_aircraft_age"] == {
        age: close(late_share(some)) for age, some in ages.items()
    }
    expected = {key: statistics.fmean(late) for key, late in groups.items()}
    old = ages["20"]
    raw = late_share(old) - late_share(known)
    within = statistics.fmean(
        flight.late - expected[flight.carrier, flight.hour, flight.month] for flight in old
    )
    assert findings["aircraft_20_to_24_years_raw_points"] == pytest.approx(100 * raw, abs=1e-7)
    assert findings["aircraft_20_to_24_years_within_points"] == pytest.approx(
        100 * within, abs=1e-7
    )
    assert raw < 0 < within  # what the text says: the sign turns


def test_flights_destinations(flights: Run, arrived: list[Flight], data: Path) -> None:
    findings = flights.load("findings.json")
    with (data / "airports.csv").open(newline="") as file:
        listed = {row["faa"] for row in csv.DictReader(file)}
    places = defaultdict(list)
    for flight in arrived:
        places[flight.dest].append(flight)
    busy = {
        dest: late_share(some)
        for dest, some in places.items()
        if dest in listed and len(some) >= 1000
    }
    assert findings["most_punctual_busy_destination"] == min(busy, key=busy.__getitem__)
    assert findings["least_punctual_busy_destination"] == max(busy, key=busy.__getitem__)
    assert findings["least_punctual_busy_destination_late_share"] == close(max(busy.values()))


def test_flights_pictures_and_page(flights: Run) -> None:
    for name in ("year.png", "carriers.png", "weather.png", "aircraft_age.png"):
        head = (flights.artifacts / name).read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", head[16:24])
        assert width >= 800
        assert height >= 400
    svg = ET.parse(flights.artifacts / "delays_by_hour.svg").getroot()  # noqa: S314 - our own
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    page = (flights.artifacts / "destinations.html").read_text()
    assert "plotly.js v" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)\s*=", page), "it loads something"


def test_flights_tables_read_back_in_another_sandbox(
    flights: Run, table: list[Flight], arrived: list[Flight], tmp_path: Path
) -> None:
    done = run_cells(
        tmp_path,
        {"results": flights.artifacts},
        """
import backintel, duckdb, openpyxl
path = backintel.sources()["results"]
hours = duckdb.sql(f"SELECT * FROM read_parquet('{path}/origin_hours.parquet')")
totals = duckdb.sql(
    "SELECT count(*) AS n, count(DISTINCT (origin, time_hour)) AS keys, sum(flights) AS flights,"
    " sum(cancelled) AS cancelled, sum(arrived) AS arrived, sum(late) AS late, count(precip) AS wet"
    " FROM hours"
).pl().row(0, named=True)
book = openpyxl.load_workbook(path / "flights_summary.xlsx")
sheets = {sheet.title: [list(row) for row in sheet.iter_rows(values_only=True)] for sheet in book}
sheets["Days"] = sheets["Days"][:1]
facts = {
    "totals": {key: int(value) for key, value in totals.items()},
    "sheets": sheets,
    "frozen": [sheet.freeze_panes for sheet in book],
    "formats": [book["Carriers"]["C2"].number_format, book["Carriers"]["D2"].number_format],
    "rules": len(book["Carriers"].conditional_formatting),
    "charts": len(book["Hours"]._charts),
}
backintel.save(facts, "facts.json")
""",
    )
    facts = done.load("facts.json")
    hours = {(flight.origin, flight.time_hour) for flight in table}
    totals = facts["totals"]
    assert totals["n"] == totals["keys"] == len(hours)
    assert totals["flights"] == len(table)
    assert totals["cancelled"] == sum(not flight.departed for flight in table)
    assert totals["arrived"] == len(arrived)
    assert totals["late"] == sum(flight.late for flight in arrived)
    assert 0.99 * totals["n"] < totals["wet"] < totals["n"]

    sheets = facts["sheets"]
    assert list(sheets) == ["Summary", "Carriers", "Hours", "Days", "Destinations"]
    assert ["Late", totals["late"]] in sheets["Summary"]
    counted = Counter(flight.carrier for flight in arrived)
    assert {row[0]: row[2] for row in sheets["Carriers"][1:]} == counted
    assert [row[0] for row in sheets["Hours"][1:]] == list(range(5, 24))
    assert facts["frozen"] == ["B2"] * 5
    assert facts["formats"] == ["#,##0", "0.0%"]
    assert facts["rules"] == facts["charts"] == 1


def test_energy_has_the_known_answers(energy: Run) -> None:
    result = energy.load("energy.json")
    assert f"{result['energy_kwh']:.10f}" == "2.1791666667"
    assert f"{result['coverage_percent']:.7f}" == "23.5185185"
    assert (result["observed_intervals"], result["expected_intervals"]) == (127, 540)
    assert result["readings"] == 150
    with (energy.artifacts / "intervals.csv").open(newline="") as file:
        intervals = list(csv.DictReader(file))
    assert len(intervals) == 540
    assert sum(row["observed"] == "true" for row in intervals) == 127
    assert sum(int(row["readings"]) for row in intervals) == 150
    assert all((row["mean_power_w"] == "") == (row["observed"] == "false") for row in intervals)
    with (energy.artifacts / "gaps.csv").open(newline="") as file:
        gaps = [float(row["hours"]) for row in csv.DictReader(file)]
    assert result["gaps_not_integrated"] == 7
    assert len(gaps) == 8  # those and the end of the window
    assert min(gaps) > 0.25
    assert (energy.artifacts / "energy.png").stat().st_size > 20_000


def test_energy_takes_its_parameters_from_the_command_line(tmp_path: Path) -> None:
    done = run(
        NOTEBOOKS / "energy.ipynb",
        tmp_path / "out",
        {"energy": NOTEBOOKS / "data" / "energy"},
        "--param",
        "MAX_GAP_MINUTES=16",
    )
    result = done.load("energy.json")
    assert result["gaps_not_integrated"] == 6  # the gap of 15 min 10 s is bridged now
    assert result["energy_kwh"] > 2.18
    assert f"{result['coverage_percent']:.7f}" == "23.5185185"


SAVE_ALL = """
import datetime as dt, json, backintel
import matplotlib.pyplot as plt, numpy as np, openpyxl, pandas as pd, plotly.graph_objects as go
import polars as pl, pyarrow as pa

fig, ax = plt.subplots()
ax.set_title("Größe")
ax.plot([1, 2])
for suffix in ("png", "jpg", "svg", "pdf"):
    backintel.save(fig, f"figure.{suffix}")
plt.close(fig)
backintel.save(go.Figure(go.Bar(y=[1, 2])), "plotly.html")
backintel.save(go.Figure(go.Bar(y=[1, 2])), "plotly.json")
when = dt.datetime(2013, 1, 2, 3, 4, tzinfo=dt.UTC)
columns = {"n": [1, 2], "x": [1.5, float("nan")], "s": ["a,b", None], "t": [when, when]}
frames = {
    "pandas": pd.DataFrame(columns),
    "indexed": pd.DataFrame(columns).set_index("n"),
    "polars": pl.DataFrame(columns),
    "arrow": pa.table(columns),
}
for name, frame in frames.items():
    for suffix in ("csv", "tsv", "json", "jsonl", "parquet", "feather", "xlsx"):
        backintel.save(frame, f"{name}.{suffix}")
book = openpyxl.Workbook()
book.active["A1"] = "hello"
backintel.save(book, "book.xlsx")
backintel.save({"np": np.float64(1.5), "list": np.arange(3), "when": when}, "dict.json")

read = {}
for name in frames:
    read[name] = [
        pl.read_parquet(f"/artifacts/{name}.parquet")["n"].to_list(),
        pl.read_ipc(f"/artifacts/{name}.feather")["s"].to_list(),
        [row[0].value for row in openpyxl.load_workbook(f"/artifacts/{name}.xlsx").active],
        pd.read_csv(f"/artifacts/{name}.tsv", sep="\\t")["s"].tolist()[0],
    ]
backintel.save(read, "read.json")
"""

REFUSE = """
import os, subprocess, sys, backintel
import numpy as np, openpyxl, pandas as pd, polars as pl, plotly.graph_objects as go

def refused(obj, name):
    before = {e.name: e.stat().st_size for e in os.scandir("/artifacts")}
    try:
        backintel.save(obj, name)
    except backintel.ArtifactError as error:
        assert before == {e.name: e.stat().st_size for e in os.scandir("/artifacts")}
        return str(error)
    raise AssertionError(f"{name} was saved")

limits = backintel.limits()
messages = {
    "plotly": refused(go.Figure(), "p.png"),
    "lazy": refused(pl.LazyFrame({"a": [1]}), "l.parquet"),
    "big bytes": refused(bytes(limits.artifacts_free_bytes + 1), "b.duckdb"),
}
filler = limits.artifacts_free_bytes - 200_000
with open("/artifacts/filler.txt", "wb") as file:
    file.write(bytes(filler))
noise = np.random.default_rng(1).random((40_000, 2))
frame = pd.DataFrame(noise, columns=["a", "b"])
for suffix in ("parquet", "feather", "csv", "json", "jsonl", "xlsx"):
    messages[suffix] = refused(frame, f"frame.{suffix}")
book = openpyxl.Workbook()
for row in noise.tolist():
    book.active.append(row)
messages["workbook"] = refused(book, "book.xlsx")
os.unlink("/artifacts/filler.txt")
backintel.save(messages, "messages.json")
"""

FACTS = """
import json, os, subprocess, sys, time, backintel, duckdb

query = (
    "SELECT current_setting('memory_limit'), current_setting('threads'),"
    " current_setting('temp_directory')"
)
child = "import duckdb, json; print(json.dumps(duckdb.sql(%r).fetchall()[0]))" % query
limits = backintel.limits()
start = time.monotonic()
install = subprocess.run(["pip", "install", "seaborn"], capture_output=True, text=True)
pip_seconds = time.monotonic() - start
module = subprocess.run([sys.executable, "-m", "pip", "install", "pandas", "polars"])
with duckdb.connect("/workspace/t.duckdb") as db:
    stored = db.sql(query).fetchall()[0]
with duckdb.connect(config={"threads": 1, "max_memory": "100MiB"}) as db:
    chosen = db.sql(query).fetchall()[0]
backintel.save(
    {
        "limits": {name: getattr(limits, name) for name in limits.__slots__},
        "default": duckdb.sql(query).fetchall()[0],
        "stored": stored,
        "chosen": chosen,
        "child": json.loads(subprocess.check_output([sys.executable, "-c", child])),
        "duckdb_temp": os.environ["BACKINTEL_DUCKDB_TEMP"],
        "pip": [install.returncode, install.stderr, pip_seconds, module.returncode],
        "docs": sorted(os.listdir("/docs")),
        "sources": {name: str(path) for name, path in backintel.sources().items()},
    },
    "facts.json",
)
"""


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Run:
    source = {"energy": NOTEBOOKS / "data" / "energy"}
    return run_cells(tmp_path_factory.mktemp("h"), source, SAVE_ALL, REFUSE, FACTS)


def test_helper_saves_each_kind_of_object(helper: Run) -> None:
    names = {path.name for path in helper.artifacts.iterdir()}
    assert len(names) == 4 + 2 + 4 * 7 + 1 + 1 + 1 + 2
    for name, rows in helper.load("read.json").items():
        header = ["n", 1, 2]
        assert rows == [[1, 2], ["a,b", None], header, "a,b"], name
    for name in ("pandas", "indexed", "polars", "arrow"):
        rows = helper.load(f"{name}.json")
        lines = (helper.artifacts / f"{name}.jsonl").read_text().splitlines()
        assert rows == [json.loads(line) for line in lines]
        assert rows[0] == {"n": 1, "x": 1.5, "s": "a,b", "t": "2013-01-02T03:04:00+00:00"}
        assert rows[1]["x"] is None
        assert rows[1]["s"] is None
    assert helper.load("dict.json") == {
        "np": 1.5,
        "list": [0, 1, 2],
        "when": "2013-01-02T03:04:00+00:00",
    }
    assert (helper.artifacts / "figure.pdf").read_bytes()[:5] == b"%PDF-"
    assert (helper.artifacts / "figure.jpg").read_bytes()[:3] == b"\xff\xd8\xff"


def test_helper_refuses_without_a_trace(helper: Run) -> None:
    """Kaleido#80: what needs a browser is refused at once."""
    messages = helper.load("messages.json")
    assert "needs a browser" in messages.pop("plotly")
    assert "call .collect() first" in messages.pop("lazy")
    assert len(messages) == 8
    for message in messages.values():
        assert re.search(r"does not fit\. [\d.]+ MiB of 128 MiB remain in /artifacts", message)


def test_nothing_is_printed_on_the_way(helper: Run) -> None:
    printed = [output.text for output in helper.outputs() if output.output_type == "stream"]
    assert [text for text in printed if "already satisfied" not in text] == []


def test_libraries_are_told_the_truth(helper: Run) -> None:
    """duckdb#19879, duckdb#15080: memory, threads and a private directory for what is spilled."""
    facts = helper.load("facts.json")
    limits = facts["limits"]
    assert (limits["profile"], limits["cpus"], limits["network"]) == ("analysis", 2, False)
    assert limits["memory_bytes"] == 2 * 1024**3
    assert limits["artifacts_bytes"] == 128 * 1024**2
    assert limits["workspace_bytes"] == 512 * 1024**2
    assert limits["session"] == helper.report["session"]
    truth = ["1.0 GiB", 2, facts["duckdb_temp"]]
    assert facts["default"] == facts["stored"] == facts["child"] == truth
    assert facts["chosen"] == ["100.0 MiB", 1, facts["duckdb_temp"]]
    assert facts["duckdb_temp"].startswith("/tmp/")
    assert facts["sources"] == {"energy": "/sources/energy"}


def test_pip_in_the_sandbox_fails_within_a_second(helper: Run) -> None:
    """offline pip install: fails in a second, names the policy and what is there."""
    status, message, seconds, module_status = helper.load("facts.json")["pip"]
    assert status == 1
    assert "BackIntel sandbox policy: nothing is installed" in message
    assert "seaborn: not in the image. Use matplotlib." in message
    assert seconds < 1
    assert module_status == 0  # what is there already is no error


def test_the_guidance_is_in_the_sandbox(helper: Run) -> None:
    committed = {path.name for path in (ROOT / "guest" / "docs").iterdir()}
    assert committed == set(helper.load("facts.json")["docs"])
