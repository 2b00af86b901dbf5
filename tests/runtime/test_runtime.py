"""Foundation of every op: dispatch of calls, compilation, launches, and the cost of importing."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton_loom
from triton_loom.testing import Forks

import weft
from tests.runtime.offline_kernels import Rows, Scaled, struct_kernel
from tests.support import IMPORTED
from weft.language import tl
from weft.runtime import Capabilities, Kernel, Launch, kernel, launch, launch_device, observing, recording
from weft.runtime.launch import recorded_by
from weft.runtime.remembered import forget, remembered
from weft.runtime.variant import triton_target

PACKAGE = Path(weft.__file__).parent
TESTS = Path(__file__).parents[1]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, including imports."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Fork a process for programs that may find everything imported."""
    with Forks(*IMPORTED, PYTHONPATH=os.pathsep.join([str(TESTS.parent), *sys.path])) as forks:
        yield forks


@pytest.fixture(scope="module")
def forks_of_torch() -> Iterator[Forks]:
    """Fork a process for programs that import Weft themselves."""
    with Forks("torch") as forks:
        yield forks


def forked(forks: Forks, tmp_path: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that has something imported."""
    script = tmp_path / "script.py"
    script.write_text(code)
    return forks.run(script, **environment)


# ---- dispatch ------------------------------------------------------------------------------------------


def test_triton_serves_the_cpu_through_loom() -> None:
    assert launch_device() == "cpu"
    x = torch.randn(3, 64)
    with weft.backend("triton"):
        y = weft.rms_norm(x)
    with weft.backend("reference"):
        reference = weft.rms_norm(x)
    assert torch.equal(weft.rms_norm(x), y)
    torch.testing.assert_close(y, reference, rtol=1e-6, atol=1e-6)


def test_reference_launches_nothing() -> None:
    def refuse(*call: Any) -> None:
        raise AssertionError("a kernel was launched")

    x = torch.randn(3, 64, requires_grad=True)
    with observing(refuse):
        with weft.backend("reference"):
            weft.rms_norm(x, quantize="1x128").dequantize().sum().backward()
        with pytest.raises(AssertionError, match="launched"):
            weft.rms_norm(x)


def test_backends_nest_and_belong_to_a_thread() -> None:
    x = torch.randn(3, 64)
    seen = []

    def other() -> None:
        with recording("sm_90") as variants:
            weft.rms_norm(x)
        seen.append(len(variants))

    with weft.backend("reference"):
        with weft.backend("triton"), recording("sm_90") as variants:
            weft.rms_norm(x)
        assert len(variants) == 1
        with recording("sm_90") as variants:
            weft.rms_norm(x)
        assert not variants
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [1]


def launched_by(function: Any, *args: Any) -> tuple[Any, list[str]]:
    """Return a call's result and the names of the kernels that it launches."""
    names: list[str] = []
    with observing(lambda launch, *call: names.append(launch.kernel.name)):
        return function(*args), names


def test_the_process_may_choose_and_a_block_overrides_it() -> None:
    x = torch.randn(3, 64)
    try:
        weft.set_backend("reference")
        assert launched_by(weft.rms_norm, x)[1] == []
        with weft.backend("triton"):
            assert launched_by(weft.rms_norm, x)[1] == ["norm_kernel"]
        seen = []
        thread = threading.Thread(target=lambda: seen.append(launched_by(weft.rms_norm, x)[1]))
        thread.start()
        thread.join()
        assert seen == [[]]
    finally:
        weft.set_backend("auto")
    assert launched_by(weft.rms_norm, x)[1] == ["norm_kernel"]
    with pytest.raises(ValueError, match="'auto', 'triton' or 'reference'"):
        weft.set_backend("cuda")  # type: ignore[arg-type]


RECORDED = """
import torch, weft
from weft.runtime import recording

with recording("sm_90") as variants:
    weft.rms_norm(torch.ones(2, 64))
print(len(variants))
"""


def test_the_environment_may_choose(tmp_path: Path, forks_of_torch: Forks) -> None:
    reference, nothing, unknown = (
        forked(forks_of_torch, tmp_path, RECORDED, WEFT_BACKEND=value) for value in ("reference", "", "gpu")
    )
    assert (reference.stdout, nothing.stdout) == ("0\n", "1\n")
    assert "the variable WEFT_BACKEND must be 'auto', 'triton' or 'reference'; got 'gpu'" in unknown.stderr


def test_a_backend_that_is_never_entered_warns() -> None:
    with pytest.warns(RuntimeWarning, match=r"set_backend\('reference'\)"):
        weft.backend("reference")


def test_a_block_may_be_a_decorator_and_reentered() -> None:
    x, block = torch.randn(3, 64), weft.backend("reference")
    assert launched_by(block(weft.rms_norm), x)[1] == []
    with block:
        with block:
            pass
        assert launched_by(weft.rms_norm, x)[1] == []
    assert launched_by(weft.rms_norm, x)[1] == ["norm_kernel"]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_a_compiled_graph_holds_its_backend(compiler: str) -> None:
    """A block inside the compiled function holds; a block around it causes a recompilation."""

    def half_and_half(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with weft.backend("reference"):
            y = weft.rms_norm(x)
        return y, weft.layer_norm(x)

    torch.compiler.reset()
    x = torch.randn(3, 64, requires_grad=True)
    compiled = torch.compile(half_and_half, fullgraph=True, backend=compiler)
    both, names = launched_by(compiled, x)
    assert names == ["norm_kernel"], "the layer norm alone"
    (gradient,), names = launched_by(torch.autograd.grad, both[0].sum() + both[1].sum(), x)
    assert names == ["norm_backward_kernel"]
    (wanted,) = torch.autograd.grad(sum(y.sum() for y in half_and_half(x)), x)
    assert torch.equal(gradient, wanted)

    compiled = torch.compile(lambda x: weft.rms_norm(x), fullgraph=True, backend=compiler)
    assert launched_by(compiled, x)[1] == ["norm_kernel"]
    with weft.backend("reference"):
        y, names = launched_by(compiled, x)
    assert names == []
    assert launched_by(y.sum().backward)[1] == []
    assert launched_by(compiled, x)[1] == ["norm_kernel"]


@pytest.mark.parametrize("transform", ["jvp", "vmap"])
def test_a_compiled_transform_is_refused(transform: str) -> None:
    """A graph would silently lose the tangent."""

    def function(x: torch.Tensor) -> Any:
        if transform == "jvp":
            return torch.func.jvp(weft.rms_norm, (x,), (torch.ones_like(x),))
        return torch.func.vmap(weft.rms_norm)(x)

    with pytest.raises(Exception, match="forward-mode" if transform == "jvp" else "cannot be mapped"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(torch.randn(3, 4, 64))


def test_torch_func_computes_first_gradients_only() -> None:
    x = torch.randn(3, 64)
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(weft.rms_norm(leaf).square().sum(), leaf)
    assert torch.equal(torch.func.grad(lambda x: weft.rms_norm(x).square().sum())(x), wanted)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.func.grad(lambda x: torch.func.grad(lambda x: weft.rms_norm(x).square().sum())(x).sum())(x)


def test_a_failing_block_restores_the_backend() -> None:
    with pytest.raises(KeyError), weft.backend("reference"):
        raise KeyError
    with recording("sm_90") as variants:
        weft.rms_norm(torch.randn(3, 64))
    assert variants


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'auto', 'triton' or 'reference'"), weft.backend("cuda"):  # type: ignore[arg-type]
        pass


def test_a_missing_triton_driver_is_an_error() -> None:
    with weft.backend("triton"), pytest.raises(RuntimeError, match="no Triton driver launches on 'meta'"):
        weft.rms_norm(torch.empty(3, 64, device="meta"))


# ---- importing -----------------------------------------------------------------------------------------


def test_import_is_quiet(tmp_path: Path) -> None:
    """The import prints and writes nothing, needs no writable home, and leaves PyTorch unchanged."""
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    done = python(
        """
import torch
spaces = (torch, torch.Tensor, torch.nn.functional)
before = {(space, name): id(value) for space in spaces for name, value in vars(space).items()}
import weft
from triton import knobs
after = {(space, name): id(value) for space in spaces for name, value in vars(space).items()}
changed = {name for name in before if before[name] != after.get(name)}
assert not changed, changed
assert knobs.runtime.launch_enter_hook is None or not knobs.runtime.launch_enter_hook.calls
""",
        HOME=str(home),
        TRITON_HOME=str(home),
        TRITON_CACHE_DIR=str(home / "cache"),
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONWARNINGS="error::DeprecationWarning:weft",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.rglob("*")) == [home]


def modules() -> list[str]:
    packages = pkgutil.walk_packages(weft.__path__, "weft.")
    return ["weft", *(m.name for m in packages if not m.name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_pass(name: str) -> None:
    if name.startswith("weft.integrations."):
        pytest.importorskip(name, reason="its framework is not installed", exc_type=ImportError)
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, "weft": weft})
    assert result.failed == 0


def test_public_functions_have_examples() -> None:
    finder = doctest.DocTestFinder()
    functions = [name for name in weft.__all__ if inspect.isfunction(getattr(weft, name))]
    for name in (*functions, "QTensor", "Format"):
        doctests = finder.find(getattr(weft, name), name)
        assert any(test.examples for test in doctests), f"{name} has no example"


# ---- launching -----------------------------------------------------------------------------------------


@kernel
def scale_kernel(x_ptr, y_ptr, extra_ptr, count, factor, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    off = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + off, mask=off < count, other=0.0).to(tl.float32) * factor
    if extra_ptr is not None:
        x += tl.load(extra_ptr + off, mask=off < count, other=0.0).to(tl.float32)
    tl.store(y_ptr + off, x.to(y_ptr.dtype.element_ty), mask=off < count)


def scale(
    x: torch.Tensor, extra: torch.Tensor | None = None, factor: float = 2.0, warps: int = 4, tile: int = 64
) -> torch.Tensor:
    y = torch.empty_like(x)
    Launch.of(scale_kernel, num_warps=warps, TILE=tile)(
        (-(-x.numel() // tile), 1, 1), (x, y, extra), (x.numel(),), (factor,)
    )
    assert torch.equal(y, x * factor + (0 if extra is None else extra))
    return y


def added(*args: Any, **kwargs: Any) -> int:
    """Return the number of variants that a call compiles."""
    before = len(scale_kernel.variants)
    scale(*args, **kwargs)
    return len(scale_kernel.variants) - before


def test_variants_depend_on_constants_warps_dtypes_and_alignment() -> None:
    """Absent pointers also make a variant; sizes and values never do."""
    scale_kernel.variants.clear()  # from other tests
    Launch.of.cache_clear()
    x = torch.randn(1000)
    assert added(x) == 1
    assert added(x) == 0
    assert added(torch.randn(1), factor=3.5) == 0
    for count in (2, 16, 17, 64, 999, 4096):
        assert added(torch.randn(count)) == 0
    assert added(x, warps=8) == 1, "8 warps must not reuse the variant of 4"
    assert added(x, warps=4) == 0
    assert added(x, tile=128) == 1
    assert added(x.double().float()) == 0
    assert added(x.bfloat16()) == 1
    assert added(x, extra=x) == 1
    assert added(x[1:]) == 1, "a pointer that is not a multiple of 16 bytes"
    assert added(x[2:]) == 0
    assert added(x[4:]) == 0, "16 bytes further"
    assert {v.num_warps for v, _ in scale_kernel.variants} == {4, 8}
    assert {v.aligned for v, _ in scale_kernel.variants} == {True, False}


def test_a_64_bit_integer_makes_another_variant() -> None:
    """Integers widen from 2^30 on, so that two sizes, or a size and a tile, can be added in the integers' own type."""
    x = torch.empty(4, device="meta")
    with recording("sm_90") as seen:
        for count in (1, 2**30 - 1, 2**30, 2**40):
            Launch.of(scale_kernel, TILE=64)((1, 1, 1), (x, x, None), (count,), (1.0,))
    assert [dict(v.signature)["count"] for v in seen] == ["i32", "i32", "i64", "i64"]


def test_equal_constants_share_a_launch() -> None:
    assert Launch.of(scale_kernel, TILE=64) is Launch.of(scale_kernel, TILE=64)
    assert Launch.of(scale_kernel, TILE=64) is not Launch.of(scale_kernel, TILE=64, num_warps=8)


def test_a_launch_without_its_constants_is_refused() -> None:
    with pytest.raises(TypeError, match=r"scale_kernel and its launch disagree about the constants TILE"):
        Launch(scale_kernel)
    with pytest.raises(TypeError, match=r"the constants WIDTH"):
        Launch(scale_kernel, TILE=64, WIDTH=3)


def test_no_jit_makes_a_missing_variant_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels still run; a missing one names itself instead of stalling every other rank."""
    x = torch.randn(100)
    scale(x)
    monkeypatch.setenv("WEFT_NO_JIT", "true")  # as well as 1
    scale(x)
    scale(torch.randn(7))
    said = r"^scale_kernel is not compiled for cpu with these options and dtypes \(fp16\), and WEFT_NO_JIT forbids"
    with pytest.raises(RuntimeError, match=said):
        scale(x.half())
    monkeypatch.setenv("WEFT_NO_JIT", "0")
    scale(x.half())


def test_no_jit_names_the_command_for_an_op(tmp_path: Path, forks: Forks) -> None:
    code = "import torch, weft; weft.rms_norm(torch.randn(3, 64))"
    done = forked(forks, tmp_path, code, WEFT_NO_JIT="1")
    (said,) = re.findall(r"^RuntimeError: (.*)$", done.stderr, re.MULTILINE)
    assert said.startswith("norm_kernel is not compiled for cpu")
    assert re.search("`weft aot build --target cpu .*--op norm .*--out FILE`", said)


def test_no_jit_says_only_what_a_user_needs() -> None:
    """The message contains neither all constants of the variant nor the names of unrelated ops."""
    variants: dict[str, Any] = {}

    def note(launched: Launch, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        variants[launched.kernel.name] = launched.kernel, launched.variant(pointers, False, len(integers))

    with recorded_by(note, "cpu"):
        x = torch.randn(8, 256)
        weft.rms_norm(x, quantize="1x128", columnwise=True)
        weft.quantize(x, "1x128")
        weft.cross_entropy(x, torch.arange(8))
    target = triton_target("cpu")
    for launched, variant in variants.values():
        said = launched._missing(variant, target, None)
        assert len(said) < 600, said
        assert launched.name in said
        assert "weft aot build --target cpu" in said
        assert "constexpr" not in said
    launched, variant = variants["quantize_rows_kernel"]
    assert "--target cpu --op quantize --op dequantize --out FILE" in launched._missing(variant, target, None)


def test_threads_compile_a_variant_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    original = launch.build
    monkeypatch.setattr(launch, "build", lambda *a, **k: (compiled.append(1), original(*a, **k))[1])
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        scale(torch.randn(50), tile=256)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


def launch_struct(
    x: torch.Tensor, bias: torch.Tensor | None = None, extra: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute y = 2 x + 1 + bias + extra by the kernel that takes structs."""
    y = torch.empty_like(x)
    arguments = struct_kernel.arguments(
        x=Rows(x, x.stride(0)),
        count=x.shape[1],
        y=Scaled(Rows(y, y.stride(0)), 2.0, bias),
        offset=1.0,
        extra_ptr=extra,
    )
    Launch.of(struct_kernel, TILE=64)((len(x), 1, 1), *arguments)
    return y


def test_a_kernel_takes_structs() -> None:
    """Members that are None are absent at compile time, each combination in its own variant."""
    struct_kernel.variants.clear()
    Launch.of.cache_clear()
    x, bias, extra = torch.randn(3, 50), torch.randn(50), torch.randn(50)
    assert torch.equal(launch_struct(x), x * 2.0 + 1.0)
    assert torch.equal(launch_struct(x, bias), x * 2.0 + 1.0 + bias)
    assert torch.equal(launch_struct(x, bias, extra), x * 2.0 + 1.0 + bias + extra)
    assert torch.equal(launch_struct(x[:, 3:40]), x[:, 3:40] * 2.0 + 1.0)
    assert len(struct_kernel.variants) == 4, "without bias, with it, with both, and not aligned"


def test_the_arguments_of_a_struct_are_ordered() -> None:
    x, y = torch.empty(2, 8), torch.empty(2, 8)
    arguments = struct_kernel.arguments(
        x=Rows(x, 8), count=7, y=Scaled(Rows(y, 9), 2.0, None), offset=1.0, extra_ptr=x
    )
    assert arguments == ((x, y, None, x), (8, 7, 9), (2.0, 1.0))
    absent = struct_kernel.arguments(x=Rows(x, 8), count=7, y=None, offset=1.0, extra_ptr=None)
    assert absent == ((x, None, None, None), (8, 7, 0), (0.0, 1.0)), "a struct that is None"
    assert scale_kernel.arguments(x_ptr=x, y_ptr=y, extra_ptr=None, count=3, factor=4) == (
        (x, y, None),
        (3, 4),
        (),
    )


def test_a_bound_launch_takes_integers_first_and_tensors_later() -> None:
    x, y, bias = torch.randn(3, 50), torch.empty(3, 50), torch.randn(50)
    bound = Launch.of(struct_kernel, TILE=64).bind((3, 1, 1), x=x.stride(0), count=50, y=y.stride(0))
    assert bound.integers == (50, 50, 50)
    arguments = struct_kernel.tensors(x=x, y=(y, 2.0, bias), offset=1.0)
    assert arguments == ((x, y, bias, None), (2.0, 1.0)), "an omitted pointer"
    bound(*arguments)
    assert torch.equal(y, x * 2.0 + 1.0 + bias)
    with pytest.raises(TypeError, match=r"struct_kernel\.tensors\(\) .*'offset'"):
        struct_kernel.tensors(x=x, y=(y, 2.0, bias))
    with pytest.raises(TypeError, match=r"struct_kernel\.integers\(\) .*'count'"):
        Launch.of(struct_kernel, TILE=64).bind((3, 1, 1), x=50, y=50)


def test_ops_launch_by_name() -> None:
    """Launches pass no tuples of pointers and integers in parameter order: `kernel.arguments` makes what follows a
    grid, and bound launches get no tuples."""
    launches = 0
    for path in sorted((PACKAGE / "ops").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case (
                    ast.Call(args=[ast.Tuple(elts=[_, _, ast.Constant(value=1)]), *arguments])
                    | ast.Call(
                        func=ast.Name("launch") | ast.Attribute(attr="launch"), args=[ast.Tuple(), *arguments]
                    )
                ) if not ast.unparse(node.func).endswith(".bind"):
                    launches += 1
                    by_name = [
                        isinstance(each, ast.Starred) and ".arguments(" in ast.unparse(each)
                        for each in arguments
                    ]
                    assert by_name == [True], f"{path}:{node.lineno}"
    assert launches > 20


def test_caches_can_be_cleared() -> None:
    calls = []

    @remembered
    def double(n: int) -> int:
        calls.append(n)
        return 2 * n

    assert [double(3), double(3)] == [6, 6]
    assert calls == [3]
    forget()
    assert double(3) == 6
    assert calls == [3, 3]


def test_all_caches_of_host_code_can_be_cleared() -> None:
    """Another bounded cache would retain the symbols of a proof; tables of angles have one, which proofs replace."""
    own = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if "lru_cache(" in path.read_text() and "lab" not in path.parts
    }
    assert own == {"remembered.py", "angles.py"}


def test_misnamed_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"struct_kernel\.arguments\(\) .*'count'"):
        struct_kernel.arguments(x=None, y=None, offset=1.0, extra_ptr=None)
    with pytest.raises(TypeError, match=r"struct_kernel\.arguments\(\) .*'counts'"):
        struct_kernel.arguments(x=None, count=1, y=None, offset=1.0, extra_ptr=None, counts=1)


def test_a_parameter_of_another_type_is_refused() -> None:
    from weft.runtime.arguments import Parameters

    with pytest.raises(TypeError, match=r"x of a kernel is annotated with <class 'str'>"):
        Parameters("some_kernel", {"x": str})


def test_the_variant_of_a_struct_is_nested() -> None:
    """Its signature is nested in the form of Triton's compiler, with the names of members."""
    x = torch.empty(2, 8, dtype=torch.bfloat16, device="meta")
    with recording("sm_90") as seen:
        launch_struct(x)
    (variant,) = seen
    assert dict(variant.signature)["y"] == Scaled(Rows("*bf16", "i32"), "fp32", "constexpr")  # type: ignore[arg-type]
    assert variant.types() == {
        "x.ptr": "*bf16",
        "x.stride": "i32",
        "count": "i32",
        "y.rows.ptr": "*bf16",
        "y.rows.stride": "i32",
        "y.factor": "fp32",
        "y.bias": "constexpr",
        "offset": "fp32",
        "extra_ptr": "constexpr",
        "TILE": "constexpr",
    }
    assert variant.constants == (("y.bias", None), ("extra_ptr", None), ("TILE", 64))


NESTED = """
import torch
from tests.support import noop_driver
from triton_loom.testing import NoopLauncher
from tests.runtime.offline_kernels import Rows, Scaled, struct_kernel
from weft.runtime import Launch

launched = []
NoopLauncher.__call__ = lambda self, *args: launched.append(args)
noop_driver.install()
x = torch.ones(2, 64)
for stride in (64, 2**30):
    y = Scaled(Rows(x, 3), 2.0, None)
    given = struct_kernel.arguments(x=Rows(x, stride), count=5, y=y, offset=1.0, extra_ptr=None)
    Launch.of(struct_kernel, TILE=64)((7, 1, 1), *given)
    address = x.data_ptr()
    assert launched[-1][:3] == (7, 1, 1)
    assert launched[-1][9:] == ((address, stride), 5, ((address, 3), 2.0, None), 1.0, None, 64), launched[-1]
assert len(struct_kernel.variants) == 2
"""


def test_launchers_get_structs_as_tuples(tmp_path: Path, forks: Forks) -> None:
    """Structs reach a recording launcher, compiled for sm_90, as tuples."""
    done = forked(forks, tmp_path, NESTED)
    assert done.returncode == 0, done.stderr


def test_the_sanitizer_names_members_of_structs() -> None:
    x = torch.randn(3, 50)
    with triton_loom.sanitize() as seen:
        launch_struct(x, torch.randn(50))
    assert not seen.findings
    with triton_loom.sanitize(collect=True) as seen:
        launch_struct(x, torch.randn(20))
    assert {finding.argument for finding in seen.findings} == {"y.bias"}


class StubDriver:
    """Driver of two GPUs that records the requested streams."""

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def get_current_stream(self, index: Any) -> str:
        self.streams.append(index)
        return f"stream {index}"

    def get_current_target(self) -> str:
        return "stub"


class StubTensor(SimpleNamespace):
    def data_ptr(self) -> int:
        return 4096 if self.aligned else 4100


def test_launches_happen_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are on device 1 while device 0 is current."""
    entered: list[int] = []
    compiled_on: list[Any] = []
    launched: list[tuple[Any, ...]] = []
    current = [0]

    @contextlib.contextmanager
    def on_device(index: int) -> Iterator[None]:
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    class Compiled:
        function, packed_metadata, metadata = "function", "metadata", SimpleNamespace()

        def run(self, *args: Any) -> None:
            launched.append((current[0], *args))

        def _init_handles(self) -> None:
            compiled_on.append(current[0])

    driver = StubDriver()
    monkeypatch.setattr(launch.language, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(launch, "build", lambda *args, **kwargs: Compiled())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", on_device)
    tensors = [
        StubTensor(device=SimpleNamespace(index=i), dtype=torch.float32, aligned=True) for i in (0, 1, 1, 0)
    ]
    scale_launch = Launch(scale_kernel, TILE=32)
    for tensor in tensors:
        scale_launch((7, 1, 1), (tensor, tensor, None), (5,), (2.0,))  # type: ignore[arg-type]
    assert [call[0] for call in launched] == [0, 1, 1, 0]
    assert [call[4] for call in launched] == ["stream 0", "stream 1", "stream 1", "stream 0"]
    assert compiled_on == [0, 1], "loaded once on each device"
    assert current == [0]
    assert launched[0][1:4] == (7, 1, 1)
    assert launched[0][-6:] == (4096, 4096, None, 5, 2.0, 32)


def test_launch_hooks_see_every_launch() -> None:
    """Profilers (Proton) rely on launch hooks."""
    from triton import knobs

    seen: list[str] = []

    def enter(described: Any) -> None:
        seen.append((described if isinstance(described, dict) else described.get())["name"])

    x = torch.randn(10)
    hook = knobs.runtime.launch_enter_hook
    chain = hasattr(hook, "add")
    if chain:
        hook.add(enter)
    else:
        knobs.runtime.launch_enter_hook = enter
    try:
        scale(x)
    finally:
        if chain:
            hook.remove(enter)
        else:
            knobs.runtime.launch_enter_hook = hook
    scale(x)
    assert seen == ["scale_kernel"]


def test_recording_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(Kernel, "compiled", refuse)
    with recording("sm_80") as outer:
        weft.rms_norm(torch.empty(8, 64, device="meta"), quantize="1x128")
        with recording("gfx950") as inner:
            weft.quantize(torch.empty(8, 64, device="meta"), "mx")
        weft.layer_norm(torch.empty(8, 64, device="meta"))
    assert [v.kernel for v in outer] == ["norm_kernel", "norm_kernel"]
    assert [v.kernel for v in inner] == ["quantize_rows_kernel"]
    assert not launch.is_recording()


def test_capabilities_follow_the_target() -> None:
    assert launch.capabilities_of(torch.device("cpu")) == Capabilities.of("cpu")
    with recording("sm_89"):
        assert launch.capabilities_of(torch.device("cpu")).target == "sm_89"
    with pytest.raises(ValueError, match="unknown target 'sm_42'"):
        Capabilities.of("sm_42")
    for target in ("sm_80", "sm_86", "sm_89", "gfx942"):
        assert not Capabilities.of(target).fp8_cast, "no conversion in hardware, or one that rounds twice"


# ---- time on the host ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host_times() -> dict[str, float]:
    """Return microseconds per call with a driver that launches nothing, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "support" / "noop_driver.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    times: dict[str, float] = json.loads(done.stdout)
    print(times)
    return times


@pytest.mark.parametrize(
    ("call", "plain", "budget"),
    [
        ("rms_norm", "plain", 2.0),
        ("rms_norm with autograd", "plain", 3.0),
        ("rms_norm with residual", "plain with residual", 2.0),
        ("rms_norm with residual and 1x128", "plain with residual", 4.0),
        ("quantize", "plain", 3.5),
        ("glu", "plain", 2.0),
        ("glu_backward", "plain", 3.0),
        ("row_map", "plain", 4.0),  # two launches, five allocations
        ("permute", "plain with residual", 2.0),
        ("permute with 1x128", "plain with residual", 4.0),
        ("unpermute", "plain", 2.0),
        ("gated_norm", "plain", 2.0),
        ("grad_norm of 32", "plain", 5.0),  # two launches; 32 tensors are inspected
        ("clip_grads_ of 32", "plain", 5.0),
        ("qkv_prepare", "plain with residual", 2.5),  # three allocations, twice as many arguments
        ("qkv_prepare with a cache", "plain with residual", 4.0),  # four more tensors to inspect
        ("rope", "plain", 2.0),
        ("cross_entropy", "plain", 3.0),  # two launches, seven allocations
        ("cross_entropy of each token", "plain", 2.0),
        ("router_linear", "plain", 2.0),
        ("route", "plain", 2.0),
        ("linear_logprobs", "plain", 5.0),  # three launches, six allocations
        ("linear_sample", "plain", 4.0),  # two launches, three allocations
        ("matmul", "plain", 4.5),
        ("matmul of FP8", "plain", 6.0),  # two quantized tensors are unpacked
        ("grouped_matmul", "plain", 5.0),
        ("attention", "plain with residual", 3.0),
        ("attention_decode", "plain with residual", 2.5),
    ],
)
def test_host_time(host_times: dict[str, float], call: str, plain: str, budget: float) -> None:
    """The budget is a multiple of allocating the result and launching a bare `triton.jit` kernel with as many
    arguments."""
    ratio = host_times[call] / host_times[plain]
    assert ratio <= budget, f"{call}: {ratio:.2f} times a plain launch ({host_times[plain]:.1f} us)"
