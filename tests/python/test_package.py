"""The package: its documentation's examples, stubs, version, engines, explain."""

import ast
import doctest
import graphlib
import importlib.metadata
import inspect
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fulgur
from fulgur import _expressions, _fulgur

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{n}")
    for page in PAGES
    for n, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]
FUNCTIONS = [
    "append",
    "append_attention",
    "attention",
    "attention_backward",
    "engines",
    "expand_blocks",
    "explain",
    "expression",
    "install_as",
    "merge",
    "plan",
    "plan_backward",
    "hadamard",
    "quantize",
    "scores",
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_documented_example(name):
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    (example,) = finder.find(getattr(fulgur, name), name)
    assert example.examples
    assert runner.run(example).failed == 0


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_of_the_pages_run(code):
    exec(compile(code, "snippet", "exec"), {})


def test_version():
    assert fulgur.__version__ == importlib.metadata.version("fulgur")


def test_extras():
    """The requirements of each extra are those that it names; without an extra NumPy alone is required."""
    wanted = importlib.metadata.requires("fulgur")
    of_extra = {}
    for line in wanted:
        package, _, extra = line.partition("; extra == ")
        of_extra.setdefault(extra.strip("'\""), []).append(package)
    assert set(of_extra) == {"", "torch", "jax", "cuda12", "cuda13", "test"}
    for extra, package in (
        ("", "numpy"), ("torch", "torch"), ("jax", "jax"), ("cuda12", "nvidia-cuda-nvrtc-cu12"),
        ("cuda13", "nvidia-cuda-nvrtc"),
    ):  # fmt: skip
        (requirement,) = of_extra[extra]
        assert re.fullmatch(rf"{package}[<>=.,0-9]+", requirement), requirement


# What calls of another library do not take: it says that itself, or has it in another way, or lacks it.
EXPRESSIONS = {"score_mod", "mask_mod", "tensors"}
ELSEWHERE = {
    "torch": {"seed", "offset", "rng_state", "threads", "engine", "algorithm", "out", "stream"},
    "jax": {"rng_state", "threads", "engine", "algorithm", "out", "stream", *EXPRESSIONS},
}
# What scales codes, which are tensors of neither: caches of codes are Quantized, which bring their scales.
DESCALES = {"q_descale", "k_descale", "v_descale", "k_zero_point", "v_zero_point", "k_mean"}
CACHE_DESCALES = {f"{x}_cache_{what}" for x in "kv" for what in ("descale", "zero_point")} | {"k_cache_mean"}


@pytest.mark.parametrize("name", ["attention", "append", "append_attention"])
@pytest.mark.parametrize("library", ELSEWHERE)
def test_other_libraries_have_every_option(name, library):
    module = pytest.importorskip(f"fulgur.{library}")
    elsewhere = ELSEWHERE[library] | ({"q_out"} | DESCALES if library == "jax" else set())
    elsewhere |= EXPRESSIONS | DESCALES if name == "append_attention" else set()

    def options(function):
        return {
            x.name: (x.default, x.kind) for x in inspect.signature(function).parameters.values()
            if x.name not in elsewhere
        }  # fmt: skip

    assert options(getattr(module, name)) == options(getattr(fulgur, name))


def program(*arguments, **options):
    command = [sys.executable, "-B", "-m", "fulgur", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_program(tmp_path):
    assert program("--version").stdout == f"fulgur {fulgur.__version__}\n"
    q = np.random.default_rng(0).standard_normal((1, 9, 2, 8), dtype=np.float32)
    np.save(tmp_path / "q.npy", q)
    names = [x for name in "qkv" for x in (f"--{name}", "q.npy")]
    done = program("attend", *names, "--out", "o.npy", "--causal", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "o.npy"), fulgur.attention(q, q, q, causal=True))


def test_program_fails():
    done = program("attnd")
    assert done.returncode == 2 and done.stderr.startswith("fulgur: there is no subcommand attnd")
    done = program("attend", "--q", "no.npy", "--k", "no.npy", "--v", "no.npy", "--out", "o.npy")
    assert done.returncode == 1 and done.stderr.startswith("fulgur: ") and "no.npy" in done.stderr


@pytest.mark.slow
def test_program_can_be_interrupted():
    command = ["env", "--default-signal=INT"]  # even where the tests run in the background
    command += [sys.executable, "-B", "-m", "fulgur", "bench", "--grid", "standard"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(20):
                time.sleep(3)  # into the minutes that it takes
                process.send_signal(signal.SIGINT)
                if process.poll() is not None:
                    break
            assert process.wait(timeout=1) == -signal.SIGINT
        finally:
            process.kill()


def functions_of(body, owner):
    """(stub, what it describes) of the public functions, and of the methods of classes."""
    for node in body:
        bases = {x.__name__: x for x in fulgur.Plan.__mro__}  # what plans share is no name of the module
        if isinstance(node, ast.ClassDef) and (cls := getattr(owner, node.name, bases.get(node.name))):
            yield from functions_of(node.body, cls)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            yield node, getattr(owner, node.name)


# The functions and methods in the stubs of each module.
STUBS = {
    "fulgur": {*FUNCTIONS, *_expressions.FUNCTIONS, "astype", "run", "dequantize", "explain", "details", "workspace"},
    "fulgur.torch": {"append", "append_attention", "attention", "enable_flex", "flex_attention", "scores"},
    "fulgur.jax": {"append", "append_attention", "attention", "dot_product_attention"},
}


@pytest.mark.parametrize("name", STUBS)
def test_stubs_have_the_signatures(name):
    module = pytest.importorskip(name)
    stub_file = Path(module.__file__).with_suffix(".pyi")
    assert (Path(fulgur.__file__).parent / "py.typed").exists()
    stubs = list(functions_of(ast.parse(stub_file.read_text()).body, module))
    assert {stub.name for stub, _ in stubs} == STUBS[name]
    for stub, function in stubs:
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert [a.arg for a in stub.args.args] == positional, stub.name
        assert [a.arg for a in stub.args.kwonlyargs] == list(keywords)
        for argument, default in zip(stub.args.kwonlyargs, stub.args.kw_defaults):
            if default is not None:
                assert ast.literal_eval(default) == keywords[argument.arg], argument.arg


def test_stubs_are_those_of_the_script():
    path = ROOT / "tools/make_stubs.py"
    script = runpy.run_path(str(path))
    for stub, text in script["stubs"]().items():
        assert stub.read_text() == text, f"{stub}: run {path}"


# The functions that take the tensors of calls of the library.
TAKE = {
    "forward": ["attention", "plan", "Plan.run", "explain", "torch.attention", "jax.attention"],
    "backward": ["attention_backward", "plan_backward", "BackwardPlan.run"],
    "append": ["append", "torch.append", "jax.append"],
    "append forward": ["append_attention", "torch.append_attention", "jax.append_attention"],
}
# The tensors among them that a function has no argument for: results that it returns, keys that are those of the
# caches, and what PyTorch and JAX have in another way: dropout's numbers, and results to write to.
NO_ARGUMENTS = {
    "attention": "lse",
    "plan": "lse",
    "explain": "out lse",
    "torch.attention": "out lse rng_state",
    "jax.attention": "out lse rng_state",
    "jax.append": "q_out",
    "append_attention": "k v cu_seqlens_k seqused_k q_out lse rng_state",
    "torch.append_attention": "k v cu_seqlens_k seqused_k q_out lse rng_state out",
    "jax.append_attention": "k v cu_seqlens_k seqused_k q_out lse rng_state out",
}


@pytest.mark.parametrize("calls, name", [(calls, name) for calls, names in TAKE.items() for name in names])
def test_every_tensor_of_the_library_is_an_argument(calls, name):
    """A row of the library's tables that Python lacks fails here."""
    module, _, function = name.rpartition(".")
    owner = fulgur if module in ("", "Plan", "BackwardPlan") else pytest.importorskip(f"fulgur.{module}")
    owner = getattr(owner, module) if module in ("Plan", "BackwardPlan") else owner
    function = getattr(owner, function)
    tensors = {x.name for call in calls.split() for x in _fulgur.tensors()[call]}
    tensors -= set(NO_ARGUMENTS.get(name, "").split()) | CACHE_DESCALES
    if name.endswith("append_attention"):
        tensors -= DESCALES
    assert tensors - set(inspect.signature(function).parameters) == set()
    for tensor in tensors:
        assert re.search(rf"\b{tensor}\b[\w,\s]*:\s", function.__doc__), tensor


def test_every_tensor_of_the_library_is_in_the_operators_and_calls():
    codes = DESCALES | CACHE_DESCALES
    tensors = {call: {x.name for x in entries} - codes for call, entries in _fulgur.tensors().items()}
    appended = tensors["append"] | tensors["forward"] - {"k", "v", "out", "lse"}
    schemas = {text.partition("(")[0]: text for text in _fulgur.torch_schemas()}
    wanted = {
        "forward_cached": tensors["forward"] - {"out", "lse"} | DESCALES,
        "forward": tensors["forward"] & tensors["backward"] - {"out", "lse"},
        "forward_into": tensors["forward"] & tensors["backward"],
        "backward": tensors["backward"] - {"dq", "dk", "dv", "dsinks", "dbias"},
        "backward_into": tensors["backward"],
        "append": tensors["append"],
        "append_forward": appended - {"q_out"},
    }
    assert schemas.keys() == wanted.keys()
    for name, text in schemas.items():
        arguments = text.partition("(")[2].rpartition(" -> ")[0]
        found = re.findall(r"Tensor(?:\(\w!\))?\??\s(\w+)", arguments)
        assert sorted(found) == sorted(wanted[name])
    written = {
        "fulgur_forward": {"out", "lse"},
        "fulgur_backward": {"dq", "dk", "dv", "dsinks", "dbias"},
        "fulgur_append": {"k_cache", "v_cache", "q_out"},
        "fulgur_append_forward": {"k_cache", "v_cache", "out", "lse"},
    }
    read = {
        "fulgur_forward": wanted["forward_cached"],
        "fulgur_backward": wanted["backward"],
        "fulgur_append": tensors["append"] - {"q_out"},
        "fulgur_append_forward": wanted["append_forward"],
    }
    for name, (operands, results) in _fulgur.jax_calls().items():
        assert sorted(operands) == sorted(read[name])
        assert sorted(results) == sorted(written[name])


def test_imports_have_no_circles():
    """A module that is imported by its package's __init__.py may take the package's other modules alone."""
    folder = Path(fulgur.__file__).parent
    names = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    imports = {}
    for name, path in names.items():
        nodes = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.ImportFrom)]
        taken = {(f"{x.module}.{y.name}", x.module) for x in nodes for y in x.names}
        known = {*names, "fulgur._fulgur"}
        imports[name] = {module if module in known else package for module, package in taken} & names.keys()
    assert "fulgur._spec" in imports["fulgur.torch._calls"]
    graphlib.TopologicalSorter(imports).prepare()  # raises where there is one


