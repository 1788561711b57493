#!/usr/bin/env bash
# Puts the packages of the extra `peers` into .cache/peers, without what they depend on: only
# single functions are read from their source (tests/numerics/peers). Does nothing when current.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=".cache/peers"
mapfile -t pins < <(.venv/bin/python -c '
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["optional-dependencies"]["peers"], sep="\n")')

stamp="$folder/.ready-$(printf '%s\n' "${pins[@]}" | sha256sum | cut -c1-16)"
[ -e "$stamp" ] && exit 0

echo "fetching ${pins[*]} into $folder"
rm -rf "$folder"
.venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --target "$folder" "${pins[@]}"
touch "$stamp"
