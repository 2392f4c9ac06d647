"""Usage, help, devices, check and explain, on the CPU."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from program import ALL, FORWARD, PEAKS, details, fails, listing, succeeds


@pytest.mark.parametrize(
    "args,says",
    [
        ([], ["subcommand"]),
        (["fly"], ["fly"]),
        (["attend"], ["--q", "required"]),
        (["attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy"], ["--out", "required"]),
        (["attend", "--input", "x.safetensors"], ["--output"]),
        (["attend", "--output", "x.safetensors"], ["--input"]),
        (["attend", "--input", "a", "--output", "b", "--q", "q.npy"], ["--q", "--input"]),
        (["attend", "--input", "a", "--output", "b", "--lse", "l.npy"], ["--lse", "--input"]),
        (FORWARD + ["--dout", "dout.npy"], ["--dout", "--dq"]),
        (FORWARD + ["--dk", "dk.npy"], ["--dk", "--dout"]),
        (FORWARD + ["--dlse", "dlse.npy"], ["--dlse", "--dout"]),
        (FORWARD + ["--sinks", "sinks.npy", "--dsinks", "ds.npy"], ["--dsinks", "--dout"]),
        (ALL + ["--dsinks", "ds.npy"], ["--dsinks", "--sinks"]),
        (FORWARD + ["--bias", "b.npy", "--dbias", "db.npy"], ["--dbias", "--dout"]),
        (ALL + ["--dbias", "db.npy"], ["--dbias", "--bias"]),
        (FORWARD + ["--lse", "./out.npy"], ["--lse", "--out"]),
        (FORWARD + ["--window", "3"], ["--window", "'3'", "L,R"]),
        (FORWARD + ["--window", "3,x"], ["--window", "3,x"]),
        (FORWARD + ["--window", "1,2,3"], ["--window", "1,2,3"]),
        (FORWARD + ["--window", "99999999999999999999,0"], ["--window"]),
        (FORWARD + ["--causal", "--window", "3,0"], ["--causal", "--window"]),
        (FORWARD + ["--chunk", "many"], ["--chunk", "many"]),
        (FORWARD + ["--dtype", "f8"], ["--dtype", "f8"]),
        (FORWARD + ["--device", "tpu"], ["--device", "tpu"]),
        (FORWARD + ["--scale", "big"], ["--scale", "got 'big', want a number"]),
        (FORWARD + ["--softcap", "3x"], ["--softcap", "got '3x', want a number"]),
        (FORWARD + ["--dropout", ""], ["--dropout", "got '', want a number"]),
        (FORWARD + ["--scale", "1e999"], ["--scale", "got '1e999', want a number"]),
        (FORWARD + ["--chunk", "9223372036854775808"], ["--chunk", "'9223372036854775808'", "9223372036854775807"]),
        (FORWARD + ["--max-workspace", "99999999999999999999"], ["--max-workspace", "'99999999999999999999'"]),
        (FORWARD + ["--threads", "0x10"], ["--threads", "'0x10'"]),
        (FORWARD + ["--seed", "1"], ["--seed", "--dropout"]),
        (FORWARD + ["--dropout", "0.5", "--seed", "-1"], ["--seed", "'-1'", "from 0 to 18446744073709551615"]),
        (FORWARD + ["--dropout", "0.5", "--seed", "18446744073709551616"], ["--seed", "'18446744073709551616'"]),
        (FORWARD + ["--cu-seqlens-k", "cu.npy"], ["--cu-seqlens-k", "--cu-seqlens-q"]),
        (FORWARD + ["--page-indptr", "p.npy"], ["--page-indptr", "--page-table"]),
        (FORWARD + ["--nonsense"], ["--nonsense"]),
        (FORWARD + ["extra"], ["extra"]),
        (["explain", "--sq", "-3"], ["--sq", "'-3'", "from 0 to 9223372036854775807"]),
        (["explain", "--sq", "9223372036854775808"], ["--sq", "'9223372036854775808'"]),
        (["explain", "--dtype", "f64"], ["--dtype", "f64"]),
        (["explain", "--device", "tpu"], ["--device", "tpu"]),
        (["explain", "--page", "0"], ["--page", "0"]),
        (["explain", "--page", "16", "--backward"], ["--page", "--backward"]),
        (["check", "--device", "tpu"], ["--device", "tpu"]),
        (["bench", "--device", "tpu"], ["--device", "tpu"]),
        (["tune", "--dtype", "f64"], ["--dtype", "f64"]),
        (["tune", "--sq", "-3"], ["--sq", "-3"]),
        (["tune", "--window", "3"], ["--window", "'3'", "L,R"]),
        (["tune", "--svg", "x.svg"], ["--svg"]),
        (["prewarm", "--dlse"], ["--dlse", "--backward"]),
        (["prewarm", "--page-indptr"], ["--page-indptr", "--page"]),
        (["prewarm", "--page", "16", "--cache-batch-idx"], ["--page", "--cache-batch-idx"]),
        (["prewarm", "--backward", "--tree-mask"], ["--backward", "--tree-mask"]),
        (["prewarm", "--hq", "0"], ["--hq", "'0'", "from 1 to"]),
        (["prewarm", "--d", "64", "0"], ["--d", "'0'", "from 1 to"]),
        (["bench", "--grid", "huge"], ["--grid", "huge"]),
        (["bench", "--reproduce", "fa4"], ["--reproduce", "fa4"]),
        (["bench", "--reproduce", "fa2", "--grid", "quick"], ["--reproduce", "--grid"]),
        (["bench", "--reproduce", "fa2", "--continue"], ["--continue", "--json"]),
        (["bench", "--seconds", "5"], ["--seconds", "--reproduce"]),
        (["bench", "--reproduce", "fa2", "--seconds", "-1"], ["--seconds", "-1"]),
        (["check", "--dtype", "f8"], ["--dtype", "f8"]),
    ],
)
def test_wrong_usage(folder, args, says):
    before = listing(folder)
    fails(*args, code=2, says=says, cwd=folder)
    assert listing(folder) == before


def test_algorithms_are_refused_by_name():
    fails("bench", "--reproduce", "fa2", says=["--reproduce: given for the CPU, want --device cuda"])
    fails("explain", "--algorithm", "fa4", says=['algorithm: got "fa4", want one of standard, fa1, fa2, fa3'])
    fails("explain", "--algorithm", "fa1", says=["engine cpu: computes by the algorithm fa2, not by fa1"])
    assert "fa2" in succeeds("explain", "--algorithm", "fa2", "--json")


def test_counts_of_the_papers_algorithms():
    call = ["explain", "--sq", "256", "--hq", "2", "--dtype", "bf16", "--card", "h100", "--algorithm", "fa2"]
    rows = {line.split()[0]: line.split()[1:] for line in succeeds(*call).splitlines() if line.startswith("  ")}
    products = 2 * 256 * 256 * 2 * 64
    assert [rows[name][2] for name in ("standard", "fa1", "fa2", "fa3")] == 4 * [str(products)]
    plan = details(*call[1:])
    assert plan["counts"]["bytes_read"] == 2 * (256 + 256 // plan["Br"] * 2 * 256) * 64 * 2  # of both heads
    assert rows["fa2"][:2] == [str(plan["counts"]["bytes_read"]), str(2 * 256 * (64 * 2 + 4))]
    assert rows["fa2"][3:] == [str(2 * 256 * 256) + "+", "0+"]
    assert rows["fa1"][4] == str(2 * 256 * 2)  # of two key blocks
    dropped = succeeds(*call, "--dropout", "0.5")
    assert "bytes_read" not in dropped


def test_help_and_version():
    assert re.fullmatch(r"fulgur \d+\.\d+\.\d+\n", succeeds("--version"))
    assert "Examples" in succeeds("--help")
    for command in ("attend", "check", "bench", "explain", "devices", "prewarm", "tune"):
        assert command in succeeds("--help")
        assert "Example" in succeeds(command, "--help")


def test_devices_lists_the_engines():
    stdout = succeeds("devices")
    assert re.search(r"^cpu +available +\S", stdout, re.M)
    assert re.search(r"^reference +available +\S", stdout, re.M)
    assert len(re.findall(PEAKS, stdout, re.M)) == 1


def test_check_passes_for_every_dtype():
    stdout = succeeds("check")
    assert "FAIL" not in stdout
    for dtype in ("f32", "bf16", "f16"):
        assert len(re.findall(rf" {dtype} .* ok$", stdout, re.M)) == 22
    assert stdout.endswith("\n66 forward and 48 backward checks passed\n")
    assert "not computed" not in stdout


def test_check_can_be_repeated():
    runs = {succeeds("check", "--dtype", "f32", "--seed", "5", "--threads", "1") for _ in range(2)}
    assert len(runs) == 1


def test_explain():
    sizes = dict(batch=2, sq=300, sk=500, hq=8, hk=2, d=96, dv=80)
    shape = [x for name, size in sizes.items() for x in (f"--{name}", size)]
    shape += ["--dtype", "bf16", "--causal"]
    stdout = succeeds("explain", *shape)
    for text in ("bf16", "300", "500", "96", "80", "cpu", "causal"):
        assert text in stdout
    forward = details(*shape)
    assert forward["engine"] == "cpu"
    call = forward["call"]
    assert call.items() >= {**sizes, "pass": "forward", "dtype": "bf16", "device": "cpu", "right": 0}.items()
    backward = details("--sq", "300", "--backward")
    assert backward["call"]["pass"] == "backward"
    paged = details("--sq", "1", "--sk", "300", "--batch", "2", "--page", "16")
    assert (paged["call"]["pages"], paged["call"]["page"]) == (38, 16)
    assert {"page_table", "seqused_k"} <= set(paged["call"]["optional_tensors"])
    for plan in (forward, backward, paged):
        assert plan["estimate_us"] > 0 and plan["bound"] in ("products", "memory")
    fails("explain", "--sk", "3000000000", "--page", "16", says=["--page", "3000000000"])
    fails("explain", "--sk", "2000000000", "--batch", "9000000000000000000", "--page", "1", says=["page_table"])
    causal, chunks = (details("--sq", "4096", "--causal", *chunk) for chunk in ((), ("--chunk", "64")))
    assert chunks["call"]["chunk"] == 64 and chunks["flops"] < causal["flops"]
    for page in ((), ("--page", "64")):
        card = details("--sq", "1", "--sk", "65536", "--d", "128", "--dtype", "bf16", *page, "--card", "h200")
        assert card["engine"] == "cuda" and card["estimate_us"] > 0 and card["bound"] == "memory"
    fails("explain", "--card", "v100", says=["v100", "h200"])
    fails("explain", "--d", "1000", says=["1000"])
    fails("explain", "--hq", "3", "--hk", "2", says=["3 heads"])


def test_explain_of_low_bit_tensors():
    decode = ["--batch", "64", "--sq", "1", "--sk", "8192", "--hq", "32", "--hk", "8", "--d", "128", "--card", "h200"]
    for page in ((), ("--page", "64")):
        bf16 = details(*decode, "--dtype", "bf16", *page)
        for kv in (["e4m3"], ["e5m2"], ["int8"], ["int4", "--kv-group", "32"], ["q8_0"], ["q4_0"]):
            codes = details(*decode, "--dtype", "bf16", "--kv-dtype", *kv, *page)
            assert (codes["call"]["k_dtype"], codes["call"]["v_dtype"]) == (kv[0], kv[0])
            scales = {"k_descale", "v_descale"} & set(codes["call"]["optional_tensors"])
            assert bool(scales) == (kv[0] not in ("q8_0", "q4_0"))
            assert codes["estimate_us"] < bf16["estimate_us"]
    on_cpu = details("--sq", "64", "--kv-dtype", "int8")
    assert on_cpu["call"].items() >= {"dtype": "f32", "k_dtype": "int8", "v_dtype": "int8"}.items()
    assert "k of e4m3, v of e4m3" in succeeds("explain", "--dtype", "bf16", "--kv-dtype", "e4m3")
    e4m3 = details("--sq", "4096", "--dtype", "e4m3", "--fast-codes", "--card", "h200")["call"]
    assert (e4m3["dtype"], e4m3["out_dtype"]) == ("e4m3", "bf16") and "k_dtype" not in e4m3
    fails("explain", "--kv-dtype", "int3", code=2, says=["--kv-dtype", "int3"])
    fails("explain", "--kv-group", "32", code=2, says=["--kv-group", "--kv-dtype"])
    fails("explain", "--kv-dtype", "int8", "--kv-group", "31", says=["--kv-group", "31 columns", "head dim 64"])
    fails("explain", "--kv-dtype", "e4m3", "--kv-group", "32", says=["--kv-group", "32 columns", "none with e4m3"])
    fails("explain", "--kv-dtype", "int8", "--backward", code=2, says=["--kv-dtype", "--backward"])
    fails("explain", "--kv-dtype", "q8_0", "--d", "80", says=["80", "q8_0"])


def test_explain_by_ranks():
    call = ["explain", "--sq", "1048576", "--hq", "32", "--hk", "8", "--d", "128", "--dtype", "bf16", "--causal"]
    call += ["--card", "h200"]
    stdout = succeeds(*call, "--ranks", "1024", "--link", "375e9,5us", "--node", "8")
    assert "1024 ranks in nodes of 8" in stdout
    percent = {}
    for way in ("gather", "heads and gather (8 ranks)", "ring"):
        (line,) = re.findall(rf"^  {re.escape(way)}  .*$", stdout, re.M)
        percent[way] = float(line.split()[-1].rstrip("%"))
    assert 0 < percent["gather"] < percent["heads and gather (8 ranks)"] < 100
    slower = succeeds(*call, "--ranks", "8", "--link", "1e9,1ms")
    assert "8 ranks in nodes of 8" in slower and "heads (8 ranks)" in slower
    for link in ("375e9", "375e9,5", "x,5us", "0,5us", "1e9,-1us", "1e9,5minutes"):
        fails(*call, "--ranks", "8", "--link", link, code=2, says=["--link", link, "375e9,5us"])
    fails(*call, "--ranks", "8", "--node", "3", says=["node: got 3, want a divisor of the 8 ranks"])
    fails(*call, "--node", "8", code=2, says=["--ranks"])


def rectangles(path, colour):
    """Areas of the rectangles of a colour, legend apart."""
    root = ET.parse(path).getroot()
    cells = root.find("{http://www.w3.org/2000/svg}g")
    return [
        float(r.get("width")) * float(r.get("height")) for r in cells if r.get("fill") == colour
    ]


def test_explain_draws_the_tile_map(tmp_path):
    svg = tmp_path / "tiles.svg"
    succeeds("explain", "--sq", "12288", "--causal", "--svg", svg)  # a multiple of every Br
    text = svg.read_text()
    legend = dict(re.findall(r">(empty|partial|full)[^(]*\(([\d.]+)%\)", text))
    colours = dict(zip(legend, re.findall(r'height="14" fill="(#\w+)"', text)))
    areas = {name: sum(rectangles(svg, colours[name])) for name in legend}
    for name, percent in legend.items():
        assert float(percent) > 0
        assert abs(areas[name] / sum(areas.values()) - float(percent) / 100) < 0.03
    assert "sq = 12288" in text and "Br = " in text and "Bc = " in text
    assert listing(tmp_path) == ["tiles.svg"]
    succeeds("explain", "--sq", "12288", "--causal", "--chunk", "1024", "--svg", svg)
    assert sum(rectangles(svg, colours["empty"])) > 0.85 * sum(areas.values())


def test_explain_counts_the_tiles_of_expressions(tmp_path):
    np.save(tmp_path / "doc.npy", np.repeat(np.arange(4, dtype=np.int32), 256))
    call = ["--sq", "1024", "--mask-mod", "doc[q] == doc[k]", "--tensor", "doc=doc.npy"]
    for more in ([], ["--backward"], ["--card", "h200", "--dtype", "bf16"]):
        stdout = succeeds("explain", *call, *more, "--svg", "t.svg", cwd=tmp_path)
        hidden, full, part = map(int, re.search(
            r"^tiles +of q head 0: (\d+) hidden, (\d+) shown in full, (\d+) in part$", stdout, re.M
        ).groups())  # fmt: skip
        assert hidden > full > 0 and part < full and "mask_mod doc[q] == doc[k]" in stdout
        percent = dict(re.findall(r">(empty|partial|full)[^(]*\(([\d.]+)%\)", (tmp_path / "t.svg").read_text()))
        assert abs(float(percent["empty"]) / 100 - hidden / (hidden + full + part)) < 0.01
    assert details(*call, cwd=tmp_path)["call"]["mask_mod"] == "doc[q] == doc[k]"
    huge = succeeds("explain", "--sq", "1000000", "--mask-mod", "k % 2 == 0")
    assert re.search(r"^tiles +\d+: too many to look at", huge, re.M)
    fails("explain", "--mask-mod", "k < ", says=["--mask-mod: at character 5"])
    fails("explain", "--mask-mod", "k < t[q]", "--tensor", "t", code=2, says=["--tensor"])


def test_explain_counts_the_tiles_of_a_bool_mask(tmp_path):
    document = np.arange(1024) // 256
    np.save(tmp_path / "mask.npy", (document[:, None] == document)[None, None])
    call = ["--sq", "1024", "--bias", "mask.npy"]
    for more in ([], ["--backward"], ["--card", "h200", "--dtype", "bf16"]):
        stdout = succeeds("explain", *call, *more, cwd=tmp_path)
        hidden, full, part = map(int, re.search(
            r"^tiles +of q head 0: (\d+) hidden, (\d+) shown in full, (\d+) in part$", stdout, re.M
        ).groups())  # fmt: skip
        assert hidden > full > 0 and part < full and ", bias" in stdout
    np.save(tmp_path / "numbers.npy", np.zeros((1, 1, 1024, 1024), np.float32))
    assert "tiles  " not in succeeds("explain", "--sq", "1024", "--bias", "numbers.npy", cwd=tmp_path)
    fails("explain", "--sq", "1000", "--bias", "mask.npy", cwd=tmp_path, says=["bias", "1024"])
    fails("explain", "--bias", "no.npy", cwd=tmp_path, says=["--bias no.npy"])


def test_the_tile_map_of_a_long_sequence_stays_small(tmp_path):
    for flags in (["--sq", "100000", "--causal"], ["--sq", "1", "--sk", "90000"], ["--sk", "0"]):
        succeeds("explain", *flags, "--svg", tmp_path / "t.svg")
        ET.parse(tmp_path / "t.svg")
        assert (tmp_path / "t.svg").stat().st_size < 200_000
    fails("explain", "--svg", tmp_path / "no" / "t.svg", says=["No such file"])
    fails("explain", "--sq", "0", "--svg", tmp_path / "u.svg", says=["--svg", "no tiles"])
