#!/bin/bash
# Runs in the emulated machine, as its root: makes an environment and the receipts that belong to
# this machine's file systems, then the tests.
set -eu
export BACKINTEL_HOME=/srv/backintel
# What is skipped in there would be seen by nobody.
export BACKINTEL_STRICT=1
# The kernel's own messages would stand in the middle of the tests' lines.
echo 1 > /proc/sys/kernel/printk
python3 -m venv --without-pip --system-site-packages /srv/venv
python=/srv/venv/bin/python3
places=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' /payload/slow /payload/repo /payload/meta /payload/site 'import backintel_slow' \
    > "$places/live.pth"
# An address of this machine that a guest must not reach.
modprobe dummy
ip link add host0 type dummy
ip address add 192.0.2.1/24 dev host0
ip link set host0 up
# Deadlines are the owner's to give; the built-in ones are for real hardware.
mkdir -p /etc/backintel
cat > /etc/backintel/backintel.toml <<'END'
[profiles.live]
ram_mib = 1024
cpus = 1
workspace_mib = 128
artifacts_mib = 64
temp_mib = 64
cell_deadline = 900
run_deadline = 1800

[profiles.flights]
ram_mib = 2048
cpus = 1
workspace_mib = 512
artifacts_mib = 128
temp_mib = 256
cell_deadline = 2400
run_deadline = 6000
END
cd /payload/repo
$python tools/live/adopt.py /image /payload/engine /payload/facts.json
mapfile -t arguments < /payload/arguments
status=0
$python -m pytest -p no:cacheprovider -v \
    -o timeout=0 --durations=20 --basetemp=/srv/pytest "${arguments[@]}" || status=$?
if [ $status != 0 ]; then
    echo "what this machine's kernel said last:"
    dmesg | tail -n 40
fi
exit $status
