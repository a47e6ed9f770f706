#!/bin/bash
# Runs in the emulated machine, as its root: makes an environment and the receipts that belong to
# this machine's file systems, then the tests.
set -eu
export BACKINTEL_HOME=/srv/backintel
# The kernel's own messages would stand in the middle of the tests' lines.
echo 1 > /proc/sys/kernel/printk
python3 -m venv --without-pip --system-site-packages /srv/venv
python=/srv/venv/bin/python3
places=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' /payload/slow /payload/repo /payload/meta /payload/site 'import backintel_slow' \
    > "$places/live.pth"
cd /payload/repo
$python tools/live/adopt.py /image /payload/engine /payload/facts.json
mapfile -t arguments < /payload/arguments
exec $python -m pytest tests/live_smolvm --ignore=tests/live_smolvm/host -p no:cacheprovider -v \
    -o timeout=0 --durations=20 --basetemp=/srv/pytest "${arguments[@]}"
