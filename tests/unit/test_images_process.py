"""Steps of a preparation: real children, their output, their end, and what the person sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kernel_provisioner.errors import PrepareFailed
from kernel_provisioner.images import process
from kernel_provisioner.images.process import Steps, Stopped, redact

ENV = {"PATH": os.environ.get("PATH", os.defpath)}


def gone(pid: int) -> bool:
    """Tell whether a process ended (a zombie that waits for its parent has)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] == "Z"


def wait_gone(pid: int) -> None:
    until = time.monotonic() + 60
    while not gone(pid):
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.01)


def test_output_and_input_pass_through() -> None:
    steps = Steps(lambda line: None)
    output = steps.run(["sh", "-c", "cat; echo err >&2"], what="x", env=ENV, stdin="in\n")
    assert output == "in\nerr\n"


def test_a_failure_shows_the_last_words_without_credentials() -> None:
    # secret-scan: allow, a fake
    url = "https://user:" + "pass@host/x"
    script = f"seq 1 50; echo E: cannot fetch {url}; exit 7"
    with pytest.raises(PrepareFailed) as caught:
        Steps(lambda line: None).run(["sh", "-c", script], what="fetching", env=ENV, remedy="r")
    text = str(caught.value)
    assert "fetching failed (status 7)" in text
    assert "https://***@host/x" in text
    assert "pass" not in text
    assert "\n30\n" not in text
    assert "Remedy: r" in text


def test_death_by_a_signal_is_said() -> None:
    with pytest.raises(PrepareFailed, match="signal 9"):
        Steps(lambda line: None).run(["sh", "-c", "kill -9 $$"], what="x", env=ENV)


def test_output_is_bounded() -> None:
    output = Steps(lambda line: None).run(
        ["sh", "-c", "head -c 50000000 /dev/zero; echo end"], what="x", env=ENV
    )
    assert output.endswith("end\n")
    assert len(output) <= 256 * 65536


@pytest.mark.parametrize("cause", ["deadline", "stop"])
def test_a_child_and_its_children_end_with_the_step(tmp_path: Path, cause: str) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    steps = Steps(lambda line: None)
    found: list[int] = []

    def watch() -> None:
        found.extend(int(pid) for pid in pids.read_text().split())
        if cause == "stop":
            steps.stop.set()
        else:
            steps.deadline = time.monotonic()

    watcher = threading.Thread(target=watch)
    watcher.start()
    script = f"sleep 300 & echo $$ $! > {pids}; trap '' TERM INT; wait"
    with pytest.raises(Stopped if cause == "stop" else PrepareFailed):
        steps.run(["sh", "-c", script], what="x", env=ENV)
    watcher.join()
    assert len(found) == 2
    for pid in found:
        wait_gone(pid)


def test_children_do_not_outlive_a_killed_preparation() -> None:
    code = (
        "from kernel_provisioner.images.process import Steps\n"
        "import os, sys\n"
        "with Steps(print).start(['sh', '-c', 'echo $$; exec sleep 300'], env=dict(os.environ),"
        " separate=True) as child:\n"
        "    print(int(child.stdout.readline()), flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not gone(child)
        parent.send_signal(signal.SIGKILL)
    wait_gone(child)


def test_a_long_step_speaks_at_least_every_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rhythm is what is promised; a busy machine may be late with any single line."""
    assert process.SPEAK_EVERY_S < 2
    monkeypatch.setattr(process, "SPEAK_EVERY_S", 0.05)
    lines: list[str] = []
    enough = tmp_path / "enough"

    def progress(line: str) -> None:
        lines.append(line)
        if len(lines) == 4:
            enough.touch()

    steps = Steps(progress, deadline=time.monotonic() + 60)
    script = f"until [ -e {enough} ]; do sleep 0.01; done"
    began = time.monotonic()
    with steps.step("sleeping"):
        steps.run(["sh", "-c", script], what="x", env=ENV)
        assert time.monotonic() - began >= 3 * process.SPEAK_EVERY_S
    assert lines[0] == "sleeping"
    assert lines[-1].startswith("sleeping: done in ")
    assert len(lines) >= 5 and all(line.startswith("sleeping ... ") for line in lines[1:-1])


def test_lines_never_overlap() -> None:
    inside = threading.Lock()

    def progress(line: str) -> None:
        assert inside.acquire(blocking=False)
        time.sleep(0.001)
        inside.release()

    steps = Steps(progress)
    threads = [
        threading.Thread(target=lambda: [steps.say("x") for _ in range(20)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://u:p@h/x", "https://***@h/x"),  # secret-scan: allow, a fake
        ("https://token@h", "https://***@h"),
        ("https://h/a@b", "https://h/a@b"),
        ("mail a@b", "mail a@b"),
    ],
)
def test_redaction(text: str, clean: str) -> None:
    assert redact(text) == clean
