"""What `fulgur` writes is complete or not there, and what it shows meanwhile."""

import os
import pty
import resource
import subprocess

import numpy as np
import pytest

from attention import assert_close, attention
from program import ALL, FORWARD, LSE, PROGRAM, RNG, fails, listing, load, save, succeeds, tensors


def test_unwritable_outputs(folder):
    before = listing(folder)
    (folder / "folder").mkdir()
    (folder / "loop.npy").symlink_to("loop.npy")
    for bad, says in [
        ("no/such/dir.npy", "No such file"),
        ("folder", "not a regular file"),
        ("/dev/null", "not a regular file"),
        ("/dev/stdout", "/dev/stdout: exists and is not a regular file"),  # a pipe, which has no path
        ("loop.npy", "loop.npy: cannot be written: Too many levels of symbolic links"),
        ("q.npy/x.npy", "Not a directory"),
        ("x" * 300 + ".npy", "too long"),
    ]:
        fails(*FORWARD, *LSE[:1], bad, says=[bad, says], cwd=folder)
    (folder / "folder").rmdir()
    (folder / "loop.npy").unlink()
    assert listing(folder) == before


def test_read_only_outputs(folder):
    (folder / "out.npy").write_text("precious")
    (folder / "out.npy").chmod(0o444)
    # Root without its capabilities is held by file modes, as everybody is.
    as_anybody = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*as_anybody, PROGRAM, *FORWARD], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "fulgur: out.npy: cannot be written: Permission denied\n"
    assert (folder / "out.npy").read_text() == "precious"
    assert "out.npy" in listing(folder) and len(listing(folder)) == 5


def test_a_full_disk_leaves_nothing(folder):
    """A limit on the size of files stands for the full disk: the small lse fits, out does not."""
    before = listing(folder)

    def limit():
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    fails(
        *FORWARD,
        *LSE,
        says=["out.npy", "cannot be written", "File too large"],
        cwd=folder,
        preexec_fn=limit,
    )
    assert listing(folder) == before


def test_a_failed_call_keeps_the_old_output(folder):
    (folder / "out.npy").write_text("precious")
    np.save(folder / "k.npy", np.zeros((1, 2), np.float32))
    fails(*FORWARD, cwd=folder)
    assert (folder / "out.npy").read_text() == "precious"


def test_an_output_may_replace_an_input(folder):
    arrays = load(folder, ["q", "k", "v"])
    succeeds("attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", "v.npy", cwd=folder)
    assert_close(np.load(folder / "v.npy"), attention(**arrays)["out"], "f32")


def test_an_output_is_complete_whenever_it_can_be_seen(tmp_path):
    """While calls replace it, a reader finds a whole file each time."""
    save(tmp_path, tensors(sq=2000, sk=3, hq=4, hk=1, d=8, dv=64))
    succeeds(*FORWARD, cwd=tmp_path)
    size = (tmp_path / "out.npy").stat().st_size
    with subprocess.Popen(
        ["sh", "-c", 'for i in 1 2 3 4 5; do "$@"; done', "sh", PROGRAM, *FORWARD],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    ) as writer:
        while writer.poll() is None:
            assert len((tmp_path / "out.npy").read_bytes()) == size
    assert writer.returncode == 0


def test_stdout_that_cannot_be_written_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, "devices"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.startswith("fulgur: ")


def on_a_terminal(*args, cwd):
    """Runs with stderr on a pseudo-terminal; what it showed there."""
    master, slave = pty.openpty()
    with subprocess.Popen([PROGRAM, *args], cwd=cwd, stdout=subprocess.DEVNULL, stderr=slave) as p:
        os.close(slave)
        shown = b""
        while True:
            try:
                chunk = os.read(master, 4096)
            except OSError:  # the terminal is closed
                break
            if not chunk:
                break
            shown += chunk
    os.close(master)
    assert p.returncode == 0
    return shown.decode()


@pytest.mark.slow
def test_long_work_shows_a_bar_and_is_right(tmp_path):
    """Beyond 2e11 flops the work is done in steps over batches and kv heads. The gradient comes
    from the last rows alone, which makes the float64 reference small."""
    rows = 5
    arrays = tensors(batch=2, sq=6000, sk=6100, hq=4, hk=2, d=192, dv=192)
    arrays["dout"][:, :-rows] = 0
    slopes, used = RNG.random((2, 4), np.float32) * 0.01, np.array([6100, 6003], np.int32)
    sinks = np.array([0.5, 3, 9, -1], np.float32)
    bias = RNG.standard_normal((2, 4, 1, 6100), np.float32)
    save(tmp_path, arrays | {"slopes": slopes, "used": used, "sinks": sinks, "bias": bias})
    shown = on_a_terminal(
        *ALL, "--alibi-slopes", "slopes.npy", "--seqused-k", "used.npy", "--sinks", "sinks.npy",
        "--dsinks", "dsinks.npy", "--bias", "bias.npy", "--dbias", "dbias.npy", cwd=tmp_path,
    )  # fmt: skip
    for text in ("forward [", "backward [", "25%", " s left"):
        assert text in shown
    assert shown.endswith("\r\x1b[K")  # wiped
    last = {n: x[:, -rows:] if n in ("q", "dout") else x for n, x in arrays.items()}
    want = attention(**last, slopes=slopes, used=used, sinks=sinks, added=bias)
    got = load(tmp_path, want)
    for name in ("out", "dq"):
        got[name] = got[name][:, -rows:]
    got["lse"] = got["lse"][:, :, -rows:]
    for name in want:
        assert_close(got[name], want[name], "f32")


def test_short_work_shows_no_bar(folder):
    assert on_a_terminal(*FORWARD, cwd=folder) == ""