def test_stubs_and_module_have_the_same_names():
    body = ast.parse((Path(fulgur.__file__).parent / "__init__.pyi").read_text()).body
    (stated,) = (n.value for n in body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__")
    assert ast.literal_eval(stated) == fulgur.__all__
    assert set(fulgur.__all__) <= set(dir(fulgur))


def test_engines():
    engines = {engine.name: engine for engine in fulgur.engines()}
    for name in ("cpu", "reference"):
        assert engines[name].unavailable == "" and engines[name].description


@pytest.mark.parametrize("backward", [False, True])
def test_explain_arrays_and_shapes(backward):
    array = np.zeros((2, 40, 4, 16), np.float32)
    options = dict(backward=backward, causal=True, threads=1)
    text = fulgur.explain(array, array, array, **options)
    assert text == fulgur.explain(array.shape, array.shape, list(array.shape), **options)
    assert ("backward" if backward else "forward") in text and "causal" in text
    assert "bf16" in fulgur.explain(*[array.shape] * 3, dtype="bf16", backward=backward)


def test_explain_allocates_nothing():
    shape = (1, 2**24, 64, 128)  # 512 GiB
    assert "16777216" in fulgur.explain(shape, shape, shape)


def test_explain_packed():
    shape, cu = (30, 4, 16), np.array([0, 10, 30], np.int32)
    text = fulgur.explain(shape, shape, shape, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert "packed" in text
