"""Libraries that suffer in sandboxes elsewhere work in ours as on a machine of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from sandboxes import Result, Sandbox, leaving_nothing, sandbox


class Shared:
    """One sandbox for all tests of this module, driven from their threads of control."""

    def __init__(self, runner: asyncio.Runner, box: Sandbox) -> None:
        self._runner = runner
        self.box = box

    def run(self, code: str) -> Result:
        """Execute code that must not fail."""
        result = self._runner.run(self.box.run(code, timeout=120))
        assert not result.error, result.error
        return result

    def do(self, work: Any) -> Any:
        """Run a coroutine on the sandbox's loop."""
        return self._runner.run(work)


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """Look around all tests, which share a sandbox."""
    with leaving_nothing():
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        started = sandbox(profile="analysis")
        box = runner.run(started.__aenter__())
        try:
            yield Shared(runner, box)
        finally:
            runner.run(started.__aexit__(None, None, None))


def test_the_first_plot_is_silent_and_chinese_text_has_its_glyphs(shared: Shared) -> None:
    """matplotlib#32246, WeasyPrint#2218: a warm cache, and fonts for what people write."""
    result = shared.run(
        "import warnings; warnings.simplefilter('error')\n"
        "import matplotlib.pyplot as plt\n"
        "figure, axes = plt.subplots(); axes.set_title('电价 電力 전기 résumé')\n"
        "axes.set_xlabel('电价', weight='bold')\n"
        "figure.savefig('/workspace/plot.png')\n"
        "from matplotlib.font_manager import get_font, fontManager\n"
        "print(*plt.rcParams['font.family'], sep=', ')\n"
    )
    assert result.text == "DejaVu Sans, WenQuanYi Zen Hei\n"


def test_the_history_is_in_memory_and_works(shared: Shared) -> None:
    """ipython#12513: SQLite errors of the history."""
    shared.run("the_answer = 41 + 1")
    result = shared.run("%history -l 2\nprint(get_ipython().history_manager.hist_file)")
    assert "\nthe_answer = 41 + 1\n" in f"\n{result.text}"
    assert result.text.endswith(":memory:\n")


def test_duckdb_spills_from_a_directory_that_is_read_only(shared: Shared) -> None:
    """duckdb#19879, duckdb#15080: a private temp_directory, and the limit that is true."""
    result = shared.run(  # 128 MB of rows, with room for 230 MiB in /tmp
        "import duckdb, os\n"
        "before = os.getcwd(); os.chdir('/docs')\n"
        "base = duckdb.connect(); base.execute(\"SET memory_limit = '100MB'; SET threads = 1\")\n"
        "query = 'SELECT i, hash(i) h FROM range(8000000) t(i) ORDER BY h'\n"
        "base.execute(f'CREATE TABLE sorted AS {query}')\n"
        "used = sum(size for _, size in base.sql('FROM duckdb_temporary_files()').fetchall())\n"
        "print(base.execute('SELECT count(*) FROM sorted').fetchone()[0], used > 10**6)\n"
        "os.chdir(before)\n"
    )
    assert result.text == "8000000 True\n"


def test_polars_and_the_numeric_libraries_use_the_profiles_cpus(shared: Shared) -> None:
    """polars#19261: threads and memory are the sandbox's, not the host's."""
    result = shared.run(
        "import os, polars, pyarrow\n"
        "print(polars.thread_pool_size(), pyarrow.cpu_count(), os.environ['OMP_NUM_THREADS'])"
    )
    assert result.text == "2 2 2\n"


def test_processes_share_memory(shared: Shared) -> None:
    """pytorch#5040: a bus error on a small /dev/shm."""
    result = shared.run(
        "import multiprocessing, numpy\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=16 * 2**20)\n"
        "numbers = numpy.ndarray(2**21, dtype='f8', buffer=memory.buf); numbers[:] = 1.0\n"
        "def add(half):\n"
        "    return float(numbers[half * 2**20:(half + 1) * 2**20].sum())\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    print(sum(pool.map(add, [0, 1])))\n"
        "del numbers; memory.close(); memory.unlink()\n"
    )
    assert result.text == "2097152.0\n"


def test_a_picture_of_plotly_is_refused_at_once_and_a_figure_shows(shared: Shared) -> None:
    """Kaleido#80: write_image hangs where it needs a browser."""
    result = shared.run(
        "import plotly.express as px, time\n"
        "figure = px.line(x=[1, 2], y=[3, 4])\n"
        "started = time.monotonic()\n"
        "try:\n"
        "    figure.write_image('/workspace/figure.png')\n"
        "except Exception as error:\n"
        "    print('kaleido' in str(error).lower(), time.monotonic() - started < 5)\n"
        "figure.show()\n"
    )
    assert result.text == "True True\n"
    shown = [m["content"]["data"] for m in result.messages if m["msg_type"] == "display_data"]
    assert "application/vnd.plotly.v1+json" in shown[-1]


def test_a_widget_answers_its_front_end(shared: Shared) -> None:
    """jupyterlab#15361: a widget's comm goes both ways."""
    result = shared.run(
        "import ipywidgets\n"
        "slider = ipywidgets.IntSlider(value=3)\n"
        "slider.observe(lambda change: print('moved to', change['new']), 'value')\n"
        "slider"
    )
    opened = [m["content"] for m in result.messages if m["msg_type"] == "comm_open"]
    slider = next(c for c in opened if c["data"]["state"].get("_model_name") == "IntSliderModel")
    shown = [m["content"]["data"] for m in result.messages if m["msg_type"] == "execute_result"]
    view = shown[-1]["application/vnd.jupyter.widget-view+json"]
    assert view["model_id"] == slider["comm_id"]

    async def move() -> str:
        client = shared.box.client
        data = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
        message = client.session.msg("comm_msg", {"comm_id": slider["comm_id"], "data": data})
        client.shell_channel.send(message)
        text = ""
        # What one print() writes may come in several messages.
        while not text.endswith("\n"):
            told = await client.get_iopub_msg(timeout=30)
            if told["parent_header"].get("msg_id") != message["header"]["msg_id"]:
                continue
            if told["msg_type"] == "stream":
                text += told["content"]["text"]
        return text

    assert shared.do(move()) == "moved to 7\n"
    assert shared.run("print(slider.value)").text == "7\n"
