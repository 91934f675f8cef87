# Sourced by jobs/quickstart and tests/run: makes .venv and installs into it what the lock names.
# Does nothing when the lock has not changed. Another machine needs a CPU wheel of torch that pip
# finds (README, "Install").
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # importing vLLM without its byte code costs 20 s in every process
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 DS_ACCELERATOR=cpu
stamp=.venv/installed
wanted=$(cat requirements-cpu.lock pyproject.toml | sha256sum)
if [ "$(cat $stamp 2>/dev/null)" != "$wanted" ]; then
  began=$SECONDS
  torch=$(grep '^torch==' requirements-cpu.lock)
  echo "setup: making .venv with $(python3 --version)"
  python3 -m venv .venv
  .venv/bin/pip install -q --disable-pip-version-check uv
  echo "setup: installing $torch (a CPU build, from where pip finds wheels)"
  .venv/bin/pip install -q --disable-pip-version-check --no-deps "$torch" || {
    echo "setup: pip found no $torch. Download the CPU wheel from the PyTorch site and put its" >&2
    echo "setup: folder into PIP_FIND_LINKS, then run this again." >&2
    exit 1
  }
  echo "setup: installing $(grep -c == requirements-cpu.lock) packages of requirements-cpu.lock"
  grep -v '^torch==' requirements-cpu.lock > .venv/rest.lock
  .venv/bin/uv pip install -q --no-deps -r .venv/rest.lock
  .venv/bin/uv pip install -q --no-deps -e .
  echo "$wanted" > $stamp
  echo "setup: done in $((SECONDS - began)) s"
fi
